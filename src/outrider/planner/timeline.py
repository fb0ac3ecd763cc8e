"""Takes spans, gives them as a trace file and back, the stage times in them, and how long each side waits; draws nothing."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from outrider.errors import UserError
from outrider.files import read_json, write_atomic
from outrider.records import Span

TRACE_NAME = "trace.json"
STAGES = ("capture", "cross", "copy", "learn", "sum", "update")  # the labels of work, in the order in which a row meets them


COUNTS = ("steps", "processes", "micro_batches")
MOST = 2**53  # of a count, and of milliseconds


@dataclass(frozen=True)
class TraceFile:
    """What ran when in `steps` optimizer steps of `processes` processes, each with `micro_batches` a step. `spans`: lanes have
    names by process ("0 learn", "0 capture 0", "0 copy"), ms. `device`: such as "cpu" or "NVIDIA H200"."""

    device: str
    steps: int
    processes: int
    micro_batches: int
    spans: tuple[Span, ...]

    def steady(self) -> tuple[float, float]:
        """Begin and end, ms, of the second half of the steps, up to the ends of the first process's updates."""
        ends = [span.end for span in self.spans if span.lane == "0 learn" and span.label == "update"]
        if len(ends) < 2 or ends[-1] <= ends[(len(ends) - 1) // 2]:
            raise UserError(f"holds {len(ends)} whole steps, at least 2 are needed: trace more (train.trace_steps)")
        return ends[(len(ends) - 1) // 2], ends[-1]

    def step_ms(self) -> float:
        """Mean time of a step in the steady half."""
        began, ended = self.steady()
        count = sum(span.lane == "0 learn" and span.label == "update" and began < span.end <= ended for span in self.spans)
        return (ended - began) / count

    def stages(self) -> dict[str, float]:
        """Median ms of each kind of work in the steady half; kinds that did not occur are absent. A capture by shares is the
        sum of theirs. Of a sum, the shortest of the processes' times: the others wait in it for the last to come."""
        began, ended = self.steady()
        found: dict[tuple[str, str], list[float]] = {}
        sums: dict[str, list[float]] = {}
        for span in self.spans:
            if span.begin >= began and span.end <= ended:
                share = span.lane.rpartition(".")[2] if span.label == "capture" and "." in span.lane else ""
                kept = sums.setdefault(span.lane, []) if span.label == "sum" else found.setdefault((span.label, share), [])
                kept.append(span.end - span.begin)
        found["sum", ""] = [min(step) for step in zip(*sums.values(), strict=False)]
        medians = {key: statistics.median(times) for key, times in found.items() if times}
        totals = {label: sum(ms for (of, _), ms in medians.items() if of == label) for label in STAGES}
        return {label: ms for label, ms in totals.items() if any(of == label for of, _ in medians)}

    def waits(self) -> dict[str, float]:
        """Share of the steady half in which each side stands idle."""
        return waits_by_side(self.spans, *self.steady())


def write_trace(path: Path, trace: TraceFile) -> None:
    """Write the file, whole or not at all."""
    values = {**asdict(trace), "spans": [astuple(span) for span in trace.spans]}
    write_atomic(path, lambda to: to.write_text(json.dumps(values), encoding="utf-8"))


def read_trace(path: Path) -> TraceFile:
    """The trace of a run, of two steps at least. Raises UserError when the file is missing or is none."""
    if not path.is_file():
        raise UserError(f"{path}: the trace is missing: make one with outrider train ... --set train.trace_steps=20")
    values: Any = read_json(path, what="the trace")
    try:
        spans = tuple(Span(str(lane), str(label), float(begin), float(end)) for lane, label, begin, end in values["spans"])
        steps, processes, micro_batches = counts = tuple(values[name] for name in COUNTS)
        trace = TraceFile(str(values["device"]), steps, processes, micro_batches, spans)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: is not a trace that a run wrote ({type(error).__name__}: {error}): trace again") from error
    for name, count in zip(COUNTS, counts, strict=True):
        if type(count) is not int or not 1 <= count <= MOST:
            raise UserError(f"{path}: {name} = {count!r}: must be a whole number from 1 to {MOST:,}: trace again")
    bad = next((span for span in spans if not -MOST <= span.begin <= span.end <= MOST), None)
    if bad is not None:
        raise UserError(f"{path}: a span of lane '{bad.lane}' from {bad.begin} to {bad.end} ms: must not end before it begins: "
                        "trace again")
    try:
        trace.step_ms()
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return trace


def waits_by_side(spans: Sequence[Span], began: float, ended: float) -> dict[str, float]:
    """Share of the time from `began` to `ended` ms in which lanes whose name holds "learn" or "capture" have no work, means."""
    busy: dict[str, float] = {}
    for span in spans:
        busy[span.lane] = busy.get(span.lane, 0.0) + max(0.0, min(span.end, ended) - max(span.begin, began))
    waits = {}
    for side in ("learn", "capture"):
        lanes = [ms for lane, ms in busy.items() if side in lane]
        if lanes:
            waits[side] = max(0.0, 1.0 - sum(lanes) / len(lanes) / (ended - began))
    return waits


def within(spans: Sequence[Span], began: float, ended: float) -> list[Span]:
    """The parts of spans that lie between two moments, told from the first of them."""
    return [Span(s.lane, s.label, max(s.begin, began) - began, min(s.end, ended) - began)
            for s in spans if s.end > began and s.begin < ended]


def by_process(spans: Mapping[int, Sequence[Span]]) -> tuple[Span, ...]:
    """The spans of several processes, with lanes named by process."""
    return tuple(Span(f"{rank} {s.lane}", s.label, s.begin, s.end) for rank, mine in sorted(spans.items()) for s in mine)
