"""What do 8-bit moments cost and save? One update of the born-from drafter's masters on one GPU, both kinds of optimizer.

    python bench/optimizer.py [--steps 20]

Random weights and gradients of the case in bench/drafter_step.py. Timed with device events: the optimizer's step alone. Bytes
are those that the first step allocates and keeps. 8-bit moments need torchao. Last line: JSON.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any, Literal

import torch
from drafter_step import DEVICE, born_from_shape, timed

from outrider.config import OptimizerConfig
from outrider.model.attention import dense_attention
from outrider.model.drafter import Drafter, count_parameters
from outrider.train.optim import build_optimizer, set_rate


def measure(state: Literal["float32", "8bit"], steps: int) -> dict[str, Any]:
    with torch.device("meta"):
        drafter = Drafter(born_from_shape(), dense_attention)
    drafter = drafter.to_empty(device=DEVICE)
    for parameter in drafter.parameters():
        with torch.no_grad():
            parameter.normal_(std=0.01)
        parameter.grad = torch.randn_like(parameter)
    optimizer = build_optimizer(drafter, OptimizerConfig(state=state))
    before, began = torch.cuda.memory_allocated(), time.perf_counter()
    optimizer.step()
    torch.cuda.synchronize()
    first_s, kept = time.perf_counter() - began, torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    times = []
    for step in range(steps):
        set_rate(optimizer, 1e-4 / (1 + step))
        times.append(timed(optimizer.step))
    return {"state": state, "ms": round(statistics.median(times), 2), "min_ms": round(min(times), 2),
            "max_ms": round(max(times), 2), "n": steps, "first_step_s": round(first_s, 1), "state_gib": round(kept / 2**30, 2),
            "bytes_a_parameter": round(kept / count_parameters(drafter.shape), 3),
            "peak_above_gib": round((torch.cuda.max_memory_allocated() - before - kept) / 2**30, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"bench": "optimizer", "skipped": "needs a CUDA GPU"}))
        return
    results = []
    for state in ("float32", "8bit"):
        torch.cuda.empty_cache()
        results.append(measure(state, args.steps))
        print(results[-1], file=sys.stderr, flush=True)
    print(json.dumps({"bench": "optimizer", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    main()
