"""Autotuners take turns: a double that keeps its arguments on itself, as Triton's does, crashes in two threads unlocked."""

import threading
import time
from typing import Any

import pytest

from outrider.features import target
from outrider.features.guards import lock_runs


def autotuners() -> tuple[type[Any], type[Any]]:
    """A class as Triton's and a subclass as FLA's, made anew: locking is for good."""

    class Autotuner:
        def __init__(self) -> None:
            self.nargs: dict[str, int] | None = None

        def run(self, value: int) -> int:
            self.nargs = {"value": value}
            time.sleep(0.01)  # a trial on the GPU, during which the interpreter's lock is free
            found = dict(**self.nargs)["value"]
            self.nargs = None
            return found

    class CachedAutotuner(Autotuner):
        def run(self, value: int) -> int:
            return super().run(value)

    return Autotuner, CachedAutotuner


def run_in_threads(tuner: Any) -> tuple[list[int], list[BaseException]]:
    found: list[int] = []
    errors: list[BaseException] = []

    def work(value: int) -> None:
        try:
            for _ in range(3):
                found.append(tuner.run(value))
        except TypeError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, errors


@pytest.mark.parametrize("which", [0, 1])
def test_without_the_lock_threads_meet_in_one_autotuner(which: int) -> None:
    found, errors = run_in_threads(autotuners()[which]())
    assert errors or sorted(found) != sorted(3 * list(range(4)))


@pytest.mark.parametrize("which", [0, 1])
def test_with_the_lock_each_thread_gets_its_own(which: int) -> None:
    classes = autotuners()
    lock_runs(classes[0])
    lock_runs(classes[0])  # again: nothing is locked twice
    found, errors = run_in_threads(classes[which]())
    assert not errors
    assert sorted(found) == sorted(3 * list(range(4)))


def test_subclasses_made_later_are_locked_too() -> None:
    base, _ = autotuners()
    lock_runs(base)

    class Later(base):  # type: ignore[misc, valid-type]
        def run(self, value: int) -> int:
            self.nargs = {"value": value}
            time.sleep(0.01)
            found = dict(**self.nargs)["value"]
            self.nargs = None
            return found

    found, errors = run_in_threads(Later())
    assert not errors
    assert sorted(found) == sorted(3 * list(range(4)))


def test_loading_a_target_locks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-linear-attention makes its autotuners when transformers imports it, while the target loads."""
    order: list[str] = []
    monkeypatch.setattr(target, "lock_autotuner", lambda: order.append("lock"))
    monkeypatch.setattr(target, "read_facts", lambda path: order.append("read") or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        target.load_target("nowhere", dtype="float32", device="cpu", last_layer=None, head=True)
    assert order == ["lock", "read"]
