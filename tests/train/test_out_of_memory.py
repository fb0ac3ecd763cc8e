"""An out-of-memory in training: one sentence, a record that reads back, the last checkpoint whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_forecast import card
from test_loop import assert_same_run

from outrider.cli import doctor
from outrider.config import RunConfig
from outrider.errors import RunFailure
from outrider.planner.doctor import record
from outrider.train import loop, rehearsal, step
from outrider.train.checkpoint import list_checkpoints, verify_checkpoint
from outrider.train.loop import train

MakeRun = Callable[..., RunConfig]
MESSAGE = "CUDA out of memory. Tried to allocate 15.00 GiB. GPU 0 has a total capacity of 94.97 GiB."


def dying_at(where: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the `times`-th call of `where` in train.step run out of memory."""
    real, calls = getattr(step, where), []

    def dies(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == times:
            raise torch.OutOfMemoryError(MESSAGE + "\nmore advice")
        return real(*args, **options)

    monkeypatch.setattr(step, where, dies)


@pytest.mark.parametrize(("where", "calls", "phase", "steps"), [
    ("drafter_terms", 1, "forward", 0),  # the rehearsal
    ("drafter_terms", 2 + 2 * 6 + 1, "forward", 6),
    ("clip_and_update", 1 + 8, "optimizer", 7),
])
def test_the_record_says_where_and_the_run_goes_on_from_its_checkpoint(
    where: str, calls: int, phase: str, steps: int, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, whole = make_run("run"), make_run("whole")
    with monkeypatch.context() as patched:
        dying_at(where, calls, patched)
        with pytest.raises(RunFailure) as failure:
            train(run, check=None, card_of=lambda device: card())
    place = run.train.folder / "out_of_memory.json"
    sentence = str(failure.value)
    assert f"out of memory after step {steps}, in '{phase}': {MESSAGE}: `outrider doctor --record {place}` says why" in sentence
    assert "\n" not in sentence
    found = record.read(place)
    assert (found.moment.phase, found.moment.step, found.moment.fused) == (phase, steps, False)
    assert found.message.startswith(MESSAGE)
    assert found.frames[-1].endswith("dies")
    assert found.settings["layout"]["anchors"] == run.layout.anchors
    assert found.by_phase
    why = doctor(record=place, log=None, run=None, settings=None, row_length=None)
    assert (why["cause"], why["requested_bytes"]) == ("not stated", 15 * 2**30)  # the message is cut off after the capacity
    assert f"after step {steps}, in '{phase}'; train.attention was 'dense'" in why["note"]
    masters = next(line.bytes for line in found.lines if line.name == "drafter: masters")
    assert found.held["drafter: masters"] == pytest.approx(masters, rel=0.01)  # a line is one whole tensor, these are many small
    for checkpoint in list_checkpoints(run.train.folder):
        verify_checkpoint(checkpoint)
    assert ("is whole" in sentence) == (steps >= 5)
    train(whole, check=None)
    train(run, check=None)
    assert_same_run(run, whole)


def test_in_the_acceptance_check_and_where_nothing_was_planned(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(target: Any, drafter: Any) -> Any:
        raise torch.OutOfMemoryError(MESSAGE)

    run = make_run("planned", **{"train.accept_every": 5})
    with pytest.raises(RunFailure, match="in 'check'"):
        train(run, check=check, card_of=lambda device: card())
    assert record.read(run.train.folder / "out_of_memory.json").moment.phase == "check"
    with pytest.raises(RunFailure, match=r"no record of its memory is left; step-.* is whole"):
        train(make_run("unplanned", **{"train.accept_every": 10}), check=check)


def test_shared_memory_is_on_record_too_and_told_from_the_cards(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_wide(*args: Any, **options: Any) -> None:
        raise RuntimeError("No valid triton configs. OutOfMemoryError: out of resource: triton_tem_fused_0 Required: 114688 "
                           "Hardware limit:101376 Reducing block sizes or `num_stages` may help.")

    run = make_run()
    monkeypatch.setattr(step, "drafter_terms", too_wide)
    with pytest.raises(RunFailure, match="outrider doctor --record"):
        train(run, check=None, card_of=lambda device: card())
    why = doctor(record=run.train.folder / "out_of_memory.json", log=None, run=None, settings=None, row_length=None)
    assert why["cause"] == "shared memory"
    assert why["remedies"] == []


def test_other_errors_are_left_alone(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(step, "drafter_terms", broken)
    assert loop.run_step is rehearsal.run_step is step.run_step
    with pytest.raises(RuntimeError, match="a kernel failed"):
        train(make_run(), check=None)
