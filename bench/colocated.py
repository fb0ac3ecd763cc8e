"""Target and drafter on one GPU, the case that the project was born from: the step, against each of them alone; and as a pair.

    python bench/colocated.py [--precision fp8 as_loaded] [--steps 8] [--seconds 130] [--out FOLDER] [--toy]
    python bench/colocated.py --draw bench/results/pair_fp8.json ...

A 27B-shaped target (bench/capture.py: random weights, 62 layers run, packed capture compiled) and the 1.7 B drafter
(bench/drafter_step.py: fused road, fp32 masters, AdamW), rows of 8192 tokens of 4 documents, 512 anchors, K = 16, one row a step,
through train.step.run_step and train.placement.Relay, everything that training runs but the checkpoint and the log. Measured with
device events, medians of `--steps` after a warm-up: the target alone; learning alone (forward, backward, update on features that
are there); both, colocated, in turn on one stream; both on the same card as a pair, each on a stream of its own (capture of row
t + 1 while row t is learned). Both precisions of the target, one after the other, in one process. Each finding is printed and
appended to colocated.jsonl in FOLDER at once, traces lie beside it (`--draw` makes pictures of them); after `--seconds` nothing
new is begun. `--toy`: small, on a CPU. Last line: JSON.
"""

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import capture as capture_bench
import torch
from drafter_step import born_from_shape

from outrider.config import ObjectiveConfig, OptimizerConfig, PlacementConfig
from outrider.features import guards
from outrider.features.capture import FeatureSource
from outrider.features.packed import PackedCapture
from outrider.features.target import Ends
from outrider.layout.anchors import draw_anchors
from outrider.layout.blocks import build_blocks
from outrider.model.attention import dense_attention
from outrider.model.drafter import Drafter
from outrider.model.fused_attention import kernels_for
from outrider.planner.timeline import TraceFile, by_process, read_trace, write_trace
from outrider.records import DrafterShape, Features, FrozenHead, TokenRows
from outrider.train.lanes import Trace
from outrider.train.masters import WholeMasters
from outrider.train.meter import Stopwatch
from outrider.train.optim import build_optimizer
from outrider.train.placement import Devices, open_relay
from outrider.train.processes import ALONE
from outrider.train.resolve import default_gamma
from outrider.train.roads import DenseRoad, FusedRoad, Road
from outrider.train.step import Learner, MicroBatch, Supply, run_step

WARM_UP = 2
LOGITS_BYTES = ObjectiveConfig(gamma=None).logits_mib * 2**20


class Bench:
    """The drafter's side on one device, and fresh rows for it."""

    def __init__(self, shape: DrafterShape, *, S: int, A: int, device: torch.device) -> None:
        self.shape, self.S, self.A, self.device = shape, S, A, device
        with torch.device("meta"):
            drafter = Drafter(shape, dense_attention)
        drafter = drafter.to_empty(device=device)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.normal_(std=parameter.shape[-1] ** -0.5) if parameter.dim() > 1 else parameter.fill_(1.0)
        dtype = torch.bfloat16
        embedding = torch.nn.Embedding(shape.vocab_size, shape.hidden_size, device=device, dtype=dtype)
        head = torch.randn(shape.vocab_size, shape.hidden_size, device=device, dtype=dtype).mul_(shape.hidden_size**-0.5)
        fused = device.type == "cuda"
        road: Road = DenseRoad(drafter, dtype=dtype)
        if fused:
            kernels = kernels_for(device, head_dim=shape.head_dim, dtype=dtype)
            road = FusedRoad(drafter, kernels, dtype=dtype, activation_budget=1.0)
        self.learner = Learner(road, WholeMasters(drafter, ALONE), Ends(embedding.requires_grad_(False), FrozenHead(head, None)),
                               build_optimizer(drafter, OptimizerConfig(learning_rate=1e-4)))
        self.count = 0

    def batch(self) -> MicroBatch:
        """A row of 4 documents, all supervised."""
        self.count += 1
        rows = replace(capture_bench.random_rows(self.S, self.shape.vocab_size, 4), row_ids_B=torch.tensor([self.count]))
        anchors, keep, eligible = draw_anchors(rows, per_row=self.A, document_floor=8, seed=self.count, epochs_B=[0])
        placed = rows.to(self.device)
        blocks = build_blocks(placed, anchors.to(self.device), keep.to(self.device), block_size=self.shape.block_size,
                              mask_token_id=self.shape.mask_token_id, gamma=default_gamma(self.shape.block_size))
        return MicroBatch(placed, rows, blocks, eligible)

    def step(self, supply: Supply, batch: MicroBatch, coming: Sequence[TokenRows]) -> Any:
        return run_step(self.learner, supply, [batch], coming, clip_norm=1.0, logits_bytes=LOGITS_BYTES, watch=Stopwatch())


class There:
    """Features that are there already."""

    ahead = 0

    def __init__(self, features: Features) -> None:
        self.found = features

    def features(self, rows: TokenRows) -> Features:
        return self.found

    def again(self, rows: TokenRows) -> Features:
        return self.found

    def expect(self, coming: Sequence[TokenRows]) -> None:
        pass

    def mark(self, label: str) -> None:
        pass


def times_of(work: Callable[[], Any], n: int, device: torch.device) -> list[float]:
    """Milliseconds between the ends of n calls on the current stream, back to back after WARM_UP more."""
    ends: list[Any] = []
    for _ in range(WARM_UP + n + 1):
        work()
        if device.type == "cuda":
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record()
        else:
            ends.append(time.perf_counter())
    if device.type == "cuda":
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(ends)][WARM_UP:]
    return [1e3 * (b - a) for a, b in itertools.pairwise(ends)][WARM_UP:]


def spread(times: Sequence[float]) -> dict[str, Any]:
    return {"ms": round(statistics.median(times), 1), "min": round(min(times), 1), "max": round(max(times), 1), "n": len(times)}


def placed_steps(
    bench: Bench, source: FeatureSource, cards: int, n: int, out: Path, name: str
) -> dict[str, Any]:
    """Steps colocated (`cards` 0) or as a pair whose two devices are streams of one card (1), traced and drawn."""
    devices = Devices(bench.device, (bench.device,) * cards)
    trace = Trace(devices.all)
    relay = open_relay([source], devices, PlacementConfig(capture_cards=cards), meeting="bench", trace=trace)
    batches = [bench.batch() for _ in range(n + WARM_UP + 1 + relay.ahead)]
    at, norms = iter(range(len(batches))), []

    def one() -> None:
        i = next(at)
        norms.append(bench.step(relay, batches[i], [b.host_rows for b in batches[i + 1 : i + 1 + relay.ahead]]).norm)

    times = times_of(one, n, bench.device)
    trace.on = False
    found = TraceFile(name, len(times), 1, 1, by_process({0: trace.spans()}))
    write_trace(out / f"{name}.json", found)
    return {**spread(times), "waits": {side: round(share, 4) for side, share in found.waits().items()},
            "stages_ms": {stage: round(ms, 1) for stage, ms in found.stages().items()},
            "norms": [round(float(norm), 5) for norm in norms[:4]]}


def measure(precision: str, bench: Bench, settings: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Everything of one target, as it becomes known."""
    began = time.perf_counter()
    config = capture_bench.toy_config(7) if settings.toy else capture_bench.born_from_config(bench.shape.target_layer_ids[-1] + 1)
    target = capture_bench.random_target(config, bench.device, precision=precision)
    ids = bench.shape.target_layer_ids
    source = FeatureSource(target, ids, keep="no", run=PackedCapture(target, ids, compiled=not settings.toy))
    first = bench.batch()
    features = source.features(first.host_rows, bench.device)
    if bench.device.type == "cuda":
        torch.cuda.synchronize()
    finite = bool(features.values_BSF.isfinite().all())
    yield {"what": "first capture", "s": round(time.perf_counter() - began, 1), "finite": finite}
    began = time.perf_counter()
    bench.step(There(features), first, [])
    if bench.device.type == "cuda":
        torch.cuda.synchronize()
    yield {"what": "first step", "s": round(time.perf_counter() - began, 1)}
    n = settings.steps
    target_alone = times_of(lambda: source.features(first.host_rows, bench.device), n, bench.device)
    yield {"what": "target alone", **spread(target_alone)}
    learning_alone = times_of(lambda: bench.step(There(features), first, []), n, bench.device)  # noqa: F821 - deleted below
    yield {"what": "learning alone", **spread(learning_alone)}
    del features
    both = statistics.median(target_alone) + statistics.median(learning_alone)
    slots = bench.A * (bench.shape.block_size - 1)
    for what, cards in (("colocated", 0), ("pair on one card", 1)):
        if bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found = placed_steps(bench, source, cards, n, settings.out, f"{what.split()[0]}_{precision}")
        yield {"what": what, **found, "over_sum_of_both_alone": round(found["ms"] / both, 4),
               "supervised_tokens_per_s": round(1e3 * slots / found["ms"]),
               "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if bench.device.type == "cuda" else None}


def draw(traces: Sequence[Path]) -> None:
    from outrider.report.timeline import draw_trace  # matplotlib, which a GPU's machine need not have

    for path in traces:
        path.with_suffix(".svg").write_text(draw_trace(read_trace(path)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", choices=["fp8", "as_loaded"], default=["fp8", "as_loaded"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--draw", nargs="+", type=Path, help="draw these traces, and measure nothing")
    settings = parser.parse_args()
    if settings.draw:
        draw(settings.draw)
        return
    if not settings.toy and not torch.cuda.is_available():
        print(json.dumps({"bench": "colocated", "skipped": "needs a CUDA GPU"}))
        return
    began = time.perf_counter()
    guards.lock_autotuner()
    device = torch.device("cpu" if settings.toy else "cuda:0")
    shape, S, A = (born_from_shape(), 8192, 512) if not settings.toy else (born_from_shape(
        hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=512,
        target_layer_ids=(1, 3, 6), num_target_layers=8, layer_types=("full_attention",) * 2), 256, 16)
    bench = Bench(shape, S=S, A=A, device=device)
    found: list[dict[str, Any]] = []
    for precision in settings.precision:
        for one in measure(precision, bench, settings):
            one = {"precision": precision, **one, "at_s": round(time.perf_counter() - began, 1)}
            found.append(one)
            print(json.dumps(one), file=sys.stderr, flush=True)
            with (settings.out / "colocated.jsonl").open("a") as lines:
                lines.write(json.dumps(one) + "\n")
            if time.perf_counter() - began > settings.seconds:
                break
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if time.perf_counter() - began > settings.seconds:
            break
    print(json.dumps({"bench": "colocated", "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                      "torch": torch.__version__, "seconds": round(time.perf_counter() - began, 1),
                      "found": {f"{one['precision']} {one['what']}": one.get("ms", one.get("s")) for one in found}}))


if __name__ == "__main__":
    main()
