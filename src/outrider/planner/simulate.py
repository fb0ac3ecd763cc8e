"""Takes stage times and where drafter and target stand, gives the time line, throughput and waits to expect; runs nothing.

The rules are those of train/placement.py: a host launches a row's learning, then the captures it may have ahead; it waits for
the present features, and at a step's end for the gradient's norm. Launches themselves take no time here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd

from outrider.planner.timeline import waits_by_side
from outrider.records import Span

STEPS, LEAST_STEPS = 6, 2  # in the steady state, and as many before it, more where rows are ahead: they fill the queues
ENOUGH = 192  # micro-batches in the steady state: fewer steps of many
ROUNDS = 100  # of the capture cards, after which it does not matter in the middle of which one it ends


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds of the parts of one micro-batch, each on the card it runs on.

    `capture`: the target's forward, all its shares. `cross`: a hidden state to the next share's card. `copy`: features to the
    learning card (0 when colocated). `learn`: forward and backward of the drafter. `sum`: gradients over the processes, once
    a step. `update`: clipping, optimizer and what the host does between two steps, once a step.
    """

    capture: float
    copy: float
    learn: float
    sum: float
    update: float
    cross: float = 0.0


@dataclass(frozen=True)
class Arrangement:
    """`processes` drafter replicas, each with `capture_cards` besides its own (0: colocated); `micro_batches` a step in each.

    `one_at_a_time`: never two targets at once on a machine of `gpus_per_machine` cards. `host_learns`: the devices are played by
    threads, learning is the host's own work, and two rows instead of one are ahead in each capture lane. `shares`: of a target
    that is spread, the part of its time on each of its cards.
    """

    processes: int
    capture_cards: int
    micro_batches: int
    one_at_a_time: bool
    gpus_per_machine: int
    host_learns: bool = False
    shares: tuple[float, ...] = (1.0,)

    @property
    def targets(self) -> int:
        """Of each process, on cards of their own."""
        return self.capture_cards // len(self.shares)

    @property
    def ahead(self) -> int:
        """Rows captured beyond the present one."""
        return self.capture_cards * (2 if self.host_learns else 1)


@dataclass(frozen=True)
class Simulated:
    """The steady state: `step_ms` a step, `waits` the share of it in which the learning and the capture cards stand idle (means
    over processes); `spans` all that was simulated, `steady` where the steady state begins and ends, ms."""

    spans: tuple[Span, ...]
    steady: tuple[float, float]
    step_ms: float
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
    lanes: dict[str, float] = field(default_factory=dict)  # of the capture cards: when each is free


def simulate(times: StageTimes, arrangement: Arrangement) -> Simulated:
    """Run some optimizer steps on paper."""
    fill, steady = _lengths(arrangement)
    per_machine = max(1, arrangement.gpus_per_machine // (1 + arrangement.capture_cards))
    processes = [_Process(p, p // per_machine, arrangement.capture_cards) for p in range(arrangement.processes)]
    turn_free: dict[int, float] = {}
    spans: list[Span] = []
    ends = []
    for step in range(fill + steady):
        for micro in range(arrangement.micro_batches):
            row = step * arrangement.micro_batches + micro
            for process in sorted(processes, key=lambda process: process.host):
                _micro_batch(process, row, times, arrangement, turn_free, spans)
        begun = max(max(process.learn_free, process.host) for process in processes)
        met = begun + times.sum
        for process in processes:
            lane = f"{process.number} learn"
            if times.sum:
                spans.append(Span(lane, "sum", begun, met))
            spans.append(Span(lane, "update", met, met + times.update))
            process.host = process.learn_free = met + times.update
        ends.append(met + times.update)
    began, ended = ends[fill - 1], ends[-1]
    return Simulated(tuple(spans), (began, ended), (ended - began) / steady, waits_by_side(spans, began, ended))


def _lengths(arrangement: Arrangement) -> tuple[int, int]:
    """Steps that fill the queues, and steps of the steady state: whole rounds of the capture cards where a part of one counts."""
    micro, cards = arrangement.micro_batches, arrangement.capture_cards
    steady = min(STEPS, max(LEAST_STEPS, ENOUGH // micro))
    fill = steady + -(-arrangement.ahead // micro)
    if steady * micro < ROUNDS * cards:
        whole = cards // gcd(cards, micro)
        steady = whole * -(-steady // whole)
    return fill, steady


def _micro_batch(
    process: _Process, row: int, times: StageTimes, arrangement: Arrangement, turn_free: dict[int, float], spans: list[Span]
) -> None:
    """Launch the learning of `row` and the captures after it, as one host does."""
    ahead = arrangement.ahead
    if len(process.captured) <= row:
        _capture(process, row, times, arrangement, turn_free, spans)
    _bring(process, row, times, spans)
    begin = max(process.learn_free, process.copied[row])
    spans.append(Span(f"{process.number} learn", "learn", begin, begin + times.learn))
    process.learn_free = begin + times.learn
    process.released.append(process.learn_free)
    if arrangement.host_learns or not ahead:
        process.host = process.learn_free
    for coming in range(len(process.captured), row + 1 + ahead):
        _capture(process, coming, times, arrangement, turn_free, spans)
    if ahead:
        _bring(process, row + 1, times, spans)
        process.host = max(process.host, process.copied[row])


def _capture(
    process: _Process, row: int, times: StageTimes, arrangement: Arrangement, turn_free: dict[int, float], spans: list[Span]
) -> None:
    begin = max(process.host, 0.0 if process.cards else process.learn_free)
    read = row - arrangement.ahead  # the row whose buffers it takes over, once they have been copied
    if process.cards and 0 <= read < len(process.copied):
        begin = max(begin, process.copied[read])
    turn = turn_free.get(process.machine, 0.0) if arrangement.one_at_a_time else 0.0  # the host waits for its turn, and in it
    end = max(begin, turn)
    for number, share in enumerate(arrangement.shares):
        lane = _capture_lane(process, row, number, arrangement)
        if number and times.cross:
            spans.append(Span(f"{process.number} cross {row % arrangement.targets}.{number}", "cross", end, end + times.cross))
            end += times.cross
        start = max(end, process.lanes.get(lane, 0.0))
        end = process.lanes[lane] = start + share * times.capture
        spans.append(Span(lane, "capture", start, end))
    if arrangement.one_at_a_time:
        turn_free[process.machine] = process.host = end
    process.captured.append(end)
    if not process.cards:
        process.learn_free = end


def _capture_lane(process: _Process, row: int, share: int, arrangement: Arrangement) -> str:
    """As train/chains.py names them."""
    if not process.cards:
        return f"{process.number} learn"
    number = f"{row % arrangement.targets}.{share}" if len(arrangement.shares) > 1 else str(row % arrangement.targets)
    return f"{process.number} capture {number}"


def _bring(process: _Process, row: int, times: StageTimes, spans: list[Span]) -> None:
    """Queue the copy of `row`, once: after its capture, and after what learned from the buffer two rows ago."""
    if len(process.copied) > row:
        return
    last = process.copied[-1] if process.copied else 0.0
    free = process.released[row - 2] if row >= 2 else 0.0
    begin = max(process.captured[row], last, free) if process.cards else process.captured[row]
    if process.cards and times.copy:
        spans.append(Span(f"{process.number} copy", "copy", begin, begin + times.copy))
    process.copied.append(begin + (times.copy if process.cards else 0.0))


def arrangements_of(gpus: int) -> Sequence[tuple[int, int]]:
    """(processes, capture cards of each) that use all of so many cards: colocated, pairs, then ever larger fan-ins."""
    return [(gpus // (1 + cards), cards) for cards in range(gpus) if gpus % (1 + cards) == 0]
