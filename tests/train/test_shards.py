"""Checkpoints of masters that are shared out: each process writes its part, any number goes on from them bit for bit."""

import errno
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from checkpoints import ORIGIN
from spawning import in_processes
from test_checkpoint import trained
from toys import noise, toy_shape

from outrider.config import CheckpointConfig, OptimizerConfig
from outrider.errors import RunFailure, UserError
from outrider.model.attention import dense_attention
from outrider.model.drafter import Drafter, initialise
from outrider.train import shards
from outrider.train.checkpoint import Position, list_checkpoints, load_checkpoint, moments, verify_checkpoint
from outrider.train.keeper import Keeper
from outrider.train.masters import is_shared_out, mine, open_masters, piece_of, whole
from outrider.train.optim import build_optimizer
from outrider.train.processes import ALONE, Processes
from outrider.weights.opening import open_drafter

Tensors = dict[str, torch.Tensor]
NAN, FULL = "a number of the last process is not finite", "the last process's disk is full"


def learner(processes: Processes, *, steps: int) -> tuple[Drafter, torch.optim.Optimizer]:
    """Masters shared out over the processes, and their optimizer after a few steps on made-up gradients."""
    drafter = Drafter(toy_shape(), dense_attention)
    initialise(drafter, seed=1, head_scale=1.0)
    open_masters(drafter, processes, "fsdp2")
    assert is_shared_out(drafter) == (processes.count > 1)
    optimizer = build_optimizer(drafter, OptimizerConfig())
    for step in range(steps):
        for i, parameter in enumerate(drafter.parameters()):
            parameter.grad = piece_of(noise(*parameter.shape, seed=1000 * step + i), parameter.detach())
        optimizer.step()
    return drafter, optimizer


def state_of(drafter: Drafter, optimizer: torch.optim.Optimizer) -> Tensors:
    return {name: whole(tensor.detach()).clone() for name, tensor in (drafter.state_dict() | moments(drafter, optimizer)).items()}


def save(processes: Processes, run: Path, steps: int, trouble: str | None) -> tuple[Tensors, str | None]:
    """Save after `steps`, in every process; gives the whole state and what saving raised."""
    drafter, optimizer = learner(processes, steps=steps)
    last = processes.rank == processes.count - 1
    if trouble == NAN and last:
        mine(optimizer.state[drafter.fc.weight]["exp_avg"])[-1, -1] = float("nan")
    if trouble == FULL and last:
        real = shards.HuggingFaceStorageWriter.write_data

        def write_data(writer: shards.HuggingFaceStorageWriter, *arguments: object) -> object:
            real(writer, *arguments)  # type: ignore[arg-type]
            raise OSError(errno.ENOSPC, "No space left on device")

        shards.HuggingFaceStorageWriter.write_data = write_data  # type: ignore[assignment,method-assign]
    raised = None
    try:
        with Keeper(run, CheckpointConfig(keep_last=9, keep_best=False), ORIGIN, Position(), processes) as keeper:
            keeper.save(drafter, optimizer, Position(step=steps))
            if trouble is None and steps:  # training goes on while it is written
                optimizer.step()
    except (UserError, RunFailure) as error:
        raised = f"{type(error).__name__}: {error}"
    return ({} if trouble else state_of(*learner(processes, steps=steps))), raised


def load(processes: Processes, folders: list[Path]) -> list[Tensors]:
    states = []
    for folder in folders:
        drafter, optimizer = learner(processes, steps=0)
        load_checkpoint(folder, drafter, optimizer)
        states.append(state_of(drafter, optimizer))
    return states


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_from_two_to_one_to_four_processes_bit_for_bit(tmp_path: Path) -> None:
    (saved, raised), _ = in_processes(2, save, tmp_path, 3, None)
    assert raised is None
    (folder,) = list_checkpoints(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"], "nothing is left beside it"
    verify_checkpoint(folder)
    assert not (folder / "optimizer.safetensors").exists()
    sizes = [sum(path.stat().st_size for path in folder.glob(f"optimizer/shard-{rank:05d}-*")) for rank in (1, 2)]
    assert min(sizes) > 0.8 * max(sizes), "each wrote its part"
    opened = open_drafter(folder / "drafter", dtype="float32", device="cpu").state_dict()
    assert_same(opened, {name: saved[name] for name in opened})

    drafter, optimizer = trained(7)
    assert load_checkpoint(folder, drafter, optimizer) == Position(step=3)
    assert_same(state_of(drafter, optimizer), saved)
    with Keeper(tmp_path, CheckpointConfig(keep_last=9, keep_best=False), ORIGIN, Position(), ALONE) as keeper:
        keeper.save(drafter, optimizer, Position(step=4))
    for states in in_processes(4, load, list_checkpoints(tmp_path)):
        for found in states:  # as two wrote it, and as one did
            assert_same(found, saved)


def test_more_processes_than_rows_of_a_tensor_and_none_stepped(tmp_path: Path) -> None:
    """A head of 16 rows over three, and a checkpoint before the first step, which has no moments."""
    for steps in (2, 0):
        (saved, raised), *_ = in_processes(3, save, tmp_path / str(steps), steps, None)
        assert raised is None
        (folder,) = list_checkpoints(tmp_path / str(steps))
        verify_checkpoint(folder)
        drafter, optimizer = trained(7, steps=0)
        load_checkpoint(folder, drafter, optimizer)
        assert_same(state_of(drafter, optimizer), saved)


@pytest.mark.parametrize(("trouble", "words"), [
    (NAN, r"RunFailure: exp_avg/fc\.weight is not finite: no checkpoint was written"),
    (FULL, r"UserError: cannot write .*checkpoints.*: the disk is full"),
], ids=["nan", "full disk"])
def test_what_one_process_meets_all_raise_and_earlier_ones_are_intact(tmp_path: Path, trouble: str, words: str) -> None:
    in_processes(2, save, tmp_path, 1, None)
    for _, raised in in_processes(2, save, tmp_path, 2, trouble):
        assert raised is not None
        assert re.match(words, raised), raised
    (folder,) = list_checkpoints(tmp_path)
    verify_checkpoint(folder)
    in_processes(2, save, tmp_path, 3, None)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-00000001", "step-00000003"], "what it left behind is swept"


def test_shards_that_are_damaged_missing_or_foreign_are_refused(tmp_path: Path) -> None:
    in_processes(2, save, tmp_path, 1, None)
    (folder,) = list_checkpoints(tmp_path)
    shard = sorted((folder / "optimizer").iterdir())[-1]
    data = shard.read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    for broken in (flipped, data[:-1], b"", None):
        shard.unlink() if broken is None else shard.write_bytes(broken)
        with pytest.raises(UserError, match=f"{shard.name}: the checkpoint is damaged"):
            verify_checkpoint(folder)
    shard.write_bytes(data)
    verify_checkpoint(folder)
    (folder / "optimizer" / ".metadata").write_bytes(pickle.dumps(1))  # what torch's other storage would unpickle
    with pytest.raises(UserError, match=r"\.metadata: the checkpoint is damaged"):
        verify_checkpoint(folder)
    (folder / "optimizer" / ".metadata").unlink()
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in ("../../../etc/passwd", "/etc/passwd"):
        (folder / "manifest.json").write_text(json.dumps({**manifest, name: "0"}))
        with pytest.raises(UserError, match="which is not in its own folder"):
            verify_checkpoint(folder)
