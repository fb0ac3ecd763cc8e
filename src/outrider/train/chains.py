"""Takes a source of features and lanes, gives the jobs that bring a row's features about; knows no learning and no turns.

A target on one device takes a row as one job. One that is spread takes it as a job a share, each on the lane of its device, and
the hidden state crosses between them on lanes of its own: while the second share has row t, the first has row t + 1.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.features.capture import FeatureSource
from outrider.features.spread import SpreadCapture
from outrider.records import TokenRows
from outrider.train.lanes import Job, Lane, Trace, side_lane

Jobs = dict[str, Job]  # by lane, each after the one before it


class Chain(Protocol):
    """One target at work. `ahead`: how many rows it is worth having in it beyond the one in use."""

    name: str
    ahead: int

    @property
    def device(self) -> torch.device | None:
        """Where the features are as they come, None where they come in parts."""

    def launch(self, rows: TokenRows, after: Sequence[Job], jobs: Jobs) -> None:
        """Begin with the capture of `rows` (on the CPU) after what is named, adding to `jobs` what was begun."""

    def values(self, jobs: Jobs, device: torch.device) -> Tensor:
        """A new tensor on `device` with the features that all of `jobs` gave, `[B, S, F]`; launched on the current stream."""


class OneLane:
    """All of a target on one lane."""

    def __init__(self, source: FeatureSource, lane: Lane) -> None:
        self.source, self.lane = source, lane
        self.name, self.ahead, self.device = lane.name, lane.ahead, source.device

    def launch(self, rows: TokenRows, after: Sequence[Job], jobs: Jobs) -> None:
        work = self.source.features
        jobs[self.name] = self.lane.launch("capture", lambda: work(rows, self.source.device).values_BSF, after)

    def values(self, jobs: Jobs, device: torch.device) -> Tensor:
        return jobs[self.name].value().to(device, non_blocking=device.type == "cuda", copy=True)


class LaneByShare:
    """The shares of a spread target, each on its own lane; `crossings` bring the hidden state to the second share and on."""

    def __init__(self, spread: SpreadCapture, lanes: Sequence[Lane], crossings: Sequence[Lane]) -> None:
        self.spread, self.lanes, self.crossings = spread, lanes, crossings
        self.name, self.ahead, self.device = lanes[0].name, sum(lane.ahead for lane in lanes), None

    def launch(self, rows: TokenRows, after: Sequence[Job], jobs: Jobs) -> None:
        spread = self.spread
        jobs[self.name] = self.lanes[0].launch("capture", lambda: spread.run(0, rows, None), after)
        for number in range(1, len(self.lanes)):
            self._follow(number, rows, after, jobs)

    def _follow(self, number: int, rows: TokenRows, after: Sequence[Job], jobs: Jobs) -> None:
        """Launch a share that begins from what the one before it gives."""
        spread, lane, crossing = self.spread, self.lanes[number], self.crossings[number - 1]
        given, device = jobs[self.lanes[number - 1].name], spread.shares[number].device
        came = crossing.launch("cross", lambda: spread.handed_on(given.value(), device), [given, *after])
        jobs[crossing.name] = came
        jobs[lane.name] = lane.launch("capture", lambda: spread.run(number, rows, came.value()), [came, *after])

    def values(self, jobs: Jobs, device: torch.device) -> Tensor:
        return self.spread.gathered([jobs[lane.name].value() for lane in self.lanes], device)


def chain_of(source: FeatureSource, number: int, trace: Trace | None, timeout_s: float) -> Chain:
    """Target `number` on lanes beside the caller's own queue. Rows that are kept come one at a time: most are only read."""
    spread = source.run
    if not isinstance(spread, SpreadCapture) or source.keeps:
        return OneLane(source, side_lane(f"capture {number}", source.device, trace, timeout_s=timeout_s))
    devices = [share.device for share in spread.shares]
    lanes = [side_lane(f"capture {number}.{s}", device, trace, timeout_s=timeout_s) for s, device in enumerate(devices)]
    crossings = [side_lane(f"cross {number}.{s}", device, trace, timeout_s=timeout_s, sources=[devices[s - 1]])
                 for s, device in enumerate(devices) if s]
    return LaneByShare(spread, lanes, crossings)
