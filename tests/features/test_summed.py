"""Layers whose last products do the adding: which they are, and that the sum is made once and in place."""

import pytest
import torch
from families import FAMILIES, family_target
from torch import nn
from toys import random_rows

from outrider.features.packed import PackedCapture
from outrider.features.summed import SummedLayer, add_product, can_sum

SUMMED = ("llama", "mistral", "qwen3", "qwen3_5", "qwen3_5_multimodal")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma2"])
def test_only_layers_that_are_known_to_add_plainly(family: str) -> None:
    """Gemma norms before it adds, experts end in no one product, gpt-oss has biases: those keep transformers' forward."""
    packed = PackedCapture(family_target(family), (0, 2), compiled=False)
    assert {isinstance(forward.__self__, SummedLayer) for _, forward in packed._forwards} == {family in SUMMED}


def test_the_sum_is_made_in_the_residual_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    target, rows, places = family_target("llama"), random_rows([[5, 7]], length=12, seed=0), []
    monkeypatch.setattr("outrider.features.summed.add_product",
                        lambda total, y, weight: (places.append(total.data_ptr()), add_product(total, y, weight))[1])
    PackedCapture(target, (0, 2), compiled=False)(rows)
    assert len(places) == 2 * 3
    assert len(set(places)) == 1


def test_a_sum_is_rounded_once() -> None:
    """1 + (2^-8 + 2^-18) in bfloat16: the product rounded by itself is 2^-8, half a step of 1, which is lost."""
    y = torch.tensor([[2.0**-8, 2.0**-18]], dtype=torch.bfloat16)
    total, weight = torch.ones(1, 1, dtype=torch.bfloat16), torch.ones(1, 2, dtype=torch.bfloat16)
    assert float(total + y @ weight.T) == 1
    add_product(total, y, weight)
    assert float(total) == 1 + 2.0**-7


def test_what_does_more_than_a_product_is_left_alone() -> None:
    layer = family_target("llama").layers[0]
    plain = nn.Linear(4, 4, bias=False)
    assert can_sum(layer, plain, plain)
    assert not can_sum(layer, plain, nn.Linear(4, 4))
    assert not can_sum(nn.Identity(), plain, plain)
    patched = nn.Linear(4, 4, bias=False)
    patched.forward = lambda x: x * 2  # type: ignore[method-assign]
    assert not can_sum(layer, plain, patched)
