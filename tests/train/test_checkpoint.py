"""Checkpoints: exact, whole or absent whatever fails or is killed, refused when damaged."""

import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import ORIGIN, save_checkpoint
from faults import count_file_operations, fail_at
from safetensors.torch import load_file
from toys import noise, toy_shape

from outrider.config import OptimizerConfig
from outrider.errors import RunFailure, UserError
from outrider.model.attention import dense_attention
from outrider.model.drafter import Drafter, initialise
from outrider.train import checkpoint as checkpoint_module
from outrider.train.checkpoint import (
    FILES,
    OtherVersionError,
    Position,
    UnreadableError,
    checkpoint_path,
    list_checkpoints,
    load_checkpoint,
    newest_sound,
    read_state,
    verify_checkpoint,
)
from outrider.train.optim import build_optimizer
from outrider.weights.opening import open_drafter


def trained(seed: int, *, steps: int = 2) -> tuple[Drafter, torch.optim.AdamW]:
    """A drafter with moments in its optimizer, after a few steps on made-up gradients."""
    drafter = Drafter(toy_shape(), dense_attention)
    initialise(drafter, seed=seed, head_scale=1.0)
    optimizer = build_optimizer(drafter, OptimizerConfig())
    for step in range(steps):
        nudge(drafter, optimizer, seed=seed + step)
    return drafter, optimizer


def nudge(drafter: Drafter, optimizer: torch.optim.Optimizer, *, seed: int) -> None:
    for i, parameter in enumerate(drafter.parameters()):
        parameter.grad = noise(*parameter.shape, seed=1000 * seed + i)
    optimizer.step()


def save(run: Path, seed: int, step: int, *, keep: int = 2) -> Path:
    drafter, optimizer = trained(seed)
    return save_checkpoint(run, drafter, optimizer, position_at(step), keep=keep)


def position_at(step: int) -> Position:
    return Position(step=step, tau=1.5, tau_step=step, best_tau=1.5, seconds=2.25, metrics_bytes=77)


def loadable(run: Path) -> list[str]:
    """Names of the run's checkpoints, each of which must load whole."""
    for folder in list_checkpoints(run):
        drafter, optimizer = trained(99, steps=0)
        verify_checkpoint(folder)
        position = load_checkpoint(folder, drafter, optimizer)
        assert folder.name == f"step-{position.step:08d}"
        open_drafter(folder / "drafter", dtype="float32", device="cpu")
    return [folder.name for folder in list_checkpoints(run)]


def test_round_trip_is_exact_and_training_goes_on_alike(tmp_path: Path) -> None:
    drafter, optimizer = trained(1)
    position = position_at(7)
    folder = save_checkpoint(tmp_path, drafter, optimizer, position)
    drawn = torch.rand(3), random.random(), np.random.rand()
    other, other_optimizer = trained(2)
    assert load_checkpoint(folder, other, other_optimizer) == position
    assert torch.equal(torch.rand(3), drawn[0])
    assert (random.random(), np.random.rand()) == drawn[1:]
    for round_number in range(3):
        for a, b in zip(drafter.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)
            assert a.dtype == b.dtype == torch.float32
            state, other_state = optimizer.state[a], other_optimizer.state[b]
            assert state.keys() == other_state.keys() == {"step", "exp_avg", "exp_avg_sq"}
            assert all(torch.equal(state[key], other_state[key]) for key in state)
        nudge(drafter, optimizer, seed=50 + round_number)
        nudge(other, other_optimizer, seed=50 + round_number)


def test_a_checkpoint_before_the_first_step_resumes(tmp_path: Path) -> None:
    drafter, optimizer = trained(1, steps=0)
    folder = save_checkpoint(tmp_path, drafter, optimizer, Position())
    other, other_optimizer = trained(2, steps=0)
    assert load_checkpoint(folder, other, other_optimizer) == Position()
    assert torch.equal(drafter.fc.weight, other.fc.weight)


def test_only_the_last_ones_are_kept_and_leftovers_go(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".step-00000001.abc.partial").mkdir(parents=True)
    for step in (5, 10, 15):
        save(tmp_path, 1, step)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000010", "step-00000015"]


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("damage", ["cut in half", "one bit", "missing", "empty"])
def test_damage_is_refused_in_one_sentence(tmp_path: Path, name: str, damage: str) -> None:
    folder = save(tmp_path, 1, 5)
    data = (folder / name).read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    if damage == "missing":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes({"cut in half": data[: len(data) // 2], "one bit": flipped, "empty": b""}[damage])
    with pytest.raises(UserError, match=r"^[^\n]*checkpoint[^\n]*$"):
        verify_checkpoint(folder)


@pytest.mark.parametrize("manifest", ["{}", "[]", "3"])
def test_a_manifest_that_vouches_for_nothing_is_refused(tmp_path: Path, manifest: str) -> None:
    folder = save(tmp_path, 1, 5)
    (folder / "manifest.json").write_text(manifest)
    with pytest.raises(UserError, match="the checkpoint is damaged"):
        verify_checkpoint(folder)


def test_a_damaged_state_is_no_other_version(tmp_path: Path) -> None:
    before, folder = save(tmp_path, 1, 5), save(tmp_path, 2, 10)
    (folder / "state.json").write_text("{}")
    assert newest_sound(tmp_path) == before
    assert list_checkpoints(tmp_path) == [before], "set aside"


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "optimizer.safetensors"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_one_that_cannot_be_read_now_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    before, folder = save(tmp_path, 1, 5), save(tmp_path, 2, 10)
    real = Path.open

    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self == folder / name:
            raise OSError(code, os.strerror(code))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UnreadableError, match=rf"{folder.name}: the checkpoint cannot be read \({os.strerror(code)}\)"):
        newest_sound(tmp_path)
    assert list_checkpoints(tmp_path) == [before, folder]


def test_checkpoints_on_a_disk_that_is_not_there_are_no_run_without_any(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to(tmp_path / "not mounted")
    with pytest.raises(UserError, match=r"checkpoints: leads to .*not mounted, which is not there: is its disk mounted\?"):
        newest_sound(tmp_path)


def test_the_newest_is_the_one_of_most_steps_and_a_users_copy_is_none(tmp_path: Path) -> None:
    for name in ("step-99999999", "step-100000000", "step-00000010", "step-mybackup"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000010", "step-99999999", "step-100000000"]


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path, 1, 5)
    monkeypatch.setattr(checkpoint_module, "FORMAT", 3)
    with pytest.raises(OtherVersionError, match="was not written by this version of outrider"):
        verify_checkpoint(folder)
    with pytest.raises(OtherVersionError):
        newest_sound(tmp_path)
    assert list_checkpoints(tmp_path) == [folder], "it is not damaged"


def test_a_checkpoint_never_holds_a_nan(tmp_path: Path) -> None:
    drafter, optimizer = trained(1)
    save(tmp_path, 1, 5)
    with torch.no_grad():
        drafter.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(RunFailure, match=r"^layers\.1\.mlp\.up_proj\.weight is not finite"):
        save_checkpoint(tmp_path, drafter, optimizer, position_at(10))
    assert loadable(tmp_path) == ["step-00000005"]
    drafter, optimizer = trained(1)
    optimizer.state[drafter.norm.weight]["exp_avg"][3] = float("inf")
    with pytest.raises(RunFailure, match=r"^exp_avg/norm\.weight is not finite"):
        save_checkpoint(tmp_path, drafter, optimizer, position_at(10))


@pytest.mark.parametrize(("code", "words"), [
    (errno.ENOSPC, "the disk is full"), (errno.EIO, "the disk reports an error"),
    (errno.EROFS, "it is on a read-only file system"),
], ids=["full", "broken", "read-only"])
def test_a_disk_that_fails_at_every_file_operation(tmp_path: Path, code: int, words: str) -> None:
    """A sentence, the previous checkpoint intact, and no bad one that loads."""
    drafter, optimizer = trained(3)

    def save_next(run: Path) -> None:
        save_checkpoint(run, drafter, optimizer, position_at(10))

    operations = count_file_operations(lambda: save_next(tmp_path / "counted"))
    assert operations > 15
    save(tmp_path / "before", 1, 5)
    for number in range(operations):
        run = shutil.copytree(tmp_path / "before", tmp_path / str(number))
        sentence = None
        try:
            fail_at(number, lambda run=run: save_next(run), code=code)
        except UserError as error:
            sentence = str(error)
        found = loadable(run)
        assert found in (["step-00000005"], ["step-00000005", "step-00000010"])
        assert re.fullmatch(rf"cannot write [^\n]*: {words}[^\n]*", sentence or "") or len(found) == 2, "a quiet failure"


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_disk_that_fills_up_in_the_middle_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Half the bytes are there."""
    real = checkpoint_module.write_tensors

    def write_half(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> str:
        total = real(tensors, path, metadata)
        if path.name == name:
            path.write_bytes(path.read_bytes()[:1000])
            raise OSError(errno.ENOSPC, "No space left on device")
        return total

    save(tmp_path, 1, 5)
    monkeypatch.setattr(checkpoint_module, "write_tensors", write_half)
    with pytest.raises(UserError, match=r"cannot write .*step-00000010: the disk is full"):
        save(tmp_path, 2, 10)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"], "nothing half-written is left"
    assert loadable(tmp_path) == ["step-00000005"]


CHILD = """
import os, resource, signal, sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {here!r}]
import torch
torch.set_num_threads(1)
from faults import at_each_file_operation
from test_checkpoint import position_at, save_checkpoint, trained
from outrider.errors import RunFailure, UserError

drafter, optimizer = trained(3)
base = Path({base!r})

def save_next(run):
    save_checkpoint(run, drafter, optimizer, position_at(10), keep=1)

def in_child(work):
    child = os.fork()
    if child == 0:
        code = 9
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]

def killed_at(number):
    seen = 0
    def kill(event):
        nonlocal seen
        seen += 1
        if seen == number + 1:
            os.kill(os.getpid(), signal.SIGKILL)
    with at_each_file_operation(kill):
        save_next(base / str(number))
    return 0

def too_large():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        save_next(base / "limit")
    except UserError as error:
        print(error, flush=True)
        return 7
    return 0

status = in_child(too_large)
assert os.waitstatus_to_exitcode(status) == 7, status
number = 0
while os.WIFSIGNALED(status := in_child(lambda: killed_at(number))) or number == 0:
    number += 1
assert os.waitstatus_to_exitcode(status) == 0, status
print(number)
"""


def test_a_kill_at_every_file_operation(tmp_path: Path) -> None:
    """SIGKILL, by the clock of the kernel's calls; and a write that the kernel itself refuses (a limit on the file size)."""
    most = 110
    save(tmp_path / "limit", 1, 5)
    for number in range(most):
        shutil.copytree(tmp_path / "limit", tmp_path / str(number))
    here = Path(__file__).parent
    script = CHILD.format(tests=str(here.parent), here=str(here), base=str(tmp_path))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=100,
                          check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr
    sentence, kills = done.stdout.splitlines()
    assert sentence.startswith(f"cannot write {checkpoint_path(tmp_path / 'limit', 10)}: the file is larger than")
    assert loadable(tmp_path / "limit") == ["step-00000005"]
    assert 15 < int(kills) < most
    outcomes = [loadable(tmp_path / str(number)) for number in range(int(kills))]
    old, both, new = ["step-00000005"], ["step-00000005", "step-00000010"], ["step-00000010"]
    assert outcomes[0] == old
    assert outcomes[-1] == new
    assert all(outcome in (old, both, new) for outcome in outcomes)
    save(tmp_path / "0", 4, 15, keep=1)
    assert [p.name for p in (tmp_path / "0" / "checkpoints").iterdir()] == ["step-00000015"], "what a kill left behind is swept"


def test_the_state_says_what_it_is(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, 5)
    state = read_state(folder)
    assert state == json.loads((folder / "state.json").read_text())
    assert state.pop("position") == json.loads(json.dumps(asdict(position_at(5))))
    assert state == {"format": 2, **{k: v for k, v in asdict(ORIGIN).items() if k != "drafter_config"}}
    assert set(load_file(folder / "drafter" / "model.safetensors")) == set(trained(1, steps=0)[0].state_dict())
