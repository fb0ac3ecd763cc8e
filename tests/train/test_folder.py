"""Where a run may live, and whether what lies there is the same run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_loop import assert_same_run, stop_after

from outrider.config import RunConfig
from outrider.errors import UserError
from outrider.files import only_writer
from outrider.train import folder as folder_module
from outrider.train.checkpoint import list_checkpoints
from outrider.train.folder import changes, check_place, versions
from outrider.train.loop import train

MakeRun = Callable[..., RunConfig]


def refused(run: RunConfig, sentence: str) -> None:
    """At once, with nothing written."""
    parent = run.train.folder.parent
    before = sorted(parent.rglob("*")) if parent.is_dir() else []
    with pytest.raises(UserError, match=sentence):
        train(run, check=None)
    assert (sorted(parent.rglob("*")) if parent.is_dir() else []) == before


@pytest.mark.parametrize("inside", ["", "deep/run"])
@pytest.mark.parametrize("name", ["target.path", "data.rows"])
def test_not_in_what_the_run_is_made_from(make_run: MakeRun, tmp_path: Path, name: str, inside: str) -> None:
    """`prepare` replaces a folder of rows whole, and a run in it would be gone."""
    run = make_run()
    source = {"target.path": Path(run.target.path), "data.rows": run.data.rows}[name]
    mine = Path(shutil.copytree(source, tmp_path / "mine"))
    (tmp_path / "link").symlink_to(mine)
    for way in (mine, tmp_path / "link"):
        run = make_run(**{name: str(mine), "train.folder": str(way / inside)})
        refused(run, rf"train\.folder = .*: lies in {name} = '{mine}'")
    check_place(make_run(**{name: str(mine), "train.folder": str(tmp_path / "mine-run")}))


@pytest.mark.parametrize("name", ["features.store", "train.init_from"])
def test_not_the_folder_of_something_else(make_run: MakeRun, tmp_path: Path, name: str) -> None:
    (tmp_path / "other").mkdir()
    run = make_run(**{name: str(tmp_path / "other"), "features.keep": "disk", "train.folder": str(tmp_path / "x/../other")})
    with pytest.raises(UserError, match=rf"is {name} too: choose a folder of its own"):
        check_place(run)


def test_not_a_file_a_circle_a_link_to_nothing_or_no_name(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "unmounted").symlink_to(tmp_path / "disk" / "run")
    for folder, sentence in {
        "file": "file is a file, not a folder", "file/run": "file is a file, not a folder", "circle": "is no path",
        "circle/run": "is no path", "unmounted": "leads to .*disk/run, which is not there: is its disk mounted?",
        "n" * 300: "is no path .File name too long", "a\0b": "is no path",
    }.items():
        refused(make_run(**{"train.folder": str(tmp_path / folder)}), sentence)


def test_a_path_that_cannot_be_made_is_one_sentence(make_run: MakeRun) -> None:
    for folder in ("/proc/run", "/sys/run/deep"):
        with pytest.raises(UserError, match=rf"^cannot write {folder}: (a folder on the way to it|permission|.*read-only)"):
            train(make_run(**{"train.folder": folder}), check=None)


def test_a_moved_run_whose_inputs_moved_too_goes_on(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To another machine, say: what lies behind a path counts, not how it is spelt."""
    whole, parts = make_run("whole"), make_run("parts")
    train(whole, check=None)
    with monkeypatch.context() as patch:
        stop_after(7, patch)
        with pytest.raises(KeyboardInterrupt):
            train(parts, check=None)
    (tmp_path / "there").mkdir()
    shutil.copytree(parts.train.folder, tmp_path / "there" / "run")
    paths = {"target.path": parts.target.path, "data.rows": parts.data.rows}
    moved = {name: str(shutil.copytree(path, tmp_path / "there" / name)) for name, path in paths.items()}
    run = make_run(**moved, **{"train.folder": str(tmp_path / "there" / "run")})
    train(run, check=None)
    assert_same_run(whole, run)
    (tmp_path / "there" / "target.path" / "config.json").write_text("{}")
    with pytest.raises(UserError):
        train(run, check=None)


def test_a_run_whose_checkpoints_have_gone_is_not_begun_anew_over_its_metrics(make_run: MakeRun) -> None:
    run = make_run(**{"checkpoint.every": 4})
    train(run, check=None)
    before = (run.train.folder / "metrics.jsonl").read_bytes()
    shutil.rmtree(run.train.folder / "checkpoints")
    for every in (4, 500):
        with pytest.raises(UserError, match=r"came to step 10 with a checkpoint every 4, but none is in .*checkpoints: bring"):
            train(make_run(**{"checkpoint.every": every}), check=None)
    assert (run.train.folder / "metrics.jsonl").read_bytes() == before


def test_a_run_killed_before_its_first_checkpoint_begins_anew(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = make_run("whole"), make_run("parts")
    with monkeypatch.context() as patch:
        stop_after(4, patch)
        with pytest.raises(KeyboardInterrupt):
            train(parts, check=None)
    assert not list_checkpoints(parts.train.folder)
    train(parts, check=None)
    train(whole, check=None)
    assert_same_run(whole, parts)


def test_a_field_that_an_older_version_did_not_know_had_its_default(make_run: MakeRun) -> None:
    """Else a newer version could go on with no run."""
    now = make_run().model_dump(mode="json")
    before: dict[str, Any] = json.loads(json.dumps(now))
    del before["objective"]["logits_mib"], before["features"]
    before["train"]["no_more"] = 3
    assert changes(before, now) == []
    assert changes(before, make_run(**{"objective.logits_mib": 5}).model_dump(mode="json")) == ["objective.logits_mib (768 -> 5)"]
    before["train"]["seed"] = 7
    assert changes(before, now) == ["train.seed (7 -> 0)"]


def test_a_second_start_at_once_is_refused_through_a_link_too(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    train(run, check=None)
    (tmp_path / "link").symlink_to(run.train.folder)
    for way in (run.train.folder, tmp_path / "link"):
        with only_writer(run.train.folder), pytest.raises(UserError, match=r"run: another process is writing there"):
            train(make_run(**{"train.folder": str(way)}), check=None)


def test_other_versions_of_libraries_are_said(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    train(make_run(), check=None)
    monkeypatch.setattr(folder_module, "versions", lambda: {**versions(), "torch": "9.0"})
    assert train(make_run(), check=None)["steps"] == 10
    said = f"torch is 9.0, {versions()['torch']} wrote step-00000010: numbers may differ in their last bits"
    assert said in capfd.readouterr().err
