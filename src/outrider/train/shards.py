"""Takes tensors that are shared out over processes, gives files to which each wrote its own part, and back onto any number.

Through torch.distributed.checkpoint with its safetensors storage: each file says in its header where its parts stand, so nothing
is pickled and no process needs to know how many wrote. Knows nothing of what the tensors mean.
"""

import warnings
from collections.abc import Mapping, Set
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from outrider.files import explain_os_errors


def write_shards(folder: Path, pieces: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Write this process's part of `pieces`, DTensors on the host. Every process of the group must call it.

    Raises in each of them, as a UserError where a disk is to blame, what any of them met.
    """
    files = {layer: number for number, layer in enumerate(sorted({_layer_of(name) for name in pieces}), 1)}
    writer = HuggingFaceStorageWriter(str(folder), {name: files[_layer_of(name)] for name in pieces}, save_distributed=True)
    with explain_os_errors(folder):
        try:
            save(dict(pieces), storage_writer=writer, process_group=group)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error


def names_in(folder: Path) -> Set[str]:
    """The tensors whose parts lie in the folder."""
    return HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.keys()


def read_shards(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fill each tensor, whole or this process's part of it, with what the folder holds of it. Each process reads for itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # that is what no_dist asks for
        load(dict(into), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def _layer_of(name: str) -> str:
    """Parts of a file are put together in memory before they are written: a layer at a time is little."""
    return ".".join(name.split("/", 1)[1].split(".")[:2])
