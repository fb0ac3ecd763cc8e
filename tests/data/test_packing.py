"""Packing against a plain oracle: nothing split, nothing lost, each row within its length, best fit by the book."""

import random

import numpy as np
import pytest

from outrider.data.packing import build_row, has_anchor, pack, packing_order


def oracle(lengths, row_length):
    """Best fit in shuffled order, in plain loops: the least room that still fits; the one free longest at that room."""
    rows, room, since = [], [], []
    for clock, document in enumerate(packing_order(len(lengths))):
        fitting = [row for row in range(len(rows)) if room[row] >= lengths[document]]
        if fitting:
            row = min(fitting, key=lambda row: (room[row], since[row]))
        else:
            row = len(rows)
            rows.append([])
            room.append(row_length)
            since.append(0)
        rows[row].append(document)
        room[row] -= lengths[document]
        since[row] = clock
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_equals_the_oracle(seed):
    draw = random.Random(seed)
    row_length = draw.choice([2, 7, 8, 9, 64])
    edges = [1, 2, 7, 8, 9, row_length - 1, row_length]
    lengths = [min(draw.choice([*edges, draw.randint(1, row_length)]), row_length) for _ in range(draw.randint(1, 120))]
    rows = pack(lengths, row_length=row_length)
    assert rows == oracle(lengths, row_length)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[document] for document in row) <= row_length for row in rows)


def test_small_cases():
    assert pack([], row_length=8) == []
    assert pack([8], row_length=8) == [[0]]
    assert sorted(map(sorted, pack([3, 5, 8], row_length=8))) == [[0, 1], [2]]
    with pytest.raises(AssertionError):
        pack([9], row_length=8)
    with pytest.raises(AssertionError):
        pack([0], row_length=8)


def test_rows_mix_what_the_file_and_the_lengths_keep_apart():
    lengths = [100] * 200 + [50] * 400  # two kinds, one after the other
    rows = pack(lengths, row_length=1000)
    assert sum(len({lengths[document] for document in row}) == 2 for row in rows) >= len(rows) - 2
    assert len(rows) <= 42  # 40 would be full


def test_build_row():
    documents = [(np.array([5, 6, 7], np.int32), np.array([False, True, True])), (np.array([8], np.int32), np.array([True]))]
    row = build_row(documents, row_length=6)
    assert row.input_ids.tolist() == [5, 6, 7, 8, 0, 0]
    assert row.document_ids.tolist() == [0, 0, 0, 1, -1, -1]
    assert row.loss_mask.tolist() == [False, True, True, True, False, False]
    with pytest.raises(AssertionError):
        build_row(documents, row_length=3)


@pytest.mark.parametrize(("mask", "expected"), [([], False), ([1], False), ([0, 0], False), ([1, 0, 1], False),
                                                ([0, 1, 1], True)])
def test_an_anchor_needs_two_neighbours(mask, expected):
    assert has_anchor(np.array(mask, dtype=np.bool_)) is expected
