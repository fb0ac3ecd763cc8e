"""Inputs, labels and weights of blocks against plain loops, at every awkward place of a row."""

import math

import pytest
import torch
from toys import MASK, rows_of

from outrider.layout.anchors import draw_anchors
from outrider.layout.blocks import build_blocks, slot_decay
from outrider.records import DraftBlocks, TokenRows

K, GAMMA = 4, 4.0


def blocks_at(rows: TokenRows, anchors: list[list[int]], keep: list[list[bool]] | None = None) -> DraftBlocks:
    kept = torch.tensor(keep) if keep else torch.ones(len(anchors), len(anchors[0]), dtype=torch.bool)
    return build_blocks(rows, torch.tensor(anchors), kept, block_size=K, mask_token_id=MASK, gamma=GAMMA)


def check_against_loops(rows: TokenRows, blocks: DraftBlocks) -> None:
    """01-dflash, "Labels, weights, loss", in plain loops."""
    ids, documents, supervised = rows.input_ids_BS.tolist(), rows.document_ids_BS.tolist(), rows.loss_mask_BS.tolist()
    S = len(ids[0])
    for b, anchors in enumerate(blocks.anchors_BA.tolist()):
        for i, a in enumerate(anchors):
            reachable = bool(blocks.keep_BA[b, i])
            for k in range(K):
                place = a + k
                assert blocks.positions_BAK[b, i, k] == rows.positions_BS[b, a] + k
                assert blocks.noise_ids_BAK[b, i, k] == (ids[b][a] if k == 0 else MASK)
                if k == 0:
                    assert blocks.weights_BAK[b, i, k] == 0
                    continue
                reachable = reachable and place < S and documents[b][place] == documents[b][a] and supervised[b][place]
                expected = math.exp(-(k - 1) / GAMMA) if reachable else 0.0
                assert float(blocks.weights_BAK[b, i, k]) == pytest.approx(expected, rel=1e-6)
                assert blocks.labels_BAK[b, i, k] == (ids[b][place] if reachable else 0)


@pytest.mark.parametrize("length", [1, 2, K - 1, K, K + 1, 2 * K])
def test_documents_shorter_and_longer_than_a_block(length: int) -> None:
    """A block at every position of the document; the next document's tokens are never labels."""
    rows = rows_of([[[9] * 3, list(range(10, 10 + length)), [99] * 5]], length=8 + length)
    blocks = blocks_at(rows, [[3 + i for i in range(length)]])
    check_against_loops(rows, blocks)
    assert not (blocks.labels_BAK == 99).any()
    assert (blocks.weights_BAK > 0).sum(-1)[0].tolist() == [min(K - 1, length - 1 - i) for i in range(length)]


def test_user_turn_in_the_middle_cuts_the_block() -> None:
    """What follows an unsupervised position cannot be reached, even if it is supervised again within the block."""
    supervised = [True, True, True, False, True, True, True, True]
    rows = rows_of([[list(range(20, 28))]], length=8, masks=[[supervised]])
    blocks = blocks_at(rows, [[0, 1, 2, 4]])
    check_against_loops(rows, blocks)
    assert (blocks.weights_BAK[0] > 0).tolist() == [
        [False, True, True, False], [False, True, False, False], [False, False, False, False], [False, True, True, True]]


def test_row_end_and_padding() -> None:
    full, padded = rows_of([[list(range(30, 40))]], length=10), rows_of([[list(range(30, 40))]], length=13)
    for rows in (full, padded):
        blocks = blocks_at(rows, [[6, 7, 8, 9]])
        check_against_loops(rows, blocks)
        assert blocks.labels_BAK[0].tolist() == [[0, 37, 38, 39], [0, 38, 39, 0], [0, 39, 0, 0], [0, 0, 0, 0]]


def test_dropped_block_has_no_weight() -> None:
    rows = rows_of([[list(range(30, 40))]], length=10)
    blocks = blocks_at(rows, [[2, 0]], [[True, False]])
    check_against_loops(rows, blocks)
    assert not blocks.weights_BAK[0, 1].any()


def test_random_rows_against_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    for seed in range(30):
        lengths = torch.randint(1, 12, (2, 4), generator=generator).tolist()
        documents = [[torch.randint(256, (n,), generator=generator).tolist() for n in row] for row in lengths]
        masks = [[(torch.rand(n, generator=generator) < 0.8).tolist() for n in row] for row in lengths]
        rows = rows_of(documents, length=48, masks=masks)
        anchors, keep, _ = draw_anchors(rows, per_row=12, document_floor=2, seed=seed, epochs_B=[0, 0])
        check_against_loops(rows, build_blocks(rows, anchors, keep, block_size=K, mask_token_id=MASK, gamma=GAMMA))


def test_every_drawn_block_has_something_to_learn() -> None:
    """An eligible anchor means that slot 1 is supervised."""
    rows = rows_of([[[1] * 9, [2] * 2, [3]]], length=16, masks=[[[False] * 4 + [True] * 5, [True] * 2, [True]]])
    anchors, keep, _ = draw_anchors(rows, per_row=16, document_floor=2, seed=0, epochs_B=[0])
    blocks = build_blocks(rows, anchors, keep, block_size=K, mask_token_id=MASK, gamma=GAMMA)
    assert torch.equal(blocks.weights_BAK[..., 1] > 0, keep)


def test_decay_starts_at_one_in_slot_one() -> None:
    assert slot_decay(4, 2.0).tolist() == pytest.approx([0.0, 1.0, math.exp(-0.5), math.exp(-1.0)])
