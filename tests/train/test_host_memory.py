"""Memory for a checkpoint's copy: side by side without touching, locked where the driver lets, refused before it is too much."""

from pathlib import Path

import pytest
import torch

from outrider.errors import UserError
from outrider.train import host_memory
from outrider.train.host_memory import PAGE, HostMemory, available_bytes, short_of

COMING = {"a": torch.empty(3, 5, device="meta"), "b": torch.empty(PAGE // 4, device="meta"),
          "c": torch.empty(PAGE // 4 + 1, device="meta"), "codes": torch.empty(7, 11, dtype=torch.uint8, device="meta"),
          "scalar": torch.empty((), device="meta")}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_each_tensor_has_its_shape_and_pages_of_its_own() -> None:
    memory = HostMemory(COMING, CPU)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in memory.tensors.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in COMING.items()}
    for number, tensor in enumerate(memory.tensors.values()):
        assert tensor.data_ptr() % PAGE == 0
        assert tensor.is_contiguous()
        tensor.fill_(number)
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(memory.tensors.values()))
    assert HostMemory({}, CPU).tensors == {}


@pytest.mark.parametrize("locks", [0, 2, 5])
def test_where_the_driver_refuses_the_rest_stays_unlocked_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], locks: int
) -> None:
    locked: dict[int, int] = {}

    def lock(part: torch.Tensor, device: torch.device) -> str | None:
        if len(locked) == locks:
            return "out of memory"
        locked[part.data_ptr()] = part.nbytes
        return None

    monkeypatch.setattr(host_memory, "lock_pages", lock)
    monkeypatch.setattr(host_memory, "unlock_pages", lambda address, device: locked.pop(address))
    memory = HostMemory(COMING, CUDA)
    assert all(size % PAGE == 0 for size in locked.values()), "whole pages: no two tensors share one"
    assert list(locked) == [tensor.data_ptr() for tensor in memory.tensors.values()][:locks]
    said = "cannot be page-locked (out of memory)" in capsys.readouterr().err
    assert said == (locks < len(COMING))
    memory.tensors["scalar"].fill_(3)
    memory.close()
    assert not locked
    assert float(memory.tensors["scalar"]) == 3


def test_more_than_the_system_gives_is_refused() -> None:
    with pytest.raises(UserError, match=r"^a checkpoint is copied to [\d.]+ GiB of host memory, which the system refuses \("):
        HostMemory({"huge": torch.empty(2**50, device="meta")}, CPU)


def test_more_than_is_available_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 3 << 30)
    assert short_of(3 << 30) is None
    assert str(short_of((3 << 30) + 1)).startswith("a checkpoint is copied to 3.00 GiB of host memory, and 3.00 are available")


@pytest.mark.parametrize(("group", "expected"), [
    ({}, 8 << 30), ({"memory.max": "max", "memory.current": "5", "memory.stat": ""}, 8 << 30),
    ({"memory.max": str(6 << 30), "memory.current": str(5 << 30), "memory.stat": f"anon 7\ninactive_file {2 << 30}\n"}, 3 << 30),
    ({"memory.max": str(6 << 30), "memory.current": str(5 << 30), "memory.stat": "anon 7\n"}, 1 << 30),
    ({"memory.max": str(64 << 30), "memory.current": "0", "memory.stat": ""}, 8 << 30),
], ids=["no group", "no limit", "limit", "limit without cache", "wide limit"])
def test_what_is_available(tmp_path: Path, group: dict[str, str], expected: int) -> None:
    """A control group's limit counts, and of what it holds a file's cache does not."""
    for name, text in {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:   {8 << 20} kB\n",
                       **{f"sys/fs/cgroup/{name}": text for name, text in group.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_bytes(tmp_path) == expected
    assert available_bytes() > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: page-locking is its driver's")
def test_on_a_gpu_the_pages_are_locked_until_it_is_closed() -> None:
    memory = HostMemory(COMING, CUDA)
    assert all(tensor.is_pinned() for tensor in memory.tensors.values())
    source = torch.rand(COMING["c"].shape, device="cuda")
    memory.tensors["c"].copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(memory.tensors["c"], source.cpu())
    memory.close()
    assert not any(tensor.is_pinned() for tensor in memory.tensors.values())


