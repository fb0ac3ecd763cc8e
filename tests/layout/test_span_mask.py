"""The intervals of the span mask are the rule's: for each query its keys, for each tile of keys the queries that see it."""

import dataclasses

import pytest
import torch
from layouts import CASES, layout

from outrider.layout.mask import dense_mask
from outrider.layout.span_mask import SpanMask, span_mask
from outrider.records import DraftBlocks, TokenRows


def check(mask: SpanMask, rows: TokenRows, blocks: DraftBlocks, window: int | None) -> None:
    """Against the whole table of who sees whom, with loops."""
    dense_BQN = dense_mask(rows, blocks, window=window)[:, 0]
    B, _, N = dense_BQN.shape
    low, high, slots_low, slots_high = (x[:, :, None] for x in mask.spans_4BQ)
    n = torch.arange(N)
    assert torch.equal(((n >= low) & (n < high)) | ((n >= slots_low) & (n < slots_high)), dense_BQN)
    S, step = mask.row_length, mask.key_tile
    tiles = [(start, min(start + step, S)) for start in range(0, S, step)]
    tiles += [(start, min(start + step, N)) for start in range(S, N, step)]
    assert mask.seen_by_BT4.shape == (B, len(tiles), 4)
    for b in range(B):
        for t, (start, end) in enumerate(tiles):
            first, last, full_first, full_last = mask.seen_by_BT4[b, t].tolist()
            seen_Q = dense_BQN[b, :, start:end].any(dim=1)
            assert not seen_Q[:first].any()
            assert not seen_Q[last:].any()
            assert dense_BQN[b, full_first:full_last, start:end].all()
            assert full_last <= full_first or (end - start == step and first <= full_first and full_last <= last)
            if start < S and seen_Q.any():
                assert seen_Q[first], "the interval is not tight"
                assert seen_Q[last - 1], "the interval is not tight"


@pytest.mark.parametrize("window", [None, 7, 150])
@pytest.mark.parametrize("key_tile", [32, 128])
@pytest.mark.parametrize("name", CASES)
def test_says_what_the_rule_says(name: str, key_tile: int, window: int | None) -> None:
    S, A, K, documents, dropped = CASES[name]
    rows, blocks = layout(S, A, K, documents, dropped, seed=len(name))
    check(span_mask(blocks, row_length=S, window=window, key_tile=key_tile), rows, blocks, window)


def test_finds_the_queries_that_see_all_of_a_tile() -> None:
    """All anchors behind the first 128 keys of a row of one document: every query sees all of that tile."""
    _, blocks = layout(512, 24, 16, [[512]], 0, seed=0)
    blocks = dataclasses.replace(blocks, anchors_BA=300 + 5 * torch.arange(24)[None], positions_BAK=blocks.positions_BAK * 0
                                 + (300 + 5 * torch.arange(24))[None, :, None] + torch.arange(16))
    assert span_mask(blocks, row_length=512, window=None, key_tile=128).seen_by_BT4[0, 0].tolist() == [0, 384, 0, 384]


def test_unsorted_anchors_cover_no_tile_with_a_gap() -> None:
    """What the kernels take for wholly seen must be so, even if the anchors were not sorted."""
    rows, blocks = layout(384, 8, 16, [[384]], 0, seed=3)
    order = torch.tensor([5, 0, 7, 2, 1, 6, 3, 4])
    mixed = dataclasses.replace(blocks, anchors_BA=blocks.anchors_BA[:, order], positions_BAK=blocks.positions_BAK[:, order])
    check(span_mask(mixed, row_length=384, window=None, key_tile=32), rows, mixed, None)


def test_a_moved_anchor_is_noticed() -> None:
    rows, blocks = layout(256, 8, 16, [[256]], 0, seed=1)
    moved = dataclasses.replace(blocks, anchors_BA=blocks.anchors_BA + 1, positions_BAK=blocks.positions_BAK + 1)
    with pytest.raises(AssertionError):
        check(span_mask(moved, row_length=256, window=None, key_tile=128), rows, blocks, None)
