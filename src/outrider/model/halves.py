"""Takes float32 values, gives them rounded to bf16 in their own memory, and the float32 back to the bit; knows no weights.

The upper 16 bits of a float32 are a bf16, cut off instead of rounded; adding one where the lower 16 bits are at least half a
unit rounds to nearest (ties away from zero), and the lower bits still say whether that one was added. So [n] float32 can hold
[n] bf16, side by side as a product wants them, and the [n] lower halves behind: no bit is lost and nothing is held twice.
"""

import torch
from torch import Tensor

INFINITE = 0x7F80  # upper half of infinity; above it come the NaN, which are never rounded: a carry would make them zeros


def split_(wide_N: Tensor) -> Tensor:
    """Rearrange float32 `[N]` in place; returns the first half of its memory, the values in bf16 `[N]`, to be read only.

    Takes as much memory again while it works. A NaN whose upper half looks infinite (no arithmetic makes one) comes back as
    the largest finite value.
    """
    if wide_N.is_cuda:
        from outrider.model.halves_cuda import split_cuda  # Triton exists only beside CUDA builds of torch

        split_cuda(wide_N)
    else:
        low_N, high_N = wide_N.view(torch.int16).view(-1, 2).unbind(-1)  # little-endian
        rounded_N, low_N = high_N + _carry(high_N, low_N), low_N.clone()
        _halves(wide_N)[0].copy_(rounded_N)
        _halves(wide_N)[1].copy_(low_N)
    return upper(wide_N)


def join_(wide_N: Tensor) -> None:
    """Undo `split_`."""
    if wide_N.is_cuda:
        from outrider.model.halves_cuda import join_cuda

        join_cuda(wide_N)
        return
    rounded_N, low_N = _halves(wide_N)
    high_N = rounded_N - _carry(rounded_N, low_N)
    wide_N.copy_(torch.stack((low_N, high_N), dim=-1).flatten().view(torch.float32))


def upper(wide_N: Tensor) -> Tensor:
    """Where `split_` leaves the bf16 values of float32 `[N]`: `[N]` in the same memory."""
    return wide_N.view(torch.bfloat16)[: len(wide_N)]


def _halves(wide_N: Tensor) -> tuple[Tensor, ...]:
    return wide_N.view(torch.int16).chunk(2)


def _carry(high_N: Tensor, low_N: Tensor) -> Tensor:
    """1 where the lower half rounds the upper one up. From the rounded upper half it is the same, as no carry makes a NaN."""
    return ((low_N < 0) & ((high_N & 0x7FFF) <= INFINITE)).to(torch.int16)  # an int16 is below 0 where its upper bit is set
