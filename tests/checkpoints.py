"""Checkpoints made without a run, and what lies in any."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from toys import toy_shape

from outrider.config import CheckpointConfig
from outrider.model.drafter import Drafter
from outrider.model.published import to_config
from outrider.train.checkpoint import Origin, Position, checkpoint_path
from outrider.train.keeper import Keeper
from outrider.train.processes import ALONE
from outrider.train.shards import read_shards

ORIGIN = Origin(
    drafter_config=to_config(toy_shape(), embedding_scale=1.0, softcap=None, dtype="bfloat16"),
    target="t", inputs={"data.rows": "abc"}, config={"train": {"seed": 0}}, versions={"torch": "1"}, git_commit=None,
)


def save_checkpoint(
    run: Path, drafter: Drafter, optimizer: torch.optim.Optimizer, position: Position, *, keep: int = 2, origin: Origin = ORIGIN
) -> Path:
    """Write one checkpoint as a run does, and wait for it."""
    with Keeper(run, CheckpointConfig(keep_last=keep, keep_best=False), origin, Position(), ALONE) as keeper:
        keeper.save(drafter, optimizer, position)
    return checkpoint_path(run, position.step)


def tensors_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Weights, moments and random generators, whichever form they are in."""
    shared_out: dict[str, torch.Tensor] = {}
    if (checkpoint / "optimizer").is_dir():
        known = HuggingFaceStorageReader(str(checkpoint / "optimizer")).read_metadata().state_dict_metadata
        shared_out = {name: torch.empty(facts.size) for name, facts in known.items()}  # type: ignore[union-attr]
        read_shards(checkpoint / "optimizer", shared_out)
    files = [checkpoint / "drafter" / "model.safetensors", *checkpoint.glob("*.safetensors")]
    return {name: tensor for file in files for name, tensor in load_file(file).items()} | shared_out
