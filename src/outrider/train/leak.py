"""Takes a micro-batch, says whether blocks read features that they must not see; trains nothing.

The rule (01-dflash in words): a block with anchor a sees context strictly before a. So features at and after a cut may be
replaced by noise, and the loss of every block whose anchor is at or before the cut must not move by one bit.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.objective.frozen_head import frozen_head_loss
from outrider.train.step import Learner, MicroBatch, Supply

CUTS = 4  # places in each row; each costs one forward
NOISE = 10.0  # in standard deviations of the features


@dataclass(frozen=True)
class Leak:
    """The summed loss (weight * nats) of the blocks before a cut, with true features and with noise behind the cut.

    `cuts`: the cut position of each row. `rows`: the rows' numbers.
    """

    rows: tuple[int, ...]
    cuts: tuple[int, ...]
    loss: float
    loss_with_noise: float


def find_leak(learner: Learner, supply: Supply, batch: MicroBatch, *, logits_bytes: int) -> Leak | None:
    """None when nothing leaks. As many forwards as CUTS + 1, through the very road that trains, at its shapes.

    Of several processes each tests rows of its own; all of them give the first that was found.
    """
    try:
        return _find(learner, supply, batch, logits_bytes)
    finally:
        learner.masters.rest()


def _find(learner: Learner, supply: Supply, batch: MicroBatch, logits_bytes: int) -> Leak | None:
    road, ends, processes = learner.road, learner.ends, learner.masters.processes
    road.begin(learner.masters)
    features_BSF = supply.again(batch.host_rows).values_BSF

    def hidden_of(values_BSF: Tensor) -> Tensor:
        return road.hidden(ends.embed, values_BSF, batch.rows, batch.blocks).detach()

    true_BQD = hidden_of(features_BSF)
    generator = torch.Generator(features_BSF.device).manual_seed(0)  # of its own: the run's numbers stay as they are
    noise_BSF = torch.randn(features_BSF.shape, generator=generator, dtype=torch.float32, device=features_BSF.device)
    noise_BSF = (NOISE * features_BSF.float().std() * noise_BSF).to(features_BSF.dtype)
    place_S = torch.arange(features_BSF.shape[1], device=features_BSF.device)
    for number in range(1, CUTS + 1):
        cut_B = _cuts(batch, number / CUTS)
        noisy_BSF = torch.where((place_S[None] >= cut_B[:, None])[..., None], noise_BSF, features_BSF)
        before_BA = batch.blocks.anchors_BA <= cut_B[:, None]
        blocks = replace(batch.blocks, weights_BAK=batch.blocks.weights_BAK * before_BA[..., None])
        true, noisy = (float(frozen_head_loss(hidden, blocks, ends.head, budget_bytes=logits_bytes).loss_sum)
                       for hidden in (true_BQD, hidden_of(noisy_BSF)))
        mine = Leak(tuple(batch.rows.row_ids_B.tolist()), tuple(cut_B.tolist()), true, noisy) if true != noisy else None
        if (found := processes.first(mine)) is not None:
            return found
    return None


def _cuts(batch: MicroBatch, share: float) -> Tensor:
    """`[B]` the anchor of each row at this share (0..1] of its kept ones, which come first; 0 in a row without any."""
    kept_B = batch.blocks.keep_BA.sum(dim=1)
    index_B = ((kept_B * share).ceil().long() - 1).clamp(min=0)
    return batch.blocks.anchors_BA.gather(1, index_B[:, None])[:, 0]
