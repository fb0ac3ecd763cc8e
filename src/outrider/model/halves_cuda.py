"""Takes float32 values on a GPU, rearranges them as halves.split_ and halves.join_ say; knows nothing of what they are for."""

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from outrider.model.halves import INFINITE

BLOCK = 4096
NAN_FROM = tl.constexpr(INFINITE + 1)


@triton.jit
def _carry(high, low):  # type: ignore[no-untyped-def]
    return tl.where((low >= 0x8000) & ((high & 0x7FFF) < NAN_FROM), 1, 0)


@triton.jit
def _split(bits, halves, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    lanes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = lanes < N
    whole = tl.load(bits + lanes, mask=here)
    low, high = whole & 0xFFFF, (whole >> 16) & 0xFFFF
    tl.store(halves + lanes, (high + _carry(high, low)).to(tl.int16), mask=here)
    tl.store(halves + N + lanes, low.to(tl.int16), mask=here)


@triton.jit
def _join(halves, bits, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    lanes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = lanes < N
    rounded = tl.load(halves + lanes, mask=here).to(tl.int32) & 0xFFFF
    low = tl.load(halves + N + lanes, mask=here).to(tl.int32) & 0xFFFF
    tl.store(bits + lanes, ((rounded - _carry(rounded, low)) << 16) | low, mask=here)


def split_cuda(wide_N: Tensor) -> None:
    """halves.split_ as one copy and one launch, 16 B a value."""
    N = len(wide_N)
    _split[(triton.cdiv(N, BLOCK),)](wide_N.clone().view(torch.int32), wide_N.view(torch.int16), N, BLOCK=BLOCK, num_warps=8)


def join_cuda(wide_N: Tensor) -> None:
    """halves.join_ as one copy and one launch, 16 B a value."""
    N = len(wide_N)
    _join[(triton.cdiv(N, BLOCK),)](wide_N.clone().view(torch.int16), wide_N.view(torch.int32), N, BLOCK=BLOCK, num_warps=8)
