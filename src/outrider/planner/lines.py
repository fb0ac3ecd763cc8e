"""Takes large tensors and when each lives, gives the bytes of every phase of a run; knows nothing of what the tensors are for.

A ledger is a list of Lines. A phase is a stretch of an optimizer step; a line lives from the first phase that holds it to the
last, both included. `load` is start-up, and what is born there and dies in LAST stays for the whole run.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

Role = Literal["learn", "capture"]
BYTES = {"float32": 4, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1, "uint8": 1, "float8": 1}
# The allocator hands out blocks of 512 B, and above 1 MiB whole numbers of 2 MiB only where it must ask the driver
GRAIN = 512
LOAD, CAPTURE, LAYOUT, LOSS, BACK_LOSS = "load", "capture", "blocks and mask", "loss", "backward: loss"
CONTEXT, BACK_CONTEXT, COLLECT, UPDATE, CHECK = "context", "backward: context", "collect gradients", "update", "acceptance check"
LAST = CHECK


@dataclass(frozen=True)
class Line:
    """One large tensor, or a set of `count` like ones: `tensor` says how the bytes of one come about. Lives from `first` to
    `last`.

    `inside`: counted by the allocator; else held by the driver, libraries or as gaps. `count` need not be whole where it was
    measured.
    """

    name: str
    tensor: str
    tensor_bytes: int
    dtype: str
    role: Role
    first: str
    last: str
    inside: bool = True
    count: float = 1

    @property
    def bytes(self) -> int:
        return int(self.count * self.tensor_bytes)

    @property
    def formula(self) -> str:
        return self.tensor if self.count == 1 else f"{self.count:g} x {self.tensor}"

    @property
    def lifetime(self) -> str:
        """In one of a few words: whole run, start-up, step, or the phases."""
        if (self.first, self.last) == (LOAD, LAST):
            return "whole run"
        if self.first == self.last:
            return "start-up" if self.first == LOAD else self.first
        return f"{self.first} .. {self.last}"


def forward(i: int) -> str:
    return f"forward: layer {i + 1}"


def back_feed_forward(i: int) -> str:
    return f"backward: layer {i + 1}, feed-forward"


def back_attention(i: int) -> str:
    return f"backward: layer {i + 1}, attention"


def phases(num_layers: int) -> tuple[str, ...]:
    """All phases of a step of a drafter with `num_layers` layers, in order."""
    layers = range(num_layers)
    backward = [phase for i in reversed(layers) for phase in (back_feed_forward(i), back_attention(i))]
    forwards = map(forward, layers)
    return (LOAD, CAPTURE, LAYOUT, CONTEXT, *forwards, LOSS, BACK_LOSS, *backward, BACK_CONTEXT, COLLECT, UPDATE, CHECK)


def line(
    name: str, shape: Mapping[str, int], dtype: str, first: str, last: str, *, role: Role = "learn", count: int = 1
) -> Line:
    """A line for `count` tensors of one shape; `shape` names each factor, `{"Q": 8192, "D": 5120}`."""
    size = prod(shape.values()) * BYTES[dtype]
    factors = " x ".join(f"{key} {value:,}" for key, value in shape.items())
    return Line(name, f"{factors} x {BYTES[dtype]} B", -(-size // GRAIN) * GRAIN, dtype, role, first, last, count=count)


def outside(name: str, formula: str, size: int, *, role: Role = "learn") -> Line:
    """A line that the allocator does not count."""
    return Line(name, formula, size, "bytes", role, LOAD, LAST, inside=False)


def for_whole_run(lines: Iterable[Line]) -> list[Line]:
    """The same lines, alive from start to end."""
    return [replace(item, first=LOAD, last=LAST) for item in lines]


def lay(lines: Sequence[Line], order: Sequence[str]) -> dict[str, int]:
    """Allocated bytes of each phase, in order: every line added to the phases from its first to its last."""
    place = {phase: i for i, phase in enumerate(order)}
    totals = [0] * len(order)
    for item in lines:
        if item.inside:
            first, last = place[item.first], place[item.last]
            assert first <= last, f"{item.name} dies in '{item.last}' before it is born in '{item.first}'"
            for i in range(first, last + 1):
                totals[i] += item.bytes
    return dict(zip(order, totals, strict=True))


def alive_in(lines: Sequence[Line], phase: str, order: Sequence[str]) -> list[Line]:
    """The allocator's lines that live in `phase`, largest first."""
    place = {name: i for i, name in enumerate(order)}
    found = [item for item in lines if item.inside and place[item.first] <= place[phase] <= place[item.last]]
    return sorted(found, key=lambda item: -item.bytes)
