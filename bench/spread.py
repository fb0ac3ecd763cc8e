"""A target of size cut into shares on one GPU: its features against those of the whole, and what the cuts cost a row.

    python bench/spread.py [--precision as_loaded|fp8] [--cuts 31] [--calls 6] [--out FOLDER] [--toy]

The target of bench/capture.py (27B-shaped, random weights, layers up to the last captured one, packed capture compiled), rows of
8192 tokens of 4 documents. First whole, then with its layers in shares that begin at 0 and at each of `--cuts`, all on the one
card: the shares one after another on one stream, and through the relay of training, each on a stream of its own, as several cards
would run them (crossings are copies on the card). Features are compared bit by bit, on all rows.
Device events, medians; `n` calls back to back after a warm-up. Each finding is printed and appended to spread.jsonl in FOLDER
at once. `--toy`: small, on a CPU. Last line: JSON.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import capture as capture_bench
import torch
from colocated import spread, times_of

from outrider.config import PlacementConfig
from outrider.features import guards
from outrider.features.capture import FeatureSource
from outrider.features.packed import PackedCapture
from outrider.features.spread import SpreadCapture, shares_of
from outrider.features.target import Stretch, Target
from outrider.records import TokenRows
from outrider.train.placement import Devices, open_relay

ROWS = 4  # different ones, taken in turn


def shared(target: Target, cuts: Sequence[int], layer_ids: Sequence[int], compiled: bool) -> SpreadCapture:
    """The target's capture in shares on its own device."""
    bounds = (0, *cuts, max(layer_ids) + 1)
    shares = shares_of(target, [Stretch(target.device, range(a, b)) for a, b in pairwise(bounds)], layer_ids)
    return SpreadCapture(target, shares, [PackedCapture(share, share.layer_ids, compiled=compiled) for share in shares])


def through_the_relay(
    run: SpreadCapture, rows: Sequence[TokenRows], truths: Sequence[torch.Tensor], layer_ids: Sequence[int], n: int
) -> dict[str, Any]:
    """Rows as the drafter would take them, each share on a lane of its own; milliseconds a row, and how many differ."""
    device, count = run.target.device, len(run.shares)
    settings = PlacementConfig(capture_cards=count, cards_per_target=count)
    relay = open_relay([FeatureSource(run.target, layer_ids, keep="no", run=run)], Devices(device, (device,) * count, count),
                       settings, meeting="bench", trace=None)
    taken, wrong = 0, []

    def one() -> None:
        nonlocal taken
        values = relay.features(rows[taken % ROWS]).values_BSF
        wrong.append((values != truths[taken % ROWS]).any())
        relay.expect([rows[(taken + 1 + i) % ROWS] for i in range(relay.ahead)])
        taken += 1

    times = times_of(one, n, device)
    relay.settle()
    return {**spread(times), "rows": taken, "rows_that_differ": int(sum(int(x) for x in wrong))}


def measure(settings: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device = torch.device("cpu" if settings.toy else "cuda:0")
    layer_ids = (1, 3, 6) if settings.toy else capture_bench.LAYER_IDS
    config = (capture_bench.toy_config if settings.toy else capture_bench.born_from_config)(max(layer_ids) + 1)
    target = capture_bench.random_target(config, device, precision=settings.precision)
    length = 128 if settings.toy else capture_bench.S
    rows = [replace(capture_bench.random_rows(length, config.vocab_size, 4 + i), row_ids_B=torch.tensor([i]))
            for i in range(ROWS)]

    def synchronised() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    began = synchronised()
    whole = PackedCapture(target, layer_ids, compiled=not settings.toy)
    truths = [whole(one).values_BSF for one in rows]
    yield {"what": "whole: first rows", "s": round(synchronised() - began, 1), "finite": bool(truths[0].isfinite().all())}
    yield {"what": "whole", **spread(times_of(lambda: whole(rows[0]), settings.calls, device))}  # noqa: F821 - deleted below
    del whole
    gc.collect()
    began = synchronised()
    run = shared(target, settings.cuts, layer_ids, compiled=not settings.toy)
    same = [bool(torch.equal(run(one).values_BSF, truth)) for one, truth in zip(rows, truths, strict=True)]
    yield {"what": "shares: first rows", "s": round(synchronised() - began, 1), "rows": ROWS,
           "rows_that_differ": same.count(False)}
    yield {"what": "shares one after another", **spread(times_of(lambda: run(rows[0]), settings.calls, device))}
    yield {"what": "shares on lanes", **through_the_relay(run, rows, truths, layer_ids, settings.calls)}
    yield {"what": "peak", "gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["as_loaded", "fp8"], default="as_loaded")
    parser.add_argument("--cuts", type=int, nargs="+", help="first layer of each share but the first; by default one, half-way")
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--toy", action="store_true")
    settings = parser.parse_args()
    settings.cuts = settings.cuts or [4 if settings.toy else 31]
    if not settings.toy and not torch.cuda.is_available():
        print(json.dumps({"bench": "spread", "skipped": "needs a CUDA GPU"}))
        return
    guards.lock_autotuner()
    began, found = time.perf_counter(), []
    for one in measure(settings):
        found.append({"precision": settings.precision, "cuts": settings.cuts, **one,
                      "at_s": round(time.perf_counter() - began, 1)})
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        with (settings.out / "spread.jsonl").open("a") as lines:
            lines.write(json.dumps(found[-1]) + "\n")
    print(json.dumps({"bench": "spread", "gpu": "cpu" if settings.toy else torch.cuda.get_device_name(),
                      "torch": torch.__version__,
                      "found": {one["what"]: one.get("ms", one.get("s", one.get("gib"))) for one in found}}))


if __name__ == "__main__":
    main()
