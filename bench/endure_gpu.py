"""Questions: what do checkpoints, metrics and guards cost a step of the 1.7 B drafter, and does a run on a GPU survive kills?

    python bench/endure_gpu.py cost [--steps 20] [--toy]      the drafter of bench/drafter_step.py, AdamW, checkpoints to --folder
    python bench/endure_gpu.py soak [--kills 3] [--seconds 6]  a toy run, killed at random, resumed, compared with one left alone

Each finding is one JSON line on stdout as it comes. --toy is a dry run on whatever device there is.
"""

import argparse
import dataclasses
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
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
from outrider.model.drafter import Drafter, count_parameters  # noqa: E402
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
            slowed_s = sum(ms - statistics.median(alone) for ms in during) / 1000
            out(what=f"checkpoint {number}" + (", its host memory made" if number == 1 else ""),
                write_s=round(keeper.write_seconds, 1),
                gib=round(12 * count_parameters(steps.shape) / 2**30, 2), step_while_writing_ms=spread(during),
                slowed_s=round(slowed_s, 2), percent_of_600_s=round(100 * (blocked + slowed_s) / 600, 3))
    after = timed_steps(steps, options.steps)
    out(what="step after, ms", **spread(after))
    sound = newest_sound(folder)
    out(what="newest checkpoint verifies", name=sound.name if sound else None)
    shutil.rmtree(folder)


CHILD = """
import json, sys, torch
from pathlib import Path
from outrider.config import load_run
from outrider.train.loop import train
print(json.dumps(train(load_run(Path(sys.argv[1])), check=None)))
"""


def soak(options: argparse.Namespace) -> None:
    """The run alone, then killed and resumed: the same state to the bit? Memory and steps a second, start by start."""
    from crashes import tensors_of
    from endure import make_data, toy_run

    from outrider.config import to_toml

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_data(folder)

        def command(name: str) -> tuple[Any, list[str]]:
            run = toy_run(folder, name)
            train = {"steps": options.steps, "device": DEVICE.type, "attention": "dense", "log_every": 10}
            run = run.model_copy(update={"train": run.train.model_copy(update=train),
                                         "checkpoint": CheckpointConfig(every=100)})
            (folder / f"{name}.toml").write_text(to_toml(run), encoding="utf-8")
            return run, [sys.executable, "-c", CHILD, str(folder / f"{name}.toml")]

        whole, alone = command("whole")
        subprocess.run(alone, check=True, capture_output=True)
        lines = (whole.train.folder / "metrics.jsonl").read_text().splitlines()
        out(what="uninterrupted", **rate(lines))
        run, again = command("killed")
        draw, kills = random.Random(0), 0
        while True:
            memory: list[int] = []
            child = subprocess.Popen(again, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            deadline = time.monotonic() + (draw.uniform(0.3, 1.0) * options.seconds + 5 if kills < options.kills else 1e9)
            while child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.5)
                memory.append(resident(child.pid))
            if child.poll() is None:
                child.send_signal(signal.SIGKILL)
                child.wait()
                kills += 1
            metrics_file = run.train.folder / "metrics.jsonl"
            found = metrics_file.read_text().splitlines() if metrics_file.exists() else []
            out(what=f"start {kills}", ended=child.returncode, steps_logged=len(found), rss_mib=[m >> 20 for m in memory[::4]],
                **rate(found))
            if child.returncode != -signal.SIGKILL:
                break
        a, b = tensors_of(whole), tensors_of(run)
        different = [name for name in a if not torch.equal(a[name], b[name])]
        out(what="killed against uninterrupted", kills=kills, tensors=len(a), different=len(different), same=not different,
            device=DEVICE.type)


def resident(pid: int) -> int:
    """Resident bytes of a process, 0 when it has gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def rate(lines: list[str]) -> dict[str, Any]:
    """Median milliseconds of a step, over the first and the second half of the lines."""
    times = [1000 * sum(json.loads(line)["seconds"].values()) for line in lines if '"loss"' in line and line.endswith("}")]
    halves = times[: len(times) // 2], times[len(times) // 2:]
    return {f"step_ms_{name}_half": round(statistics.median(half), 2) if half else None
            for name, half in zip(("first", "second"), halves, strict=True)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("part", choices=("cost", "soak"), nargs="?", default="cost")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--saves", type=int, default=2)
    options.add_argument("--kills", type=int, default=3)
    options.add_argument("--seconds", type=float, default=6.0)
    options.add_argument("--folder")
    options.add_argument("--toy", action="store_true")
    chosen = options.parse_args()
    if not CUDA and not chosen.toy:
        print(json.dumps({"bench": "endure_gpu", "skipped": "needs a CUDA GPU"}))
        return
    sys.path.insert(0, str(HERE.parent / "tests" / "endure"))
    cost(chosen) if chosen.part == "cost" else soak(chosen)


if __name__ == "__main__":
    main()
