"""Takes linear layers, gives the same ones with 8-bit weights and inputs, scaled by row; knows nothing of targets or rows."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448
FINE = ("in_proj_b", "in_proj_a")  # 0.5 % of a gated delta net's weights; their outputs decide what its state keeps
MULTIPLE = 16  # both sizes of a scaled product must be multiples of it


def quantise_rows(values_XD: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as e4m3 `[X, D]` and their float32 scales `[X, 1]`: value = e4m3 * scale, the largest of a row at 448."""
    scale_X1 = values_XD.abs().amax(dim=-1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (values_XD.float() / scale_X1).clamp(-LARGEST, LARGEST).to(E4M3), scale_X1


class Fp8Linear(nn.Module):
    """`x W^T + b` with e4m3 weights `[N, D]`, one scale a row, and inputs quantised by token as they come."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=E4M3), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(out_features, 1, dtype=torch.float32), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.product(*quantise_rows(x.flatten(0, -2)), x.dtype).unflatten(0, x.shape[:-1])

    def product(self, x8_XD: Tensor, scale_X1: Tensor, dtype: torch.dtype) -> Tensor:
        """Of inputs that are in 8 bits already, `[X, N]` in `dtype`."""
        return scaled_product(x8_XD, scale_X1, self.weight, self.scale, self.bias, dtype)


def scaled_product(
    x8_XD: Tensor, scale_X1: Tensor, weight_ND: Tensor, scale_N1: Tensor, bias_N: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`[X, D]` times the e4m3 rows, `[X, N]`: fp32 sums; on a CPU, which has no such product, over float32 copies."""
    if x8_XD.is_cuda:
        return torch._scaled_mm(
            x8_XD, weight_ND.T, scale_a=scale_X1, scale_b=scale_N1.T, bias=bias_N, out_dtype=dtype, use_fast_accum=True
        )
    out_XN = ((x8_XD.float() * scale_X1) @ (weight_ND.float() * scale_N1).T).to(dtype)
    return out_XN if bias_N is None else out_XN + bias_N


@torch.library.custom_op("outrider::swiglu_in_8_bits", mutates_args=())
def swiglu_in_8_bits(gate_up_XF: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) * up as `quantise_rows` gives it, `[X, F / 2]` and `[X, 1]`; `gate_up_XF` holds both side by side."""
    gate, up = gate_up_XF.float().chunk(2, dim=-1)
    return quantise_rows(F.silu(gate) * up)


@swiglu_in_8_bits.register_kernel("cuda")
def _(gate_up_XF: Tensor) -> tuple[Tensor, Tensor]:
    from outrider.features.passes_cuda import swiglu_cuda

    return swiglu_cuda(gate_up_XF, LARGEST)


@swiglu_in_8_bits.register_fake
def _(gate_up_XF: Tensor) -> tuple[Tensor, Tensor]:
    return _empty_rows(gate_up_XF, gate_up_XF.shape[1] // 2)


@torch.library.custom_op("outrider::gated_norm_in_8_bits", mutates_args=())
def gated_norm_in_8_bits(x_XHE: Tensor, gate_XF: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Each head's RMSNorm, times silu(gate), as `quantise_rows` gives it, `[X, H * E]` and `[X, 1]`."""
    x = x_XHE.float()
    normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight_E.float()
    return quantise_rows(normed.flatten(1) * F.silu(gate_XF.float()))


@gated_norm_in_8_bits.register_kernel("cuda")
def _(x_XHE: Tensor, gate_XF: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from outrider.features.passes_cuda import gated_norm_cuda

    return gated_norm_cuda(x_XHE, gate_XF, weight_E, eps, LARGEST)


@gated_norm_in_8_bits.register_fake
def _(x_XHE: Tensor, gate_XF: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _empty_rows(gate_XF, gate_XF.shape[1])


def _empty_rows(like: Tensor, width: int) -> tuple[Tensor, Tensor]:
    return like.new_empty(len(like), width, dtype=E4M3), like.new_empty(len(like), 1, dtype=torch.float32)


def quantised(layer: nn.Linear) -> Fp8Linear:
    """The 8-bit twin of a linear layer, on its device."""
    with torch.device(layer.weight.device):
        eight = Fp8Linear(layer.in_features, layer.out_features, layer.bias is not None)
    weight_ND, scale_N1 = quantise_rows(layer.weight.detach())
    eight.weight.data.copy_(weight_ND)
    eight.scale.data.copy_(scale_N1)
    if layer.bias is not None and eight.bias is not None:
        eight.bias.data = layer.bias.detach()
    return eight


def can_quantise(module: nn.Module) -> bool:
    """Whether a module is a linear layer that a scaled product can take over."""
    return type(module) is nn.Linear and module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0
