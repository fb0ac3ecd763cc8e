"""float32 as bf16 in its own memory and back: every upper half, rounding against torch's, and the GPU's twin."""

import pytest
import torch
from torch import Tensor

from outrider.model.halves import join_, split_

LOWS = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def every_upper_half(low: int) -> Tensor:
    """All float32 with these lower 16 bits, infinities, NaN and denormals with them, but for NaN that look infinite."""
    bits = (torch.arange(-(2**15), 2**15) << 16) | low
    values = bits.to(torch.int32).view(torch.float32)
    looks_infinite = values.isnan() & ((bits >> 16) & 0x7FFF == 0x7F80)
    return values[~looks_infinite]


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("low", LOWS)
def test_every_value_comes_back_to_the_bit(low: int) -> None:
    values = every_upper_half(low)
    wide = values.clone()
    narrow = split_(wide)
    assert narrow.data_ptr() == wide.data_ptr(), "in its own memory"
    assert torch.equal(narrow.isnan(), values.isnan())
    expected = values.to(torch.bfloat16)
    if low == 0x8000:  # a tie: torch rounds to even, here away from zero, by one unit at most
        off = (bits(narrow).int() - bits(expected).int())[~values.isnan()]
        assert off.unique().tolist() == [0, 1]
    else:
        assert torch.equal(bits(narrow)[~values.isnan()], bits(expected)[~values.isnan()])
    join_(wide)
    assert torch.equal(bits(wide), bits(values))


def test_one_value_and_an_odd_number_of_them() -> None:
    for n in (1, 7):
        values = torch.randn(n)
        wide = values.clone()
        assert torch.equal(split_(wide), values.bfloat16())
        join_(wide)
        assert torch.equal(wide, values)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: the twin is a Triton kernel")
def test_the_gpu_does_the_same() -> None:
    for values in (*map(every_upper_half, LOWS), torch.randn(4096 * 5 + 3), torch.randn(1)):
        here, there = values.clone(), values.cuda()
        assert torch.equal(bits(split_(there)).cpu(), bits(split_(here)))
        assert torch.equal(bits(there).cpu(), bits(here)), "the lower halves too"
        join_(there)
        assert torch.equal(bits(there).cpu(), bits(values))
