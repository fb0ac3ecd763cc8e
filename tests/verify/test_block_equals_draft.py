"""Training block == inference call, in float32: the most important test in the house (01-dflash)."""

import pytest
import torch
from overfit import random_drafter
from torch import Tensor
from toys import MASK, noise, random_rows, toy_shape

from outrider.layout.blocks import build_blocks
from outrider.layout.mask import dense_mask
from outrider.model.drafter import ContextCache, Drafter
from outrider.records import FULL, SLIDING, TokenRows

K, WINDOW = 4, 6
LENGTHS = [[9, 12, 5], [21]]  # documents shorter and longer than the window, and not at the row's start


def training_outputs(drafter: Drafter, rows: TokenRows, features: Tensor, noise_BQD: Tensor, anchors: Tensor) -> Tensor:
    blocks = build_blocks(rows, anchors, torch.ones_like(anchors, dtype=torch.bool), block_size=K, mask_token_id=MASK, gamma=4.0)
    masks = {kind: dense_mask(rows, blocks, window=WINDOW if kind == SLIDING else None) for kind in (FULL, SLIDING)}
    out = drafter(noise_BQD, features, blocks.positions_BAK.flatten(1), rows.positions_BS, masks)
    return out.view(*anchors.shape, K, -1)


def drafted(drafter: Drafter, noise_KD: Tensor, context_JF: Tensor, chunk: int) -> Tensor:
    """The block as inference drafts it, its context arriving in chunks (each with a block of its own, as when drafting)."""
    cache = ContextCache()
    for start in range(0, len(context_JF) - chunk, chunk):
        drafter.draft(torch.randn(1, K, noise_KD.shape[-1]), context_JF[None, start : start + chunk], cache)
    return drafter.draft(noise_KD[None], context_JF[None, cache.length :], cache)[0]


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("kinds", [(FULL, FULL), (SLIDING, SLIDING), (FULL, SLIDING)], ids=["full", "sliding", "mixed"])
def test_training_block_equals_inference_call(kinds: tuple[str, ...], chunk: int) -> None:
    shape = toy_shape(layer_types=kinds, sliding_window=WINDOW if SLIDING in kinds else None, block_size=K)
    drafter, rows = random_drafter(shape, seed=5), random_rows(LENGTHS, length=27, seed=0)
    features, D = noise(2, 27, 3 * shape.hidden_size, seed=1), shape.hidden_size
    for lengths, b in zip(LENGTHS, range(2), strict=True):
        anchors = torch.arange(sum(lengths))[None]  # every position: neighbouring blocks overlap, and blocks pass document ends
        row = TokenRows(*(getattr(rows, name)[b : b + 1] for name in
                          ("input_ids_BS", "document_ids_BS", "positions_BS", "loss_mask_BS", "row_ids_B")))
        noise_BQD = noise(1, anchors.shape[1] * K, D, seed=2 + b)
        trained = training_outputs(drafter, row, features[b : b + 1], noise_BQD, anchors)[0]
        for a, position in enumerate(row.positions_BS[0, anchors[0]].tolist()):
            context = features[b, a - position : a]
            inferred = drafted(drafter, noise_BQD[0, a * K : (a + 1) * K], context, chunk)
            # float32 rounding: the same sums over other widths
            torch.testing.assert_close(trained[a], inferred, atol=2e-5, rtol=2e-5)
