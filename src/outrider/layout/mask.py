"""Takes documents, anchors and K, gives who sees whom; the visibility rule stands here once, as index arithmetic."""

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.records import DraftBlocks, TokenRows

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def visibility(
    document_ids_BS: Tensor, anchors_BA: Tensor, keep_BA: Tensor, *, block_size: int, window: int | None
) -> MaskMod:
    """The visibility rule as a predicate `(b, h, q, n) -> bool` over broadcastable index tensors.

    Queries q = block * K + slot; keys n < S are context at row position n, keys n >= S are slots, in the queries' order.
    A query sees context of its anchor's document strictly before the anchor, and every slot of its own block. With a
    `window` (positions; sliding-window layers) context must also satisfy query position - key position < window, and of
    its own block it sees only the slots up to its own. A dropped block sees only itself.
    """
    S = document_ids_BS.shape[1]

    def rule(b: Tensor, h: Tensor, q: Tensor, n: Tensor) -> Tensor:
        block, slot = q // block_size, q % block_size
        anchor = anchors_BA[b, block]
        position = n.clamp(max=S - 1)
        same_document = document_ids_BS[b, position] == document_ids_BS[b, anchor]
        sees_context = (n < S) & keep_BA[b, block] & same_document & (n < anchor)
        key_slot = n - S
        sees_slot = (n >= S) & (key_slot // block_size == block)
        if window is not None:
            sees_context = sees_context & (anchor + slot - n < window)
            sees_slot = sees_slot & (key_slot % block_size <= slot)
        return sees_context | sees_slot

    return rule


def dense_mask(rows: TokenRows, blocks: DraftBlocks, *, window: int | None) -> Tensor:
    """`[B, 1, Q, N]` bool, the whole table of `visibility`: the reference that the fused masks are tested against."""
    B, S = rows.document_ids_BS.shape
    A, K = blocks.noise_ids_BAK.shape[1:]
    rule = visibility(rows.document_ids_BS, blocks.anchors_BA, blocks.keep_BA, block_size=K, window=window)
    device = rows.document_ids_BS.device
    b = torch.arange(B, device=device)[:, None, None]
    q = torch.arange(A * K, device=device)[None, :, None]
    n = torch.arange(S + A * K, device=device)[None, None, :]
    return rule(b, torch.zeros_like(b), q, n)[:, None]
