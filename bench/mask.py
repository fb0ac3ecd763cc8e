"""The block mask of the born-from case: in closed form against torch's create_block_mask, time and memory.

    python bench/mask.py

Row of 8192 tokens, 512 anchors, K = 16: 8192 queries over 16384 keys. On a GPU; on a CPU both run too, for orientation. Median of
20 (create_block_mask: 5). Last line: JSON.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from drafter_step import born_from_shape, random_blocks, random_rows
from torch.nn.attention.flex_attention import create_block_mask

from outrider.layout.block_mask import block_mask
from outrider.layout.mask import visibility

S, A = 8192, 512


def measure(call: Callable[[], Any], n: int, device: torch.device) -> dict[str, float]:
    """Wall milliseconds until the device is done, and the peak memory above what stood before."""
    call()
    times, peak = [], 0
    for _ in range(n):
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
            peak = max(peak, torch.cuda.max_memory_allocated() - before)
        times.append((time.perf_counter() - start) * 1e3)
    return {"ms": round(statistics.median(times), 2), "min_ms": round(min(times), 2), "max_ms": round(max(times), 2), "n": n,
            "peak_mib": round(peak / 2**20, 1)}


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = born_from_shape()
    rows = random_rows(S, shape.vocab_size, 8, 0)
    blocks = random_blocks(rows, shape, A).to(device)
    rows = rows.to(device)
    K, Q = shape.block_size, A * shape.block_size
    rule = visibility(rows.document_ids_BS, blocks.anchors_BA, blocks.keep_BA, block_size=K, window=None)
    results = {
        "closed form": measure(lambda: block_mask(blocks, row_length=S, window=None), 20, device),
        "create_block_mask": measure(lambda: create_block_mask(rule, 1, None, Q, S + Q, device=device.type), 5, device),
    }
    for name, result in results.items():
        print(f"{name:18} {result['ms']:9.2f} ms, {result['peak_mib']:8.1f} MiB", file=sys.stderr)
    print(json.dumps({"bench": "mask", "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                      "torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    main()
