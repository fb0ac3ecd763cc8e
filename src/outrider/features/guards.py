"""Takes the process that will run GPU kernels, makes its autotuners take turns; knows nothing of models or rows."""

import functools
import threading
from typing import Any

LOCK = threading.RLock()  # one for all autotuners: they share kernels, and one run may start another
MARK = "_outrider_locked"


def lock_autotuner() -> None:
    """Make Triton's autotuners take turns, for the whole process; to be called before flash-linear-attention is imported.

    `Autotuner.run` keeps its arguments on the object (`self.nargs`) and sets them to None at its end (Triton 3.6 to 3.9), so two
    threads in one autotuner crash ("'NoneType' object is not a mapping") or, worse, tune with each other's arguments. Without
    Triton there is nothing to lock.
    """
    try:
        from triton.runtime.autotuner import Autotuner  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return
    lock_runs(Autotuner)


def lock_runs(autotuner: type[Any]) -> None:
    """Put every `run` of this class and of its subclasses, those made later too, under LOCK."""
    for owner in [autotuner, *_subclasses(autotuner)]:
        _lock_own_run(owner)
    if MARK in autotuner.__dict__:
        return
    inherited = autotuner.__init_subclass__

    def init_subclass(cls: type[Any], **kwargs: Any) -> None:
        inherited(**kwargs)
        _lock_own_run(cls)

    setattr(autotuner, "__init_subclass__", classmethod(init_subclass))  # noqa: B010 - the type checker refuses the plain form
    setattr(autotuner, MARK, True)


def _subclasses(owner: type[Any]) -> list[type[Any]]:
    return [below for child in owner.__subclasses__() for below in [child, *_subclasses(child)]]


def _lock_own_run(owner: type[Any]) -> None:
    run = owner.__dict__.get("run")
    if run is None or hasattr(run, MARK):
        return

    @functools.wraps(run)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with LOCK:
            return run(*args, **kwargs)

    setattr(locked, MARK, True)
    owner.run = locked
