"""What do 8-bit moments, and masters that lend their memory, cost and save? The born-from drafter's masters on one GPU.

    python bench/optimizer.py [--steps 20] [--only float32|8bit|lending]

Random weights and gradients of the case in bench/drafter_step.py. Timed with device events: the optimizer's step alone; the
masters lent to the compute weights and given back, and in their place a copy beside them. Bytes are those that the first step
allocates and keeps. 8-bit moments need torchao. Last line: JSON.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from drafter_step import DEVICE, born_from_shape, timed

from outrider.config import OptimizerConfig
from outrider.model.attention import dense_attention
from outrider.model.drafter import Drafter
from outrider.model.flops import count_parameters
from outrider.model.fused_drafter import fused_twin
from outrider.train.optim import build_optimizer, set_rate


def random_drafter() -> Drafter:
    with torch.device("meta"):
        drafter = Drafter(born_from_shape(), dense_attention)
    drafter = drafter.to_empty(device=DEVICE)
    for parameter in drafter.parameters():
        with torch.no_grad():
            parameter.normal_(std=0.01)
    return drafter


def spread(times: list[float]) -> dict[str, float]:
    return {"ms": round(statistics.median(times), 2), "min_ms": round(min(times), 2), "max_ms": round(max(times), 2),
            "n": len(times)}


@torch.no_grad()
def lending(steps: int) -> list[dict[str, Any]]:
    drafter = random_drafter()
    fused = fused_twin(drafter, dense_attention, dtype=torch.bfloat16, compile_part=lambda part: part)
    fused.borrow(drafter)
    fused.give_back()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lent, back = zip(*((timed(lambda: fused.borrow(drafter)), timed(fused.give_back)) for _ in range(steps)), strict=True)
    room = round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)
    masters = [parameter.detach() for parameter in drafter.parameters()]
    copies = [torch.empty_like(master, dtype=torch.bfloat16) for master in masters]
    beside = [timed(lambda: torch._foreach_copy_(copies, masters)) for _ in range(steps)]
    return [{"what": "masters lent", **spread(list(lent)), "peak_above_gib": room}, {"what": "given back", **spread(list(back))},
            {"what": "rounded into a copy beside", **spread(beside), "copy_gib":
             round(sum(copy.nbytes for copy in copies) / 2**30, 2)}]


def update(state: Literal["float32", "8bit"], steps: int) -> list[dict[str, Any]]:
    drafter = random_drafter()
    for parameter in drafter.parameters():
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
    return [{"what": f"update, {state}", **spread(times), "first_step_s": round(first_s, 1), "state_gib": round(kept / 2**30, 2),
             "bytes_a_parameter": round(kept / count_parameters(drafter.shape), 3),
             "peak_above_gib": round((torch.cuda.max_memory_allocated() - before - kept) / 2**30, 2)}]


PARTS: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "float32": partial(update, "float32"), "8bit": partial(update, "8bit"), "lending": lending,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=list(PARTS))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"bench": "optimizer", "skipped": "needs a CUDA GPU"}))
        return
    results = []
    for name, part in PARTS.items():
        if args.only in (None, name):
            torch.cuda.empty_cache()
            found = part(args.steps)
            print(*found, sep="\n", file=sys.stderr, flush=True)
            results += found
    print(json.dumps({"bench": "optimizer", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    main()
