"""8-bit linear layers: the error of rounding and no more, half the memory, the report of what it costs, refusals."""

from dataclasses import replace

import pytest
import torch
from families import family_target
from torch import nn
from toys import noise, random_rows

from outrider.errors import UserError
from outrider.features.capture import capture
from outrider.features.eight_bit import MOST_TOKENS, in_8_bits, one_document
from outrider.features.fp8 import FINE, LARGEST, Fp8Linear, quantise_rows, quantised
from outrider.features.packed import PackedCapture
from outrider.features.projections import Projections, side_by_side
from outrider.features.target import Stretch

ON_CPU = (Stretch(torch.device("cpu"), range(6)),)
IDS = (1, 3)
ROWS = random_rows([[9, 40]], length=60, seed=4)


def test_rows_keep_three_bits_of_mantissa_whatever_their_size() -> None:
    values = noise(6, 64, seed=0) * torch.tensor([1e-6, 1e-3, 1.0, 1e3, 1e6, 0.0])[:, None]
    eight, scale = quantise_rows(values)
    assert eight.dtype == torch.float8_e4m3fn
    assert scale.shape == (6, 1)
    back, largest = eight.float() * scale, values.abs().amax(dim=-1, keepdim=True)
    # half of a step of 2^-3 of each value, or half of the least step (2^-9 of 448) below the normal numbers
    assert ((back - values).abs() <= torch.maximum(values.abs() / 16, largest * 2**-10 / LARGEST) * 1.001).all()
    assert not back[5].any()


@pytest.mark.parametrize("bias", [True, False])
def test_the_twin_of_a_linear_layer(bias: bool) -> None:
    layer = nn.Linear(64, 32, bias=bias).requires_grad_(False)
    with torch.no_grad():
        layer.weight.copy_(noise(32, 64, seed=1))
    x = noise(2, 5, 64, seed=2)
    found, truth = quantised(layer)(x), layer(x)
    assert found.shape == truth.shape
    assert 0.005 < float((found - truth).norm() / truth.norm()) < 0.05  # 3 bits on either side, averaged over 64 products


def test_8_bit_layers_side_by_side_are_each_their_own() -> None:
    layers = [quantised(nn.Linear(32, n, bias=False)) for n in (16, 48)]
    x = noise(3, 32, seed=0)
    apart = [layer(x) for layer in layers]
    joint = side_by_side(*layers)
    assert isinstance(joint, Projections)
    for a, b in zip(apart, joint(x), strict=True):
        torch.testing.assert_close(a, b)
    first, second = (layer.weight.data for layer in layers)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr(), "held once"


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gpt_oss"])
def test_a_target_in_8_bits_and_its_report(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    exact_target, document = family_target(family), one_document(ROWS)
    exact = capture(exact_target, document, IDS).values_BSF
    target, errors = in_8_bits(family_target(family), ROWS, IDS, ON_CPU)
    rough = capture(target, document, IDS).values_BSF
    for j, error in enumerate(errors):
        a, b = (v.unflatten(-1, (2, -1))[..., j, :] for v in (rough, exact))
        assert error == pytest.approx(float((a - b).norm() / b.norm()), rel=1e-3)
        assert 1e-3 < error < 0.5
    linear = {name: type(module) for name, module in target.layers.named_modules() if isinstance(module, (nn.Linear, Fp8Linear))}
    fine = {name for name in linear if name.endswith(FINE) or int(name.split(".")[0]) > max(IDS)}
    assert {name for name, kind in linear.items() if kind is Fp8Linear} == set(linear) - fine
    said = capsys.readouterr().err
    assert f"layer 1 {100 * errors[0]:.1f} %, layer 3 {100 * errors[1]:.1f} %" in said
    assert "document of 40 tokens" in said


def test_packed_and_apart_agree_in_8_bits() -> None:
    target, errors = in_8_bits(family_target("qwen3_5"), ROWS, IDS, ON_CPU)
    packed = PackedCapture(target, IDS, compiled=False)(ROWS).values_BSF
    apart = capture(target, ROWS, IDS).values_BSF
    # a float32 sum in another order may fall on the other side of an 8-bit step, a few times, where the error to the exact
    # features has every value off
    assert float((packed - apart).norm() / apart.norm()) < 0.3 * errors[-1]


def test_the_longest_document_is_measured_on() -> None:
    rows = random_rows([[3, MOST_TOKENS + 9, 5]], length=MOST_TOKENS + 20, seed=0)
    assert torch.equal(one_document(rows).input_ids_BS[0], rows.input_ids_BS[0, 3 : 3 + MOST_TOKENS])


class OtherLinear(nn.Linear):
    """As another library's quantised layer."""


def test_refusals() -> None:
    target = family_target("llama")
    target.facts = replace(target.facts, quantised="awq")
    with pytest.raises(UserError, match=r'quantised already.*use "as_loaded"'):
        in_8_bits(target, ROWS, IDS, ON_CPU)
    target = family_target("llama")
    for layer in target.layers:
        for name, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear):
                layer.set_submodule(name, OtherLinear(module.in_features, module.out_features, bias=False))
    with pytest.raises(UserError, match="no plain linear layer"):
        in_8_bits(target, ROWS, IDS, ON_CPU)
