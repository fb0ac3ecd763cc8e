"""Packing against a plain oracle: nothing split, nothing lost, each row within its length, best fit by the book."""

import random

import numpy as np
import pytest

from outrider.data.packing import build_row, has_anchor, pack


def oracle(lengths, row_length):
    """Best fit decreasing in plain loops: the row with the least room that still fits; the one free longest at that room."""
    rows, room, since = [], [], []
    for clock, document in enumerate(sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))):
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
    assert pack([3, 5, 8, 1, 7], row_length=8) == [[2], [4, 3], [1, 0]]
    with pytest.raises(AssertionError):
        pack([9], row_length=8)
    with pytest.raises(AssertionError):
        pack([0], row_length=8)


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
