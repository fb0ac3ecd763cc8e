"""The file that a checkpoint's tensors go to: what the safetensors library reads and would write, and its sum."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from toys import noise

from outrider.files import sha256_file
from outrider.train import tensor_file
from outrider.train.tensor_file import write_tensors

TENSORS = {
    "b": noise(3, 5, seed=1), "a": noise(7, seed=2), "count": torch.tensor(3.0), "words": torch.arange(624),
    "generator": torch.get_rng_state(), "none": torch.zeros(0, dtype=torch.float64), "wide": noise(2, 2, seed=3).double(),
}


@pytest.mark.parametrize("piece", [1, 1000, 2**24])
def test_safetensors_reads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(tensor_file, "PIECE", piece)
    total = write_tensors(TENSORS, tmp_path / "ours", {"format": "pt"})
    assert total == sha256_file(tmp_path / "ours")
    found = load_file(tmp_path / "ours")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with safe_open(tmp_path / "ours", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_data_lies_without_gaps_and_each_tensor_at_a_multiple_of_its_element(tmp_path: Path) -> None:
    write_tensors(TENSORS, tmp_path / "ours")
    data = (tmp_path / "ours").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    places = [(*header[name]["data_offsets"], tensor.element_size()) for name, tensor in TENSORS.items()]
    assert all(begin % size == 0 for begin, _, size in places)
    assert sum(end - begin for begin, end, _ in places) == max(end for _, end, _ in places) == len(data) - 8 - length


class Slow(io.FileIO):
    """Takes a few bytes a call, as the kernel may."""

    def write(self, data: Any) -> int:
        return super().write(memoryview(data)[:301])


def test_a_kernel_that_takes_less_than_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda path, *_, **__: Slow(path, "w"))
        total = write_tensors(TENSORS, tmp_path / "ours")
    assert total == sha256_file(tmp_path / "ours")
    assert load_file(tmp_path / "ours").keys() == TENSORS.keys()
