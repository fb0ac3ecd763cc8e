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
    floor = min(floor, int(counts.max(initial=0)))  # above the largest count a floor says nothing more
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


def anchor_lots(count: int, *, seed: int, epoch: int, row_id: int) -> NDArray[np.uint64]:
    """`count` random numbers that (seed, epoch, row id) alone decide; the smallest lots of a document win.

    Raw output of Philox (a counter-based generator), which no version of numpy changes. The generator counts up in the first
    words of its counter, so the row stands in the last: rows never share numbers. Word 2 keeps clear of the order of the rows.
    """
    counter = np.array([0, 0, 1, row_id], dtype=np.uint64)
    return np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64), counter=counter).random_raw(count)


def draw_anchors(
    rows: TokenRows, *, per_row: int, document_floor: int, seed: int, epochs_B: Sequence[int]
) -> tuple[Tensor, Tensor, int]:
    """Draw the anchors of each row: `anchors_BA` int64 sorted (0 where dropped), `keep_BA` bool, and the eligible count.

    Without replacement, uniform within a document, shared out among documents by `share_out`. The draw depends on
    (seed, epoch of the row, row id) alone, so a resumed run, another batch composition or another number of processes draws
    the same ones. Exactly A = `per_row` slots; the kept ones come first.
    """
    eligible_BS = eligible_positions(rows.document_ids_BS, rows.loss_mask_BS).numpy()
    document_ids_BS = rows.document_ids_BS.numpy()
    anchors_BA = np.zeros((len(eligible_BS), per_row), dtype=np.int64)
    keep_BA = np.zeros((len(eligible_BS), per_row), dtype=bool)
    for b, (row_id, epoch) in enumerate(zip(rows.row_ids_B.tolist(), epochs_B, strict=True)):
        positions = np.flatnonzero(eligible_BS[b])
        lots = anchor_lots(len(positions), seed=seed, epoch=epoch, row_id=row_id)
        _, counts = np.unique(document_ids_BS[b, positions], return_counts=True)
        quotas = share_out(counts.astype(np.int64), per_row, document_floor)
        starts = np.cumsum(counts) - counts
        drawn = [start + np.argsort(lots[start : start + count], kind="stable")[:quota]
                 for start, count, quota in zip(starts, counts, quotas, strict=True)]
        chosen = np.sort(positions[np.concatenate(drawn)]) if drawn else positions
        anchors_BA[b, : len(chosen)] = chosen
        keep_BA[b, : len(chosen)] = True
    return torch.from_numpy(anchors_BA), torch.from_numpy(keep_BA), int(eligible_BS.sum())
