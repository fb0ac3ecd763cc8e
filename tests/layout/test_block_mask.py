"""The tiles of the fused mask are those that the rule itself gives, tile by tile, in every layout."""

import dataclasses

import pytest
import torch
from layouts import CASES, layout
from torch.nn.attention.flex_attention import create_block_mask

from outrider.layout.block_mask import block_mask, visible_spans
from outrider.layout.mask import dense_mask, visibility


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
