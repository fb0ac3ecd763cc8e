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
from outrider.train.chains import Chain, Jobs, OneLane, chain_of
from outrider.train.lanes import Job, Lane, OwnLane, Stamp, Trace, moment, side_lane
from outrider.train.processes import Place


@dataclass(frozen=True)
class Devices:
    """One process's devices: `learn` has the drafter, `capture` the target(s); none there: the target is on `learn` too.

    `per_target` of `capture`, in order, hold one target.
    """

    learn: torch.device
    capture: tuple[torch.device, ...]
    per_target: int = 1

    @property
    def targets(self) -> list[tuple[torch.device, ...]]:
        """The devices of each target."""
        if not self.capture:
            return [(self.learn,)]
        return [self.capture[first : first + self.per_target] for first in range(0, len(self.capture), self.per_target)]

    @property
    def all(self) -> list[torch.device]:
        return list(dict.fromkeys((self.learn, *self.capture)))


def find_devices(name: str, placement: PlacementConfig, place: Place) -> Devices:
    """The devices of a process whose `train.device` is `name`. Raises UserError when they are not there.

    On "cuda" each process of a machine takes the next 1 + `capture_cards` cards; "cuda:2" counts from there, for one process.
    """
    device = torch.device(name)
    if device.type == "cpu":
        return Devices(device, (device,) * placement.capture_cards, placement.cards_per_target)
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
    return Devices(cards[0], tuple(cards[1:]), placement.cards_per_target)


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
    def turn(self, jobs: Jobs) -> Iterator[None]:
        """Hold the turn until what the body adds to `jobs` is done."""
        if self._lock is None:
            yield
            return
        with self._lock.open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
            for job in jobs.values():
                job.wait(self._timeout_s)


def open_turns(placement: PlacementConfig, meeting: str) -> Turns:
    """Turns as `placement.turns` says; `meeting` tells the processes of one run on one machine from those of others."""
    lock = Path(tempfile.gettempdir()) / f"outrider-{meeting}.turn" if placement.turns == "one_at_a_time" else None
    return Turns(lock, timeout_s=placement.timeout_s)


@dataclass
class Parcel:
    """The features of some rows on their way: by the jobs of `chain`, and by that of a copy to the learning device once begun."""

    rows: TokenRows
    chain: Chain
    jobs: Jobs
    copied: Job | None = None

    @property
    def job(self) -> Job:
        """The last so far."""
        return self.copied or list(self.jobs.values())[-1]


class Relay:
    """Brings features to the learning device, captured ahead of time where the targets have lanes of their own.

    Rows go to the targets in turn. A chain's tensors are let go of only when its lanes have been made to wait for whoever read
    them, so the allocator can give their memory to the lanes' next work, and no more than one tensor a lane stands beside the
    ones in use.
    """

    def __init__(
        self, sources: Sequence[FeatureSource], chains: Sequence[Chain], copying: Lane | None, *, learn: torch.device,
        turns: Turns, timeout_s: int, trace: Trace | None,
    ) -> None:
        """`copying`: the lane that copies to `learn`, None where features are made on `learn` itself."""
        self.sources, self.learn, self.turns, self.timeout_s, self.trace = sources, learn, turns, timeout_s, trace
        self.ahead = sum(chain.ahead for chain in chains)
        self._chains, self._copying = chains, copying
        self._read: dict[str, Job] = {}  # by chain, and of the copies: what last read its tensors, to be followed before they go
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
            owner = self._copying if self._present.copied and self._copying else self._present.chain
            self._read[owner.name] = moment(self.learn)
            self._present = None
        if not self._coming:
            self._launch(rows)
        parcel = self._present = self._coming.popleft()
        self._bring(parcel)
        assert parcel.rows is rows, "rows are asked for in the order in which they were expected"
        with self._first_cause(parcel):
            parcel.job.follow(self.timeout_s)
            values = parcel.job.value().to(self.learn, non_blocking=True)  # nothing to do but for what was captured elsewhere
        self._since = self.trace.begin(self.learn) if self.trace else None
        return Features(values)

    def expect(self, coming: Sequence[TokenRows]) -> None:
        """Begin with the capture of `coming`, and with the copy of the first; then see that the present ones have come."""
        self.mark("learn")
        for rows in coming[len(self._coming):]:
            self._launch(rows)
        if self._coming:
            self._bring(self._coming[0])
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
        chain = self._chains[self._launched % len(self._chains)]
        parcel = Parcel(rows, chain, {})
        after = [self._read.pop(chain.name)] if chain.name in self._read else []
        with self._first_cause(parcel), self.turns.turn(parcel.jobs):
            chain.launch(rows, after, parcel.jobs)
        self._coming.append(parcel)
        self._launched += 1

    def _bring(self, parcel: Parcel) -> None:
        """See that the features come to the learning device: nothing to do, or a copy that is launched now."""
        copying, chain, jobs = self._copying, parcel.chain, parcel.jobs
        if copying is None or parcel.copied is not None:
            return
        after = [parcel.job, *([self._read.pop(copying.name)] if copying.name in self._read else [])]
        with self._first_cause(parcel):
            parcel.copied = copying.launch("copy", lambda: chain.values(jobs, self.learn), after)
        self._read[chain.name] = parcel.copied

    @contextlib.contextmanager
    def _first_cause(self, parcel: Parcel) -> Iterator[None]:
        """Say which rows and lane a failure belongs to; what went wrong there comes first."""
        which = f"features of rows {parcel.rows.row_ids_B.tolist()}"
        jobs = parcel.jobs | ({self._copying.name: parcel.copied} if parcel.copied and self._copying else {})
        try:
            yield
        except TimeoutError as error:
            late = [name for name, job in jobs.items() if not job.done()]
            raise RuntimeError(f"{which} did not come within placement.timeout_s = {self.timeout_s} s: still at work: "
                               f"{' and then '.join(late)}") from error
        except RuntimeError as error:
            kind = RunFailure if isinstance(error, RunFailure) else RuntimeError
            raise kind(f"{error} ({which}, by {' and then '.join(jobs) or parcel.chain.name})") from error


def open_relay(
    sources: Sequence[FeatureSource], devices: Devices, settings: PlacementConfig, *, meeting: str, trace: Trace | None
) -> Relay:
    """The relay of a process: targets on cards of their own, or in other processes, run ahead on lanes of their own, else in turn
    with the drafter."""
    learn, timeout_s = devices.learn, settings.timeout_s
    chains: list[Chain] = [OneLane(sources[0], OwnLane("learn", learn, trace))]
    copying: Lane | None = None
    if devices.capture or any(source.elsewhere for source in sources):
        chains = [chain_of(source, number, trace, timeout_s) for number, source in enumerate(sources)]
        if devices.capture and any(chain.device != learn for chain in chains):
            copying = side_lane("copy", learn, trace, timeout_s=timeout_s, sources=devices.capture)
    return Relay(sources, chains, copying, learn=learn, turns=open_turns(settings, meeting), timeout_s=timeout_s, trace=trace)
