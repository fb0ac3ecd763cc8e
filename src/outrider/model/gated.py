"""Takes gate and up projections side by side and the down projection, gives their SwiGLU; knows nothing of layers.

The fast twin of drafter.FeedForward behind its first product. What lies between the products is one pass over memory each way:
the backward makes silu(gate) * up again for the weight's gradient while it makes the gate's and up's, so that neither pass
writes what another reads, and the activation is not kept (285 of 1,390 MiB a layer in the born-from case).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_down(gate_up_BQJ: Tensor, down_DI: Tensor) -> Tensor:
    """`(silu(gate) * up) W_down^T`, `[B, Q, D]`; J = 2 I, the gate first."""
    out_BQD: Tensor = _GatedDown.apply(gate_up_BQJ, down_DI)
    return out_BQD


class _GatedDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_BQJ: Tensor, down_DI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_BQJ, down_DI)
        return F.linear(gated(gate_up_BQJ), down_DI)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate_up_BQJ, down_DI = ctx.saved_tensors
        (out_BQD,) = gradients
        gate_up_gradient_BQJ, active_BQI = gated_backward(out_BQD @ down_DI, gate_up_BQJ)
        return gate_up_gradient_BQJ, out_BQD.flatten(0, 1).mT @ active_BQI.flatten(0, 1)


@torch.library.custom_op("outrider::gated", mutates_args=())
def gated(gate_up_BQJ: Tensor) -> Tensor:
    """silu(gate) * up, `[B, Q, I]`, in float32 at least, rounded once."""
    if gate_up_BQJ.is_cuda:
        from outrider.model import gated_cuda  # Triton exists only beside CUDA builds of torch

        return gated_cuda.forward(gate_up_BQJ)
    gate_BQI, up_BQI = _wide(gate_up_BQJ).chunk(2, dim=-1)
    return (F.silu(gate_BQI) * up_BQI).to(gate_up_BQJ.dtype)


@gated.register_fake
def _(gate_up_BQJ: Tensor) -> Tensor:
    return _half(gate_up_BQJ)


@torch.library.custom_op("outrider::gated_backward", mutates_args=())
def gated_backward(active_gradient_BQI: Tensor, gate_up_BQJ: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of gate and up, `[B, Q, J]`, and `gated` once more."""
    if gate_up_BQJ.is_cuda:
        from outrider.model import gated_cuda

        return gated_cuda.backward(active_gradient_BQI, gate_up_BQJ)
    gate_BQI, up_BQI = _wide(gate_up_BQJ).chunk(2, dim=-1)
    gradient_BQI, share_BQI = _wide(active_gradient_BQI), gate_BQI.sigmoid()
    silu_BQI = gate_BQI * share_BQI
    gate_gradient_BQI = gradient_BQI * up_BQI * (share_BQI + silu_BQI * (1 - share_BQI))
    both_BQJ = torch.cat((gate_gradient_BQI, gradient_BQI * silu_BQI), dim=-1)
    return both_BQJ.to(gate_up_BQJ.dtype), (silu_BQI * up_BQI).to(gate_up_BQJ.dtype)


@gated_backward.register_fake
def _(active_gradient_BQI: Tensor, gate_up_BQJ: Tensor) -> tuple[Tensor, Tensor]:
    return gate_up_BQJ.new_empty(gate_up_BQJ.shape), _half(gate_up_BQJ)


def _half(gate_up_BQJ: Tensor) -> Tensor:
    return gate_up_BQJ.new_empty(*gate_up_BQJ.shape[:-1], gate_up_BQJ.shape[-1] // 2)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.bfloat16 else x
