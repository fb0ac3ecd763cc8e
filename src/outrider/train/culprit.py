"""Takes a step's micro-batches whose gradient was not finite, gives the first bad tensor and its rows; changes no parameter.

Runs only after a bad step: the step is computed again, looked at after each part. Healthy steps pay nothing for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.files import write_atomic
from outrider.objective.frozen_head import frozen_head_loss
from outrider.train.masters import whole
from outrider.train.processes import Processes
from outrider.train.step import Learner, MicroBatch, Supply

NORM_OVERFLOWS = "the gradient's norm (each tensor is finite, their squares together are not)"
NOT_AGAIN = "no tensor when the step was computed again (a passing fault of the device or its memory)"


@dataclass(frozen=True)
class Culprit:
    """`tensor`: what was not finite first, in words. `rows`: numbers of the rows it came from, as far as they can be told."""

    tensor: str
    rows: tuple[int, ...]


def find_culprit(learner: Learner, supply: Supply, batches: Sequence[MicroBatch], *, logits_bytes: int) -> Culprit:
    """Compute a bad step again, part by part, until a value is not finite in any process. Leaves no gradients behind.

    Every process must call it, and each comes to the same answer.
    """
    masters, processes = learner.masters, learner.masters.processes
    masters.rest()
    learner.road.begin(masters)
    try:
        for number, batch in enumerate(batches, start=1):
            masters.micro_batch(last=number == len(batches))
            found = _in_batch(learner, supply, batch, logits_bytes)
            if found is not None:
                return found
        masters.sum_gradients()
        norm = whole(torch.nn.utils.get_total_norm([p.grad for p in masters.drafter.parameters() if p.grad is not None]))
        rows = [row for batch in batches for row in batch.rows.row_ids_B.tolist()]
        return Culprit(NOT_AGAIN if torch.isfinite(norm) else NORM_OVERFLOWS,
                       tuple(row for of_one in processes.gather(rows) for row in of_one))
    finally:
        masters.rest()


def _in_batch(learner: Learner, supply: Supply, batch: MicroBatch, logits_bytes: int) -> Culprit | None:
    """The first bad tensor of one micro-batch of each process, in the order in which they are computed."""
    road, ends, processes = learner.road, learner.ends, learner.masters.processes
    features = supply.again(batch.host_rows)
    if found := _agreed(processes, "the target's features", features.values_BSF, batch):
        return found
    hidden_BQD = road.hidden(ends.embed, features.values_BSF, batch.rows, batch.blocks)
    if found := _agreed(processes, "the drafter's hidden states", hidden_BQD, batch):
        return found
    hidden_BQD.retain_grad()
    loss_sum = frozen_head_loss(hidden_BQD, batch.blocks, ends.head, budget_bytes=logits_bytes).loss_sum
    loss_sum.backward()
    road.collect(learner.masters)
    assert hidden_BQD.grad is not None
    if found := _agreed(processes, "the loss", hidden_BQD.grad + 0 * loss_sum.detach(), batch):
        return found
    bad = None
    for name, parameter in reversed(list(road.drafter.named_parameters())):  # as the backward comes to them
        if parameter.grad is not None and not torch.isfinite(whole(parameter.grad)).all():
            bad = Culprit(f"the gradient of {name}", tuple(batch.rows.row_ids_B.tolist()))
            break
    return _first(processes, bad)


def _agreed(processes: Processes, tensor: str, values_BXX: Tensor, batch: MicroBatch) -> Culprit | None:
    """A culprit when a value is not finite in any process, with the rows of all that found one."""
    healthy = bool(torch.isfinite(values_BXX).all())
    return _first(processes, None if healthy else Culprit(tensor, _bad_rows(values_BXX, batch)))


def _first(processes: Processes, mine: Culprit | None) -> Culprit | None:
    """The first process's culprit, and the rows of all that found the same tensor."""
    if not processes.any(mine is not None):
        return None
    found = [culprit for culprit in processes.gather(mine) if culprit is not None]
    return Culprit(found[0].tensor, tuple(row for culprit in found if culprit.tensor == found[0].tensor for row in culprit.rows))


def _bad_rows(values_BXX: Tensor, batch: MicroBatch) -> tuple[int, ...]:
    """Rows with a value that is not finite; all of them where none has one of its own."""
    bad_B = ~torch.isfinite(values_BXX).flatten(1).all(dim=1)
    rows = batch.rows.row_ids_B.to(bad_B.device)
    return tuple((rows[bad_B] if bad_B.any() else rows).tolist())


def save_rows(path: Path, culprit: Culprit, batches: Sequence[MicroBatch], processes: Processes) -> None:
    """Write the culprit's rows and their anchors to a safetensors file, to look at or to compute again.

    Every process must call it, as each has its own rows; the first one writes.
    """
    tensors: dict[str, Tensor] = {}
    for batch in batches:
        for b, row in enumerate(batch.rows.row_ids_B.tolist()):
            if row in culprit.rows:
                of_row = {"input_ids": batch.rows.input_ids_BS, "document_ids": batch.rows.document_ids_BS,
                          "loss_mask": batch.rows.loss_mask_BS, "anchors": batch.blocks.anchors_BA, "keep": batch.blocks.keep_BA}
                tensors |= {f"row-{row}/{name}": values[b].cpu().clone() for name, values in of_row.items()}
    for others in processes.gather(tensors):
        tensors |= others
    if processes.leads:
        write_atomic(path, lambda temporary: save_file(tensors, temporary, metadata={"first_bad_tensor": culprit.tensor}))
