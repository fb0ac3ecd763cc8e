"""Takes lines of metrics, gives them to the user's tracker as well; knows nothing of what they mean."""

from pathlib import Path
from typing import Any, Protocol

from outrider.errors import UserError


class Tracker(Protocol):
    def log(self, line: dict[str, Any]) -> None:
        """Record one line of metrics.jsonl; `line["step"]` says when."""

    def close(self) -> None:
        """Everything is on disk."""


class NoTracker:
    """Records nothing: metrics.jsonl is enough."""

    def log(self, line: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoard:
    """Scalars under `<run folder>/tensorboard`; lists are numbered from slot 1, dictionaries named by key."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError("train.tracker = 'tensorboard': tensorboard is not installed: "
                            "pip install 'outrider[trackers]'") from error
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def log(self, line: dict[str, Any]) -> None:
        for name, value in scalars(line).items():
            self._writer.add_scalar(name, value, global_step=line["step"])

    def close(self) -> None:
        self._writer.close()


def scalars(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line, flat: `slot_accuracy/1`, `seconds/capture`."""
    flat: dict[str, float] = {}
    for name, value in line.items():
        match value:
            case list():
                flat |= {f"{name}/{slot}": float(item) for slot, item in enumerate(value, start=1)}
            case dict():
                flat |= {f"{name}/{key}": float(item) for key, item in value.items()}
            case int() | float() if name != "step":
                flat[name] = float(value)
    return flat


def open_tracker(name: str | None, folder: Path, *, first_step: int) -> Tracker:
    """The tracker of the run file. Raises UserError when it is not installed."""
    return NoTracker() if name is None else TensorBoard(folder, first_step=first_step)
