"""Predicted against measured peak memory over a grid of runs on one GPU, through the code that training runs.

    python bench/ledger.py [--only NAME ...] [--beside] [--out FOLDER] [--steps 2] [--card rtx-pro-6000] [--list] [--draw]

Each point is a run file and a target's config. A random target of that config stands on the GPU, a drafter learns from it for a
few optimizer steps, and torch.cuda.max_memory_allocated and the device's own "used" are held against the ledger. What went wrong
elsewhere (unfused attention, plain logits, an eager block mask) is run on purpose: these points replace that one part.
Appends to ledger.jsonl in FOLDER; `--draw` makes ledger.svg of all of it. `--beside`: other processes share the device; what it
shows as used is then known only where the driver tells processes apart. `--card` caps the allocator to a smaller card of the
catalogue. With more than 2 steps those from the third on are timed, each with its capture.
`--list`: the points and what is predicted of them, without a GPU. Last line: JSON.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from drafter_step import random_rows
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.config import PlacementConfig, parse_run
from outrider.features.capture import FeatureSource
from outrider.features.eight_bit import quantise_layer
from outrider.features.facts import read_facts
from outrider.features.fp8 import Fp8Linear, quantise_rows
from outrider.features.source import capture_in
from outrider.features.target import Target
from outrider.layout.mask import visibility
from outrider.model import tripwire
from outrider.model.attention import dense_attention
from outrider.model.drafter import Drafter
from outrider.model.fused_attention import flex_kernels, fused_attention, kernels_for
from outrider.model.fused_drafter import fused_twin
from outrider.objective.losses import plain_loss
from outrider.planner.doctor.readings import card_processes
from outrider.planner.gpus import parse_gpus
from outrider.planner.job import job_of
from outrider.planner.ledger import DeviceLedger, colocated
from outrider.planner.target_shapes import read_target_shape
from outrider.train import step
from outrider.train.masters import WholeMasters
from outrider.train.meter import Stopwatch
from outrider.train.optim import build_optimizer
from outrider.train.placement import Devices, open_relay
from outrider.train.processes import ALONE
from outrider.train.resolve import Resolved, resolve
from outrider.train.roads import DenseRoad, FusedRoad

GIB = 2**30
UNTIMED = 2  # the optimizer's moments are born in the first, which compiles too


def small_target(D: int, layers: int, V: int, **changes: Any) -> dict[str, Any]:
    """A qwen3 of width D; FFN 3 D."""
    heads = D // 128
    return {"model_type": "qwen3", "hidden_size": D, "num_hidden_layers": layers, "vocab_size": V, "intermediate_size": 3 * D,
            "num_attention_heads": heads, "num_key_value_heads": max(heads // 4, 1), "head_dim": 128,
            "tie_word_embeddings": False,
            "max_position_embeddings": 65536, **changes}


def dense_target(D: int, layers: int, wide: int, heads: int, *, tied: bool) -> dict[str, Any]:
    """A qwen3 as published: 8 key heads of 128, vocabulary 151,936."""
    return small_target(D, layers, 151936, intermediate_size=wide, num_attention_heads=heads, num_key_value_heads=8,
                        tie_word_embeddings=tied)


def expert_target(layers: int) -> dict[str, Any]:
    """The first layers of a qwen3_moe of 128 experts, 8 of them a token."""
    return small_target(2048, layers, 151936, model_type="qwen3_moe", num_attention_heads=32, num_key_value_heads=4,
                        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, intermediate_size=6144)


BORN_FROM = json.loads((Path(__file__).parents[1] / "examples" / "born-from" / "config.json").read_text())


@dataclasses.dataclass(frozen=True)
class Point:
    """One run: `target` is a config.json, `sections` what its run file says besides, S tokens a row."""

    name: str
    target: dict[str, Any]
    S: int = 4096
    sections: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    suppositions: tuple[str, ...] = ()
    documents: int = 1

    def document(self, target: Path) -> dict[str, Any]:
        document: dict[str, Any] = {
            "target": {"path": str(target)}, "data": {"rows": "none"}, "drafter": {"mask_token_id": 1},
            "train": {"folder": "none", "device": "cuda", "attention": "fused"},
        }
        for section, values in self.sections.items():
            document[section] = document.get(section, {}) | values
        return document


def born_from(name: str, **sections: dict[str, Any]) -> Point:
    return Point(name, BORN_FROM, 8192, {**sections, "drafter": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
                                                                 **sections.get("drafter", {})}})


def points() -> list[Point]:
    medium, wide = small_target(2048, 12, 65536), small_target(5120, 8, 65536)
    dense, unfused = {"attention": "dense"}, ("unfused-attention",)
    base = Point("fused", medium)

    def but(name: str, point: Point = base, **changes: Any) -> Point:
        return dataclasses.replace(point, name=name, **changes)

    return [
        base,
        but("accumulation 3", sections={"train": {"accumulation": 3}}),
        but("packed documents", documents=9),
        but("logits 256 MiB", sections={"objective": {"logits_mib": 256}}),
        but("plain logits", suppositions=("plain-logits",)),
        but("eager mask", suppositions=("eager-mask",)),
        but("unfused", suppositions=unfused),
        but("unfused, 128 anchors", suppositions=unfused, sections={"layout": {"anchors": 128}}),
        but("unfused, plain logits, eager mask", suppositions=(*unfused, "plain-logits", "eager-mask")),
        but("dense, 128 anchors", sections={"train": dense, "layout": {"anchors": 128}}),
        but("dense, 256 anchors", sections={"train": dense, "layout": {"anchors": 256}}),
        but("dense fp32", sections={"train": {**dense, "precision": "float32"}, "layout": {"anchors": 128}}),
        but("vocabulary 151,936", target=small_target(2048, 12, 151936)),
        but("2 rows a batch", S=2048, sections={"train": {"rows_per_batch": 2}, "layout": {"anchors": 256}}),
        but("anchors 128", sections={"layout": {"anchors": 128}}),
        but("2 layers", sections={"drafter": {"num_layers": 2}}),
        but("K 8", sections={"drafter": {"block_size": 8}}),
        but("row 16384", S=16384),
        but("head_dim 256", sections={"drafter": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 256}}),
        but("recompute 0.5", sections={"train": {"activation_budget": 0.5}}),
        but("small: width 576", target=small_target(576, 30, 49152, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
                                                    intermediate_size=1536, tie_word_embeddings=True), S=1024,
            sections={"layout": {"anchors": 96}, "drafter": {"block_size": 8, "num_layers": 2}}),
        but("8-bit moments", sections={"optimizer": {"state": "8bit"}}),
        but("target 1.7B", target=dense_target(2048, 28, 6144, 16, tied=True)),
        but("target 8B", target=dense_target(4096, 36, 12288, 32, tied=False)),
        but("target 8B FP8", target=dense_target(4096, 36, 12288, 32, tied=False), sections={"features": {"precision": "fp8"}}),
        but("experts: 8 layers of 128", target=expert_target(8)),
        but("wide: 5120", target=wide, S=8192),
        but("wide, unfused, 64 anchors", target=wide, S=8192, suppositions=unfused, sections={"layout": {"anchors": 64}}),
        born_from("27B bf16"),
        born_from("27B bf16, 64 anchors", layout={"anchors": 64}),
        born_from("27B bf16, packed", features={"documents": "packed"}),
        born_from("27B FP8, packed", features={"documents": "packed", "precision": "fp8"}),
    ]


def random_target(folder: Path, last_layer: int, *, fp8: bool, device: str = "cuda") -> Target:
    """A target of the folder's config with random weights on `device`, cut as loading would cut it; `fp8`: made in 8 bits."""
    facts = read_facts(str(folder))
    config = AutoConfig.from_pretrained(folder).get_text_config()
    config.num_hidden_layers = last_layer + 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: last_layer + 1]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if fp8:
        for layer in model.get_decoder().layers:
            quantise_layer(layer)
    model.to_empty(device=device).eval().requires_grad_(False)
    model.tie_weights()  # to_empty made a tensor for each name
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            eight, scale = quantise_rows(torch.randn(module.weight.shape, device=device, dtype=torch.bfloat16) * 0.02)
            module.weight.copy_(eight)
            module.scale.copy_(scale)
            continue
        for weight in module.parameters(recurse=False):
            weight.normal_(std=0.02) if weight.dim() > 1 else weight.fill_(0.1)
    with torch.device(device):  # its buffers are numbers, not weights
        model.get_decoder().rotary_emb = type(model.get_decoder().rotary_emb)(config)
    return Target(model, facts)


@contextlib.contextmanager
def supposing(suppositions: tuple[str, ...]) -> Iterator[None]:
    """The real code with the loss replaced by what goes wrong elsewhere; `open_road` replaces parts of the drafter."""
    with contextlib.ExitStack() as stack:
        if "plain-logits" in suppositions:
            stack.enter_context(patch.object(step, "frozen_head_loss", lambda hidden, blocks, head, *, budget_bytes:
                                             plain_loss(hidden, blocks, head)))
        yield


def eager_mask(blocks: Any, *, row_length: int, window: int | None) -> Any:
    B, A, K = blocks.noise_ids_BAK.shape
    documents_BS = torch.zeros(B, row_length, dtype=torch.int64, device=blocks.anchors_BA.device)
    rule = visibility(documents_BS, blocks.anchors_BA, blocks.keep_BA, block_size=K, window=window)
    return create_block_mask(rule, B, None, A * K, row_length + A * K, device=str(blocks.anchors_BA.device))


def open_road(resolved: Resolved, suppositions: tuple[str, ...]) -> Any:
    settings = resolved.config.train
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[settings.precision]
    with torch.device("cuda"):
        drafter = Drafter(resolved.shape, dense_attention)
    if settings.attention == "dense":
        return DenseRoad(drafter, dtype=dtype)
    kernels = kernels_for(torch.device("cuda"), head_dim=resolved.shape.head_dim, dtype=dtype)
    if suppositions:  # what goes wrong elsewhere goes wrong with flex_attention
        kernels = flex_kernels(torch.device("cuda"), head_dim=resolved.shape.head_dim)
    if "eager-mask" in suppositions:
        kernels = dataclasses.replace(kernels, mask=eager_mask)
    road = FusedRoad(drafter, kernels, dtype=dtype, activation_budget=settings.activation_budget)
    if "unfused-attention" in suppositions:
        tripwire.remove()
        road.fused = fused_twin(drafter, lambda q, k, v, mask: fused_attention(q, k, v, mask, options={}), dtype=dtype,
                                compile_part=lambda part: part)
    return road


def foretold(point: Point, folder: Path) -> tuple[Resolved, DeviceLedger]:
    """The point's run, whose target's config is put into `folder`, and its ledger."""
    (folder / "config.json").write_text(json.dumps(point.target))
    resolved = resolve(parse_run(point.document(folder), where=point.name), read_facts(str(folder)))
    job = job_of(resolved.config, resolved.shape, read_target_shape(str(folder)), row_length=point.S, replicas=1, sharded=False,
                 suppositions=point.suppositions)
    return resolved, colocated(job)


def measure(point: Point, *, alone: bool, steps: int) -> dict[str, Any]:
    """Run the point; its bytes as predicted and as measured, and the milliseconds of a step where any was timed."""
    with tempfile.TemporaryDirectory() as name:
        resolved, ledger = foretold(point, Path(name))
        began = time.monotonic()
        with supposing(point.suppositions):
            target = random_target(Path(name), resolved.shape.target_layer_ids[-1],
                                   fp8=resolved.config.features.precision == "fp8")
            found, times = run(point, resolved, target, steps)
    peak, used = found["measured"], own_bytes() or (found["measured_used"] if alone else None)
    return {
        "name": point.name, "predicted": ledger.peak_bytes, **found, "error": ledger.peak_bytes / peak - 1,
        "predicted_used": ledger.device_used_bytes, "measured_used": used,
        "error_used": ledger.device_used_bytes / used - 1 if used else None,
        "standing": ledger.standing_bytes, "phase": ledger.peak_phase, "seconds": round(time.monotonic() - began, 1),
        **({"ms": round(statistics.median(times), 1), "min_ms": round(min(times), 1), "max_ms": round(max(times), 1),
            "n": len(times)} if times else {}),
    }


def run(point: Point, resolved: Resolved, target: Target, steps: int) -> tuple[dict[str, int], list[float]]:
    """Bytes after a few optimizer steps: peak allocated, reserved by the allocator, used on the device; and the milliseconds of
    the steps after UNTIMED."""
    config = resolved.config
    road = open_road(resolved, point.suppositions)
    optimizer = build_optimizer(road.drafter, config.optimizer)
    learner = step.Learner(road, WholeMasters(road.drafter, ALONE), target.ends, optimizer)
    layer_ids = resolved.shape.target_layer_ids
    source = FeatureSource(target, layer_ids, keep="no", run=capture_in(config.features.documents, target, layer_ids))
    relay = open_relay([source], Devices(target.device, ()), PlacementConfig(), meeting="bench", trace=None)
    times = []
    for count in range(steps):
        batches = [step.lay_out(rows_of(point, config, seed=100 * count + micro), resolved, [0] * config.train.rows_per_batch,
                                torch.device("cuda")) for micro in range(config.train.accumulation)]
        torch.cuda.synchronize()
        began = time.perf_counter()
        step.run_step(learner, relay, batches, [], clip_norm=1.0, logits_bytes=config.objective.logits_mib * 2**20,
                      watch=Stopwatch())
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    free, total = torch.cuda.mem_get_info()
    return {"measured": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.memory_reserved(),
            "measured_used": total - free}, times[UNTIMED:]


def own_bytes() -> int | None:
    """What this process holds of the device, as the driver tells; None where it does not."""
    mine = [item.used_bytes for item in card_processes(torch.device("cuda", 0)) if item.pid == os.getpid()]
    return mine[0] if mine else None


def rows_of(point: Point, config: Any, seed: int) -> Any:
    V = point.target["vocab_size"]
    rows = [random_rows(point.S, V, point.documents, seed + b) for b in range(config.train.rows_per_batch)]
    return type(rows[0])(**{f.name: torch.cat([getattr(r, f.name) for r in rows]) for f in dataclasses.fields(rows[0])})


def fresh_device() -> None:
    """Give everything back, so that the next point starts from an empty card."""
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def show(result: dict[str, Any]) -> None:
    used = "" if result["measured_used"] is None else f"used {result['measured_used'] / GIB:7.2f} {result['error_used']:+6.1%} | "
    print(f"{result['name']:36} measured {result['measured'] / GIB:7.2f} predicted {result['predicted'] / GIB:7.2f} GiB "
          f"{result['error']:+6.1%} | reserved {result['reserved'] / GIB:7.2f} | {used}{result['phase']} ({result['seconds']} s)"
          + (f", {result['ms']} ms a step ({result['min_ms']}..{result['max_ms']}, n = {result['n']})" if "ms" in result else ""),
          file=sys.stderr, flush=True)


def draw(folder: Path) -> None:
    """Predicted over measured of every point measured so far, the last of each name."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    found = {row["name"]: row for row in map(json.loads, (folder / "ledger.jsonl").read_text().splitlines())}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 5), width_ratios=(1, 1.3))
    measured, predicted = ([row[key] / GIB for row in found.values()] for key in ("measured", "predicted"))
    left.plot([0.5, 150], [0.5, 150], color="grey", linewidth=0.8)
    left.scatter(measured, predicted, s=18)
    left.set(xscale="log", yscale="log", xlabel="measured peak allocated, GiB", ylabel="predicted, GiB", title="Peak memory")
    rows = sorted(found.values(), key=lambda row: row["error"])
    right.barh([row["name"] for row in rows], [100 * row["error"] for row in rows], height=0.7)
    right.axvspan(-3, 3, alpha=0.15, color="green")
    right.set(xlabel="predicted over measured, %", title="Error (green: within 3 %)")
    right.tick_params(axis="y", labelsize=7)
    figure.tight_layout()
    figure.savefig(folder / "ledger.svg", metadata={"Date": None})


def foretell() -> None:
    for point in points():
        with tempfile.TemporaryDirectory() as name:
            _, ledger = foretold(point, Path(name))
        print(f"{point.name:36} {ledger.peak_bytes / GIB:7.2f} GiB in {ledger.peak_phase}, "
              f"{ledger.device_used_bytes / GIB:7.2f} used")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="names of points")
    parser.add_argument("--beside", action="store_true", help="other processes use the device")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--steps", type=int, default=UNTIMED, help="optimizer steps a point")
    parser.add_argument("--card", help="cap the allocator to this card's memory")
    parser.add_argument("--draw", action="store_true", help="draw what was measured so far, and measure nothing")
    parser.add_argument("--list", action="store_true", help="what is predicted of each point, without a GPU")
    args = parser.parse_args()
    if args.list or args.draw:
        foretell() if args.list else draw(args.out)
        return
    if not torch.cuda.is_available():
        print(json.dumps({"bench": "ledger", "skipped": "needs a CUDA GPU"}))
        return
    warnings.simplefilter("ignore")
    if args.card:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(parse_gpus(args.card)[0].usable_bytes / total)
    results = []
    for point in [p for p in points() if not args.only or p.name in args.only]:
        fresh_device()
        try:
            result = measure(point, alone=not args.beside, steps=args.steps)
        except torch.OutOfMemoryError as error:
            print(f"{point.name}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            continue
        show(result)
        results.append(result)
        with (args.out / "ledger.jsonl").open("a") as lines:
            lines.write(json.dumps(result) + "\n")
    print(json.dumps({"bench": "ledger", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "n": len(results),
                      "mean_error": sum(abs(r["error"]) for r in results) / len(results),
                      "worst": max(results, key=lambda r: abs(r["error"]))["name"]}))


if __name__ == "__main__":
    main()
