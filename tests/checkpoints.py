"""Checkpoints made without a run."""

from pathlib import Path

import torch
from toys import toy_shape

from outrider.config import CheckpointConfig
from outrider.model.drafter import Drafter
from outrider.model.published import to_config
from outrider.train.checkpoint import Origin, Position, checkpoint_path
from outrider.train.keeper import Keeper
from outrider.train.processes import ALONE

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
