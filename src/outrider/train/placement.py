"""Takes a run's placement and this process's place, gives its devices and the features that cross between them; knows no losses.

The target of row t+1 runs while the drafter learns row t. One host thread launches everything: on CUDA the devices wait for
each other by events, features cross by peer copy, and nothing goes through the host where peers can reach each other.
"""

import contextlib
import fcntl
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.config import PlacementConfig, RunConfig
from outrider.errors import RunFailure, UserError
from outrider.features.capture import FeatureSource
from outrider.records import Features, TokenRows
from outrider.train.lanes import Job, Lane, OwnLane, Stamp, Trace, moment, side_lane
from outrider.train.processes import Place


@dataclass(frozen=True)
class Devices:
    """One process's devices: `learn` has the drafter, `capture` the target(s); none there: the target is on `learn` too."""

    learn: torch.device
    capture: tuple[torch.device, ...]

    @property
    def all(self) -> list[torch.device]:
        return list(dict.fromkeys((self.learn, *self.capture)))


def find_devices(name: str, placement: PlacementConfig, place: Place) -> Devices:
    """The devices of a process whose `train.device` is `name`. Raises UserError when they are not there.

    On "cuda" each process of a machine takes the next 1 + `capture_cards` cards; "cuda:2" counts from there, for one process.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"train.device = {name!r}: not a device: use 'cpu' or 'cuda'") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"train.device = {name!r}: not supported: use 'cpu' or 'cuda'")
    if device.type == "cpu":
        return Devices(device, (device,) * placement.capture_cards)
    if device.index is not None and place.count > 1:
        raise UserError(f"train.device = {name!r}: names one card, and {place.count} processes need one each: use 'cuda'")
    each = 1 + placement.capture_cards
    first = device.index if device.index is not None else place.local_rank * each
    found = torch.cuda.device_count()
    if first + each > found:
        raise UserError(f"train.device = {name!r}: process {place.local_rank} of this machine needs {each} CUDA device(s) from "
                        f"number {first} on, and {found} CUDA devices were found here: start fewer processes, lower "
                        "placement.capture_cards, or use 'cpu'")
    cards = [torch.device("cuda", first + i) for i in range(each)]
    return Devices(cards[0], tuple(cards[1:]))


def process_count(config: RunConfig, *, gpus: int | None, processes: int | None, started: Place | None) -> int:
    """How many processes to start for what was asked: 1 when nothing was, or a launcher has `started` this one. Raises
    UserError."""
    asked = [f"--{name} {value}" for name, value in (("gpus", gpus), ("processes", processes)) if value is not None]
    if not asked:
        return 1
    if started is not None and started.count > 1:
        raise UserError(f"{asked[0]}: torchrun or srun has started {started.count} processes already: leave the option out")
    if len(asked) == 2:
        raise UserError(f"{' '.join(asked)}: say one of the two")
    if min(value for value in (gpus, processes) if value is not None) < 1:
        raise UserError(f"{asked[0]}: must be at least 1")
    if gpus is None:
        return processes or 1
    if config.train.device != "cuda":
        raise UserError(f"{asked[0]}: train.device is '{config.train.device}': set it to 'cuda', or use --processes on a CPU")
    each = 1 + config.placement.capture_cards
    if gpus % each:
        raise UserError(f"{asked[0]}: each process takes {each} cards (placement.capture_cards = {each - 1} beside its own): use "
                        f"a multiple of {each}")
    return gpus // each


class Turns:
    """Who may run a target now: any time, or one at a time on this machine (a lock file that a killed process lets go of)."""

    def __init__(self, lock: Path | None, *, timeout_s: int) -> None:
        self._lock, self._timeout_s = lock, timeout_s

    @contextlib.contextmanager
    def turn(self, jobs: list[Job]) -> Iterator[None]:
        """Hold the turn until what the body adds to `jobs` is done."""
        if self._lock is None:
            yield
            return
        with self._lock.open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
            for job in jobs:
                job.wait(self._timeout_s)


def open_turns(placement: PlacementConfig, meeting: str) -> Turns:
    """Turns as `placement.turns` says; `meeting` tells the processes of one run on one machine from those of others."""
    lock = Path(tempfile.gettempdir()) / f"outrider-{meeting}.turn" if placement.turns == "one_at_a_time" else None
    return Turns(lock, timeout_s=placement.timeout_s)


@dataclass
class Parcel:
    """The features of some rows on their way: the last of `jobs` gives them, on the device of `lane`."""

    rows: TokenRows
    lane: Lane
    jobs: dict[str, Job]  # by lane, in order

    @property
    def job(self) -> Job:
        return list(self.jobs.values())[-1]


class Relay:
    """Brings features to the learning device, captured ahead of time where the targets have lanes of their own.

    Rows go to the sources in turn. A lane's tensors are let go of only when the lane has been made to wait for whoever read
    them, so the allocator can give their memory to the lane's next work and no more than one tensor a lane stands beside the
    one in use.
    """

    def __init__(
        self, sources: Sequence[FeatureSource], lanes: Sequence[Lane], crossing: Lane | None, *, learn: torch.device,
        turns: Turns, timeout_s: int, trace: Trace | None,
    ) -> None:
        """`crossing`: the lane that copies to `learn`, None where features are made on `learn` itself."""
        self.sources, self.learn, self.turns, self.timeout_s, self.trace = sources, learn, turns, timeout_s, trace
        self.ahead = sum(lane.ahead for lane in lanes)
        self._lanes, self._crossing = lanes, crossing
        self._read: dict[str, Job] = {}  # by lane: what last read its tensors, to be followed before they go
        self._coming: deque[Parcel] = deque()
        self._present: Parcel | None = None
        self._launched = 0
        self._since: Stamp | None = None
        self._summed = False

    def features(self, rows: TokenRows) -> Features:
        """Features `[B, S, F]` of `rows` (on the CPU) on the learning device; good until the next call."""
        if self._summed:
            self.mark("update")
        self._summed = False
        if self._present is not None:
            self._read[self._present.lane.name] = moment(self.learn)
            self._present = None
        if not self._coming:
            self._launch(rows)
        parcel = self._bring(self._coming.popleft())
        assert parcel.rows is rows, "rows are asked for in the order in which they were expected"
        self._present = parcel
        with self._first_cause(parcel):
            parcel.job.follow(self.timeout_s)
            values = parcel.job.value().to(self.learn, non_blocking=True)  # nothing to do but for what was captured elsewhere
        self._since = self.trace.begin(self.learn) if self.trace else None
        return Features(values)

    def expect(self, coming: Sequence[TokenRows]) -> None:
        """Begin with the capture of `coming`, and with the crossing of the first; then see that the present ones have come."""
        self.mark("learn")
        for rows in coming[len(self._coming):]:
            self._launch(rows)
        if self._coming:
            self._coming[0] = self._bring(self._coming[0])
        if self._present is not None:
            with self._first_cause(self._present):
                self._present.job.wait(self.timeout_s)
        self._since = self.trace.begin(self.learn) if self.trace else None  # launching and waiting are no work of the device

    def again(self, rows: TokenRows) -> Features:
        """Features of `rows` (on the CPU) out of turn, on the caller's own queue."""
        self.settle()
        source = self.sources[0]
        return source.features(rows, source.device).to(self.learn)

    def settle(self) -> None:
        """Until no target is at work, so that the caller may run one."""
        for parcel in self._coming:
            with self._first_cause(parcel):
                parcel.job.wait(self.timeout_s)

    def mark(self, label: str) -> None:
        """For the trace: what the learning device did since the last mark, or since it had features, was `label`."""
        self._summed = self._summed or label == "sum"
        if self.trace:
            self._since = self.trace.end("learn", label, self._since)

    def _launch(self, rows: TokenRows) -> None:
        number = self._launched % len(self.sources)
        source, lane = self.sources[number], self._lanes[number]
        after = [self._read.pop(lane.name)] if lane.name in self._read else []
        jobs: list[Job] = []
        with self.turns.turn(jobs):
            jobs.append(lane.launch("capture", lambda: source.features(rows, source.device).values_BSF, after))
        self._coming.append(Parcel(rows, lane, {lane.name: jobs[0]}))
        self._launched += 1

    def _bring(self, parcel: Parcel) -> Parcel:
        """The parcel on the learning device: itself, or a copy that is launched now."""
        crossing = self._crossing
        if crossing is None or parcel.lane is crossing:
            return parcel
        after = [parcel.job, *([self._read.pop(crossing.name)] if crossing.name in self._read else [])]
        job = crossing.launch("copy", lambda: parcel.job.value().to(self.learn, non_blocking=True, copy=True), after)
        self._read[parcel.lane.name] = job
        return Parcel(parcel.rows, crossing, {**parcel.jobs, crossing.name: job})

    @contextlib.contextmanager
    def _first_cause(self, parcel: Parcel) -> Iterator[None]:
        """Say which rows and lane a failure belongs to; what went wrong there comes first."""
        which = f"features of rows {parcel.rows.row_ids_B.tolist()}"
        try:
            yield
        except TimeoutError as error:
            late = [name for name, job in parcel.jobs.items() if not job.done()]
            raise RuntimeError(f"{which} did not come within placement.timeout_s = {self.timeout_s} s: still at work: "
                               f"{' and then '.join(late)}") from error
        except RuntimeError as error:
            kind = RunFailure if isinstance(error, RunFailure) else RuntimeError
            raise kind(f"{error} ({which}, by {' and then '.join(parcel.jobs)})") from error


def open_relay(
    sources: Sequence[FeatureSource], devices: Devices, settings: PlacementConfig, *, meeting: str, trace: Trace | None
) -> Relay:
    """The relay of a process: targets on cards of their own, or in other processes, run ahead on lanes of their own, else in turn
    with the drafter."""
    lanes: list[Lane] = [OwnLane("learn", devices.learn, trace)]
    crossing: Lane | None = None
    if devices.capture or any(source.elsewhere for source in sources):
        lanes = [side_lane(f"capture {number}", source.device, trace) for number, source in enumerate(sources)]
        crossing = side_lane("copy", devices.learn, trace) if devices.all != [devices.learn] else None
    return Relay(sources, lanes, crossing, learn=devices.learn, turns=open_turns(settings, meeting), timeout_s=settings.timeout_s,
                 trace=trace)
