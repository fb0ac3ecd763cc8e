"""Takes hidden states, blocks and the frozen head, gives LossTerms by the plain road: all logits, cross-entropy in fp32."""

import torch.nn.functional as F
from torch import Tensor

from outrider.objective.acceptance import accepted_runs, slot_counts
from outrider.records import DraftBlocks, FrozenHead, LossTerms


def plain_loss(hidden_BQD: Tensor, blocks: DraftBlocks, head: FrozenHead) -> LossTerms:
    """Weighted cross-entropy (nats) of every slot against its label, as sums (01-dflash, "Labels, weights, loss").

    The reference of the frozen-head loss: keeps logits of `[B * A * (K - 1), V]`. Slot 0 has no label and is left out.
    """
    B, A, K = blocks.labels_BAK.shape
    hidden_XKD = hidden_BQD.reshape(B * A, K, -1)
    labels_XK, weights_XK = blocks.labels_BAK.reshape(B * A, K), blocks.weights_BAK.reshape(B * A, K)
    logits_YV = head.logits(hidden_XKD[:, 1:].flatten(0, 1)).float()
    loss_Y = F.cross_entropy(logits_YV, labels_XK[:, 1:].flatten(), reduction="none")
    supervised_XK = weights_XK > 0
    correct_XK = supervised_XK.clone()
    correct_XK[:, 1:] = logits_YV.argmax(-1).view(B * A, K - 1) == labels_XK[:, 1:]
    correct_K, count_K = slot_counts(correct_XK, supervised_XK)
    run_sum, block_count = accepted_runs(correct_XK, supervised_XK)
    return LossTerms(
        loss_sum=(loss_Y * weights_XK[:, 1:].flatten()).sum(),
        weight_sum=weights_XK.sum(),
        correct_K=correct_K,
        count_K=count_K,
        run_sum=run_sum,
        block_count=block_count,
    )
