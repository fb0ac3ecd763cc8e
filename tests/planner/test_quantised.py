"""Weights that came quantised: bits a weight as the config states them, against what the libraries' own layers hold."""

from typing import Any

import pytest
from test_ledger import born_from  # noqa: F401 - the fixture

from outrider.planner.ledger import capturer
from outrider.planner.plan import changes_of
from outrider.planner.quantised import read_quantised
from outrider.planner.target_shapes import target_shape

PLAIN = {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 4, "vocab_size": 4096, "intermediate_size": 3072,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": False}
ATTENTION, FEED = 1024 * 64 * (16 + 2 * 8) + 16 * 64 * 1024, 3 * 1024 * 3072


def bits(**config: Any) -> float | None:
    found = read_quantised({"quantization_config": config})
    return None if found is None else found.bits


@pytest.mark.parametrize(("config", "expected"), [
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + (16 + 4) / 128),
    ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
    ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4 + (16 + 4) / 64),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2), ({"quant_method": "fp8"}, 8),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8), ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 4 + 0.125 + 32 / 64 / 256),
    ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}}, 4.5),
    ({"quant_method": "mxfp4"}, 4.25),
    # not known, or not stated: nothing is claimed
    ({"quant_method": "another"}, None), ({"quant_method": "gptq"}, None), ({"quant_method": "gptq", "bits": "four"}, None),
    ({"quant_method": "gptq", "bits": True}, None), ({"quant_method": "compressed-tensors", "config_groups": []}, None),
    ({"quant_method": "gptq", "bits": -4}, None),
])
def test_bits_of_a_weight_with_its_share_of_scales(config: dict[str, Any], expected: float | None) -> None:
    assert bits(**config) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(("spared", "packed"), [
    ([], ATTENTION + FEED), (["lm_head"], ATTENTION + FEED), (["model.layers.0.self_attn.q_proj"], ATTENTION + FEED),
    (["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"], FEED), (["re:.*mlp.*"], ATTENTION),
])
def test_parts_that_every_layer_spares_stay_in_the_runs_dtype(spared: list[str], packed: int) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "modules_to_not_convert": spared}
    shape = target_shape({**PLAIN, "quantization_config": config}, where="here")
    assert {layer.packed for layer in shape.layers} == {packed}
    assert {layer.matrices for layer in shape.layers} == {ATTENTION + FEED}


def test_the_ledger_counts_them_by_their_bits_and_suggests_no_other_quantisation(born_from: Any) -> None:  # noqa: F811
    from dataclasses import replace

    layers = tuple(replace(layer, packed=layer.matrices) for layer in born_from.target.layers)
    quantised = replace(born_from, target=replace(born_from.target, layers=layers, quantised="gptq", bits=4.15625))
    plain, four = capturer(born_from), capturer(quantised)
    matrices = sum(layer.matrices for layer in layers[: born_from.captured])
    assert plain.standing_bytes - four.standing_bytes == pytest.approx(matrices * (2 - 4.15625 / 8), rel=1e-6)
    assert any(line.name == "target: layers, 4.16 bits a weight (gptq)" for line in four.lines)
    assert not any("features.precision" in settings for settings, _ in changes_of(quantised, fp8=True))
    assert any("features.precision" in settings for settings, _ in changes_of(born_from, fp8=True))
