"""Takes linear layers, gives the same ones with 8-bit weights and inputs, scaled by row; knows nothing of targets or rows."""

import torch
from torch import Tensor, nn

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
        return scaled_product(x, self.weight, self.scale, self.bias)


def scaled_product(x: Tensor, weight_ND: Tensor, scale_N1: Tensor, bias_N: Tensor | None) -> Tensor:
    """`[..., D]` times the e4m3 rows, in x's dtype: fp32 sums; on a CPU, which has no such product, over float32 copies."""
    x8_XD, scale_X1 = quantise_rows(x.flatten(0, -2))
    if x.is_cuda:
        out_XN = torch._scaled_mm(
            x8_XD, weight_ND.T, scale_a=scale_X1, scale_b=scale_N1.T, bias=bias_N, out_dtype=x.dtype, use_fast_accum=True
        )
    else:
        out_XN = ((x8_XD.float() * scale_X1) @ (weight_ND.float() * scale_N1).T).to(x.dtype)
        out_XN = out_XN if bias_N is None else out_XN + bias_N
    return out_XN.unflatten(0, x.shape[:-1])


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
