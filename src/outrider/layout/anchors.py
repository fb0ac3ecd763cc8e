"""Takes rows and a seed, gives the anchors of each row; knows nothing of blocks, models or devices (CPU, numpy)."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.records import PADDING_DOCUMENT, TokenRows

Int64 = NDArray[np.int64]


def eligible_positions(document_ids_BS: Tensor, loss_mask_BS: Tensor) -> Tensor:
    """`[B, S]` bool: positions a such that a and a + 1 lie in the same document and both are supervised."""
    eligible_BS = torch.zeros_like(loss_mask_BS)
    same_document = (document_ids_BS[:, :-1] == document_ids_BS[:, 1:]) & (document_ids_BS[:, :-1] != PADDING_DOCUMENT)
    eligible_BS[:, :-1] = same_document & loss_mask_BS[:, :-1] & loss_mask_BS[:, 1:]
    return eligible_BS


def share_out(counts: Int64, total: int, floor: int) -> Int64:
    """Share `total` anchors among documents with `counts` eligible positions; returns int64 quotas, none above its count.

    Every document first gets `min(floor, count)` (as far as `total` reaches, smallest grant first in document order); the
    rest goes in proportion to the positions left, by largest remainder. The quotas sum to min(total, counts.sum()).
    """
    total = min(total, int(counts.sum()))
    quotas = np.minimum(counts, floor)
    while quotas.sum() > total:  # more documents than anchors allow at this floor: lower the floor
        floor -= 1
        quotas = np.minimum(counts, floor)
    if floor == 0 and total < (counts > 0).sum():
        return _largest_remainder(counts, total)
    return quotas + _largest_remainder(counts - quotas, total - int(quotas.sum()))


def _largest_remainder(weights: Int64, total: int) -> Int64:
    """Integers proportional to `weights`, each at most its weight, summing to min(total, weights.sum())."""
    if total == 0 or weights.sum() == 0:
        return np.zeros_like(weights)
    exact = weights * (total / weights.sum())
    shares = np.minimum(np.floor(exact).astype(np.int64), weights)
    by_remainder = np.argsort(-(exact - shares), kind="stable")
    for index in by_remainder[: total - int(shares.sum())]:
        shares[index] += 1
    return shares


def draw_anchors(
    rows: TokenRows, *, per_row: int, document_floor: int, seed: int, epochs_B: Sequence[int]
) -> tuple[Tensor, Tensor, int]:
    """Draw the anchors of each row: `anchors_BA` int64 sorted (0 where dropped), `keep_BA` bool, and the eligible count.

    Without replacement, uniform within a document, shared out among documents by `share_out`. The draw depends on
    (seed, epoch of the row, row id) alone, through a counter-based generator (Philox), so a resumed run, another batch composition
    or another number of processes draws the same ones. Exactly A = `per_row` slots; the kept ones come first.
    """
    eligible_BS = eligible_positions(rows.document_ids_BS, rows.loss_mask_BS).numpy()
    document_ids_BS = rows.document_ids_BS.numpy()
    anchors_BA = np.zeros((len(eligible_BS), per_row), dtype=np.int64)
    keep_BA = np.zeros((len(eligible_BS), per_row), dtype=bool)
    for b, (row_id, epoch) in enumerate(zip(rows.row_ids_B.tolist(), epochs_B, strict=True)):
        generator = np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[row_id, 0, 0, 0]))
        positions = np.flatnonzero(eligible_BS[b])
        _, counts = np.unique(document_ids_BS[b, positions], return_counts=True)
        groups = np.split(positions, np.cumsum(counts)[:-1]) if len(positions) else []
        quotas = share_out(counts.astype(np.int64), per_row, document_floor)
        drawn = [generator.choice(group, size=quota, replace=False) for group, quota in zip(groups, quotas, strict=True)]
        chosen = np.sort(np.concatenate(drawn)) if drawn else np.zeros(0, dtype=np.int64)
        anchors_BA[b, : len(chosen)] = chosen
        keep_BA[b, : len(chosen)] = True
    return torch.from_numpy(anchors_BA), torch.from_numpy(keep_BA), int(eligible_BS.sum())
