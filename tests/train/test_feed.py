"""Which rows come next: what it costs to know does not grow with what is left of the run."""

import tracemalloc
from types import SimpleNamespace
from typing import Any

from outrider.train.feed import rows_after


def run_of(*, steps: int, accumulation: int, ahead: int, first: int) -> Any:
    read = {(step, micro): f"rows of {step}.{micro}" for step in range(first, first + 4) for micro in range(accumulation)}
    train = SimpleNamespace(accumulation=accumulation)
    return SimpleNamespace(steps=steps, read=read, relay=SimpleNamespace(ahead=ahead), processes=SimpleNamespace(rank=0, count=1),
                           resolved=SimpleNamespace(config=SimpleNamespace(train=train)))


def test_as_many_as_the_targets_may_run_ahead_and_none_after_the_end() -> None:
    assert rows_after(run_of(steps=9, accumulation=2, ahead=3, first=5), 4) == ["rows of 5.0", "rows of 5.1", "rows of 6.0"]
    assert rows_after(run_of(steps=6, accumulation=2, ahead=3, first=5), 4) == ["rows of 5.0", "rows of 5.1"]
    assert rows_after(run_of(steps=5, accumulation=2, ahead=3, first=5), 4) == []


def test_of_a_million_steps_only_those_are_listed() -> None:
    run = run_of(steps=1_000_000, accumulation=1, ahead=1, first=1)
    tracemalloc.start()
    rows_after(run, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000  # bytes; a list of all the steps left took 120 MB and 0.1 s, at every step
