"""Takes a sign of life once a step, ends a process that gives none for too long, all stacks on record; knows nothing of steps."""

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from outrider.progress import say

STUCK_NAME = "stuck.txt"


def end_process() -> None:
    """At once and without clean-up, which may be what is stuck."""
    os._exit(1)


class Watchdog:
    """While open: when `alive` is not called for `minutes`, write every thread's stack to `stuck.txt` in `folder` and `end`.

    Two guards of different kinds: a thread that says what happened, and the timer of faulthandler (a C thread) for code that
    holds the interpreter's lock, under which no Python thread runs; the thread puts that timer off as long as it runs itself.
    """

    def __init__(self, folder: Path, *, minutes: float, rank: int = 0, end: Callable[[], None] = end_process) -> None:
        """`rank`: of this process among several; each writes a file of its own."""
        self._path, self._limit_s, self._end = folder / (f"stuck-{rank}.txt" if rank else STUCK_NAME), 60 * minutes, end
        self._alive = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._file = self._path.open("w", encoding="utf-8")  # open before anything is wrong: a full disk has no room for it then
        self._alive = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        empty = self._file.tell() == 0
        self._file.close()
        if empty:
            self._path.unlink(missing_ok=True)

    def alive(self) -> None:
        self._alive = time.monotonic()

    def _watch(self) -> None:
        while True:
            faulthandler.dump_traceback_later(2 * self._limit_s, exit=True, file=self._file)
            if self._closed.wait(self._limit_s / 8):
                return
            silent_s = time.monotonic() - self._alive
            if silent_s > self._limit_s:
                self._file.write(f"no step, measurement or checkpoint ended for {silent_s / 60:.1f} minutes; all stacks:\n")
                self._file.flush()
                faulthandler.dump_traceback(self._file, all_threads=True)
                self._file.flush()
                say(f"stuck: nothing ended for {silent_s / 60:.1f} minutes (guards.stuck_minutes = {self._limit_s / 60:g}): all "
                    f"stacks are in {self._path}; the process ends, the same command goes on from the last checkpoint")
                self._end()
                return
