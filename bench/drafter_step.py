"""The drafter's forward and backward on one GPU: the case that the project was born from, and sweeps around it.

    python bench/drafter_step.py [--sweep ["anchors 128" ...]] [--steps 20] [--documents 1 0] [--activation-budget 1.0]
                                 [--attention span flex] [--profile]
    python bench/drafter_step.py --draw bench/results/drafter_step.jsonl bench/results/drafter_step.svg

The case: hidden 5120, FFN 17408, 32/8 heads of 128, 5 layers, vocabulary 248,320, a row of 8192 tokens, 512 anchors, K = 16,
bf16 compute weights of fp32 masters, random weights, fresh features, documents and anchors every step (--documents 0: 1 to 12
packed documents, another number each step). Timed: block mask, drafter, frozen-head loss, backward. "Static" is masters,
compute weights, their gradients, head and embedding. The matrix rate is measured before (a cool chip) and after the steps
(one at its power limit). Last line: JSON.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.config import ObjectiveConfig
from outrider.features.guards import wake_compilers
from outrider.layout.anchors import draw_anchors
from outrider.layout.block_mask import visible_spans
from outrider.layout.blocks import build_blocks
from outrider.model.attention import dense_attention
from outrider.model.drafter import Drafter
from outrider.model.flops import StepFlops, count_flops, count_parameters
from outrider.model.fused_attention import FusedKernels, flex_kernels, span_kernels
from outrider.objective.frozen_head import frozen_head_loss
from outrider.records import FULL, DraftBlocks, DrafterShape, FrozenHead, TokenRows
from outrider.train.masters import WholeMasters
from outrider.train.processes import ALONE
from outrider.train.resolve import default_gamma
from outrider.train.roads import FusedRoad

DEVICE = torch.device("cuda")
WARM_UP = 3


def born_from_shape(**changes: Any) -> DrafterShape:
    shape = DrafterShape(
        hidden_size=5120, intermediate_size=17408, num_layers=5, num_heads=32, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-6,
        rope_theta=1e6, vocab_size=248320, max_position_embeddings=32768, block_size=16, mask_token_id=1,
        target_layer_ids=(1, 16, 31, 46, 61), num_target_layers=64, tie_word_embeddings=False, layer_types=(FULL,) * 5,
    )
    return dataclasses.replace(shape, **changes)


def random_rows(S: int, vocab: int, documents: int, seed: int) -> TokenRows:
    """One row of `documents` packed documents of random lengths, all of it supervised."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randperm(S - 1, generator=generator)[: documents - 1].add(1).sort().values
    starts_S = torch.zeros(S, dtype=torch.int64)
    starts_S[cuts] = 1
    ids_S = starts_S.cumsum(0)
    first_S = torch.cat((torch.zeros(1, dtype=torch.int64), cuts))[ids_S]
    return TokenRows(
        torch.randint(2, vocab, (1, S), generator=generator), ids_S[None], (torch.arange(S) - first_S)[None],
        torch.ones(1, S, dtype=torch.bool), torch.tensor([seed]),
    )


def random_blocks(rows: TokenRows, shape: DrafterShape, A: int) -> DraftBlocks:
    anchors, keep, _ = draw_anchors(rows, per_row=A, document_floor=8, seed=0, epochs_B=[0])
    return build_blocks(rows, anchors, keep, block_size=shape.block_size, mask_token_id=shape.mask_token_id,
                        gamma=default_gamma(shape.block_size))


def kernels_named(name: str, shape: DrafterShape) -> FusedKernels:
    if name == "flex":
        return flex_kernels(DEVICE, head_dim=shape.head_dim)
    kernels = span_kernels(DEVICE, head_dim=shape.head_dim, dtype=torch.bfloat16)
    assert kernels is not None
    return kernels


@dataclasses.dataclass
class Case:
    """A drafter on the GPU with the target's frozen parts, and steps over fresh rows."""

    shape: DrafterShape
    S: int
    A: int
    documents: int
    logits_mib: int
    activation_budget: float
    attention: str

    def __post_init__(self) -> None:
        shape = self.shape
        with torch.device("meta"):
            drafter = Drafter(shape, dense_attention)
        self.drafter = drafter.to_empty(device=DEVICE)
        with torch.no_grad():
            for parameter in self.drafter.parameters():
                parameter.normal_(std=parameter.shape[-1] ** -0.5) if parameter.dim() > 1 else parameter.fill_(1.0)
        self.embedding_VD = torch.randn(shape.vocab_size, shape.hidden_size, device=DEVICE, dtype=torch.bfloat16)
        self.head = FrozenHead(torch.randn_like(self.embedding_VD).mul_(shape.hidden_size**-0.5), None)
        kernels = kernels_named(self.attention, shape)
        self.road = FusedRoad(self.drafter, kernels, dtype=torch.bfloat16, activation_budget=self.activation_budget)
        self.road.begin(WholeMasters(self.drafter, ALONE))
        self.count = 0

    def fresh(self) -> tuple[TokenRows, DraftBlocks, Tensor]:
        self.count += 1
        rows = random_rows(self.S, self.shape.vocab_size, self.documents or 1 + self.count % 12, self.count)
        blocks = random_blocks(rows, self.shape, self.A)
        width = len(self.shape.target_layer_ids) * self.shape.hidden_size
        return rows.to(DEVICE), blocks.to(DEVICE), torch.randn(1, self.S, width, device=DEVICE, dtype=torch.bfloat16)

    def forward_backward(self, rows: TokenRows, blocks: DraftBlocks, features: Tensor) -> Tensor:
        hidden = self.road.hidden(self.embed, features, rows, blocks)
        terms = frozen_head_loss(hidden, blocks, self.head, budget_bytes=self.logits_mib * 2**20)
        (terms.loss_sum / blocks.weights_BAK.sum()).backward()
        return terms.loss_sum.detach()

    def embed(self, ids: Tensor) -> Tensor:
        """As the target's own does: `table[id]` of a single id would wait for the device."""
        return F.embedding(ids, self.embedding_VD)

    def clear(self) -> None:
        for parameter in self.road.fused.parameters():
            parameter.grad = None

    def static_bytes(self) -> int:
        """Masters, which hold the compute weights, those weights' gradients, head and embedding."""
        masters = sum(p.numel() * p.element_size() for p in self.drafter.parameters())
        gradients = sum(p.numel() * p.element_size() for p in self.road.fused.parameters())
        frozen = 2 * self.embedding_VD.numel() * self.embedding_VD.element_size()
        return masters + gradients + frozen

    def flops(self) -> StepFlops:
        """Counted on a fresh row, so the attention's part is that of packed documents."""
        _, blocks, _ = self.fresh()
        pairs = int(visible_spans(blocks, row_length=self.S, window=None).pairs)
        return count_flops(self.shape, queries=self.A * self.shape.block_size, context=self.S, pairs=pairs)


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds on the device's own clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def matmul_rate() -> float:
    """TFLOP/s of a large bf16 product on random data, median of 20, in this run: the ceiling of everything here."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    return 2 * 8192**3 / statistics.median(timed(lambda: a @ b) for _ in range(20)) / 1e9


def seconds_since_process_start() -> float:
    """Interpreter and imports included (Linux)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def measure(case: Case, steps: int) -> dict[str, Any]:
    """Median, least and most milliseconds of `steps` steps after the first ones, and the memory above what must stand."""
    first = time.perf_counter()
    case.forward_backward(*case.fresh())
    torch.cuda.synchronize()
    first, since_start = time.perf_counter() - first, seconds_since_process_start()
    times, reserved = [], []
    for number in range(WARM_UP + steps):
        if number == WARM_UP:
            compilations = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            torch.cuda.reset_peak_memory_stats()
            times.clear()
            reserved.clear()
        case.clear()
        batch = case.fresh()
        torch.cuda.synchronize()
        times.append(timed(lambda batch=batch: case.forward_backward(*batch)))  # type: ignore[misc]
        reserved.append(torch.cuda.memory_reserved())
    flops = case.flops()
    median = statistics.median(times)
    above = torch.cuda.max_memory_allocated() - case.static_bytes()
    return {
        "ms": round(median, 1), "min_ms": round(min(times), 1), "max_ms": round(max(times), 1), "n": steps,
        "first_step_s": round(first, 1), "first_step_ended_s": round(since_start, 1),
        "peak_above_static_gib": round(above / 2**30, 2),
        "tflop": round(flops.total / 1e12, 1), "tflop_s": round(flops.total / median / 1e9),
        "reserved_grew_mib": round((reserved[-1] - reserved[0]) / 2**20), "new_compilations":
        torch._dynamo.utils.counters["stats"]["unique_graphs"] - compilations,
        "parts": {k: round(v / 1e12, 1) for k, v in dataclasses.asdict(flops).items()},
    }


def kernel_times(case: Case) -> str:
    """Device milliseconds of one step by kernel, the longest first."""
    case.clear()
    batch = case.fresh()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        case.forward_backward(*batch)
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda e: -e.device_time_total)
    lines = [f"{e.device_time_total / 1e3:9.3f} ms {e.count:5d} x {e.key[:110]}" for e in events if e.device_time_total > 20]
    return "\n".join([f"{sum(e.device_time_total for e in events) / 1e3:9.3f} ms in all", *lines])


def sweep_points() -> list[tuple[str, dict[str, Any]]]:
    base = {"S": 8192, "A": 512, "changes": {}}
    points = [(f"anchors {A}", {**base, "A": A}) for A in (64, 128, 256, 1024, 2048)]
    points += [(f"row {S}", {**base, "S": S}) for S in (1024, 2048, 4096, 16384, 32768)]
    points += [(f"K {K}", {**base, "changes": {"block_size": K}}) for K in (4, 8)]
    points += [(f"vocabulary {V}", {**base, "changes": {"vocab_size": V}}) for V in (49152, 152064)]
    return points


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Milliseconds against anchors and against row length, with the limit at the run's own matrix rate, as one SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for axis, swept, at_base in zip(axes, ("anchors", "row"), (512, 8192), strict=True):
        points = {int(r["case"].split()[1]): r for r in results if r["case"].startswith(swept)}
        points[at_base] = next(r for r in results if r["case"] == "born from")
        xs = sorted(points)
        axis.errorbar(xs, [points[x]["ms"] for x in xs], marker="o", markersize=4, label="measured, least to most", yerr=(
            [points[x]["ms"] - points[x]["min_ms"] for x in xs], [points[x]["max_ms"] - points[x]["ms"] for x in xs]))
        axis.plot(xs, [points[x]["limit_ms"] for x in xs], linestyle="--", color="grey", label="FLOP at the matrix rate")
        label = {"anchors": "anchors (row of 8192)", "row": "row length (512 anchors)"}[swept]
        axis.set(xlabel=label, ylabel="ms", xlim=0, ylim=0)
        axis.legend()
    figure.suptitle("Drafter forward and backward, one H200")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def newest_points(lines: Path) -> list[dict[str, Any]]:
    """Of each point of a sweep the run measured last, with one document and the attention that is the default."""
    runs = [json.loads(line).get("results") for line in lines.read_text().splitlines()]
    points = [point for run in runs if isinstance(run, list) for point in run]
    return list({point["case"]: point for point in points
                 if point.get("documents", 1) == 1 and point.get("attention", "span") == "span"}.values())


def run_point(
    name: str, point: dict[str, Any], attention: str, args: argparse.Namespace, rate: float
) -> list[dict[str, Any]]:
    """One drafter, compiled once, measured with each number of documents."""
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    case = Case(born_from_shape(**point["changes"]), point["S"], point["A"], documents=args.documents[0],
                logits_mib=args.logits_mib, activation_budget=args.activation_budget, attention=attention)
    results = []
    for case.documents in args.documents:
        result = {"case": name, "attention": attention, "documents": case.documents,
                  "parameters": count_parameters(case.shape), **measure(case, args.steps)}
        result["share_of_matmul_rate"] = round(result["tflop_s"] / rate, 3)
        result["limit_ms"] = round(result["tflop"] / rate * 1e3, 1)
        print(f"{name:18} {attention}, documents {case.documents or '1 to 12'}: {result['ms']:8.1f} ms "
              f"({result['min_ms']:.1f}..{result['max_ms']:.1f}), limit {result['limit_ms']:.1f}, "
              f"{result['peak_above_static_gib']:.2f} GiB above static, {result['tflop_s']} TFLOP/s "
              f"({result['share_of_matmul_rate']:.0%}), first step {result['first_step_s']} s", file=sys.stderr, flush=True)
        result["matmul_tflop_s_after"] = round(matmul_rate())
        results.append(result)
        if args.out:
            with args.out.open("a") as lines:
                lines.write(json.dumps(result) + "\n")
    if args.profile:
        print(kernel_times(case), file=sys.stderr, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name, _ in sweep_points()]
    parser.add_argument("--sweep", nargs="*", choices=names, metavar="POINT", help=f"all points, or some of: {', '.join(names)}")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--documents", type=int, nargs="+", default=[1], help="0: 1 to 12, another number each step")
    parser.add_argument("--logits-mib", type=int, default=ObjectiveConfig().logits_mib)
    parser.add_argument("--activation-budget", type=float, default=1.0)
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("LINES", "SVG"), help="draw a JSON lines file")
    parser.add_argument("--out", type=Path, help="each point's JSON line is appended here as soon as it is measured")
    parser.add_argument("--attention", nargs="+", choices=("span", "flex"), default=["span"], help="each in turn, in one run")
    parser.add_argument("--profile", action="store_true", help="print one step's device time by kernel")
    args = parser.parse_args()
    if args.draw:
        draw(newest_points(args.draw[0]), args.draw[1])
        return
    if not torch.cuda.is_available():
        print(json.dumps({"bench": "drafter_step", "skipped": "needs a CUDA GPU"}))
        return
    wake_compilers()
    rate = matmul_rate()
    wanted = [] if args.sweep is None else args.sweep or names
    points = [("born from", {"S": 8192, "A": 512, "changes": {}}), *((n, p) for n, p in sweep_points() if n in wanted)]
    results = []
    for name, point in points:
        for attention in args.attention:
            results += run_point(name, point, attention, args, rate)
    print(json.dumps({"bench": "drafter_step", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                      "matmul_tflop_s": round(rate), "results": results}))


if __name__ == "__main__":
    main()
