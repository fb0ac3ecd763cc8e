"""Takes rows and anchors, gives the blocks' inputs, labels and weights; knows nothing of models."""

import math

import torch
from torch import Tensor

from outrider.records import DraftBlocks, TokenRows


def slot_decay(block_size: int, gamma: float, device: torch.device | None = None) -> Tensor:
    """`[K]` float32: w_k = exp(-(k - 1) / gamma) for k >= 1, and 0 for slot 0, which has no label."""
    decay_K = torch.exp(-(torch.arange(block_size, dtype=torch.float32, device=device) - 1) / gamma)
    decay_K[0] = 0.0
    return decay_K


def build_blocks(
    rows: TokenRows, anchors_BA: Tensor, keep_BA: Tensor, *, block_size: int, mask_token_id: int, gamma: float
) -> DraftBlocks:
    """Blocks of K slots from each anchor: inputs, positions, labels and weights (see DraftBlocks).

    A slot is supervised when its position lies in the anchor's document and is supervised, and so are all slots before it
    (what follows an unsupervised position cannot be reached). Slots beyond the document's end stay, as masks of weight 0.
    """
    assert 0 < gamma < math.inf
    B, S = rows.input_ids_BS.shape
    A = anchors_BA.shape[1]
    slots_K = torch.arange(block_size, device=anchors_BA.device)
    places_BAK = anchors_BA[:, :, None] + slots_K
    inside_BAK = places_BAK < S
    flat_BX = places_BAK.clamp(max=S - 1).reshape(B, A * block_size)

    def at_places(table_BS: Tensor) -> Tensor:
        return table_BS.gather(1, flat_BX).reshape(B, A, block_size)

    documents_BAK = at_places(rows.document_ids_BS)
    reachable_BAK = inside_BAK & (documents_BAK == documents_BAK[:, :, :1]) & at_places(rows.loss_mask_BS)
    supervised_BAK = reachable_BAK[:, :, 1:].to(torch.uint8).cumprod(dim=2).bool() & keep_BA[:, :, None]
    weights_BAK = torch.zeros(B, A, block_size, device=anchors_BA.device)
    weights_BAK[:, :, 1:] = supervised_BAK * slot_decay(block_size, gamma, anchors_BA.device)[1:]
    tokens_BAK = at_places(rows.input_ids_BS)
    noise_ids_BAK = torch.full_like(tokens_BAK, mask_token_id)
    noise_ids_BAK[:, :, 0] = tokens_BAK[:, :, 0]
    return DraftBlocks(
        anchors_BA=anchors_BA,
        keep_BA=keep_BA,
        noise_ids_BAK=noise_ids_BAK,
        positions_BAK=rows.positions_BS.gather(1, anchors_BA)[:, :, None] + slots_K,
        labels_BAK=torch.where(weights_BAK > 0, tokens_BAK, 0),
        weights_BAK=weights_BAK,
    )
