"""Takes activations on a GPU, gives what several steps of a layer make of them, in one pass over memory; knows no models.

Each is the Triton kernel of an operator whose plain twin stands in kernels.py or fp8.py.
"""

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

BLOCK_X, WARPS = 32, 4  # tokens of one head in a program: of 128 channels, 32 values a thread
ROW_WARPS = 16  # a program holds a whole row of up to 32,768 values in registers: one read, where two passes read twice


@triton.jit
def _convolve(  # type: ignore[no-untyped-def]
    x, taps, bias, since_start, out, X, stride, first, C, heads, BIASED: tl.constexpr, NORMED: tl.constexpr, W: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_C: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    lanes = tl.arange(0, BLOCK_C)
    inside, real = place < X, lanes < C
    channels = first + tl.program_id(1) * C + lanes
    since = tl.load(since_start + place, mask=inside, other=0)
    total = tl.zeros([BLOCK_X, BLOCK_C], tl.float32)
    for back in tl.static_range(W):
        tap = tl.load(taps + channels * W + (W - 1 - back), mask=real, other=0.0).to(tl.float32)
        rows = (place - back).to(tl.int64)
        seen = (inside & (since >= back))[:, None] & real[None, :]
        earlier = tl.load(x + rows[:, None] * stride + channels[None, :], mask=seen, other=0.0).to(tl.float32)
        total += earlier * tap[None, :]
    if BIASED:
        total += tl.load(bias + channels, mask=real, other=0.0).to(tl.float32)[None, :]
    total = total * tl.sigmoid(total)
    if NORMED:
        total = total * tl.rsqrt(tl.sum(total * total, 1) + 1e-6)[:, None]
    to = (place.to(tl.int64) * heads + tl.program_id(1))[:, None] * C + lanes[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=inside[:, None] & real[None, :])


def convolve_cuda(
    x_XF: Tensor, taps_FW: Tensor, bias_F: Tensor | None, since_start_X: Tensor, key_heads: int, key_size: int, value_heads: int,
    value_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """kernels.convolve, one launch for each of q, k and v."""
    X = len(x_XF)
    assert x_XF.stride(1) == 1
    parts, first = [], 0
    for heads, size, normed in ((key_heads, key_size, True), (key_heads, key_size, True), (value_heads, value_size, False)):
        out = torch.empty(X, heads, size, dtype=x_XF.dtype, device=x_XF.device)
        _convolve[(triton.cdiv(X, BLOCK_X), heads)](
            x_XF, taps_FW, taps_FW if bias_F is None else bias_F, since_start_X, out, X, x_XF.stride(0), first, size, heads,
            BIASED=bias_F is not None, NORMED=normed, W=taps_FW.shape[1], BLOCK_X=BLOCK_X,
            BLOCK_C=triton.next_power_of_2(size), num_warps=WARPS,
        )
        parts.append(out)
        first += heads * size
    return parts[0], parts[1], parts[2]


@triton.jit
def _store_row(values, eight, scale, largest, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row's scale from its largest value; gives the values over it."""
    step = tl.maximum(largest, 1e-12) / LARGEST
    tl.store(scale, step)
    return tl.clamp(values / step, -LARGEST, LARGEST).to(eight.dtype.element_ty)


@triton.jit
def _swiglu(gate_up, eight, scale, F, LARGEST: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    real = lanes < F
    gate = tl.load(gate_up + row * 2 * F + lanes, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + lanes, mask=real, other=0.0).to(tl.float32)
    values = gate * tl.sigmoid(gate) * up
    rounded = _store_row(values, eight, scale + row, tl.max(tl.abs(values), 0), LARGEST)
    tl.store(eight + row * F + lanes, rounded, mask=real)


def swiglu_cuda(gate_up_XF: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """fp8.swiglu_in_8_bits, one program a row."""
    X, F = len(gate_up_XF), gate_up_XF.shape[1] // 2
    assert gate_up_XF.is_contiguous()
    eight_XF = torch.empty(X, F, dtype=torch.float8_e4m3fn, device=gate_up_XF.device)
    scale_X1 = torch.empty(X, 1, dtype=torch.float32, device=gate_up_XF.device)
    _swiglu[(X,)](gate_up_XF, eight_XF, scale_X1, F, LARGEST=largest, BLOCK=triton.next_power_of_2(F), num_warps=ROW_WARPS)
    return eight_XF, scale_X1


@triton.jit
def _gated_norm(  # type: ignore[no-untyped-def]
    x, gate, weight, eight, scale, gate_stride, eps, H, E, LARGEST: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    heads, lanes = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_E)[None, :]
    real = (heads < H) & (lanes < E)
    values = tl.load(x + row * H * E + heads * E + lanes, mask=real, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_stride + heads * E + lanes, mask=real, other=0.0).to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values, 1) / E + eps)[:, None]
    values = values * tl.load(weight + lanes, mask=lanes < E, other=0.0).to(tl.float32)
    values = values * gates * tl.sigmoid(gates)
    rounded = _store_row(values, eight, scale + row, tl.max(tl.max(tl.abs(values), 1), 0), LARGEST)
    tl.store(eight + row * H * E + heads * E + lanes, rounded, mask=real)


def gated_norm_cuda(x_XHE: Tensor, gate_XF: Tensor, weight_E: Tensor, eps: float, largest: float) -> tuple[Tensor, Tensor]:
    """fp8.gated_norm_in_8_bits, one program a token."""
    X, H, E = x_XHE.shape
    assert x_XHE.is_contiguous()
    assert gate_XF.stride(1) == 1
    eight_XF = torch.empty(X, H * E, dtype=torch.float8_e4m3fn, device=x_XHE.device)
    scale_X1 = torch.empty(X, 1, dtype=torch.float32, device=x_XHE.device)
    _gated_norm[(X,)](
        x_XHE, gate_XF, weight_E, eight_XF, scale_X1, gate_XF.stride(0), eps, H, E, LARGEST=largest,
        BLOCK_H=triton.next_power_of_2(H), BLOCK_E=triton.next_power_of_2(E), num_warps=ROW_WARPS,
    )
    return eight_XF, scale_X1
