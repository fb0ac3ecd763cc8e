"""Takes lines of metrics, gives metrics.jsonl and the user's tracker; knows nothing of what the lines mean."""

import contextlib
import json
import os
from collections import deque
from pathlib import Path
from typing import Any

from outrider.files import explain_os_errors
from outrider.progress import say
from outrider.train.guards import LOSSES_KEPT
from outrider.train.tracker import open_tracker

METRICS_NAME = "metrics.jsonl"


class Metrics:
    """Appends to the run's metrics.jsonl from `at_bytes` on: what lies beyond is of steps that will be made again, and is cut.

    Of several processes one `writes`; in the others lines go nowhere.
    """

    def __init__(self, run_folder: Path, tracker: str | None, *, at_bytes: int, at_step: int, writes: bool) -> None:
        self.path, self.writes = run_folder / METRICS_NAME, writes
        self.losses: deque[float] = deque(maxlen=LOSSES_KEPT)  # the newest logged
        self.tracker = open_tracker(tracker if writes else None, run_folder, first_step=at_step)
        if not writes:
            return
        with explain_os_errors(self.path), self.path.open("ab") as handle:
            if handle.tell() < at_bytes:
                say(f"{self.path}: has {handle.tell()} bytes where the checkpoint counted {at_bytes}: some lines were lost, the "
                    "run itself is whole")
            handle.truncate(self._whole_lines(min(handle.tell(), at_bytes)))
        self.losses.extend(self._read_losses())

    @property
    def size(self) -> int:
        """Bytes of whole lines so far."""
        return self.path.stat().st_size if self.writes else 0

    def log(self, line: dict[str, Any]) -> None:
        """Add one line. Raises UserError when the disk refuses."""
        if "loss" in line:
            self.losses.append(line["loss"])
        if not self.writes:
            return
        self.tracker.log(line)
        with explain_os_errors(self.path), self.path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(line) + "\n")

    def sync(self) -> None:
        """All lines are on the disk: a checkpoint that counts them must not come before them."""
        if self.writes:
            with explain_os_errors(self.path), self.path.open("rb") as handle:
                os.fsync(handle.fileno())

    def event(self, step: int, event: str, **facts: Any) -> None:
        """Add a line on something odd: `{"step": ..., "event": ..., ...}`. Its facts have no key that a step's line has."""
        self.log({"step": step, "event": event, **facts})

    @property
    def last_loss(self) -> float | None:
        return self.losses[-1] if self.losses else None

    def _whole_lines(self, size: int) -> int:
        """So many of the first `size` bytes are whole lines: what comes next must not be joined to half of one."""
        with self.path.open("rb") as handle:
            return handle.read(size).rfind(b"\n") + 1

    def _read_losses(self) -> list[float]:
        """Of the lines that can be read: damage is the report's to count, and no reason to end a run."""
        losses = []
        for text in self.path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                line = json.loads(text)
                if isinstance(line, dict) and isinstance(line.get("loss"), float):
                    losses.append(line["loss"])
        return losses
