"""Takes signals and the clock, gives one reason to stop, asked for once a step; knows nothing of what is being trained."""

import contextlib
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

# SIGHUP comes when a terminal closes, SIGUSR1 is the warning that SLURM's --signal=USR1@120 sends
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SAME_REQUEST_S = 1.0  # a terminal and a launcher may both pass on one Ctrl-C


def heard() -> list[signal.Signals]:
    """The stop signals that this process was not started to ignore, as nohup has SIGHUP ignored."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


class StopRequests:
    """While open, the first stop signal is remembered and a second one ends the process at once, by its default action.

    `max_hours`: wall-clock budget from `began` (time.monotonic), or none. Signals reach only the main thread of a process; in
    another thread the budget alone counts.
    """

    def __init__(self, *, began: float, max_hours: float | None) -> None:
        self._deadline = None if max_hours is None else began + 3600 * max_hours
        self._signal: str | None = None
        self._signal_at = 0.0
        self._before: dict[int, Any] = {}

    reasons = frozenset({*(number.name for number in STOP_SIGNALS), "train.max_hours"})

    def __enter__(self) -> "StopRequests":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on_signal) for number in heard()}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def reason(self, *, needed_s: float) -> str | None:
        """Why to stop now, or None; `needed_s` is what another step and a last checkpoint may take."""
        if self._signal is not None:
            return self._signal
        if self._deadline is not None and time.monotonic() + needed_s > self._deadline:
            return "train.max_hours"
        return None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._signal is None:
            self._signal, self._signal_at = name, time.monotonic()
            _say_now(f"{name}: the step is finished and saved, then the run stops; a second signal stops it at once")
        elif time.monotonic() - self._signal_at > SAME_REQUEST_S:
            _say_now(f"{name} again: stopping at once; the last checkpoint is whole")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _say_now(message: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be what has gone
        os.write(2, f"{message}\n".encode())  # print is not safe here: the signal may have come in the middle of a print
