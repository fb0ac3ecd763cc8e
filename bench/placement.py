"""Does the simulator tell the step of a placement before it is run? CPU: colocated, pair, fan-in, two processes, turns.

    python bench/placement.py [--real] [--steps 12] [--repeat 3]

Each run is `train` on a toy target, traced (train.trace_steps). Stage times are the medians of a colocated run of one process;
from them the simulator predicts the step of every other arrangement, and the trace of that run says what it was; a second
prediction takes the stage times of the run itself (a busy machine slows a stage down in one run and not in another). By default
each target and each drafter stands on a DOUBLE of a device: it takes a stated time (300 and 200 ms) and leaves the cores of the
machine free, as a GPU does; the real work on toy sizes is done besides, inside that time. `--real`: no doubles, the cores do all
the work, and what lanes take from each other on them is in the measurement but not in the prediction. Draws the first pair's time
line as placement_pair.svg and writes placement.json into bench/results. Last line: JSON.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]

import torch  # noqa: E402
from endure import make_data  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from toys import MASK  # noqa: E402

from outrider import progress  # noqa: E402
from outrider.config import RunConfig, parse_run  # noqa: E402
from outrider.features.capture import FeatureSource  # noqa: E402
from outrider.features.spread import SpreadCapture  # noqa: E402
from outrider.planner.simulate import Arrangement, StageTimes, simulate  # noqa: E402
from outrider.planner.timeline import TRACE_NAME, TraceFile, read_trace  # noqa: E402
from outrider.report.timeline import draw_trace  # noqa: E402
from outrider.train import step  # noqa: E402
from outrider.train.checkpoint import list_checkpoints  # noqa: E402
from outrider.train.loop import train  # noqa: E402
from outrider.train.processes import run_processes  # noqa: E402

AFTER = 3  # steps after the traced ones: the last of a run have nothing ahead to capture
CAPTURE_S, LEARN_S = 0.300, 0.200  # of the doubles: a target slower than its drafter, as the born-from one is


@dataclasses.dataclass(frozen=True)
class Case:
    """One arrangement: `processes`, capture lanes of each besides its own, `each` of them to a target, micro-batches a step over
    all."""

    name: str
    processes: int = 1
    cards: int = 0
    micro_batches: int = 2
    turns: str = "overlapped"
    each: int = 1

    def arrangement(self) -> Arrangement:
        own = -(-self.micro_batches // self.processes)
        return Arrangement(self.processes, self.cards, own, self.turns == "one_at_a_time", gpus_per_machine=64, host_learns=True,
                           shares=(1 / self.each,) * self.each)

    def run(self, folder: Path, repeat: int, steps: int) -> RunConfig:
        return parse_run({
            "target": {"path": str(folder / "target"), "dtype": "float32"}, "data": {"rows": str(folder / "rows")},
            "drafter": {"num_layers": 2, "block_size": 4, "mask_token_id": MASK, "target_layer_ids": [1, 2, 4]},
            "layout": {"anchors": 12, "document_floor": 2}, "optimizer": {"learning_rate": 3e-3},
            "placement": {"capture_cards": self.cards, "cards_per_target": self.each, "turns": self.turns},
            "train": {"folder": str(folder / f"{self.name}-{repeat}"), "steps": steps + AFTER, "trace_steps": steps,
                      "precision": "float32", "accumulation": self.micro_batches, "log_every": 10**6},
        }, where="bench")


CASES = (
    Case("colocated"), Case("pair", cards=1), Case("fan-in of 2", cards=2), Case("2 processes", processes=2),
    Case("2 processes, targets in turn", processes=2, turns="one_at_a_time"),
    Case("pair, 4 micro-batches", cards=1, micro_batches=4), Case("2 pairs", processes=2, cards=1),
    Case("2 pairs, targets in turn", processes=2, cards=1, turns="one_at_a_time"),
    Case("a target over 2 cards", cards=2, each=2), Case("2 targets over 2 cards each", cards=4, each=2),
)


def use_doubles() -> None:
    """From here on, in this process, capture and learning take at least the doubles' times."""
    features, run_share, terms = FeatureSource.features, SpreadCapture.run, step.drafter_terms

    def slow_features(self: FeatureSource, *given: Any) -> Any:
        began = time.perf_counter()
        found = features(self, *given)
        time.sleep(max(0.0, CAPTURE_S - (time.perf_counter() - began)))
        return found

    def slow_share(self: SpreadCapture, *given: Any) -> Any:
        began = time.perf_counter()
        found = run_share(self, *given)
        time.sleep(max(0.0, CAPTURE_S / len(self.shares) - (time.perf_counter() - began)))
        return found

    def slow_terms(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        found = terms(*given, **named)
        time.sleep(max(0.0, LEARN_S - (time.perf_counter() - began)))
        return found

    FeatureSource.features, step.drafter_terms = slow_features, slow_terms  # type: ignore[method-assign]
    SpreadCapture.run = slow_share  # type: ignore[method-assign]


def work(run: RunConfig, doubles: bool) -> None:
    """One process of a run."""
    torch.set_num_threads(1)
    progress.speaks(False)
    if doubles:
        use_doubles()
    train(run, check=None)


def traced(case: Case, folder: Path, repeat: int, steps: int, doubles: bool) -> TraceFile:
    """Run the case, in processes of its own, and read its trace."""
    run = case.run(folder, repeat, steps)
    run_processes(case.processes, work, (run, doubles))
    return read_trace(run.train.folder / TRACE_NAME)


def stage_times(trace: TraceFile) -> StageTimes:
    found = trace.stages()
    return StageTimes(found["capture"], 0.0, found["learn"], found["sum"] if trace.processes > 1 else 0.0, found["update"])


def same_bits(one: Path, other: Path) -> bool:
    """Whether two runs ended with the same drafter, to the bit."""
    a, b = (load_file(list_checkpoints(folder)[-1] / "drafter" / "model.safetensors") for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def measure(folder: Path, cases: Sequence[Case], *, steps: int, repeat: int, doubles: bool) -> Iterator[list[dict[str, Any]]]:
    """Every case, `repeat` times; predicted from the colocated run of the same round. Gives what is known after each round."""
    found: dict[str, list[dict[str, Any]]] = {case.name: [] for case in cases}
    for number in range(repeat):
        times: StageTimes | None = None
        for case in cases:
            trace = traced(case, folder, number, steps, doubles)
            times = times or stage_times(trace)
            predicted = simulate(times, case.arrangement())
            own = simulate(stage_times(trace), case.arrangement())
            found[case.name].append({"predicted_ms": predicted.step_ms, "own_ms": own.step_ms, "measured_ms": trace.step_ms(),
                                     "waits": trace.waits(), "predicted_waits": predicted.waits})
            if case.name == "pair" and number == 0:
                name = "placement_pair.svg" if doubles else "placement_pair_real.svg"
                (HERE / "results" / name).write_text(draw_trace(trace) + "\n")
            print(f"round {number}: {case.name:32} predicted {predicted.step_ms:7.1f} measured {trace.step_ms():7.1f} ms, "
                  f"from its own stages {own.step_ms:7.1f}", file=sys.stderr, flush=True)
        yield [summary(case, found[case.name]) for case in cases]


def summary(case: Case, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors = sorted(r["predicted_ms"] / r["measured_ms"] - 1 for r in rounds)
    median = {key: statistics.median(r[key] for r in rounds) for key in ("predicted_ms", "own_ms", "measured_ms")}
    own = sorted(r["own_ms"] / r["measured_ms"] - 1 for r in rounds)
    waits = {side: statistics.median(r["waits"][side] for r in rounds) for side in rounds[0]["waits"]}
    predicted = {side: statistics.median(r["predicted_waits"][side] for r in rounds) for side in rounds[0]["predicted_waits"]}
    return {"case": case.name, "n": len(rounds), **median, "error_min": errors[0], "error_median": statistics.median(errors),
            "error_max": errors[-1], "own_errors": own, "errors": errors, "waits": waits, "predicted_waits": predicted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="no doubles: the cores do all the work")
    parser.add_argument("--only", nargs="+", default=[case.name for case in CASES], help="these cases, the colocated one first")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_data(folder)
        cases = [case for case in CASES if case.name in args.only]
        for rows in measure(folder, cases, steps=args.steps, repeat=args.repeat, doubles=not args.real):
            same = {case.name: same_bits(folder / "colocated-0", folder / f"{case.name}-0") for case in cases
                    if case.processes == 1 and case.micro_batches == 2}
            result = {"bench": "placement", "doubles": not args.real, "cores": os.cpu_count(), "load": os.getloadavg()[1],
                      "torch": torch.__version__, "steps": args.steps, "rows": rows, "same_bits_as_colocated": same}
            name = "placement_real.json" if args.real else "placement.json" if cases == list(CASES) else "placement_only.json"
            (HERE / "results" / name).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}
                     | {"worst_error": max(abs(row["error_median"]) for row in rows)}))


if __name__ == "__main__":
    main()
