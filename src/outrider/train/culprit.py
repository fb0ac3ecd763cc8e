"""Takes a step's micro-batches whose gradient was not finite, gives the first bad tensor and its rows; changes no parameter.

Runs only after a bad step: the step is computed again, looked at after each part. Healthy steps pay nothing for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.features.capture import FeatureSource
from outrider.files import write_atomic
from outrider.objective.frozen_head import frozen_head_loss
from outrider.train.roads import Road
from outrider.train.step import MicroBatch

NORM_OVERFLOWS = "the gradient's norm (each tensor is finite, their squares together are not)"
NOT_AGAIN = "no tensor when the step was computed again (a passing fault of the device or its memory)"


@dataclass(frozen=True)
class Culprit:
    """`tensor`: what was not finite first, in words. `rows`: numbers of the rows it came from, as far as they can be told."""

    tensor: str
    rows: tuple[int, ...]


def find_culprit(road: Road, source: FeatureSource, batches: Sequence[MicroBatch], *, logits_bytes: int) -> Culprit:
    """Compute a bad step again, part by part, until a value is not finite. Leaves no gradients behind."""
    drafter = road.drafter
    drafter.zero_grad(set_to_none=True)
    road.begin()
    try:
        for batch in batches:
            found = _in_batch(road, source, batch, logits_bytes)
            if found is not None:
                return found
        norm = torch.nn.utils.get_total_norm([p.grad for p in drafter.parameters() if p.grad is not None])
        rows = tuple(row for batch in batches for row in batch.rows.row_ids_B.tolist())
        return Culprit(NOT_AGAIN if torch.isfinite(norm) else NORM_OVERFLOWS, rows)
    finally:
        drafter.zero_grad(set_to_none=True)


def _in_batch(road: Road, source: FeatureSource, batch: MicroBatch, logits_bytes: int) -> Culprit | None:
    """The first bad tensor of one micro-batch, in the order in which they are computed."""
    features = source.features(batch.rows, road.drafter.norm.weight.device)
    if not torch.isfinite(features.values_BSF).all():
        return Culprit("the target's features", _bad_rows(features.values_BSF, batch))
    hidden_BQD = road.hidden(source.target.embed, features.values_BSF, batch.rows, batch.blocks)
    if not torch.isfinite(hidden_BQD).all():
        return Culprit("the drafter's hidden states", _bad_rows(hidden_BQD, batch))
    hidden_BQD.retain_grad()
    loss_sum = frozen_head_loss(hidden_BQD, batch.blocks, source.target.head, budget_bytes=logits_bytes).loss_sum
    loss_sum.backward()
    road.collect()
    assert hidden_BQD.grad is not None
    if not torch.isfinite(loss_sum) or not torch.isfinite(hidden_BQD.grad).all():
        return Culprit("the loss", _bad_rows(hidden_BQD.grad, batch))
    for name, parameter in reversed(list(road.drafter.named_parameters())):  # as the backward comes to them
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            return Culprit(f"the gradient of {name}", tuple(batch.rows.row_ids_B.tolist()))
    return None


def _bad_rows(values_BXX: Tensor, batch: MicroBatch) -> tuple[int, ...]:
    """Rows with a value that is not finite; all of them where none has one of its own."""
    bad_B = ~torch.isfinite(values_BXX).flatten(1).all(dim=1)
    rows = batch.rows.row_ids_B.to(bad_B.device)
    return tuple((rows[bad_B] if bad_B.any() else rows).tolist())


def save_rows(path: Path, culprit: Culprit, batches: Sequence[MicroBatch]) -> None:
    """Write the culprit's rows and their anchors to a safetensors file, to look at or to compute again."""
    tensors: dict[str, Tensor] = {}
    for batch in batches:
        for b, row in enumerate(batch.rows.row_ids_B.tolist()):
            if row in culprit.rows:
                of_row = {"input_ids": batch.rows.input_ids_BS, "document_ids": batch.rows.document_ids_BS,
                          "loss_mask": batch.rows.loss_mask_BS, "anchors": batch.blocks.anchors_BA, "keep": batch.blocks.keep_BA}
                tensors |= {f"row-{row}/{name}": values[b].cpu().clone() for name, values in of_row.items()}
    write_atomic(path, lambda temporary: save_file(tensors, temporary, metadata={"first_bad_tensor": culprit.tensor}))
