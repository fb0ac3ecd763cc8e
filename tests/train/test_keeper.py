"""Which checkpoints are made and kept, and that writing them in the background changes and hides nothing."""

import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from checkpoints import ORIGIN
from safetensors.torch import load_file
from test_checkpoint import nudge, trained
from toys import toy_shape

from outrider.config import CheckpointConfig, RunConfig
from outrider.errors import UserError
from outrider.model.flops import count_parameters
from outrider.train import host_memory
from outrider.train import keeper as keeper_module
from outrider.train.checkpoint import Origin, Position, Snapshot, checkpoint_path, list_checkpoints, verify_checkpoint
from outrider.train.host_memory import HostMemory
from outrider.train.keeper import Keeper, kept
from outrider.train.loop import train
from outrider.train.processes import ALONE, Processes


def positions(*rows: tuple[int, float | None, float]) -> dict[Path, Position]:
    """(step, tau measured there or None, hours) of each checkpoint."""
    return {Path(str(step)): Position(step=step, tau=tau, tau_step=None if tau is None else step, seconds=3600 * hours)
            for step, tau, hours in rows}


@pytest.mark.parametrize(("policy", "expected"), [
    ({"keep_last": 1, "keep_best": False}, [60]),
    ({"keep_last": 2, "keep_best": False}, [50, 60]),
    ({"keep_last": 9, "keep_best": False}, [10, 20, 30, 40, 50, 60]),
    ({"keep_last": 1}, [40, 60]),
    ({"keep_last": 1, "keep_best": False, "keep_every_hours": 1.0}, [30, 50, 60]),
    ({"keep_last": 1, "keep_every_hours": 2.0}, [40, 50, 60]),
], ids=str)
def test_what_is_kept(policy: dict[str, object], expected: list[int]) -> None:
    """The best is the later of two equal ones; 20 was best before it was measured at 40."""
    found = positions((10, None, 0.2), (20, 2.0, 0.9), (30, None, 1.1), (40, 2.5, 1.9), (50, 2.25, 2.3), (60, None, 2.4))
    assert sorted(int(path.name) for path in kept(found, CheckpointConfig(**policy))) == expected


@pytest.mark.parametrize(("position", "due"), [
    (Position(step=4), False), (Position(step=5), True), (Position(step=12), True), (Position(step=3), False),
    (Position(step=3, tau=1.0, tau_step=3), True), (Position(step=4, tau=2.0, tau_step=4, best_tau=2.0), True),
    (Position(step=4, tau=2.0, tau_step=4, best_tau=2.5), False), (Position(step=5, tau=2.0, tau_step=4, best_tau=2.0), True),
], ids=str)
def test_when_one_is_due(tmp_path: Path, position: Position, due: bool) -> None:
    """At every fifth step, at the end (12), for a new best, and never what is saved already (step 3, not yet measured)."""
    with Keeper(tmp_path, CheckpointConfig(every=5 if position.step != 3 else 3), ORIGIN, Position(step=3), ALONE) as keeper:
        assert keeper.due(position, total=12) is due


def test_minutes_make_one_due_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(keeper_module.time, "monotonic", lambda: now)
    drafter, optimizer = trained(1)
    with Keeper(tmp_path, CheckpointConfig(every_minutes=10.0), ORIGIN, Position(), ALONE) as keeper:
        for minutes, step, due in ((9.9, 1, False), (10.1, 2, True), (19.9, 3, False), (20.2, 4, True)):
            now = 60 * minutes
            assert keeper.due(Position(step=step), total=1000) is due
            if due:
                keeper.save(drafter, optimizer, Position(step=step))


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file holds the weights and moments of the step that it is named after, whatever came after."""
    go_on = threading.Event()
    real = keeper_module.write_checkpoint

    def write(*args: object) -> object:
        assert go_on.wait(20)
        return real(*args)

    monkeypatch.setattr(keeper_module, "write_checkpoint", write)
    drafter, optimizer = trained(1)
    weights = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    moment = optimizer.state[drafter.fc.weight]["exp_avg_sq"].clone()
    with Keeper(tmp_path, CheckpointConfig(), ORIGIN, Position(), ALONE) as keeper:
        keeper.save(drafter, optimizer, Position(step=1))
        for step in range(3):
            nudge(drafter, optimizer, seed=step)
            keeper.check()
        assert list_checkpoints(tmp_path) == []
        go_on.set()
    saved = load_file(list_checkpoints(tmp_path)[0] / "drafter" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights.items())
    assert torch.equal(load_file(list_checkpoints(tmp_path)[0] / "optimizer.safetensors")["exp_avg_sq/fc.weight"], moment)
    assert not torch.equal(drafter.fc.weight, weights["fc.weight"])


def test_copies_stand_in_memory_that_is_made_once_and_beside_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made on the writer's thread, before anything is saved; the same for each copy, and as large as the ledger says."""
    made_by: list[str] = []
    addresses: list[dict[str, int]] = []

    class Memory(HostMemory):
        def __init__(self, coming: Mapping[str, torch.Tensor], device: torch.device) -> None:
            made_by.append(threading.current_thread().name)
            super().__init__(coming, device)

    def write(folder: Path, snapshot: Snapshot, origin: Origin, shards: Path | None) -> None:
        everything = snapshot.drafter | snapshot.optimizer
        addresses.append({name: tensor.data_ptr() for name, tensor in everything.items() if tensor.dim()})
        large = sum(tensor.nbytes for tensor in everything.values() if tensor.dim())
        assert large == 12 * count_parameters(toy_shape())

    monkeypatch.setattr(keeper_module, "HostMemory", Memory)
    monkeypatch.setattr(keeper_module, "write_checkpoint", write)
    drafter, optimizer = trained(1)
    with Keeper(tmp_path, CheckpointConfig(), ORIGIN, Position(), ALONE) as keeper:
        keeper.make_room(drafter, optimizer)
        assert keeper._room is not None
        room = keeper._room.result(timeout=20).tensors
        assert made_by == ["checkpoint_0"]
        for step in (1, 2):
            keeper.save(drafter, optimizer, Position(step=step))
    assert made_by == ["checkpoint_0"]
    assert addresses == 2 * [{name: tensor.data_ptr() for name, tensor in room.items()}]


def test_a_run_that_has_too_little_host_memory_does_not_begin(
    make_run: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
    config = make_run()
    with pytest.raises(UserError, match=r"a checkpoint is copied to 0\.\d\d GiB of host memory, and 0\.00 are available"):
        train(config, check=None)
    assert [path.name for path in config.train.folder.rglob("*") if path.is_file()] == []


def test_the_copies_of_all_processes_of_a_machine_must_have_room(
    make_run: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three others, one on another machine, each would fit by itself."""
    here, gib = socket.gethostname(), 2**30
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 8 * gib)
    monkeypatch.setattr(Processes, "gather", lambda self, mine: (
        [mine, (here, 5 * gib), ("elsewhere", 5 * gib), (here, 5 * gib)] if isinstance(mine, tuple) else [mine]))
    with pytest.raises(UserError, match=r"copied to 10\.\d\d GiB of host memory, and 8\.00 are available"):
        train(make_run(), check=None)


def test_a_checkpoint_that_was_moved_and_linked_back_ends_like_others_and_what_it_links_to_stays(tmp_path: Path) -> None:
    drafter, optimizer = trained(1)
    with Keeper(tmp_path, CheckpointConfig(keep_last=1), ORIGIN, Position(), ALONE) as keeper:
        keeper.save(drafter, optimizer, Position(step=1))
        keeper.wait()
        (moved := tmp_path / "elsewhere").mkdir()
        (there := list_checkpoints(tmp_path)[0]).rename(moved / "kept")
        there.symlink_to(moved / "kept")
        keeper.save(drafter, optimizer, Position(step=2))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    verify_checkpoint(moved / "kept")


def test_an_old_checkpoint_that_says_no_position_ends_no_run_and_is_left(tmp_path: Path) -> None:
    drafter, optimizer = trained(1)
    with Keeper(tmp_path, CheckpointConfig(keep_last=2), ORIGIN, Position(), ALONE) as keeper:
        for step in (1, 2, 3, 4):
            keeper.save(drafter, optimizer, Position(step=step))
            keeper.wait()
            if step == 1:
                (checkpoint_path(tmp_path, 1) / "state.json").write_text("{}")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001", "step-00000003", "step-00000004"]


def test_what_a_kill_between_two_renames_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".step-00000001.abc.retired").mkdir(parents=True)
    drafter, optimizer = trained(1)
    with Keeper(tmp_path, CheckpointConfig(), ORIGIN, Position(), ALONE) as keeper:
        keeper.save(drafter, optimizer, Position(step=2))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_failed_write_reaches_the_loop_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*args: object) -> None:
        raise UserError("cannot write: the disk is full")

    drafter, optimizer = trained(1)
    monkeypatch.setattr(keeper_module, "write_checkpoint", write)
    with Keeper(tmp_path, CheckpointConfig(), ORIGIN, Position(), ALONE) as keeper:
        keeper.save(drafter, optimizer, Position(step=1))
        assert keeper._writing is not None
        keeper._writing.exception(timeout=20)
        with pytest.raises(UserError, match="the disk is full"):
            keeper.check()
        keeper.check()
    with (pytest.raises(UserError, match="the disk is full"),
          Keeper(tmp_path, CheckpointConfig(), ORIGIN, Position(), ALONE) as keeper):
        keeper.save(drafter, optimizer, Position(step=1))


def test_a_failed_write_does_not_hide_what_ended_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(*args: object) -> None:
        raise UserError("cannot write: the disk is full")

    monkeypatch.setattr(keeper_module, "write_checkpoint", write)
    drafter, optimizer = trained(1)

    def train() -> None:
        with Keeper(tmp_path, CheckpointConfig(), ORIGIN, Position(), ALONE) as keeper:
            keeper.save(drafter, optimizer, Position(step=1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert "the checkpoint that was being written failed too: cannot write: the disk is full" in capsys.readouterr().err


def test_a_long_wait_for_the_disk_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(keeper_module, "QUIET_S", 0.05)
    monkeypatch.setattr(keeper_module, "write_checkpoint", lambda *args: threading.Event().wait(0.3))
    drafter, optimizer = trained(1)
    with Keeper(tmp_path, CheckpointConfig(), ORIGIN, Position(), ALONE) as keeper:
        keeper.save(drafter, optimizer, Position(step=7))
    assert "waiting for the checkpoint of step 7 to be written" in capsys.readouterr().err
