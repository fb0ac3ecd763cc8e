"""What goes wrong in a run is skipped, named, counted and recorded, and a limit stops it: each guard is tripped on purpose."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, safe_open
from test_loop import assert_same_run, final_tensors, metrics, run_in_child, stop_after

from outrider.config import RunConfig
from outrider.data.rows import PreparedRows, RowError
from outrider.errors import RunFailure, UserError
from outrider.layout import mask as mask_module
from outrider.report.run import read_metrics
from outrider.train import guards as guards_module
from outrider.train import loop as loop_module
from outrider.train.checkpoint import list_checkpoints, read_position
from outrider.train.guards import DiskWatch, leak_test_due, spike
from outrider.train.loop import train

MakeRun = Callable[..., RunConfig]
NAN = float("nan")


def events(run: RunConfig) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if "event" in line]


def poison(kind: str, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From step 3 on, one value that is not finite wherever this row is met."""
    real_start = loop_module.start

    def start(*args: Any) -> Any:
        run = real_start(*args)
        drafter = run.drafter
        now: list[Any] = []
        real_features, real_hidden = run.source.features, run.road.hidden

        def features(rows: Any, device: torch.device) -> Any:
            now[:] = [rows]
            found = real_features(rows, device)
            if kind == "features" and run.position.step >= 3:
                found.values_BSF[rows.row_ids_B == row, 1, 2] = NAN
            return found

        def hidden(*args: Any) -> torch.Tensor:
            out = real_hidden(*args)
            bad = (now[0].row_ids_B == row) & (run.position.step >= 3)
            if kind == "hidden":
                out = out * torch.where(bad, NAN, 1.0)[:, None, None]
            if kind == "loss" and bad.any():
                out.register_hook(lambda g: torch.where(bad[:, None, None], NAN, g))
            return out

        if kind == "gradient":
            def hook(gradient: torch.Tensor) -> torch.Tensor:
                return gradient * NAN if run.position.step >= 3 and bool((now[0].row_ids_B == row).any()) else gradient
            drafter.layers[1].mlp.gate_proj.weight.register_hook(hook)
        monkeypatch.setattr(run.source, "features", features)
        monkeypatch.setattr(run.road, "hidden", hidden)
        return run

    monkeypatch.setattr(loop_module, "start", start)


@pytest.mark.parametrize(("kind", "tensor"), [
    ("features", "the target's features"), ("hidden", "the drafter's hidden states"),
    ("gradient", "the gradient of layers.1.mlp.gate_proj.weight"),
])
def test_a_bad_row_is_skipped_named_and_saved(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, kind: str, tensor: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    poison(kind, 4, monkeypatch)
    assert train(run, check=None)["steps"] == 10
    skipped = events(run)
    assert skipped, "row 4 comes again after step 3"
    for number, line in enumerate(skipped, start=1):
        assert (line["event"], line["tensor"], line["total"]) == ("skipped", tensor, number)
        assert line["rows"] == [4] if kind != "gradient" else 4 in line["rows"]
        saved = run.train.folder / "bad_steps" / f"step-{line['step']:08d}.safetensors"
        rows = load_file(saved)
        assert {f"row-4/{name}" for name in ("input_ids", "document_ids", "loss_mask", "anchors", "keep")} <= rows.keys()
        with safe_open(saved, "pt") as opened:
            assert opened.metadata() == {"first_bad_tensor": tensor}
    good = [line for line in metrics(run) if "event" not in line]
    assert len(good) + len(skipped) == 10
    assert all(torch.isfinite(value).all() for value in final_tensors(run).values())
    assert read_position(list_checkpoints(run.train.folder)[-1]).bad_steps == len(skipped)
    assert f"skipped (1 so far): the first tensor that was not finite is {tensor}" in capsys.readouterr().err
    report = read_metrics(run.train.folder)
    assert ([event.model_dump() for event in report.events], report.unreadable) == (skipped, 0)


def test_a_skipped_step_moves_nothing(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run, short = make_run("run", **{"checkpoint.every": 3}), make_run("short", **{"checkpoint.every": 3})
    real = loop_module.run_step
    steps = iter(range(100))

    def run_step(*args: Any, **kwargs: Any) -> Any:
        if next(steps) >= 3:
            raise FloatingPointError
        return real(*args, **kwargs)

    monkeypatch.setattr(loop_module, "run_step", run_step)
    with pytest.raises(RunFailure, match="5 steps in a row"):
        train(run, check=None)
    monkeypatch.undo()
    stop_after(3, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train(short, check=None)
    assert [path.name for path in list_checkpoints(run.train.folder)] == ["step-00000003", "step-00000006"]
    after, before = final_tensors(run), final_tensors(short)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_too_many_bad_steps_in_a_row_stop_the_run(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(**{"guards.max_bad_steps": 2})
    for row in range(9):
        poison("hidden", row, monkeypatch)
    with pytest.raises(RunFailure) as failed:
        train(run, check=None)
    sentence = str(failed.value)
    assert sentence.startswith("step 5: the gradient was not finite 2 steps in a row (guards.max_bad_steps): the first tensor")
    assert "is the drafter's hidden states, rows " in sentence
    assert f"{run.train.folder}/bad_steps/step-00000005.safetensors" in sentence
    assert len(events(run)) == 2


def test_the_count_in_a_row_survives_a_resume(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad row of the data is met again by the resumed run: it must come to the same end, and to the same lines."""
    whole, parts = (make_run(name, **{"checkpoint.every": 1, "checkpoint.keep_last": 20}) for name in ("whole", "parts"))
    poison("features", 4, monkeypatch)
    train(whole, check=None)
    with monkeypatch.context() as patch:
        stop_after(6, patch)
        with pytest.raises(KeyboardInterrupt):
            train(parts, check=None)
    train(parts, check=None)
    assert_same_run(whole, parts)
    positions = [[(p.bad_steps, p.bad_in_row) for p in map(read_position, list_checkpoints(run.train.folder))]
                 for run in (whole, parts)]
    assert positions[0] == positions[1]
    assert positions[0][-1][0] > 0


def test_a_fault_that_does_not_come_again_is_called_passing(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    real = loop_module.run_step
    steps = iter(range(100))

    def run_step(*args: Any, **kwargs: Any) -> Any:
        if next(steps) == 4:
            raise FloatingPointError
        return real(*args, **kwargs)

    monkeypatch.setattr(loop_module, "run_step", run_step)
    train(run, check=None)
    assert "passing fault" in events(run)[0]["tensor"]


def test_spikes() -> None:
    assert spike(2.01, [1.0] * 10, factor=2.0) == 1.0
    assert spike(1.99, [1.0] * 10, factor=2.0) is None
    assert spike(100.0, [1.0] * 9, factor=2.0) is None, "too few to say what is usual"
    assert spike(2.01, [1.0] * 26 + [50.0] * 24, factor=2.0) == 1.0, "a median: earlier spikes do not hide this one"


def test_a_spike_is_recorded_and_the_same_after_a_resume(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = (make_run(name, **{"train.steps": 14, "guards.loss_spike": 1.5}) for name in ("whole", "parts"))
    real = loop_module.report_step

    def report_step(*args: Any, **kwargs: Any) -> Any:
        report = real(*args, **kwargs)
        return report if kwargs["step"] != 13 else report.__class__(**{**report.__dict__, "loss": 3 * report.loss})

    monkeypatch.setattr(loop_module, "report_step", report_step)
    train(whole, check=None)
    with monkeypatch.context() as patch:
        stop_after(7, patch)
        with pytest.raises(KeyboardInterrupt):
            train(parts, check=None)
    train(parts, check=None)
    assert_same_run(whole, parts)
    (found,) = events(whole)
    assert (found["event"], found["step"], len(found["rows"])) == ("loss spike", 13, 4)
    assert found["to"] > 1.5 * found["median"] > 0


def test_when_the_leak_test_is_due() -> None:
    assert leak_test_due([0.95, 0.91], too_good=0.9, step=3, tested_at=None)
    assert not leak_test_due([0.95, 0.8], too_good=0.9, step=3, tested_at=None)
    assert not leak_test_due([1.0], too_good=0.9, step=5, tested_at=3)
    assert leak_test_due([1.0], too_good=0.9, step=6, tested_at=3)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_too_good_runs_the_leak_test_which_passes(make_run: MakeRun, precision: str) -> None:
    plain, alarmed = (make_run(name, **{"guards.too_good": limit, "train.precision": precision})
                      for name, limit in (("plain", 2.0), ("alarmed", 1e-6)))
    train(plain, check=None)
    train(alarmed, check=None)
    found = events(alarmed)
    assert found
    assert all(line["event"] == "too good" and line["leak"] is False for line in found)
    assert len(found) <= 4, "at steps 1, 2, 4, 8 at most"
    assert events(plain) == []
    a, b = final_tensors(plain), final_tensors(alarmed)
    assert all(torch.equal(a[name], b[name]) for name in a), "testing changes nothing"


@pytest.mark.parametrize(("old", "new"), [("(n < anchor)", "(n <= anchor)"), ("(n < anchor)", "(n < anchor + 3)")])
def test_a_leak_stops_the_run(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """The visibility rule, broken on purpose."""
    source = Path(mask_module.__file__).read_text(encoding="utf-8")
    assert old in source
    scope: dict[str, Any] = {}
    exec(compile(source.replace(old, new), "broken", "exec"), scope)
    monkeypatch.setattr("outrider.train.roads.dense_mask", scope["dense_mask"])
    run = make_run(**{"guards.too_good": 1e-6})
    with pytest.raises(RunFailure, match=r"\(guards\.too_good\) because blocks see what they must not: noise in"):
        train(run, check=None)


def test_the_disk_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, now = 3 << 30, 100.0
    monkeypatch.setattr(guards_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    monkeypatch.setattr(guards_module.time, "monotonic", lambda: now)
    watch = DiskWatch(tmp_path / "new" / "run", checkpoint_bytes=1 << 30, min_free_gib=2.0)
    assert watch.short() is None
    free -= 1
    assert watch.short() is None, "looked a moment ago"
    now += 11
    assert "3.00 GiB are free on its disk, one more checkpoint and guards.min_free_gib need 3.00" in (watch.short() or "")


def test_the_disk_is_that_of_the_checkpoints(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may be another one than the run folder's."""
    run, asked = make_run(), list[Path]()
    (tmp_path / "big").mkdir()
    run.train.folder.mkdir()
    (run.train.folder / "checkpoints").symlink_to(tmp_path / "big")

    def usage(path: Path) -> Any:
        asked.append(Path(path).resolve())
        return SimpleNamespace(free=1 << 40)

    monkeypatch.setattr(guards_module.shutil, "disk_usage", usage)
    train(run, check=None)
    assert set(asked) == {tmp_path / "big"}


def test_a_disk_that_fills_up_stops_the_run_saved(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run, whole = make_run("run", **{"checkpoint.keep_last": 9}), make_run("whole", **{"checkpoint.keep_last": 9})
    monkeypatch.setattr(guards_module, "DISK_LOOK_EVERY_S", 0.0)
    frees = iter([10 << 30] * 8 + [1 << 20] * 2)
    with monkeypatch.context() as patch:
        patch.setattr(DiskWatch, "free_bytes", property(lambda self: next(frees)))
        with pytest.raises(UserError, match=r"0\.00 GiB are free.*stopped and saved after step 6 of 10, the same"):
            train(run, check=None)
    assert [path.name for path in list_checkpoints(run.train.folder)] == ["step-00000005", "step-00000006"]
    train(run, check=None)
    train(whole, check=None)
    list_checkpoints(run.train.folder)[1].rename(run.train.folder / "set aside")  # the whole run has no step 6
    assert_same_run(run, whole)


def test_a_full_disk_refuses_the_start(make_run: MakeRun) -> None:
    run = make_run(**{"guards.min_free_gib": 1e9})
    with pytest.raises(UserError, match=r"GiB are free on its disk"):
        train(run, check=None)
    assert not run.train.folder.exists()


STUCK = """
from outrider.train import loop
def one_step(run, step, *rest):
    {how}
loop._one_step = one_step
"""


@pytest.mark.parametrize(("how", "says"), [
    ("time.sleep(60)", "stuck: nothing ended for"),
    ("import ctypes; ctypes.PyDLL(None).sleep(60)", ""),  # holds the interpreter's lock: no Python thread can say a word
], ids=["waits", "holds the lock"])
def test_a_stuck_step_ends_with_all_stacks(make_run: MakeRun, how: str, says: str) -> None:
    run = make_run(**{"guards.stuck_minutes": 1 / 60})
    started = time.monotonic()
    done = run_in_child(run, STUCK.format(how=how))
    assert done.returncode == 1, done.stderr
    assert time.monotonic() - started < 40
    assert says in done.stderr
    stacks = (run.train.folder / "stuck.txt").read_text()
    assert "in one_step" in stacks
    assert "in _iterate" in stacks
    assert train(make_run(), check=None)["steps"] == 10
    assert not (run.train.folder / "stuck.txt").exists(), "a run that is well leaves none"


def lose_row(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be read once, then never again in this start of the run."""
    real, reads = PreparedRows._row, 0

    def read(self: PreparedRows, number: int) -> Any:
        nonlocal reads
        reads += number == row
        if number == row and reads > 1:
            raise RowError(f"rows.parquet:row {row + 1}", "cannot be read any more", row=row)
        return real(self, number)

    monkeypatch.setattr(PreparedRows, "_row", read)


def test_a_row_that_cannot_be_read_any_more_is_left_out(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run leaves the same row out, even if it is back by then."""
    whole, parts = (make_run(name, **{"train.steps": 12, "checkpoint.every": 2, "checkpoint.keep_last": 9})
                    for name in ("whole", "parts"))
    with monkeypatch.context() as patch:
        lose_row(4, patch)
        assert train(whole, check=None)["steps"] == 12
    (line,) = events(whole)
    assert (line["event"], line["row"], line["reason"]) == ("bad row", 4, "rows.parquet:row 5: cannot be read any more")
    positions = [read_position(path) for path in list_checkpoints(whole.train.folder)]
    assert [position.bad_rows for position in positions] == [(4,) if p.step >= line["step"] else () for p in positions]
    with monkeypatch.context() as patch:
        lose_row(4, patch)
        stop_after(line["step"] + 2, patch)
        with pytest.raises(KeyboardInterrupt):
            train(parts, check=None)
    train(parts, check=None)
    assert_same_run(whole, parts)
    with monkeypatch.context() as patch:
        lose_row(4, patch)
        with pytest.raises(RunFailure, match=r"row 5: cannot be read any more \(guards\.max_bad_rows = 0: 1 rows are bad\)"):
            train(make_run("none", **{"guards.max_bad_rows": 0}), check=None)


def test_event_lines_are_json(make_run: MakeRun) -> None:
    run = make_run(**{"guards.too_good": 1e-6})
    train(run, check=None)
    for line in (run.train.folder / "metrics.jsonl").read_text().splitlines():
        assert isinstance(json.loads(line)["step"], int)
