"""Takes hidden states, blocks and the frozen head, gives LossTerms while keeping no logits; knows nothing of the drafter.

The fast twin of losses.plain_loss. The head is frozen, so only the gradient of the hidden states is needed: rows go through
in chunks, and each chunk's logits are overwritten by their own gradient (softmax - one-hot) and multiplied back at once, in
the forward. Two products a chunk and nothing recomputed; memory is the byte budget, whatever the row or the vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outrider.errors import UserError
from outrider.objective.acceptance import accepted_runs, slot_counts
from outrider.records import DraftBlocks, FrozenHead, LossTerms

# Turns logits [R, V] into their gradient in place; returns the loss [R] float32 (nats) and whether the top-1 is the label [R].
ScoreRows = Callable[[Tensor, Tensor, float | None], tuple[Tensor, Tensor]]

# fp32 working tile of the elementwise part on a CPU: 8 MiB is the fastest on two idle cores, but each tile is 10 parallel
# regions that wait for the slower core, and beside another process it took twice as long (bench/results/loss.md)
CPU_TILE_BYTES = 2**25


def frozen_head_loss(hidden_BQD: Tensor, blocks: DraftBlocks, head: FrozenHead, *, budget_bytes: int) -> LossTerms:
    """Weighted cross-entropy (nats) of every slot against its label, as sums: the value and gradient of `plain_loss`.

    `budget_bytes` bounds one chunk's logits, in the head's dtype; at least one row is taken. The products run in the head's
    dtype whatever autocast says, everything between them in fp32. Slot 0 has no label and is left out.
    """
    B, A, K = blocks.labels_BAK.shape
    hidden_YD = hidden_BQD.reshape(B * A, K, -1)[:, 1:].flatten(0, 1)
    labels_XK, weights_XK = blocks.labels_BAK.reshape(B * A, K), blocks.weights_BAK.reshape(B * A, K)
    chunk = rows_per_chunk(hidden_YD.shape[0], head.weight_VD, budget_bytes)
    loss_sum, right_Y = _FrozenHeadLoss.apply(
        hidden_YD, head.weight_VD, labels_XK[:, 1:].flatten(), weights_XK[:, 1:].flatten(), head.softcap, chunk
    )
    supervised_XK = weights_XK > 0
    correct_XK = supervised_XK.clone()
    correct_XK[:, 1:] = right_Y.view(B * A, K - 1)
    correct_K, count_K = slot_counts(correct_XK, supervised_XK)
    run_sum, block_count = accepted_runs(correct_XK, supervised_XK)
    return LossTerms(
        loss_sum=loss_sum, weight_sum=weights_XK.sum(), correct_K=correct_K, count_K=count_K, run_sum=run_sum,
        block_count=block_count,
    )


def rows_per_chunk(rows: int, head_VD: Tensor, budget_bytes: int) -> int:
    """Rows of logits that fit `budget_bytes` in the head's dtype, evened out over the chunks; at least 1."""
    fit = max(1, budget_bytes // (head_VD.shape[0] * head_VD.element_size()))
    chunks = -(-rows // fit)
    return -(-rows // max(chunks, 1)) if rows else 1


class _FrozenHeadLoss(torch.autograd.Function):
    """sum(weights * CE) and right_Y, with the hidden states' gradient made in the forward and scaled in the backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden_YD: Tensor, head_VD: Tensor, labels_Y: Tensor, weights_Y: Tensor, softcap: float | None, chunk: int
    ) -> tuple[Tensor, Tensor]:
        score = _scorer(hidden_YD.device)
        gradient_YD = torch.zeros_like(hidden_YD) if ctx.needs_input_grad[0] else None
        loss_Y = torch.zeros_like(weights_Y, dtype=torch.float32)
        right_Y = torch.zeros_like(labels_Y, dtype=torch.bool)
        logits_RV = head_VD.new_empty(min(chunk, len(labels_Y)), head_VD.shape[0])
        with torch.autocast(hidden_YD.device.type, enabled=False):
            for rows in _chunks(weights_Y, chunk):
                part_RV = logits_RV[: len(labels_Y[rows])]
                torch.mm(hidden_YD[rows].to(head_VD.dtype), head_VD.T, out=part_RV)
                loss_Y[rows], right_Y[rows] = score(part_RV, labels_Y[rows], softcap)
                if gradient_YD is not None:
                    back_RD = (part_RV @ head_VD).mul_(weights_Y[rows][:, None])
                    gradient_YD[rows] = back_RD.to(hidden_YD.dtype)
        if gradient_YD is not None:
            ctx.save_for_backward(gradient_YD)
        ctx.mark_non_differentiable(right_Y)
        return (loss_Y * weights_Y).sum(), right_Y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_YD,) = ctx.saved_tensors
        return gradient_YD * gradients[0].to(gradient_YD.dtype), None, None, None, None, None


def _chunks(weights_Y: Tensor, chunk: int) -> list[Any]:
    """Index of each chunk's rows. On the CPU rows of weight 0 are left out; a GPU keeps fixed shapes and asks nothing back."""
    if weights_Y.device.type == "cpu":
        live_X = weights_Y.nonzero().squeeze(1)
        return list(live_X.split(chunk)) if len(live_X) else []
    return [slice(start, start + chunk) for start in range(0, len(weights_Y), chunk)]


def _scorer(device: torch.device) -> ScoreRows:
    if device.type == "cpu":
        return score_rows_cpu
    if device.type == "cuda":
        from outrider.objective.frozen_head_cuda import score_rows_cuda  # Triton exists only beside CUDA builds of torch

        return score_rows_cuda
    raise UserError(f"train.device = '{device}': the frozen-head loss exists for cpu and cuda: choose one of them")


def score_rows_cpu(logits_RV: Tensor, labels_R: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """ScoreRows in tiles of rows, so that the several passes over [R, V] in fp32 need a bounded buffer and mostly meet caches."""
    R, V = logits_RV.shape
    loss_R = torch.empty(R)
    right_R = torch.empty(R, dtype=torch.bool)
    step = max(1, CPU_TILE_BYTES // (4 * V))
    work_TV = torch.empty(min(step, R), V)
    for start in range(0, R, step):
        tile_TV, labels_T1 = logits_RV[start : start + step], labels_R[start : start + step, None]
        wide_TV = work_TV[: len(tile_TV)]
        wide_TV.copy_(tile_TV)
        slope_TV = None
        if softcap is not None:
            slope_TV = torch.tanh(wide_TV / softcap)
            torch.mul(slope_TV, softcap, out=wide_TV)
        label_T1 = wide_TV.gather(1, labels_T1)
        top_T1, place_T1 = wide_TV.max(dim=1, keepdim=True)  # vectorised with its index, unlike argmax (16 against 60 ms)
        torch.softmax(wide_TV, dim=1, out=wide_TV)
        # log-sum-exp = top - log softmax(top): the top's share is at least 1 / V, so this loses nothing and saves a pass
        loss_T1 = top_T1 - wide_TV.gather(1, place_T1).log() - label_T1
        wide_TV.scatter_add_(1, labels_T1, wide_TV.new_full(labels_T1.shape, -1.0))
        if slope_TV is not None:
            wide_TV.mul_(slope_TV.square_().neg_().add_(1.0))
        tile_TV.copy_(wide_TV)
        loss_R[start : start + step] = loss_T1[:, 0]
        right_R[start : start + step] = place_T1[:, 0] == labels_T1[:, 0]
    return loss_R, right_R
