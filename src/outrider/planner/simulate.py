"""Takes measured stage times and a placement, gives the time line, throughput and waits to expect; runs nothing.

The rules are those of train/placement.py: a host launches a row's learning, then the captures it may have ahead; it waits for
the present features, and at a step's end for the gradient's norm. Launches themselves take no time here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.errors import UserError

MOST_GPUS = 64


@dataclass(frozen=True)
class Span:
    """Labelled work on a lane from `begin` to `end`, ms."""

    lane: str
    label: str
    begin: float
    end: float


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds of the parts of one micro-batch, each measured alone on the card it would run on.

    `capture`: the target's forward. `copy`: features to the learning card (0 when colocated). `learn`: forward and backward of
    the drafter. `sum`: gradients over the processes, once a step. `update`: clipping and the optimizer, once a step.
    """

    capture: float
    copy: float
    learn: float
    sum: float
    update: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise UserError(f"{name} = {value}: must be a time in ms, at least 0")


@dataclass(frozen=True)
class Layout:
    """`processes` drafter replicas, each with `capture_cards` besides its own (0: colocated); `micro_batches` a step in each."""

    processes: int
    capture_cards: int
    micro_batches: int
    one_at_a_time: bool
    gpus_per_machine: int

    @property
    def gpus(self) -> int:
        return self.processes * (1 + self.capture_cards)

    def __post_init__(self) -> None:
        if not 1 <= self.gpus <= MOST_GPUS:
            raise UserError(f"{self.processes} processes of {1 + self.capture_cards} cards are {self.gpus} GPUs: must be 1 to "
                            f"{MOST_GPUS}")


@dataclass(frozen=True)
class Simulated:
    """`step_ms` and `rows_per_s` in the steady state (`rows_per_s` counts micro-batches of one row over all processes).

    `waits`: share of the steady state in which the learning and the capture cards stand idle, means over processes.
    """

    spans: list[Span]
    step_ms: float
    rows_per_s: float
    waits: dict[str, float]


@dataclass
class _Process:
    """One process while it is simulated: when its host and its lanes are free, and the rows on their way."""

    number: int
    machine: int
    cards: int
    host: float = 0.0
    learn_free: float = 0.0
    copied: list[float] = field(default_factory=list)  # by row: when its features are on the learning card
    captured: list[float] = field(default_factory=list)
    released: list[float] = field(default_factory=list)  # by row: when learning has read its features

    def lane(self, row: int) -> str:
        return f"{self.number} capture {row % self.cards}" if self.cards else f"{self.number} learn"


def simulate(times: StageTimes, layout: Layout, *, steps: int) -> Simulated:
    """Run `steps` optimizer steps (at least 2) on paper. The first half fills the queues; rates and waits are of the second."""
    per_machine = max(1, layout.gpus_per_machine // (1 + layout.capture_cards))
    processes = [_Process(p, p // per_machine, layout.capture_cards) for p in range(layout.processes)]
    turn_free: dict[int, float] = {}
    spans: list[Span] = []
    ends = []
    for step in range(steps):
        for micro in range(layout.micro_batches):
            row = step * layout.micro_batches + micro
            for process in sorted(processes, key=lambda process: process.host):
                _micro_batch(process, row, times, layout, turn_free, spans)
        met = max(process.learn_free for process in processes) + times.sum
        for process in processes:
            lane = f"{process.number} learn"
            if times.sum:
                spans.append(Span(lane, "sum", met - times.sum, met))
            spans.append(Span(lane, "update", met, met + times.update))
            process.host, process.learn_free = met, met + times.update
        ends.append(met + times.update)
    half = steps // 2
    began, ended = ends[half - 1], ends[-1]
    step_ms = (ended - began) / (steps - half)
    return Simulated(spans, step_ms, 1e3 * layout.micro_batches * layout.processes / step_ms, waits_by_side(spans, began, ended))


def _micro_batch(
    process: _Process, row: int, times: StageTimes, layout: Layout, turn_free: dict[int, float], spans: list[Span]
) -> None:
    """Launch the learning of `row` and the captures after it, as one host does."""
    ahead = layout.capture_cards
    if len(process.captured) <= row:
        _capture(process, row, times, layout, turn_free, spans)
    _bring(process, row, times, spans)
    begin = max(process.learn_free, process.copied[row], process.host if not ahead else 0.0)
    spans.append(Span(f"{process.number} learn", "learn", begin, begin + times.learn))
    process.learn_free = begin + times.learn
    process.released.append(process.learn_free)
    for coming in range(len(process.captured), row + 1 + ahead):
        _capture(process, coming, times, layout, turn_free, spans)
    if ahead:
        _bring(process, row + 1, times, spans)
        process.host = max(process.host, process.copied[row])


def _capture(
    process: _Process, row: int, times: StageTimes, layout: Layout, turn_free: dict[int, float], spans: list[Span]
) -> None:
    lane, cards = process.lane(row), layout.capture_cards
    free = process.learn_free
    if cards:
        free = max(process.captured[row - cards], process.copied[row - cards]) if row >= cards else 0.0
    begin = max(process.host, free)
    if layout.one_at_a_time:
        begin = max(begin, turn_free.get(process.machine, 0.0))
        turn_free[process.machine] = process.host = begin + times.capture
    spans.append(Span(lane, "capture", begin, begin + times.capture))
    process.captured.append(begin + times.capture)
    if not cards:
        process.learn_free = begin + times.capture


def _bring(process: _Process, row: int, times: StageTimes, spans: list[Span]) -> None:
    """Queue the copy of `row`, once: after its capture, and after what learned from the buffer two rows ago."""
    if len(process.copied) > row:
        return
    last = process.copied[-1] if process.copied else 0.0
    free = process.released[row - 2] if row >= 2 else 0.0
    begin = max(process.captured[row], last, free) if process.cards else process.captured[row]
    if process.cards:
        spans.append(Span(f"{process.number} copy", "copy", begin, begin + times.copy))
    process.copied.append(begin + (times.copy if process.cards else 0.0))


def waits_by_side(spans: Sequence[Span], began: float, ended: float) -> dict[str, float]:
    """Share of the time from `began` to `ended` ms in which lanes whose name holds "learn" or "capture" have no work, means."""
    waits = {}
    for side in ("learn", "capture"):
        lanes = sorted({span.lane for span in spans if side in span.lane})
        if lanes:
            busy = [sum(max(0.0, min(s.end, ended) - max(s.begin, began)) for s in spans if s.lane == lane) for lane in lanes]
            waits[side] = 1.0 - sum(busy) / len(lanes) / (ended - began)
    return waits
