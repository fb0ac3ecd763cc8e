"""A toy drafter trained on one document by the pieces of the training step; for tests of what decoding then accepts."""

import functools

import torch
from toys import rows_of

from outrider.features.capture import capture
from outrider.features.target import Target
from outrider.layout.blocks import build_blocks
from outrider.layout.mask import dense_mask
from outrider.model.attention import dense_attention
from outrider.model.drafter import Drafter, initialise
from outrider.objective.losses import plain_loss
from outrider.records import SLIDING, DrafterShape


def random_drafter(shape: DrafterShape, *, seed: int) -> Drafter:
    """A drafter from scratch, frozen, in float32."""
    drafter = Drafter(shape, dense_attention)
    initialise(drafter, seed=seed, head_scale=1.0)
    return drafter.requires_grad_(False)


@functools.cache
def overfit_drafter(target: Target, shape: DrafterShape, document: tuple[int, ...], *, prompt: int, steps: int) -> Drafter:
    """Train on blocks from every position of `document` after its first `prompt` tokens."""
    drafter = random_drafter(shape, seed=1).requires_grad_(True)
    rows = rows_of([[list(document)]], length=len(document))
    anchors = torch.arange(prompt, len(document) - 1)[None]
    blocks = build_blocks(rows, anchors, torch.ones_like(anchors, dtype=torch.bool), block_size=shape.block_size,
                          mask_token_id=shape.mask_token_id, gamma=float(shape.block_size))
    features = capture(target, rows, shape.target_layer_ids)
    masks = {kind: dense_mask(rows, blocks, window=shape.sliding_window if kind == SLIDING else None)
             for kind in set(shape.layer_types)}
    noise_BQD = target.embed(blocks.noise_ids_BAK.flatten(1))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=4e-3, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        hidden = drafter(noise_BQD, features.values_BSF, blocks.positions_BAK.flatten(1), rows.positions_BS, masks)
        terms = plain_loss(hidden, blocks, target.head)
        (terms.loss_sum / terms.weight_sum).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
    return drafter.requires_grad_(False)
