"""Takes linear layers that read the same input, gives one product for all of them, in the memory they had; knows no models."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.features.fp8 import Fp8Linear, quantise_rows, scaled_product


class Projections(nn.Module):
    """Plain or 8-bit linear layers side by side, as one product.

    The layers stay usable: their weights become slices of the joint one, so that nothing is held twice.
    """

    def __init__(self, layers: Sequence[nn.Linear] | Sequence[Fp8Linear]) -> None:
        super().__init__()
        assert can_join(layers)
        self.sizes = [layer.weight.shape[0] for layer in layers]
        self.register_buffer("weight", join([layer.weight for layer in layers]), persistent=False)
        self.register_buffer("scale", join([layer.scale for layer in layers if isinstance(layer, Fp8Linear)]), persistent=False)

    def joint(self, x: Tensor) -> Tensor:
        """The layers' outputs side by side."""
        weight = self.get_buffer("weight")
        if self.scale is None:
            return F.linear(x, weight)
        eight = quantise_rows(x.flatten(0, -2))
        return scaled_product(*eight, weight, self.get_buffer("scale"), None, x.dtype).unflatten(0, x.shape[:-1])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """The layers' outputs, in order."""
        return self.joint(x).split(self.sizes, dim=-1)


class OneByOne(nn.Module):
    """Layers side by side that cannot be joined, each by its own product."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer in self.layers)


def side_by_side(*layers: nn.Module) -> nn.Module:
    """One product for the layers where their weights can be joined, else one each (weights of another library's kind)."""
    return Projections(layers) if can_join(layers) else OneByOne(layers)  # type: ignore[arg-type]


def can_join(layers: Sequence[nn.Module]) -> bool:
    """Whether all are plain linear layers, or all 8-bit ones, without bias, and none does more than its product.

    A library that quantises a layer's inputs puts a `forward` on the layer itself and leaves its type as it was.
    """
    kinds = {type(layer) for layer in layers}
    plain = kinds in ({nn.Linear}, {Fp8Linear}) and all(layer.bias is None for layer in layers)
    return plain and not any("forward" in vars(layer) for layer in layers)


def join(parameters: Sequence[Tensor]) -> Tensor | None:
    """The rows of all parameters in one tensor; each becomes a view of its own rows. None of none."""
    if not parameters:
        return None
    first = parameters[0]
    joint = torch.empty(sum(len(p) for p in parameters), first.shape[1], dtype=first.dtype, device=first.device)
    for parameter, rows in zip(parameters, joint.split([len(p) for p in parameters]), strict=True):
        rows.copy_(parameter.data)
        parameter.data = rows
    return joint
