"""Faults at the n-th file operation: an audit hook sees each open, rename, removal and so on just before it happens.

fsync raises no audit event, so it is wrapped.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator

FILE_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.truncate", "os.listdir", "os.scandir",
               "shutil.rmtree", "tempfile.mkdtemp", "tempfile.mkstemp"}
_on_event: Callable[[str], None] | None = None


def _hook(event: str, args: tuple[object, ...]) -> None:
    if _on_event is not None and event in FILE_EVENTS:
        _on_event(event)


sys.addaudithook(_hook)  # cannot be removed, so it is added once and asks whether anyone listens


@contextlib.contextmanager
def at_each_file_operation(do: Callable[[str], None]) -> Iterator[None]:
    global _on_event
    _on_event, real_fsync = do, os.fsync

    def fsync(descriptor: int) -> None:
        do("os.fsync")
        real_fsync(descriptor)

    os.fsync = fsync
    try:
        yield
    finally:
        _on_event, os.fsync = None, real_fsync


def count_file_operations(work: Callable[[], object]) -> int:
    seen: list[str] = []
    with at_each_file_operation(seen.append):
        work()
    return len(seen)


def fail_at(number: int, work: Callable[[], object], *, code: int = errno.ENOSPC) -> None:
    """Run `work`; its file operation `number` (from 0) meets an OSError with `code`."""
    seen: list[str] = []

    def do(event: str) -> None:
        seen.append(event)
        if len(seen) == number + 1:
            raise OSError(code, os.strerror(code))

    with at_each_file_operation(do):
        work()
