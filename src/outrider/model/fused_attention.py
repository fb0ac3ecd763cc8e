"""Takes a CUDA device, gives the attention without a score matrix that suits it and its mask; knows nothing of layers or rows.

The fast twins of attention.dense_attention: our own kernels (span_attention) where they apply, flex_attention elsewhere. The
latter is fused only inside torch.compile with the inductor backend: see tripwire, which makes any other run an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from outrider.layout.block_mask import block_mask
from outrider.layout.span_mask import span_mask
from outrider.model.attention import Attention
from outrider.model.span_attention import span_attention
from outrider.model.span_tiles import span_tiles
from outrider.records import DraftBlocks

SMALL_SHARED_MEMORY = 110 * 2**10  # bytes a thread block: sm_86, sm_89 and sm_120 have 99 KiB, sm_80 163, sm_90 227


def tile_options(*, shared_memory: int, head_dim: int) -> dict[str, bool | int]:
    """Kernel options for a device with `shared_memory` bytes a thread block (its opt-in limit).

    With head_dim > 128 the default tiles of the backward need 114,688 bytes, and a card that has 101,376 fails with a message
    about memory that is not the device's; tiles of 32 fit. ROWS_GUARANTEED_SAFE is never set: it asks that every query sees a
    key in each tile that its 128 neighbours touch, not just somewhere, and gave NaN here (and no speed).
    """
    options: dict[str, bool | int] = {}
    if shared_memory < SMALL_SHARED_MEMORY and head_dim > 128:
        options |= {f"bwd_{tile}": 32 for tile in ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")}
        options |= {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32}
    return options


def fused_attention(
    q_BHQC: Tensor, k_BGNC: Tensor, v_BGNC: Tensor, mask: BlockMask, *, options: Mapping[str, bool | int]
) -> Tensor:
    """Softmax attention over a BlockMask with H=None; `[B, H, Q, C]`. Query head h reads key/value head h * G // H."""
    kernel_options: Any = dict(options)
    return flex_attention(
        q_BHQC, k_BGNC, v_BGNC, block_mask=mask, enable_gqa=q_BHQC.shape[1] != k_BGNC.shape[1], kernel_options=kernel_options
    )


class BuildMask(Protocol):
    def __call__(self, blocks: DraftBlocks, *, row_length: int, window: int | None) -> Any: ...


@dataclass(frozen=True)
class FusedKernels:
    """An attention and what builds the mask that it takes. `name`: "span", our own kernels, or "flex"."""

    name: Literal["span", "flex"]
    attention: Attention
    mask: BuildMask


def span_kernels(device: torch.device, *, head_dim: int, dtype: torch.dtype) -> FusedKernels | None:
    """Our own kernels; None where they do not apply: another dtype than bf16, a head or a device that no tile suits."""
    tiles = span_tiles(capability=torch.cuda.get_device_capability(device), head_dim=head_dim)
    if dtype != torch.bfloat16 or tiles is None:
        return None
    return FusedKernels("span", span_attention, partial(span_mask, key_tile=tiles.backward.keys))


def flex_kernels(device: torch.device, *, head_dim: int) -> FusedKernels:
    """flex_attention with the tile options of this CUDA device."""
    properties: Any = torch.cuda.get_device_properties(device)
    options = tile_options(shared_memory=properties.shared_memory_per_block_optin, head_dim=head_dim)
    return FusedKernels("flex", partial(fused_attention, options=options), block_mask)


def kernels_for(device: torch.device, *, head_dim: int, dtype: torch.dtype) -> FusedKernels:
    """What is fastest on this CUDA device."""
    return span_kernels(device, head_dim=head_dim, dtype=dtype) or flex_kernels(device, head_dim=head_dim)
