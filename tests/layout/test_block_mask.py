"""The tiles of the fused mask are those that the rule itself gives, tile by tile, in every layout."""

import dataclasses

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from outrider.layout.block_mask import block_mask, visible_spans
from outrider.layout.mask import dense_mask, visibility
from outrider.records import DraftBlocks, TokenRows


def layout(S: int, A: int, K: int, documents: list[list[int]], dropped: int, seed: int) -> tuple[TokenRows, DraftBlocks]:
    """Rows of the given document lengths (the rest padding) with A sorted random anchors, the last `dropped` of them empty."""
    generator = torch.Generator().manual_seed(seed)
    ids, positions = torch.full((len(documents), S), -1), torch.zeros(len(documents), S, dtype=torch.int64)
    anchors = torch.zeros(len(documents), A, dtype=torch.int64)
    for b, lengths in enumerate(documents):
        start = 0
        for number, length in enumerate(lengths):
            ids[b, start : start + length] = number
            positions[b, start : start + length] = torch.arange(length)
            start += length
        anchors[b, : A - dropped] = torch.randint(start, (A - dropped,), generator=generator).sort().values
    keep = (torch.arange(A) < A - dropped).expand(len(documents), A)
    zeros = torch.zeros(len(documents), A, K, dtype=torch.int64)
    rows = TokenRows(ids.clamp(min=0), ids, positions, ids >= 0, torch.arange(len(documents)))
    places = positions.gather(1, anchors)[:, :, None] + torch.arange(K)
    return rows, DraftBlocks(anchors, keep, zeros, places, zeros, zeros.float())


CASES = {
    "one document, whole tiles": (512, 32, 16, [[512]], 0),
    "packed": (640, 24, 16, [[100, 29, 300, 211]], 0),
    "padding and dropped blocks": (512, 40, 16, [[130, 200], [512]], 7),
    "all blocks dropped": (256, 8, 16, [[256]], 8),
    "row not a multiple of 128": (333, 16, 16, [[100, 233], [5, 1, 300]], 1),
    "queries not a multiple of 128": (384, 13, 10, [[384], [200, 184]], 2),
    "one token": (1, 2, 4, [[1]], 0),
    "127, 129": (127, 43, 3, [[60, 67]], 0),
    "1000": (1000, 63, 8, [[999], [1, 500, 400]], 5),
}


@pytest.mark.parametrize("window", [None, 7, 150])
@pytest.mark.parametrize("name", CASES)
def test_equals_create_block_mask(name: str, window: int | None) -> None:
    S, A, K, documents, dropped = CASES[name]
    rows, blocks = layout(S, A, K, documents, dropped, seed=len(name))
    B, Q, N = len(documents), A * K, S + A * K
    fast = block_mask(blocks, row_length=S, window=window)
    rule = visibility(rows.document_ids_BS, blocks.anchors_BA, blocks.keep_BA, block_size=K, window=window)

    def bounded(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return rule(b, h, q.clamp(max=Q - 1), n.clamp(max=N - 1)) & (q < Q) & (n < N)

    plain = create_block_mask(bounded, B, None, Q, N, device="cpu")
    assert fast.seq_lengths == plain.seq_lengths == (Q, N)
    for field in ("kv", "full_kv", "q", "full_q"):
        counts, expected = (getattr(mask, f"{field}_num_blocks") for mask in (fast, plain))
        torch.testing.assert_close(counts, expected, rtol=0, atol=0, msg=field)
        indices, wanted = (getattr(mask, f"{field}_indices") for mask in (fast, plain))
        used = torch.arange(indices.shape[-1]) < counts[..., None]
        assert torch.equal(indices[used], wanted[used]), field

    b, q, n = torch.meshgrid(torch.arange(B), torch.arange(Q), torch.arange(N), indexing="ij")
    dense = dense_mask(rows, blocks, window=window)
    assert torch.equal(fast.mask_mod(b, b, q, n), dense[:, 0])
    assert visible_spans(blocks, row_length=S, window=window).pairs == dense.sum()


def test_a_moved_anchor_moves_the_tiles() -> None:
    """The comparison above can fail: an anchor taken one position further is seen."""
    rows, blocks = layout(256, 8, 16, [[256]], 0, seed=1)
    moved = dataclasses.replace(blocks, anchors_BA=blocks.anchors_BA + 1, positions_BAK=blocks.positions_BAK + 1)
    dense = dense_mask(rows, blocks, window=None)
    b, q, n = torch.meshgrid(torch.arange(1), torch.arange(128), torch.arange(384), indexing="ij")
    assert not torch.equal(block_mask(moved, row_length=256, window=None).mask_mod(b, b, q, n), dense[:, 0])
