"""Takes micro-batches of rows, gives one optimizer step's LossTerms; knows nothing of schedules, files or progress."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.features.capture import FeatureSource
from outrider.features.target import Target
from outrider.layout.anchors import draw_anchors
from outrider.layout.blocks import build_blocks
from outrider.objective.frozen_head import frozen_head_loss
from outrider.records import DraftBlocks, Features, LossTerms, TokenRows
from outrider.train.meter import Stopwatch
from outrider.train.resolve import Resolved
from outrider.train.roads import Road


@dataclass(frozen=True)
class MicroBatch:
    """Rows with their blocks, on the drafter's device; `eligible` counts the positions that could have been anchors."""

    rows: TokenRows
    blocks: DraftBlocks
    eligible: int


def lay_out(rows: TokenRows, resolved: Resolved, epochs_B: Sequence[int], device: torch.device) -> MicroBatch:
    """Draw the rows' anchors (CPU) and build their blocks on `device`."""
    layout, shape = resolved.config.layout, resolved.shape
    anchors_BA, keep_BA, eligible = draw_anchors(
        rows, per_row=layout.anchors, document_floor=layout.document_floor, seed=resolved.config.train.seed, epochs_B=epochs_B
    )
    rows = rows.to(device)
    blocks = build_blocks(
        rows, anchors_BA.to(device), keep_BA.to(device), block_size=shape.block_size, mask_token_id=shape.mask_token_id,
        gamma=resolved.gamma,
    )
    return MicroBatch(rows, blocks, eligible)


def drafter_terms(
    road: Road, target: Target, rows: TokenRows, features: Features, blocks: DraftBlocks, *, logits_bytes: int
) -> LossTerms:
    """Forward the drafter over the blocks of the rows and score it."""
    hidden_BQD = road.hidden(target.embed, features.values_BSF, rows, blocks)
    return frozen_head_loss(hidden_BQD, blocks, target.head, budget_bytes=logits_bytes)


def run_step(
    road: Road, source: FeatureSource, optimizer: torch.optim.Optimizer, batches: Sequence[MicroBatch], *, clip_norm: float,
    logits_bytes: int, watch: Stopwatch,
) -> tuple[LossTerms, Tensor]:
    """One optimizer step: capture, forward, backward over all micro-batches, clip, update.

    The loss is sum(w * CE) / sum(w) over the whole step: weights are known before any forward, so each micro-batch is
    divided by the step's total. Returns the summed terms and the gradient's norm before clipping. Raises FloatingPointError,
    with the parameters untouched, when the gradient is not finite.
    """
    drafter = road.drafter
    optimizer.zero_grad(set_to_none=True)
    road.begin()
    total_weight = torch.stack([batch.blocks.weights_BAK.sum() for batch in batches]).sum().clamp(min=1e-12)
    terms: LossTerms | None = None
    for batch in batches:
        with watch("capture"):
            features = source.features(batch.rows, drafter.norm.weight.device)
        with watch("forward"):
            part = drafter_terms(road, source.target, batch.rows, features, batch.blocks, logits_bytes=logits_bytes)
        with watch("backward"):
            (part.loss_sum / total_weight).backward()
            road.collect()
        terms = part.detach() if terms is None else terms + part.detach()
    assert terms is not None
    with watch("optimizer"):
        norm = torch.nn.utils.get_total_norm([p.grad for p in drafter.parameters() if p.grad is not None])
        if not torch.isfinite(norm):  # looked at before clipping, which would spread one NaN over all gradients
            bad = (n for n, p in drafter.named_parameters() if p.grad is not None and not torch.isfinite(p.grad).all())
            raise FloatingPointError(f"the gradient of {next(bad, 'all parameters together')} is not finite: lower "
                                     "optimizer.learning_rate; no checkpoint holds it")
        torch.nn.utils.clip_grads_with_norm_(drafter.parameters(), clip_norm, norm)
        optimizer.step()
    return terms, norm
