"""Takes counts of finished work, gives progress with an estimate of the rest on stderr; knows nothing of the work."""

import contextlib
import sys
import time
from collections.abc import Iterable
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

PLAIN_LINE_EVERY_S = 5.0
_speaks = True


def speaks(yes: bool) -> None:
    """Whether this process shows anything: of several that do one job, one should."""
    global _speaks
    _speaks = yes


def say(message: str) -> None:
    """One plain line on stderr; where nobody listens any more (a terminal or a pipe that was closed) the work goes on unsaid."""
    if _speaks:
        with contextlib.suppress(OSError):
            print(message, file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """Seconds as `m:ss` or `h:mm:ss`."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class _BarWithNote(Progress):
    """A bar, and a note on the line below it."""

    note = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.note:
            yield Text(self.note, style="dim")


class ProgressBar:
    """A bar on a terminal, otherwise a plain line every few seconds; both on stderr, both with the time left.

    Use as a context manager and call `advance` as work finishes.
    """

    def __init__(self, label: str, *, total: int, unit: str) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = 0
        self.note = ""
        self._skipped = 0
        self._started = self._last_line = time.monotonic()
        self._bar: _BarWithNote | None = None

    def __enter__(self) -> "ProgressBar":
        console = Console(stderr=True)
        self._started = self._last_line = time.monotonic()
        if console.is_terminal and _speaks:
            columns = (
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(self.unit),
                TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            )
            self._bar = _BarWithNote(*columns, console=console)
            self._task = self._bar.add_task(self.label, total=self.total)
            self._bar.start()
        return self

    def skip(self, amount: int) -> None:
        """`amount` units were finished by an earlier run; they do not count towards the estimate."""
        self.done += amount
        self._skipped += amount
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)

    def advance(self, amount: int, *, note: str = "") -> None:
        """`amount` more units are done; `note` is shown with the bar."""
        self.done += amount
        self.note = note or self.note
        if self._bar is not None:
            self._bar.note = self.note
            with contextlib.suppress(OSError):  # as in `say`
                self._bar.update(self._task, advance=amount)
            return
        now = time.monotonic()
        if now - self._last_line >= PLAIN_LINE_EVERY_S or self.done >= self.total:
            self._last_line = now
            elapsed = now - self._started
            left = elapsed / max(self.done - self._skipped, 1) * max(self.total - self.done, 0)
            say(f"{self.label}: {self.done}/{self.total} {self.unit}, {clock(elapsed)} elapsed, {clock(left)} left"
                + (f", {self.note}" if self.note else ""))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()
