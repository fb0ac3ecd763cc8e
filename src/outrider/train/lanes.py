"""Takes work and what it must follow, gives it launched in order on a device's own queue; knows nothing of what the work is.

A lane is a queue of a device: a CUDA stream, a thread where the device is the CPU, or the caller's own queue. Work on one lane
runs in order, lanes run side by side, and only what is named in `after` is waited for, by the device itself on CUDA.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from outrider.records import Span

Work = Callable[[], Tensor]
POLL_S = 2e-4  # between two looks at a device's event: far below a step


class Job(Protocol):
    """Work that was launched."""

    def value(self) -> Tensor:
        """What it gives; on CUDA at once, to be used after it in stream order."""

    def follow(self, timeout_s: float) -> None:
        """Make the caller's own queue wait for it: the current stream, or on a CPU the caller itself (see `wait`)."""

    def wait(self, timeout_s: float | None) -> None:
        """Make the host wait, None: as long as it takes. Raises what the work raised, TimeoutError."""

    def done(self) -> bool:
        """Has it ended?"""


class Lane(Protocol):
    """`ahead`: how many rows it is worth keeping queued beyond the one in use, so that it never runs dry."""

    name: str
    ahead: int

    def launch(self, label: str, work: Work, after: Sequence[Job]) -> Job:
        """Queue `work` behind what is queued here and behind `after`."""


@dataclass
class Trace:
    """Records when labelled work ran on which lane, while `on`; costs two events a job on CUDA. Make it when the devices are
    idle."""

    devices: Sequence[torch.device]
    on: bool = True
    _origins: dict[torch.device, "Stamp"] = field(default_factory=dict)
    _marks: list[tuple[str, str, "Stamp", "Stamp"]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.began = time.time()  # what traces of several processes have in common
        self._origins = {device: stamp(device) for device in self.devices}

    def begin(self, device: torch.device) -> "Stamp | None":
        """Now, on the current stream of `device`; None once the trace is off."""
        return stamp(device) if self.on else None

    def end(self, lane: str, label: str, begin: "Stamp | None") -> "Stamp | None":
        """What began at `begin` ends now, on the current stream of its device; gives that moment."""
        if begin is None or not self.on:
            return None
        now = stamp(begin.device)
        self._marks.append((lane, label, begin, now))
        return now

    def spans(self) -> list[Span]:
        """All that was recorded, in milliseconds since the trace was made; waits for the devices."""
        return [Span(lane, label, begin.ms_since(self._origins[begin.device]), end.ms_since(self._origins[end.device]))
                for lane, label, begin, end in self._marks]


@dataclass(frozen=True)
class Stamp:
    """A moment of a device's own queue: a CUDA event, or the clock of the CPU."""

    device: torch.device
    event: torch.cuda.Event | None
    seconds: float

    def ms_since(self, origin: "Stamp") -> float:
        if self.event is None or origin.event is None:
            return 1e3 * (self.seconds - origin.seconds)
        self.event.synchronize()
        return origin.event.elapsed_time(self.event)


def stamp(device: torch.device) -> Stamp:
    """Now, on the current stream of `device`."""
    if device.type != "cuda":
        return Stamp(device, None, time.perf_counter())
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return Stamp(device, event, 0.0)


@dataclass(frozen=True)
class StreamJob:
    """Work on a CUDA stream; the event stands behind it."""

    result: Tensor
    event: torch.cuda.Event

    def value(self) -> Tensor:
        return self.result

    def follow(self, timeout_s: float) -> None:
        torch.cuda.current_stream().wait_event(self.event)

    def wait(self, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.event.query():
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(POLL_S)

    def done(self) -> bool:
        return self.event.query()


@dataclass(frozen=True)
class ThreadJob:
    """Work in another thread."""

    future: "Future[Tensor]"

    def value(self) -> Tensor:
        return self.future.result()

    def follow(self, timeout_s: float) -> None:
        self.future.result(timeout_s)

    def wait(self, timeout_s: float | None) -> None:
        self.future.result(timeout_s)

    def done(self) -> bool:
        return self.future.done()


@dataclass(frozen=True)
class DoneJob:
    """Work that the caller's own queue has behind it."""

    result: Tensor

    def value(self) -> Tensor:
        return self.result

    def follow(self, timeout_s: float) -> None:
        pass

    def wait(self, timeout_s: float | None) -> None:
        pass

    def done(self) -> bool:
        return True


class StreamLane:
    """A stream of its own on a CUDA device; the caller's thread launches, one row ahead: learning is launched then, not done.

    A copy is run by the device it comes from: on each of `sources` it has a stream of its own as well, or copies that wait would
    hold up one another there. What another thread gives is waited for `timeout_s` at most, by the caller.
    """

    ahead = 1

    def __init__(
        self, name: str, device: torch.device, trace: Trace | None, *, timeout_s: float, sources: Sequence[torch.device] = ()
    ) -> None:
        self.name, self.device, self.trace, self.timeout_s = name, device, trace, timeout_s
        self._stream = torch.cuda.Stream(device)
        self._others = [torch.cuda.Stream(other) for other in dict.fromkeys(sources) if other.type == "cuda" and other != device]

    def launch(self, label: str, work: Work, after: Sequence[Job]) -> Job:
        with contextlib.ExitStack() as streams:
            for stream in (*self._others, self._stream):  # the last one's device becomes the current one
                streams.enter_context(torch.cuda.stream(stream))
            for job in after:
                job.follow(self.timeout_s)
            begin = self.trace.begin(self.device) if self.trace else None
            result = work()
            if self.trace:
                self.trace.end(self.name, label, begin)
            event = torch.cuda.Event()
            event.record(self._stream)
        return StreamJob(result, event)


class ThreadLane:
    """A thread: what a stream is to a GPU. Two rows ahead: when the caller comes to ask, it has learned the present one.

    A daemon, unlike an executor's: work that is stuck must not keep a process alive that has given it up.
    """

    ahead = 2

    def __init__(self, name: str, device: torch.device, trace: Trace | None) -> None:
        self.name, self.device, self.trace = name, device, trace
        self._queue: SimpleQueue[tuple[Future[Tensor], Work] | None] = SimpleQueue()
        threading.Thread(target=_work_off, args=(self._queue,), name=name, daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def launch(self, label: str, work: Work, after: Sequence[Job]) -> Job:
        def run() -> Tensor:
            for job in after:
                job.wait(None)
            begin = self.trace.begin(self.device) if self.trace else None
            result = work()
            if self.trace:
                self.trace.end(self.name, label, begin)
            return result

        future: Future[Tensor] = Future()
        self._queue.put((future, run))
        return ThreadJob(future)


def _work_off(queue: "SimpleQueue[tuple[Future[Tensor], Work] | None]") -> None:
    """Run what comes, in order, until None does."""
    while (item := queue.get()) is not None:
        future, work = item
        try:
            future.set_result(work())
        except BaseException as error:  # whoever waits for it gets it
            future.set_exception(error)
        del item, future, work  # or the last features would stay until the next work comes


class OwnLane:
    """The caller's own queue: the current stream, or the CPU at once."""

    ahead = 0

    def __init__(self, name: str, device: torch.device, trace: Trace | None) -> None:
        self.name, self.device, self.trace = name, device, trace

    def launch(self, label: str, work: Work, after: Sequence[Job]) -> Job:
        for job in after:
            job.follow(0.0)
        begin = self.trace.begin(self.device) if self.trace else None
        result = work()
        if self.trace:
            self.trace.end(self.name, label, begin)
        return DoneJob(result)


def side_lane(
    name: str, device: torch.device, trace: Trace | None, *, timeout_s: float, sources: Sequence[torch.device] = ()
) -> Lane:
    """A lane beside the caller's own queue (see StreamLane)."""
    if device.type == "cuda":
        return StreamLane(name, device, trace, timeout_s=timeout_s, sources=sources)
    return ThreadLane(name, device, trace)


def moment(device: torch.device) -> Job:
    """What the caller's own queue on `device` holds up to now, as a job that others can follow."""
    nothing = torch.empty(0)
    if device.type != "cuda":
        return DoneJob(nothing)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return StreamJob(nothing, event)
