"""Takes gate and up side by side on a GPU, gives silu(gate) * up or its gradient in one pass; knows nothing of products."""

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

BLOCK, WARPS = 1024, 4  # 16 bytes a thread of each tensor


@triton.jit
def _share(gate):  # type: ignore[no-untyped-def]
    """The logistic function, from exp alone: no overflow reaches the quotient but as infinity, which gives 0."""
    return 1.0 / (1.0 + tl.exp(-gate))


@triton.jit
def _place(I, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's row and its columns of one half."""
    parts = tl.cdiv(I, BLOCK)
    return (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _gated(gate_up, active, I, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, columns = _place(I, BLOCK)
    here = columns < I
    gate = tl.load(gate_up + row * 2 * I + columns, mask=here, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * I + I + columns, mask=here, other=0.0).to(tl.float32)
    tl.store(active + row * I + columns, gate * _share(gate) * up, mask=here)


@triton.jit
def _gated_backward(gradient, gate_up, gate_up_gradient, active, I, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, columns = _place(I, BLOCK)
    here = columns < I
    gate = tl.load(gate_up + row * 2 * I + columns, mask=here, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * I + I + columns, mask=here, other=0.0).to(tl.float32)
    d = tl.load(gradient + row * I + columns, mask=here, other=0.0).to(tl.float32)
    share = _share(gate)
    silu = gate * share
    tl.store(active + row * I + columns, silu * up, mask=here)
    tl.store(gate_up_gradient + row * 2 * I + columns, d * up * (share + silu * (1.0 - share)), mask=here)
    tl.store(gate_up_gradient + row * 2 * I + I + columns, d * silu, mask=here)


def forward(gate_up_BQJ: Tensor) -> Tensor:
    """gated.gated as one launch."""
    assert gate_up_BQJ.is_contiguous()
    *rows, J = gate_up_BQJ.shape
    active_BQI = gate_up_BQJ.new_empty(*rows, J // 2)
    _gated[_grid(gate_up_BQJ)](gate_up_BQJ, active_BQI, J // 2, BLOCK=BLOCK, num_warps=WARPS)
    return active_BQI


def backward(active_gradient_BQI: Tensor, gate_up_BQJ: Tensor) -> tuple[Tensor, Tensor]:
    """gated.gated_backward as one launch."""
    assert gate_up_BQJ.is_contiguous()
    gradient_BQJ, active_BQI = torch.empty_like(gate_up_BQJ), torch.empty_like(active_gradient_BQI)
    _gated_backward[_grid(gate_up_BQJ)](
        active_gradient_BQI.contiguous(), gate_up_BQJ, gradient_BQJ, active_BQI, gate_up_BQJ.shape[-1] // 2, BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return gradient_BQJ, active_BQI


def _grid(gate_up_BQJ: Tensor) -> tuple[int]:
    J = gate_up_BQJ.shape[-1]
    return (gate_up_BQJ.numel() // J * triton.cdiv(J // 2, BLOCK),)
