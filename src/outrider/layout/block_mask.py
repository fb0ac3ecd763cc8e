"""Takes documents, anchors and K, gives the visibility rule as tiles for the fused kernel; knows nothing of attention itself.

The fast twin of mask.dense_mask. What a query sees is two intervals of keys: the context from its document's start (or the
window's) to its anchor, and its own block. So every 128 x 128 tile is known from interval ends alone: [Q, N / 128] booleans
instead of [Q, N] (8192 x 16384: 1 MiB against 128 MiB, and no compiled mask builder, which took more than 85 s).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from outrider.records import DraftBlocks

TILE = 128


@dataclass(frozen=True)
class Spans:
    """The keys that each query sees: `first <= n < last`, int32, `[B, Q]`; empty where first == last. Slots are keys S + slot."""

    context_first_BQ: Tensor
    context_last_BQ: Tensor
    slots_first_BQ: Tensor
    slots_last_BQ: Tensor

    @property
    def pairs(self) -> Tensor:
        """int64 scalar: how many (query, key) pairs are visible, the size of the attention's arithmetic."""
        context = (self.context_last_BQ - self.context_first_BQ).sum(dtype=torch.int64)
        return context + (self.slots_last_BQ - self.slots_first_BQ).sum(dtype=torch.int64)


def visible_spans(blocks: DraftBlocks, *, row_length: int, window: int | None) -> Spans:
    """The rule of mask.visibility as intervals. A document's start is its anchor's index minus its position in the document."""
    B, A, K = blocks.noise_ids_BAK.shape
    slots_K = torch.arange(K, device=blocks.anchors_BA.device)
    last_BAK = torch.where(blocks.keep_BA, blocks.anchors_BA, 0)[:, :, None].expand(B, A, K)
    start_BA = torch.where(blocks.keep_BA, blocks.anchors_BA - blocks.positions_BAK[:, :, 0], 0)
    first_BAK = start_BA[:, :, None].expand(B, A, K)
    if window is not None:
        first_BAK = torch.minimum(torch.maximum(first_BAK, last_BAK + slots_K - window + 1), last_BAK)
    own_A1 = row_length + K * torch.arange(A, device=slots_K.device)[:, None]
    own_last_AK = own_A1 + (K if window is None else slots_K + 1)

    def flat(x: Tensor) -> Tensor:
        return x.expand(B, A, K).reshape(B, A * K).to(torch.int32)

    return Spans(flat(first_BAK), flat(last_BAK), flat(own_A1), flat(own_last_AK))


def block_mask(blocks: DraftBlocks, *, row_length: int, window: int | None) -> BlockMask:
    """The BlockMask of one kind of layer over `Q = A * K` queries and `N = row_length + Q` keys, for all heads alike (H=None)."""
    spans = visible_spans(blocks, row_length=row_length, window=window)
    K, Q = blocks.noise_ids_BAK.shape[2], spans.context_first_BQ.shape[1]
    touched_BQT, covered_BQT = _tiles(spans, row_length + Q)
    missing = -Q % TILE  # queries that pad the last tile see nothing, so that tile is never full
    touched_BXT = F.pad(touched_BQT, (0, 0, 0, missing)).unflatten(1, (-1, TILE)).any(dim=2)
    full_BXT = F.pad(covered_BQT, (0, 0, 0, missing)).unflatten(1, (-1, TILE)).all(dim=2)
    in_use_ZBXT = torch.stack((touched_BXT & ~full_BXT, full_BXT))
    (kv_count, full_kv_count), (kv_index, full_kv_index) = _in_order(in_use_ZBXT)
    (q_count, full_q_count), (q_index, full_q_index) = _in_order(in_use_ZBXT.mT)
    return BlockMask(  # as from_kv_blocks would, which sorts four times to find the queries' side again
        seq_lengths=(Q, row_length + Q), kv_num_blocks=kv_count, kv_indices=kv_index, full_kv_num_blocks=full_kv_count,
        full_kv_indices=full_kv_index, q_num_blocks=q_count, q_indices=q_index, full_q_num_blocks=full_q_count,
        full_q_indices=full_q_index, BLOCK_SIZE=(TILE, TILE),
        mask_mod=_rule(spans, row_length=row_length, block_size=K, causal_slots=window is not None),
    )


def _tiles(spans: Spans, keys: int) -> tuple[Tensor, Tensor]:
    """`[B, Q, T]` bool each: does the query see a key of the tile, and does it see all 128 of them."""
    starts_T = torch.arange(0, keys, TILE, device=spans.context_first_BQ.device, dtype=torch.int32)
    touched, covered = [], []
    for first_BQ, last_BQ in ((spans.context_first_BQ, spans.context_last_BQ), (spans.slots_first_BQ, spans.slots_last_BQ)):
        first_BQ1, last_BQ1 = first_BQ[:, :, None], last_BQ[:, :, None]
        touched.append(torch.maximum(first_BQ1, starts_T) < torch.minimum(last_BQ1, starts_T + TILE))
        covered.append((first_BQ1 <= starts_T) & (last_BQ1 >= starts_T + TILE))
    return touched[0] | touched[1], covered[0] | covered[1]


def _in_order(in_use_ZBXT: Tensor) -> tuple[Tensor, Tensor]:
    """Counts `[Z, B, 1, X]` and indices `[Z, B, 1, X, T]` (int32) of the tiles: those in use first, in increasing order."""
    index_ZBXT = torch.argsort(in_use_ZBXT.to(torch.uint8), dim=-1, descending=True, stable=True)
    return in_use_ZBXT.sum(-1, dtype=torch.int32)[:, :, None], index_ZBXT.to(torch.int32)[:, :, None].contiguous()


def _rule(
    spans: Spans, *, row_length: int, block_size: int, causal_slots: bool
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The predicate inside a partial tile: two loads and comparisons, against the rule's own five gathers."""
    first_BQ, last_BQ = spans.context_first_BQ, spans.context_last_BQ

    def rule(b: Tensor, h: Tensor, q: Tensor, n: Tensor) -> Tensor:
        sees_context = (n >= first_BQ[b, q]) & (n < last_BQ[b, q])
        key_slot = n - row_length
        sees_slot = (n >= row_length) & (key_slot // block_size == q // block_size)
        if causal_slots:
            sees_slot = sees_slot & (key_slot % block_size <= q % block_size)
        return sees_context | sees_slot

    return rule
