"""Takes named tensors on the host, gives a safetensors file and its SHA-256 in one pass; knows nothing of what they mean."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.uint8: "U8"}  # all that a checkpoint holds
PIECE = 2**24  # bytes hashed and written at a time; both leave Python's lock to the training thread


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> str:
    """Write contiguous CPU tensors as https://huggingface.co/docs/safetensors says; returns the hex SHA-256 of the file.

    safetensors' own writer first copies every tensor into Python bytes, under Python's lock and in as much memory again, and
    the sum would want the file read back. Raises OSError.
    """
    in_order = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # keeps each aligned
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in in_order:
        assert tensor.is_contiguous()
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    total = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        head = memoryview(len(text).to_bytes(8, "little") + text)
        for view in (head, *(_bytes_of(tensor) for _, tensor in in_order)):
            for at in range(0, len(view), PIECE):
                piece = view[at : at + PIECE]
                total.update(piece)
                while len(piece):  # the kernel may take less than it was given
                    piece = piece[file.write(piece):]
    return total.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's own memory, not copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
