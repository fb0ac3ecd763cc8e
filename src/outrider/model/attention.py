"""Takes queries, keys, values and who sees whom, gives attended values; knows nothing of layers, rows or devices."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Attention = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def dense_attention(q_BHQC: Tensor, k_BGNC: Tensor, v_BGNC: Tensor, mask_B1QN: Tensor | None) -> Tensor:
    """Softmax attention over a dense bool mask (None: everything is visible); `[B, H, Q, C]`. The reference, on any device.

    Every query must see at least one key. H must be a multiple of G: query head h reads key/value head h * G // H.
    """
    return F.scaled_dot_product_attention(q_BHQC, k_BGNC, v_BGNC, attn_mask=mask_B1QN, enable_gqa=True)


def rotary_table(positions_BX: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin `[B, 1, X, C]` float32 of the rotary embedding (arXiv 2104.09864), halves layout ("neox")."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=positions_BX.device).float() / head_dim
    angles_BXc = positions_BX[:, :, None].float() * (1.0 / theta**exponents)
    angles_B1XC = torch.cat((angles_BXc, angles_BXc), dim=-1)[:, None]
    return angles_B1XC.cos(), angles_B1XC.sin()


def rotate(x_BHXC: Tensor, cos_B1XC: Tensor, sin_B1XC: Tensor) -> Tensor:
    """Turn each pair (c, c + C/2) of channels by its angle; computed and returned in x's dtype."""
    first, second = x_BHXC.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_BHXC * cos_B1XC.to(x_BHXC.dtype) + turned * sin_B1XC.to(x_BHXC.dtype)
