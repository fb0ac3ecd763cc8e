"""Takes documents, anchors and K, gives the visibility rule as intervals for our own kernels; knows nothing of attention itself.

The twin of block_mask without lists of tiles. Anchors are sorted, so the queries that see a tile of keys stand side by side,
and so do those that see all of it: four numbers a tile, and the kernels skip the rest at their own tile size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.layout.block_mask import visible_spans
from outrider.records import DraftBlocks


@dataclass(frozen=True)
class SpanMask:
    """Who sees whom, all int32.

    `spans_4BQ`: by query, the keys it sees: `[0] <= n < [1]` of the context, `[2] <= n < [3]` of the slots.
    `seen_by_BT4`: by tile of `key_tile` keys, the queries `[0] <= q < [1]` among which are all that see a key of it, and
    `[2] <= q < [3]`, all of which see every key of it. First the tiles of the context's `row_length` keys, then, from key
    `row_length` on, those of the slots: no tile holds both.
    """

    spans_4BQ: Tensor
    seen_by_BT4: Tensor
    row_length: int
    key_tile: int


def span_mask(blocks: DraftBlocks, *, row_length: int, window: int | None, key_tile: int) -> SpanMask:
    """The SpanMask of one kind of layer over `Q = A * K` queries and `N = row_length + Q` keys."""
    spans = visible_spans(blocks, row_length=row_length, window=window)
    spans_4BQ = torch.stack((spans.context_first_BQ, spans.context_last_BQ, spans.slots_first_BQ, spans.slots_last_BQ))
    context_BT4 = _context_tiles(spans_4BQ[0], spans_4BQ[1], row_length, key_tile)
    slots_T4 = _slot_tiles(spans_4BQ.shape[2], blocks.noise_ids_BAK.shape[2], key_tile, spans_4BQ.device)
    seen_by_BT4 = torch.cat((context_BT4, slots_T4.expand(len(context_BT4), -1, -1)), dim=1)
    return SpanMask(spans_4BQ, seen_by_BT4, row_length, key_tile)


def _context_tiles(first_BQ: Tensor, last_BQ: Tensor, row_length: int, key_tile: int) -> Tensor:
    starts_T = torch.arange(0, row_length, key_tile, device=first_BQ.device, dtype=torch.int32)
    first_BQ1, last_BQ1 = first_BQ[:, :, None], last_BQ[:, :, None]
    touched_BQT = torch.maximum(first_BQ1, starts_T) < torch.minimum(last_BQ1, starts_T + key_tile)
    covered_BQT = (first_BQ1 <= starts_T) & (last_BQ1 >= starts_T + key_tile)
    rows_2BQT = torch.stack((touched_BQT, covered_BQT))
    Q = first_BQ.shape[1]
    index_Q1 = torch.arange(Q, device=first_BQ.device, dtype=torch.int32)[:, None]
    low_2BT = torch.where(rows_2BQT, index_Q1, Q).amin(dim=2)
    high_2BT = torch.where(rows_2BQT, index_Q1 + 1, 0).amax(dim=2)
    # what touches may have gaps, the kernels look at every key there; what covers must have none
    whole_BT = high_2BT[1] - low_2BT[1] == covered_BQT.sum(dim=1, dtype=torch.int32)
    covered_from_BT, covered_to_BT = (torch.where(whole_BT, x[1], 0) for x in (low_2BT, high_2BT))
    return torch.stack((low_2BT[0], high_2BT[0], covered_from_BT, covered_to_BT), dim=-1)


def _slot_tiles(Q: int, K: int, key_tile: int, device: torch.device) -> Tensor:
    starts_T = torch.arange(0, Q, key_tile, device=device, dtype=torch.int32)
    ends_T = (starts_T + key_tile).clamp(max=Q)
    none_T = torch.zeros_like(starts_T)
    return torch.stack((starts_T // K * K, (ends_T - 1) // K * K + K, none_T, none_T), dim=-1)
