"""Anchors: which positions may be one, how they are shared out, and what the draw depends on."""

from dataclasses import fields, replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from toys import random_rows, rows_of

from outrider.layout.anchors import anchor_lots, draw_anchors, eligible_positions, share_out
from outrider.records import TokenRows

Drawn = tuple[torch.Tensor, torch.Tensor, int]


def draw(rows: TokenRows, *, per_row: int = 8, floor: int = 2, seed: int = 0, epoch: int = 0) -> Drawn:
    return draw_anchors(rows, per_row=per_row, document_floor=floor, seed=seed, epochs_B=[epoch] * len(rows.row_ids_B))


def test_eligible_is_two_supervised_neighbours_of_one_document() -> None:
    generator = torch.Generator().manual_seed(3)
    documents = [[[1] * 7, [1], [1] * 2, [1] * 6], [[1] * 16], [[1] * 20]]
    masks = [[(torch.rand(len(d), generator=generator) < 0.7).tolist() for d in row] for row in documents]
    rows = rows_of(documents, length=20, masks=masks)
    document, supervised = rows.document_ids_BS.tolist(), rows.loss_mask_BS.tolist()
    expected = [[a + 1 < 20 and document[b][a] == document[b][a + 1] != -1 and supervised[b][a] and supervised[b][a + 1]
                 for a in range(20)] for b in range(3)]
    assert eligible_positions(rows.document_ids_BS, rows.loss_mask_BS).tolist() == expected
    assert 10 < sum(map(sum, expected)) < 35


def test_padding_is_never_eligible_even_if_marked() -> None:
    rows = rows_of([[[1, 2, 3]]], length=8)
    marked = torch.ones_like(rows.loss_mask_BS)
    assert eligible_positions(rows.document_ids_BS, marked).sum() == 2


def test_share_out_keeps_the_floor_and_the_proportion() -> None:
    """Floor for all, the rest within one anchor of exact proportion to the positions left, and the sum exact."""
    generator = np.random.default_rng(0)
    for _ in range(300):
        counts = generator.integers(0, 60, size=generator.integers(1, 9)).astype(np.int64)
        total, floor = int(generator.integers(1, 120)), int(generator.integers(0, 9))
        quotas = share_out(counts, total, floor)
        assert quotas.sum() == min(total, counts.sum())
        assert (quotas <= counts).all()
        assert (quotas >= 0).all()
        granted = np.minimum(counts, floor)
        if granted.sum() <= total and counts.sum() > granted.sum():
            assert (quotas >= granted).all()
            for count, quota, first in zip(counts, quotas, granted, strict=True):
                rest = Fraction(int(count - first) * int(quotas.sum() - granted.sum()), int((counts - granted).sum()))
                assert abs(int(quota - first) - rest) < 1


@pytest.mark.parametrize(("counts", "total", "floor", "expected"), [
    ([1000, 10], 100, 8, [92, 8]),      # the short document gets its floor, not its 1 %
    ([1000, 10], 100, 0, [99, 1]),      # no floor: proportion alone
    ([3, 1000], 20, 8, [3, 17]),        # a document shorter than the floor gives all it has
    ([50, 50, 50], 9, 8, [3, 3, 3]),    # a floor that cannot be kept is lowered for all alike
    ([9, 9, 9, 9], 2, 8, [1, 1, 0, 0]),  # fewer anchors than documents
    ([5, 0, 5], 100, 8, [5, 0, 5]),     # fewer positions than anchors
    ([], 5, 8, []),
])
def test_share_out_examples(counts: list[int], total: int, floor: int, expected: list[int]) -> None:
    assert share_out(np.array(counts, dtype=np.int64), total, floor).tolist() == expected


def test_always_a_slots_sorted_eligible_without_replacement() -> None:
    rows = random_rows([[30, 5, 2, 1], [40], [3], [1, 1], []], length=40, seed=0)
    eligible = eligible_positions(rows.document_ids_BS, rows.loss_mask_BS)
    for per_row in (1, 5, 64):
        anchors, keep, count = draw(rows, per_row=per_row)
        assert anchors.shape == keep.shape == (5, per_row)
        assert count == int(eligible.sum()) == 29 + 4 + 1 + 39 + 2
        for b in range(5):
            kept = anchors[b][keep[b]].tolist()
            assert kept == sorted(set(kept))
            assert all(eligible[b, a] for a in kept)
            assert len(kept) == min(per_row, int(eligible[b].sum()))
            assert keep[b].tolist() == [i < len(kept) for i in range(per_row)], "kept blocks come first"
            assert (anchors[b][~keep[b]] == 0).all()


def test_floor_reaches_the_drawn_anchors() -> None:
    rows = random_rows([[200, 6]], length=256, seed=0)
    anchors, keep, _ = draw(rows, per_row=16, floor=4)
    assert sum(200 <= a < 206 for a in anchors[keep].tolist()) == 4


def test_draw_depends_on_seed_epoch_and_row_id_alone() -> None:
    rows = random_rows([[60], [60], [30, 30]], length=64, seed=0)
    anchors, _, _ = draw(rows)
    again, _, _ = draw(rows)
    assert torch.equal(anchors, again)
    last = TokenRows(**{field.name: getattr(rows, field.name)[2:] for field in fields(rows)})
    assert torch.equal(draw(last)[0][0], anchors[2]), "the rows beside it must not matter"
    torch.manual_seed(99)
    np.random.seed(99)
    other_tokens = replace(rows, input_ids_BS=rows.input_ids_BS + 1)
    assert torch.equal(draw(other_tokens)[0], anchors), "nor tokens, nor any global generator"
    assert not torch.equal(draw(rows, seed=1)[0], anchors)
    assert not torch.equal(draw(rows, epoch=1)[0], anchors)
    assert not torch.equal(draw(replace(rows, row_ids_B=rows.row_ids_B + 1))[0], anchors)
    mixed = draw_anchors(rows, per_row=8, document_floor=2, seed=0, epochs_B=[0, 1, 0])[0]
    assert torch.equal(mixed[0], anchors[0])
    assert torch.equal(mixed[1], draw(rows, epoch=1)[0][1]), "each row has its own epoch"


def test_draw_is_committed() -> None:
    """A change here changes every run that is resumed across it: say so when this test is changed."""
    anchors, _, _ = draw(random_rows([[60]], length=64, seed=0), seed=7, epoch=3)
    assert anchors.tolist() == [[5, 6, 8, 25, 31, 33, 43, 51]]


def test_rows_and_epochs_share_no_random_numbers() -> None:
    """A counter that is set to the row number and counts up gives row r + 1 the numbers of row r, four further on."""
    lots = [number for seed in (0, 1) for epoch in (0, 1) for row in range(40)
            for number in anchor_lots(200, seed=seed, epoch=epoch, row_id=row).tolist()]
    assert len(set(lots)) == len(lots)


def test_draw_is_uniform_within_a_document() -> None:
    """3 of 10 eligible positions in 3000 rows: each 900 times, standard deviation 25; 5 of them allowed."""
    rows = random_rows([[11]], length=16, seed=0)
    hits = np.zeros(10)
    for row in range(3000):
        anchors, _, _ = draw(replace(rows, row_ids_B=torch.tensor([row])), per_row=3, floor=0)
        hits[anchors[0].numpy()] += 1
    assert np.abs(hits - 900).max() < 125, hits


def test_large_seeds_epochs_and_rows_are_legal() -> None:
    rows = replace(random_rows([[30]], length=32, seed=0), row_ids_B=torch.tensor([2**40]))
    draw(rows, seed=2**63 - 1, epoch=10**6)


def test_no_eligible_position_is_legal() -> None:
    rows = random_rows([[1, 1, 1], []], length=8, seed=0)
    anchors, keep, eligible = draw(rows, per_row=4)
    assert not anchors.any()
    assert not keep.any()
    assert eligible == 0


def test_a_huge_floor_is_the_largest_count() -> None:
    counts = np.array([5, 300, 2], dtype=np.int64)
    assert share_out(counts, 100, 10**9).tolist() == share_out(counts, 100, 300).tolist()
