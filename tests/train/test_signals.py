"""Stop requests: the step is finished and saved, a second signal ends the process at once, and the run goes on exactly."""

import contextlib
import os
import pty
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_loop import CHILD, assert_same_run, metrics, run_in_child

from outrider.config import RunConfig, to_toml
from outrider.records import AcceptReport
from outrider.train import loop as loop_module
from outrider.train import signals as signals_module
from outrider.train.checkpoint import list_checkpoints
from outrider.train.loop import train
from outrider.train.signals import STOP_SIGNALS, StopRequests

MakeRun = Callable[..., RunConfig]


def signal_in_step(step: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = loop_module._one_step

    def one_step(run: Any, now: int, *rest: Any) -> Any:
        if now == step:
            os.kill(os.getpid(), number)
        return real(run, now, *rest)

    monkeypatch.setattr(loop_module, "_one_step", one_step)


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_a_signal_finishes_the_step_saves_and_goes_on_exactly(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    whole, parts = make_run("whole", **{"checkpoint.keep_last": 9}), make_run("parts", **{"checkpoint.keep_last": 9})
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    with monkeypatch.context() as patch:
        signal_in_step(6, number, patch)
        result = train(parts, check=None)
    assert (result["stopped"], result["steps"]) == (number.name, 7)
    assert result["loss"] == metrics(parts)[-1]["loss"]
    assert [p.name for p in list_checkpoints(parts.train.folder)] == ["step-00000005", "step-00000007"]
    assert f"stopped by {number.name} after step 7 of 10: the same command goes on" in capfd.readouterr().err
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before, "the handlers are put back"
    assert train(parts, check=None)["stopped"] is None
    train(whole, check=None)
    list_checkpoints(parts.train.folder)[1].rename(parts.train.folder / "set aside")  # the whole run has no step 7
    assert_same_run(whole, parts)


def test_a_stop_before_a_measurement_leaves_it_to_the_next_start(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement may take minutes, a warning gives two: it is made when the run goes on, as if there had been no stop."""
    def check(target: Any, drafter: Any) -> AcceptReport:
        tau = 100 + int(drafter.fc.weight.detach().sum() * 1e4)  # of the weights, so that another step's is seen
        return AcceptReport(runs=[[1]], tokens=tau, forwards=100, drafted_K=[0, 1], accepted_K=[0, 1], seconds=0.1)

    whole, parts = (make_run(name, **{"train.accept_every": 5, "checkpoint.keep_last": 9}) for name in ("whole", "parts"))
    with monkeypatch.context() as patch:
        signal_in_step(4, signal.SIGTERM, patch)
        assert train(parts, check=check)["steps"] == 5
    assert not any("tau" in line for line in metrics(parts))
    train(parts, check=check)
    train(whole, check=check)
    assert_same_run(whole, parts)
    assert [line["step"] for line in metrics(parts) if "tau" in line] == [5, 10]


DURING_THE_LAST_WRITE = """
from outrider.train import checkpoint
real = checkpoint.write_tensors
def write_tensors(tensors, path, metadata=None):
    if "step-00000010" in str(path) and path.name == "optimizer.safetensors":
        os.kill(os.getpid(), signal.SIGUSR1)  # SLURM warns
        time.sleep(0.5)
    return real(tensors, path, metadata)
checkpoint.write_tensors = write_tensors
"""


def test_a_signal_while_the_last_checkpoint_is_written_does_not_lose_it(make_run: MakeRun) -> None:
    run = make_run()
    done = run_in_child(run, DURING_THE_LAST_WRITE)
    assert done.returncode == 0, done.stderr
    assert "SIGUSR1: the step is finished and saved" in done.stderr
    assert [p.name for p in list_checkpoints(run.train.folder)] == ["step-00000005", "step-00000010"]


def test_what_a_process_was_started_to_ignore_it_ignores() -> None:
    """As nohup does with SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequests(began=0.0, max_hours=None) as stops:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stops.reason(needed_s=0.0) is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert stops.reason(needed_s=0.0) == "SIGTERM"
    finally:
        signal.signal(signal.SIGHUP, before)


CLOSED = """
from outrider.train import loop
real = loop._one_step
def one_step(run, step, *rest):
    if step == 6:
        (run.folder.parent / "at step 6").touch()
        time.sleep(3)  # the terminal is closed meanwhile
    return real(run, step, *rest)
loop._one_step = one_step
"""


def test_a_terminal_that_is_closed_stops_the_run_saved(make_run: MakeRun) -> None:
    run = make_run()
    file = run.train.folder.with_suffix(".toml")
    file.write_text(to_toml(run), encoding="utf-8")
    child, terminal = pty.fork()
    if child == 0:
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        os.execv(sys.executable, [sys.executable, "-c", CHILD.format(patch=CLOSED), str(file)])
    os.set_blocking(terminal, False)
    deadline = time.monotonic() + 100
    while not (run.train.folder.parent / "at step 6").exists():
        assert time.monotonic() < deadline
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 65536)
        time.sleep(0.05)
    os.close(terminal)
    os.waitpid(child, 0)  # what it says at its very end cannot be said, so any code will do
    assert [p.name for p in list_checkpoints(run.train.folder)] == ["step-00000005", "step-00000007"]


SECOND_SIGNAL = """
from outrider.train import loop
real = loop._one_step
def one_step(run, step, *rest):
    if step == 7:
        for _ in range(3):  # two at once are one request, the third is another
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.6)
        time.sleep(60)
    return real(run, step, *rest)
loop._one_step = one_step
"""


def test_a_second_signal_stops_at_once(make_run: MakeRun) -> None:
    whole, parts = make_run("whole"), make_run("parts")
    started = time.monotonic()
    done = run_in_child(parts, SECOND_SIGNAL)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert time.monotonic() - started < 50
    assert "SIGTERM: the step is finished and saved" in done.stderr
    assert "SIGTERM again: stopping at once" in done.stderr
    assert [p.name for p in list_checkpoints(parts.train.folder)] == ["step-00000005"]
    train(parts, check=None)
    train(whole, check=None)
    assert_same_run(whole, parts)


def test_the_wall_clock_budget_leaves_time_for_a_step_and_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(signals_module.time, "monotonic", lambda: now)
    stops = StopRequests(began=1000.0, max_hours=1.0)
    assert stops.reason(needed_s=3599.0) is None
    assert stops.reason(needed_s=3601.0) == "train.max_hours"
    now = 1000.0 + 3590
    assert stops.reason(needed_s=9.0) is None
    assert stops.reason(needed_s=11.0) == "train.max_hours"
    assert StopRequests(began=1000.0, max_hours=None).reason(needed_s=1e9) is None


def test_a_budget_in_a_run(make_run: MakeRun, tmp_path: Path) -> None:
    result = train(make_run(**{"train.max_hours": 1e-9}), check=None)
    assert (result["stopped"], result["steps"], result["checkpoint"]) == ("train.max_hours", 0, None)
    assert train(make_run(), check=None)["steps"] == 10, "the budget is free to change"
