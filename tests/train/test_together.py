"""A run in several processes: the same drafter, checkpoints that other numbers of processes go on from, agreed incidents."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from spawning import break_down, in_processes, refuse
from test_loop import final_tensors, metrics

from outrider.config import RunConfig, to_toml
from outrider.errors import RunFailure, UserError
from outrider.model.drafter import Drafter
from outrider.records import AcceptReport
from outrider.train import loop as loop_module
from outrider.train.checkpoint import list_checkpoints, newest_sound, read_position, verify_checkpoint
from outrider.train.forecast import card_of
from outrider.train.loop import take_part, train
from outrider.train.placement import process_count
from outrider.train.processes import Place, Processes, find_place, run_processes

MakeRun = Callable[..., RunConfig]
# Four micro-batches a step; sums in another order, divided by Adam's own small numbers, over 10 steps at 3e-3
SHARED: dict[str, Any] = {"train.rows_per_batch": 1, "train.accumulation": 4, "train.precision": "float32"}
TOLERANCE = 1e-4


def check(target: Any, drafter: Drafter) -> AcceptReport:
    """Knows the drafter by its weights: a piece of it would give another number."""
    size = float(sum(p.detach().abs().sum() for p in drafter.parameters()))
    return AcceptReport([], tokens=10**6 + int(1e3 * size), forwards=10**6, drafted_K=[1] * 4, accepted_K=[0] * 4, seconds=0.1)


def until(processes: Processes, run: RunConfig, stop: int) -> dict[str, Any] | None:
    """Train, ended as by a kill right before the step after `stop`."""
    real = loop_module._one_step

    def one_step(run: Any, number: int, *rest: Any) -> Any:
        if number == stop:
            raise KeyboardInterrupt
        return real(run, number, *rest)

    loop_module._one_step = one_step  # type: ignore[assignment]
    try:
        return take_part(run, processes, check=check, initial=None, card_of=card_of)
    except KeyboardInterrupt:
        return None


def assert_alike(run: RunConfig, other: RunConfig) -> None:
    a, b = final_tensors(run), final_tensors(other)
    assert a.keys() == b.keys()
    for name in set(a) - {"torch", "python", "python_gauss", "numpy", "numpy_place", "numpy_gauss"}:
        assert (a[name] - b[name]).norm() <= TOLERANCE * b[name].norm(), name
    for mine, its in zip(metrics(run), metrics(other), strict=True):
        assert mine["step"] == its["step"]
        for key in {"loss", "tau", "supervised_slots", "anchors", "eligible", "gradient_norm"} & its.keys():
            assert mine[key] == pytest.approx(its[key], rel=1e-3), (key, its["step"])


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_a_run_goes_on_in_other_numbers_of_processes(make_run: MakeRun, sharding: str) -> None:
    """4, then 2, then 1: what one process alone learns."""
    shared = {**SHARED, "checkpoint.every": 3, "train.accept_every": 5}
    parts, whole = make_run("parts", **shared, **{"placement.sharding": sharding}), make_run("whole", **shared)
    train(whole, check=check)
    assert in_processes(4, until, parts, 4) == [None] * 4
    assert read_position(list_checkpoints(parts.train.folder)[-1]).step == 3
    assert in_processes(2, until, parts, 8) == [None] * 2
    assert read_position(list_checkpoints(parts.train.folder)[-1]).step == 6
    assert train(parts, check=check)["steps"] == 10
    assert_alike(parts, whole)


def test_rows_that_do_not_come_out_even(make_run: MakeRun) -> None:
    """3 micro-batches a step for 2 processes, 2 rows in each, capture on devices of their own: one has an empty one."""
    shared = {**SHARED, "train.accumulation": 3, "train.rows_per_batch": 2, "features.keep": "memory"}
    parts, whole = make_run("parts", **shared, **{"placement.capture_cards": 1}), make_run("whole", **shared)
    train(whole, check=None)
    results = in_processes(2, until, parts, -1)
    assert [result["steps"] for result in results] == [10, 10]
    a, b = final_tensors(parts), final_tensors(whole)
    assert all((a[name] - b[name]).norm() <= TOLERANCE * b[name].norm() for name in b if name.startswith(("layers", "fc", "exp")))


def poisoned(processes: Processes, run: RunConfig, row: int) -> list[dict[str, Any]]:
    """Train with one row's features not finite from step 4 on; gives every skipped step as this process came to know it."""
    real = loop_module.start

    def start(*args: Any) -> Any:
        run = real(*args)
        features = run.source.features

        def bad(rows: Any, device: torch.device) -> Any:
            found = features(rows, device)
            if run.position.step >= 3:
                found.values_BSF[rows.row_ids_B == row, 1, 2] = float("nan")
            return found

        run.source.features = bad
        return run

    loop_module.start = start
    seen: list[dict[str, Any]] = []
    skip = loop_module.skip
    def count(run: Any, step: int, batches: Any) -> None:
        skip(run, step, batches)
        seen.append({"step": step + 1, "bad_steps": run.position.bad_steps})
    loop_module.skip = count
    take_part(run, processes, check=None, initial=None, card_of=card_of)
    return seen


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_a_bad_row_of_one_process_is_skipped_in_all_of_them(make_run: MakeRun, sharding: str) -> None:
    """And the leak test, which suspicion (set to always) starts, finds nothing and disturbs no process."""
    run = make_run(**SHARED, **{"placement.sharding": sharding, "guards.too_good": 1e-6})
    found = in_processes(2, poisoned, run, 4)
    assert found[0] == found[1] != []
    events = [line for line in metrics(run) if line.get("event") == "skipped"]
    assert [line["step"] for line in events] == [line["step"] for line in found[0]]
    assert all((line["tensor"], line["rows"]) == ("the target's features", [4]) for line in events)
    assert all((run.train.folder / "bad_steps" / f"step-{line['step']:08d}.safetensors").exists() for line in events)
    tests = [line for line in metrics(run) if line.get("event") == "too good"]
    assert tests
    assert not any(line["leak"] for line in tests)
    assert all(torch.isfinite(value).all() for value in final_tensors(run).values())


def signalled(processes: Processes, run: RunConfig) -> dict[str, Any]:
    """Train; the last process alone gets a stop signal, while step 4 is made."""
    real = loop_module._one_step

    def one_step(run: Any, number: int, *rest: Any) -> Any:
        if number == 3 and not processes.leads:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(run, number, *rest)

    loop_module._one_step = one_step  # type: ignore[assignment]
    return take_part(run, processes, check=None, initial=None, card_of=card_of)


def test_a_signal_to_one_process_stops_all_after_the_same_step(make_run: MakeRun) -> None:
    run = make_run(**SHARED)
    results = in_processes(2, signalled, run)
    assert [(result["stopped"], result["steps"]) for result in results] == [("SIGTERM", 4)] * 2
    assert read_position(list_checkpoints(run.train.folder)[-1]).step == 4


def start_cli(run: RunConfig, *options: str) -> "subprocess.Popen[str]":
    file = run.train.folder.with_suffix(".toml")
    file.write_text(to_toml(run), encoding="utf-8")
    return subprocess.Popen([sys.executable, "-m", "outrider", "train", str(file), "--json", *options], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def wait_for_step(run: RunConfig, step: int, *, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not any(line["step"] >= step for line in metrics_so_far(run)):
        assert time.monotonic() < deadline, f"step {step} did not come"
        time.sleep(0.05)


def metrics_so_far(run: RunConfig) -> list[dict[str, Any]]:
    file = run.train.folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def processes_of(launcher: int) -> list[int]:
    """The launcher's training processes, in the order in which they were started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_the_command_starts_stops_and_fails_as_one(make_run: MakeRun) -> None:
    """A stop signal to the launcher ends all processes saved; one that is killed takes the others with it, first cause on top."""
    run = make_run(**SHARED, **{"train.steps": 100_000, "checkpoint.every": 5, "checkpoint.keep_last": 3})
    started = start_cli(run, "--processes", "2")
    wait_for_step(run, 3)
    started.send_signal(signal.SIGTERM)
    out, err = started.communicate(timeout=60)
    assert started.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    assert (result["stopped"], Path(result["checkpoint"])) == ("SIGTERM", list_checkpoints(run.train.folder)[-1])
    assert read_position(Path(result["checkpoint"])).step == result["steps"] >= 3
    assert err.count("drafter:") == 1, "one process speaks"

    started = start_cli(run, "--processes", "2")
    wait_for_step(run, result["steps"] + 7)
    victim = processes_of(started.pid)[-1]
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    _, err = started.communicate(timeout=60)
    assert time.monotonic() - began < 60
    assert started.returncode == 1, err
    said = [line for line in err.splitlines() if line.startswith("failed:")]
    assert said == ["failed: process 1 of 2 failed, and the others were stopped: it was ended by SIGKILL"]
    newest = newest_sound(run.train.folder)
    assert newest is not None
    verify_checkpoint(newest)
    assert read_position(newest).step >= result["steps"]


def test_the_first_cause_comes_from_whichever_process_had_it() -> None:
    with pytest.raises(UserError, match=r"^field = 7: must be less: lower it$"):
        run_processes(2, refuse, (7,))
    with pytest.raises(RunFailure, match=r"(?s)^process 1 of 2 failed, and the others .*: .*out of luck.*in break_down"):
        run_processes(2, break_down, ())


@pytest.mark.parametrize(("options", "changes", "expected"), [
    ({}, {}, 1), ({"processes": 3}, {}, 3), ({"gpus": 4}, {"train.device": "cuda"}, 4),
    ({"gpus": 4}, {"train.device": "cuda", "placement.capture_cards": 1}, 2),
    ({"gpus": 4}, {}, r"--gpus 4: train\.device is 'cpu'"),
    ({"gpus": 4}, {"train.device": "cuda", "placement.capture_cards": 2}, r"each process takes 3 cards .*: use a multiple of 3"),
    ({"gpus": 2, "processes": 2}, {}, "say one of the two"), ({"processes": 0}, {}, "--processes 0: must be at least 1"),
])
def test_how_many_processes(
    make_run: MakeRun, options: dict[str, int], changes: dict[str, Any], expected: int | str
) -> None:
    asked: Mapping[str, int | None] = {"gpus": None, "processes": None} | options
    run = make_run(**changes)
    if isinstance(expected, int):
        assert process_count(run, **asked, started=None) == expected
        return
    with pytest.raises(UserError, match=expected):
        process_count(run, **asked, started=None)


def test_a_launcher_that_is_there_is_joined(make_run: MakeRun) -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    srun = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}
    assert find_place(torchrun) == Place(3, 8, 1)
    assert find_place(srun) == Place(5, 8, 1)
    assert find_place({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}) is None, "sbatch itself is no srun"
    with pytest.raises(UserError, match="must be whole numbers, as torchrun or srun sets them"):
        find_place({**torchrun, "RANK": "x"})
    with pytest.raises(UserError, match="torchrun or srun has started 8 processes already"):
        process_count(make_run(), gpus=None, processes=2, started=Place(3, 8, 1))


def test_more_processes_than_micro_batches_are_refused(make_run: MakeRun) -> None:
    run = make_run(**{"train.accumulation": 1})
    with pytest.raises(AssertionError, match=r"train\.accumulation = 1: .* set it to at least 2"):
        in_processes(2, until, run, -1)
    assert not run.train.folder.exists()
