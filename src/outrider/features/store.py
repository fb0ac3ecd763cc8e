"""Takes the features of rows one by one, keeps them on disk, gives them back in any order; knows nothing of how they were made.

A folder with `store.json`, which says what the features are of, and one safetensors file a row, written whole or not at all:
a stopped run goes on with what is there.
"""

import contextlib
import re
import shutil
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import UserError
from outrider.features.fp8 import E4M3, quantise_rows
from outrider.files import explain_os_errors, read_json, set_aside, write_atomic, write_json
from outrider.progress import say

INFO_NAME = "store.json"
ROW_NAME = re.compile(r"row-\d{8,}\.safetensors")
UNFINISHED = re.compile(r"\.(store\.json|row-\d{8,}\.safetensors)\..*\.partial")
WAY_OUT = f"delete its {INFO_NAME} and all its row-*.safetensors together, or name another folder in features.store"


@dataclass(frozen=True)
class StoreInfo:
    """What a store's features are of. `target`, `rows`: digests. `precision`: how they were captured. `dtype`: how they are kept.

    `num_rows` rows of `row_length` tokens, each with `hidden_size` values for each of `layer_ids`.
    """

    target: str
    rows: str
    precision: str
    dtype: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    row_length: int
    num_rows: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; in 8 bits a float32 scale goes with each token and layer."""
        values = self.row_length * len(self.layer_ids) * self.hidden_size
        return values + values // self.hidden_size * 4 if self.dtype == "fp8" else values * getattr(torch, self.dtype).itemsize


class FeatureStore:
    """Features on disk (a `capture.Kept`). Raises UserError when the folder holds anything else, or the disk is too small.

    Nothing is written before the first row is kept, so that it may be opened before a target is loaded that may not fit.
    """

    def __init__(self, folder: Path, info: StoreInfo) -> None:
        self.folder, self.info = folder, info
        _check_same(folder, info)
        with explain_os_errors(folder):
            there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
            present = sum(1 for _ in folder.glob("row-*.safetensors"))
            free = shutil.disk_usage(there).free
        self.need = (info.num_rows - present) * info.row_bytes
        if self.need > free:
            raise UserError(f"features.keep = \"disk\": {info.num_rows - present} rows of {info.row_bytes / 2**20:.1f} MiB need "
                            f"{self.need / 2**30:.1f} GiB in {folder}, which has {free / 2**30:.1f} GiB free: name another "
                            "place in features.store, keep them in 8 bits (features.keep_dtype = \"fp8\"), or keep none")
        self._described = False

    def put(self, row_id: int, values_SF: Tensor) -> None:
        """Write one row's features, with their checksum. Raises UserError."""
        if not self._described:
            _check_same(self.folder, self.info)  # another run may have begun to keep its own there meanwhile
            write_json(self.folder / INFO_NAME, asdict(self.info))
            self._described = True
        values_SLD = values_SF.cpu().unflatten(-1, (len(self.info.layer_ids), -1)).contiguous()
        if self.info.dtype == "fp8":
            values, scale = quantise_rows(values_SLD)
            tensors = {"values": values, "scale": scale}
        else:
            tensors = {"values": values_SLD}
        metadata = {name: str(checksum(tensor)) for name, tensor in tensors.items()}
        write_atomic(self._path(row_id), lambda path: save_file(tensors, path, metadata=metadata))

    def get(self, row_id: int, dtype: torch.dtype) -> Tensor | None:
        """One row's features `[S, F]` on the CPU in `dtype`; None where there are none. A damaged file is set aside, and said."""
        path = self._path(row_id)
        if not path.exists():
            return None
        try:
            tensors = _read(path)
        except (SafetensorError, OSError, ValueError) as error:
            with explain_os_errors(path), contextlib.suppress(FileNotFoundError):  # another process may have met it too
                say(f"{path}: {error}; renamed to {set_aside(path).name}, and its row is captured again")
            return None
        values_SLD = tensors["values"]
        if values_SLD.dtype == E4M3:
            values_SLD = values_SLD.float() * tensors["scale"]
        return values_SLD.to(dtype).flatten(1)

    def _path(self, row_id: int) -> Path:
        return self.folder / f"row-{row_id:08d}.safetensors"


def _read(path: Path) -> dict[str, Tensor]:
    """Raises SafetensorError, OSError, or ValueError when the file is not what `put` wrote."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        metadata = file.metadata() or {}
    if "values" not in tensors or any(str(checksum(tensor)) != metadata.get(name) for name, tensor in tensors.items()):
        raise ValueError("its checksum does not match")
    return tensors


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes: 1 to 3 GB/s, where SHA-256 would take longer than the read."""
    return zlib.crc32(tensor.view(torch.uint8).numpy().data)


def _check_same(folder: Path, info: StoreInfo) -> None:
    """Raise UserError unless `folder` is a store of `info`, empty or absent: rows without a description are not believed."""
    description = folder / INFO_NAME
    names = _names(folder)  # before looking for the description: another process may write that now, and then its first row
    if not description.exists():
        if others := [name for name in names if not ROW_NAME.fullmatch(name)]:
            raise UserError(f"{folder}: is no feature store but holds other files ({others[0]}): name an empty or absent folder "
                            "in features.store")
        if names:
            raise UserError(f"{folder}: holds rows' features but no {INFO_NAME} that says what they are of: {WAY_OUT}")
        return
    before: dict[str, Any] = read_json(description, what="the description of the rows' features beside it", way_out=WAY_OUT)
    now = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(info).items()}
    changed = [name for name, value in now.items() if not isinstance(before, dict) or before.get(name) != value]
    if changed:
        raise UserError(f"{folder}: holds features made for another {', '.join(changed)}: {WAY_OUT}")


def _names(folder: Path) -> list[str]:
    """What lies in `folder`, sorted, but for what a kill left of our own writes; nothing where there is no folder."""
    with explain_os_errors(folder):
        if not folder.exists():
            return []
        return sorted(path.name for path in folder.iterdir() if not UNFINISHED.fullmatch(path.name))
