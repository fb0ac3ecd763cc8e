"""Question: what do checkpoints, metrics and guards cost a step of the 1.7 B drafter?

    python bench/endure_gpu.py [--steps 20]      the drafter of bench/drafter_step.py, AdamW, checkpoints to --folder

Each finding is one JSON line on stdout as it comes. --toy is a dry run on whatever device there is.
"""

import argparse
import dataclasses
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

import torch  # noqa: E402
from drafter_step import born_from_shape, random_blocks, random_rows  # noqa: E402
from torch import Tensor  # noqa: E402

from outrider.config import CheckpointConfig, GuardsConfig, OptimizerConfig  # noqa: E402
from outrider.model.attention import dense_attention  # noqa: E402
from outrider.model.drafter import Drafter  # noqa: E402
from outrider.model.flops import count_parameters  # noqa: E402
from outrider.model.fused_attention import kernels_for  # noqa: E402
from outrider.model.published import to_config  # noqa: E402
from outrider.objective.frozen_head import frozen_head_loss  # noqa: E402
from outrider.records import DrafterShape, FrozenHead  # noqa: E402
from outrider.train.checkpoint import Origin, Position, newest_sound  # noqa: E402
from outrider.train.guards import DiskWatch, leak_test_due, spike  # noqa: E402
from outrider.train.keeper import Keeper  # noqa: E402
from outrider.train.masters import WholeMasters  # noqa: E402
from outrider.train.meter import as_metrics, report_step  # noqa: E402
from outrider.train.metrics import Metrics  # noqa: E402
from outrider.train.optim import build_optimizer  # noqa: E402
from outrider.train.processes import ALONE  # noqa: E402
from outrider.train.roads import DenseRoad, FusedRoad, Road  # noqa: E402
from outrider.train.watchdog import Watchdog  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DEVICE_BYTES = torch.cuda.mem_get_info()[1] if CUDA else 0


def out(**line: Any) -> None:
    print(json.dumps(line), flush=True)


class Steps:
    """Whole optimizer steps of a drafter on one row, features made up: what the loop does, its guards and metrics apart."""

    def __init__(self, shape: DrafterShape, *, S: int, A: int, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        with torch.device("meta"):
            drafter = Drafter(shape, dense_attention)
        self.drafter = drafter.to_empty(device=DEVICE)
        with torch.no_grad():
            for parameter in self.drafter.parameters():
                parameter.normal_(std=parameter.shape[-1] ** -0.5) if parameter.dim() > 1 else parameter.fill_(1.0)
        self.optimizer = build_optimizer(self.drafter, OptimizerConfig())
        self.road: Road = DenseRoad(self.drafter, dtype=dtype)
        if CUDA:
            kernels = kernels_for(DEVICE, head_dim=shape.head_dim, dtype=dtype)
            self.road = FusedRoad(self.drafter, kernels, dtype=dtype, activation_budget=1.0)
        self.embedding_VD = torch.randn(shape.vocab_size, shape.hidden_size, device=DEVICE, dtype=dtype)
        self.head = FrozenHead(torch.randn_like(self.embedding_VD).mul_(shape.hidden_size**-0.5), None)
        rows = random_rows(S, shape.vocab_size, 1, 1)
        self.rows, self.blocks = rows.to(DEVICE), random_blocks(rows, shape, A).to(DEVICE)
        F = len(shape.target_layer_ids) * shape.hidden_size
        self.features_BSF = torch.randn(1, S, F, device=DEVICE, dtype=dtype)

    def step(self) -> tuple[Any, Tensor]:
        self.optimizer.zero_grad(set_to_none=True)
        masters = WholeMasters(self.drafter, ALONE)
        self.road.begin(masters)
        hidden = self.road.hidden(self.embedding_VD.__getitem__, self.features_BSF, self.rows, self.blocks)
        terms = frozen_head_loss(hidden, self.blocks, self.head, budget_bytes=768 * 2**20)
        (terms.loss_sum / self.blocks.weights_BAK.sum()).backward()
        self.road.collect(masters)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.drafter.parameters() if p.grad is not None])
        assert torch.isfinite(norm)
        torch.nn.utils.clip_grads_with_norm_(self.drafter.parameters(), 1.0, norm)
        self.optimizer.step()
        return terms.detach(), norm


def now() -> float:
    """Seconds, when the device has done all that it was given."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def spread(values: list[float]) -> dict[str, float]:
    return {"n": len(values), "median": round(statistics.median(values), 3), "min": round(min(values), 3),
            "max": round(max(values), 3)}


def timed_steps(steps: Steps, count: int) -> list[float]:
    """Milliseconds of each."""
    times = []
    for _ in range(count):
        began = now()
        steps.step()
        times.append(1000 * (now() - began))
    return times


def guard_times(steps: Steps, folder: Path, count: int) -> list[float]:
    """Milliseconds that the loop spends beside a step: report, metrics line, spike, leak test due, disk watch, watchdog."""
    guards = GuardsConfig()
    metrics = Metrics(folder, None, at_bytes=0, at_step=0, writes=True)
    disk = DiskWatch(folder, checkpoint_bytes=12 * count_parameters(steps.shape), min_free_gib=0.0)
    times = []
    with Watchdog(folder, minutes=guards.stuck_minutes) as watchdog:
        for number in range(1, count + 1):
            terms, norm = steps.step()
            began = now()
            watchdog.alive()
            disk.short()
            report = report_step(terms, step=number, gradient_norm=float(norm), learning_rate=1e-4, anchors=512, eligible=8000,
                                 seconds={"data": 0.001, "capture": 0.1, "forward": 0.1, "backward": 0.1, "optimizer": 0.01})
            spike(report.loss, list(metrics.losses), factor=guards.loss_spike)
            metrics.log(as_metrics(report))
            leak_test_due(report.slot_accuracy, too_good=guards.too_good, step=number, tested_at=None)
            times.append(1000 * (now() - began))
    return times


def cost(options: argparse.Namespace) -> None:
    """Steps alone, the guards' share, then checkpoints: the copy on the step's thread, the write beside the steps."""
    if options.toy:
        shape = dataclasses.replace(born_from_shape(), hidden_size=64, intermediate_size=128, head_dim=16, num_heads=4,
                                    num_kv_heads=2, vocab_size=512)
        steps = Steps(shape, S=256, A=16, dtype=torch.bfloat16)
    else:
        steps = Steps(born_from_shape(), S=8192, A=512, dtype=torch.bfloat16)
    began = now()
    steps.step()
    out(what="first step, compilation included", seconds=round(now() - began, 1), parameters=count_parameters(steps.shape),
        device=torch.cuda.get_device_name() if CUDA else "cpu", torch=torch.__version__)
    timed_steps(steps, 3)
    alone = timed_steps(steps, options.steps)
    out(what="step alone, ms", **spread(alone))
    folder = Path(options.folder or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    beside = guard_times(steps, folder, options.steps)
    out(what="metrics and guards beside a step, ms", share_of_step_percent=round(
        100 * statistics.median(beside) / statistics.median(alone), 3), **spread(beside))
    origin = Origin(drafter_config=to_config(steps.shape, embedding_scale=1.0, softcap=None, dtype="bfloat16"), target="t",
                    inputs={}, config={}, versions={}, git_commit=None)
    with Keeper(folder, CheckpointConfig(keep_last=1), origin, Position(), ALONE) as keeper:
        making = make_room(keeper, steps, statistics.median(alone))
        for number in range(1, options.saves + 1):
            began = now()
            keeper.save(steps.drafter, steps.optimizer, Position(step=number))
            blocked = now() - began
            out(what=f"checkpoint {number} copied", step_waits_ms=round(1000 * blocked, 1),
                copy_ms=round(1000 * keeper.copy_seconds, 1))
            during = []
            while keeper._writing is not None and len(during) < 2000:
                during += timed_steps(steps, 1)
                keeper.check()
            slowed_s = sum(ms - statistics.median(alone) for ms in during) / 1000 + (making if number == 1 else 0.0)
            out(what=f"checkpoint {number}" + (", the making of its memory counted" if number == 1 else ""),
                write_s=round(keeper.write_seconds, 1),
                gib=round(12 * count_parameters(steps.shape) / 2**30, 2), step_while_writing_ms=spread(during),
                slowed_s=round(slowed_s, 2), percent_of_600_s=round(100 * (blocked + slowed_s) / 600, 3))
    after = timed_steps(steps, options.steps)
    out(what="step after, ms", **spread(after))
    sound = newest_sound(folder)
    out(what="newest checkpoint verifies", name=sound.name if sound else None)
    shutil.rmtree(folder)


def make_room(keeper: Keeper, steps: Steps, alone_ms: float) -> float:
    """Seconds by which steps are slower while the host memory of a copy is made beside them."""
    began = now()
    keeper.make_room(steps.drafter, steps.optimizer)
    asked, during = now() - began, []
    while keeper._room is not None and not keeper._room.done():
        during += timed_steps(steps, 1)
    assert keeper._room is not None
    locked = keeper._room.result()._locked
    slowed_s = asked + sum(ms - alone_ms for ms in during) / 1000
    out(what="host memory made beside steps", seconds=round(now() - began, 1), locked_parts=len(locked),
        step_meanwhile_ms=spread(during) if during else None, slowed_s=round(slowed_s, 2))
    return slowed_s


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--saves", type=int, default=2)
    options.add_argument("--folder")
    options.add_argument("--toy", action="store_true")
    chosen = options.parse_args()
    if not CUDA and not chosen.toy:
        print(json.dumps({"bench": "endure_gpu", "skipped": "needs a CUDA GPU"}))
        return
    cost(chosen)


if __name__ == "__main__":
    main()
