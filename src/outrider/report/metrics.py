"""Takes a run folder, gives the lines of its metrics.jsonl, each checked; knows nothing of how they are drawn."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from outrider.errors import UserError

METRICS_NAME = "metrics.jsonl"  # as train/ writes it
Count = Annotated[int, Field(ge=0, lt=2**53)]  # a float still holds each
Share = Annotated[float, Field(ge=0, le=1)]
Shares = Annotated[list[Share], Field(min_length=1)]
Amount = Annotated[FiniteFloat, Field(ge=0, le=1e15)]


class Line(BaseModel):
    """A line of metrics.jsonl; keys that are not named here are of other readers."""

    model_config = ConfigDict(frozen=True, strict=True)
    step: Count


class StepLine(Line):
    """A step of training, as train/meter.py has it. Numbers that training may find not finite may be so here."""

    loss: float
    slot_accuracy: Shares
    tau_proxy: float
    gradient_norm: float
    learning_rate: float
    seconds: dict[str, Amount]
    supervised_slots_per_s: Amount
    anchor_coverage: Amount


class MeasuredLine(Line):
    """A real accepted length, measured by decoding held-out prompts."""

    tau: Amount
    acceptance_by_slot: Shares
    tokens: Count
    forwards: Count


class EventLine(Line):
    """Something odd that happened, with whatever facts belong to it."""

    model_config = ConfigDict(extra="allow")
    event: str

    @property
    def facts(self) -> dict[str, Any]:
        return self.model_extra or {}


LINE: TypeAdapter[StepLine | MeasuredLine | EventLine] = TypeAdapter(
    Annotated[StepLine | MeasuredLine | EventLine, Field(union_mode="left_to_right")])
OneKind = TypeVar("OneKind", bound=Line)


@dataclass(frozen=True)
class Metrics:
    """`steps` of training, `measured` accepted lengths, odd `events`, and how many lines were no such thing."""

    steps: list[StepLine]
    measured: list[MeasuredLine]
    events: list[EventLine]
    unreadable: int


def read_metrics(run: Path) -> Metrics:
    """The run's metrics, in order; lines that a kill, a disk or a hand damaged are counted. Raises UserError without the file."""
    steps, measured, events, unreadable = [], [], [], 0
    for text in read_bytes(run / METRICS_NAME).splitlines():
        try:
            line = LINE.validate_json(text)
        except ValidationError:
            unreadable += 1
            continue
        match line:
            case StepLine():
                steps.append(line)
            case MeasuredLine():
                measured.append(line)
            case EventLine():
                events.append(line)
    return Metrics(steps, measured, events, unreadable)


def read_bytes(path: Path) -> bytes:
    """A file of a run folder. Raises UserError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): name a run folder, that of train.folder") from error


def series(lines: Sequence[OneKind], value: Callable[[OneKind], float]) -> tuple[list[float], list[float]]:
    """(steps, values) of the lines where `value` is finite."""
    found = [(float(line.step), float(number)) for line in lines if math.isfinite(number := value(line))]
    return [step for step, _ in found], [number for _, number in found]
