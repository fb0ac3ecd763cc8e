"""Takes micro-batches of rows, gives one optimizer step's LossTerms; knows nothing of schedules, files or progress."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from outrider.features.target import Ends
from outrider.layout.anchors import draw_anchors
from outrider.layout.blocks import build_blocks
from outrider.objective.frozen_head import frozen_head_loss
from outrider.records import DraftBlocks, Features, LossTerms, TokenRows
from outrider.train.masters import Masters, whole
from outrider.train.meter import Stopwatch
from outrider.train.processes import Processes
from outrider.train.resolve import Resolved
from outrider.train.roads import Road


@dataclass(frozen=True)
class MicroBatch:
    """Rows with their blocks, on the drafter's device; `eligible` counts the positions that could have been anchors.

    `host_rows` are the same rows on the CPU, where capture wants them.
    """

    rows: TokenRows
    host_rows: TokenRows
    blocks: DraftBlocks
    eligible: int


class Supply(Protocol):
    """Where features come from. `ahead`: how many rows after the present ones it wants to know of."""

    ahead: int

    def features(self, rows: TokenRows) -> Features:
        """Features of `rows` (on the CPU) for the drafter's device; good until the next call."""

    def expect(self, coming: Sequence[TokenRows]) -> None:
        """What will be asked for next, in order: its capture may begin. Called once the present rows' work is launched."""

    def again(self, rows: TokenRows) -> Features:
        """Features of `rows` (on the CPU) out of turn."""

    def mark(self, label: str) -> None:
        """For a trace: what the drafter's device did since the last mark was `label`."""


@dataclass(frozen=True)
class Learner:
    """What learns in one process: the road, the masters behind it, the target's ends on the drafter's device, the optimizer."""

    road: Road
    masters: Masters
    ends: Ends
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True)
class StepSums:
    """One optimizer step's sums over micro-batches and processes; `norm` is the gradient's before clipping."""

    terms: LossTerms
    norm: Tensor
    anchors: Tensor
    eligible: Tensor


def lay_out(rows: TokenRows, resolved: Resolved, epochs_B: Sequence[int], device: torch.device) -> MicroBatch:
    """Draw the rows' anchors (CPU) and build their blocks on `device`."""
    layout, shape = resolved.config.layout, resolved.shape
    anchors_BA, keep_BA, eligible = draw_anchors(
        rows, per_row=layout.anchors, document_floor=layout.document_floor, seed=resolved.config.train.seed, epochs_B=epochs_B
    )
    placed = rows.to(device)
    blocks = build_blocks(
        placed, anchors_BA.to(device), keep_BA.to(device), block_size=shape.block_size, mask_token_id=shape.mask_token_id,
        gamma=resolved.gamma,
    )
    return MicroBatch(placed, rows, blocks, eligible)


def drafter_terms(
    road: Road, ends: Ends, rows: TokenRows, features: Features, blocks: DraftBlocks, *, logits_bytes: int
) -> LossTerms:
    """Forward the drafter over the blocks of the rows and score it."""
    hidden_BQD = road.hidden(ends.embed, features.values_BSF, rows, blocks)
    return frozen_head_loss(hidden_BQD, blocks, ends.head, budget_bytes=logits_bytes)


def run_step(
    learner: Learner, supply: Supply, batches: Sequence[MicroBatch], coming: Sequence[TokenRows], *, clip_norm: float,
    logits_bytes: int, watch: Stopwatch,
) -> StepSums:
    """One optimizer step: capture, forward, backward over all micro-batches, clip, update. Every process takes part.

    The loss is sum(w * CE) / sum(w) over the whole step, all processes: weights are known before any forward, so each
    micro-batch is divided by the step's total. `coming`: rows after this step's, for the supply to begin with. Raises
    FloatingPointError, with the parameters untouched, when the gradient is not finite: in all processes or in none.
    """
    road, masters, optimizer = learner.road, learner.masters, learner.optimizer
    optimizer.zero_grad(set_to_none=True)
    road.begin(masters)
    counts_3 = count(batches, masters.processes)
    total_weight = counts_3[0].clamp(min=1e-12)
    order = [*(batch.host_rows for batch in batches), *coming]
    terms: LossTerms | None = None
    for number, batch in enumerate(batches, start=1):
        masters.micro_batch(last=number == len(batches))
        with watch("capture"):
            features = supply.features(batch.host_rows)
        with watch("forward"):
            part = drafter_terms(road, learner.ends, batch.rows, features, batch.blocks, logits_bytes=logits_bytes)
        with watch("backward"):
            (part.loss_sum / total_weight).backward()
            road.collect(masters)
        with watch("capture"):
            supply.expect(order[number : number + supply.ahead])
        terms = part.detach() if terms is None else terms + part.detach()
    assert terms is not None
    with watch("optimizer"):
        masters.sum_gradients()
        supply.mark("sum")
        norm = clip_and_update(learner, clip_norm)
    return StepSums(sum_terms(terms, masters.processes), norm, counts_3[1], counts_3[2])


def count(batches: Sequence[MicroBatch], processes: Processes) -> Tensor:
    """Over all micro-batches and processes: the blocks' weight, their anchors, the eligible positions. float32 `[3]`."""
    weight = torch.stack([batch.blocks.weights_BAK.sum() for batch in batches]).sum()
    anchors = torch.stack([batch.blocks.keep_BA.sum() for batch in batches]).sum()
    eligible = torch.full_like(weight, sum(batch.eligible for batch in batches))
    counts_3 = torch.stack((weight, anchors.float(), eligible))
    processes.sum([counts_3])
    return counts_3


def sum_terms(terms: LossTerms, processes: Processes) -> LossTerms:
    """The terms of all processes together, by one sum."""
    parts = {f.name: getattr(terms, f.name) for f in fields(terms)}
    flat = torch.cat([part.flatten() for part in parts.values()])
    processes.sum([flat])
    pieces = flat.split([part.numel() for part in parts.values()])
    return LossTerms(**{name: piece.view(part.shape) for (name, part), piece in zip(parts.items(), pieces, strict=True)})


def clip_and_update(learner: Learner, clip_norm: float) -> Tensor:
    """Move the masters by their gradients, clipped to `clip_norm`; gives the norm before. Raises FloatingPointError."""
    drafter = learner.masters.drafter
    norm = whole(torch.nn.utils.get_total_norm([p.grad for p in drafter.parameters() if p.grad is not None]))
    if not torch.isfinite(norm):  # looked at before clipping, which would spread one NaN over all gradients
        bad = [n for n, p in drafter.named_parameters() if p.grad is not None and not torch.isfinite(whole(p.grad)).all()]
        raise FloatingPointError(f"the gradient of {next(iter(bad), 'all parameters together')} is not finite: lower "
                                 "optimizer.learning_rate; no checkpoint holds it")
    if norm > clip_norm - 1e-6:  # clip_grads_with_norm_ adds 1e-6 to it; below, it would read and write every gradient to no end
        torch.nn.utils.clip_grads_with_norm_(drafter.parameters(), clip_norm, norm)
    learner.optimizer.step()
    return norm
