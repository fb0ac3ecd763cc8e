"""The frozen-head loss against the plain one: value, gradient, time and memory, on what this machine has.

    python bench/loss.py

GPU: 8192 slots (7680 with a label), width 5120, vocabulary 248,320, bf16. CPU: 1344 slots, width 576, vocabulary 49,152, bf16 and
fp32, the demo's size. Forward and backward, median of 10 (CPU: 5). Last line: JSON.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from outrider.config import ObjectiveConfig
from outrider.layout.blocks import slot_decay
from outrider.objective.frozen_head import frozen_head_loss
from outrider.objective.losses import plain_loss
from outrider.records import DraftBlocks, FrozenHead, LossTerms

K = 16


def measure(call: Callable[[], LossTerms], hidden: torch.Tensor, n: int) -> dict[str, Any]:
    """Wall milliseconds of forward and backward, and the peak above what stood before (GPU)."""
    on_gpu = hidden.is_cuda
    times, peak = [], 0
    for _ in range(n + 1):
        hidden.grad = None
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        terms = call()
        terms.loss_sum.backward()
        if on_gpu:
            torch.cuda.synchronize()
            peak = max(peak, torch.cuda.max_memory_allocated() - before)
        times.append((time.perf_counter() - start) * 1e3)
    times = times[1:]
    return {"ms": round(statistics.median(times), 1), "min_ms": round(min(times), 1), "max_ms": round(max(times), 1), "n": n,
            "peak_gib": round(peak / 2**30, 2), "loss_sum": float(terms.loss_sum.detach())}


def run_case(device: torch.device, blocks_count: int, D: int, V: int, dtype: torch.dtype, n: int) -> dict[str, Any]:
    torch.manual_seed(0)
    hidden = torch.randn(1, blocks_count * K, D, device=device, dtype=dtype).requires_grad_()
    head = FrozenHead((torch.randn(V, D, device=device) * D**-0.5).to(dtype), None)
    labels = torch.randint(V, (1, blocks_count, K), device=device)
    weights = slot_decay(K, 7.0, device).expand(1, blocks_count, K)
    zeros = torch.zeros(1, blocks_count, dtype=torch.int64, device=device)
    blocks = DraftBlocks(zeros, zeros == 0, labels, labels, labels, weights)
    budget = ObjectiveConfig().logits_mib * 2**20
    results, gradients = {}, {}
    calls: dict[str, Callable[[], LossTerms]] = {
        "frozen head": lambda: frozen_head_loss(hidden, blocks, head, budget_bytes=budget),
        "plain": lambda: plain_loss(hidden, blocks, head),
    }
    for name, call in calls.items():
        results[name] = measure(call, hidden, n)
        assert hidden.grad is not None
        gradients[name] = hidden.grad.double()
        print(f"{device.type} {dtype} {name:12} {results[name]}", file=sys.stderr, flush=True)
    difference = gradients["frozen head"] - gradients["plain"]
    results["gradient_difference"] = float(difference.norm() / gradients["plain"].norm())
    return results


def main() -> None:
    results = {}
    if torch.cuda.is_available():
        results["gpu bf16"] = run_case(torch.device("cuda"), 512, 5120, 248320, torch.bfloat16, 10)
    else:
        for name, dtype in (("cpu bf16", torch.bfloat16), ("cpu fp32", torch.float32)):
            results[name] = run_case(torch.device("cpu"), 84, 576, 49152, dtype, 5)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {torch.get_num_threads()} threads"
    print(json.dumps({"bench": "loss", "device": device, "torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    main()
