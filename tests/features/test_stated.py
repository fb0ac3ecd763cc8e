"""A config that is read without its class means what transformers makes of it, and any other is left to transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from outrider.features.facts import facts_of, read_text_config
from outrider.features.stated import KINDS, read_stated, values_of
from outrider.planner.target_shapes import target_shape

BORN_FROM = Path(__file__).parents[2] / "examples" / "born-from"
PLAIN = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 512, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
LINEAR = {
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_num_value_heads": 4, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
}
OTHERS = {  # as published configs have them
    "architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": [2, 5],
    "use_cache": True,
    "attention_bias": False, "hidden_act": "silu", "initializer_range": 0.02, "rope_scaling": None, "attention_dropout": 0.0,
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 3, "transformers_version": "4.51.0",
}


def config(kind: str, **changes: Any) -> dict[str, Any]:
    found = {"model_type": kind, **PLAIN, **(LINEAR if kind == "qwen3_5_text" else {}), **changes}
    return {key: value for key, value in found.items() if value is not ...}


def by_transformers(values: dict[str, Any]) -> dict[str, Any]:
    values = json.loads(json.dumps(values))
    return AutoConfig.for_model(values.pop("model_type"), **values).get_text_config().to_dict()


def told(values: dict[str, Any]) -> tuple[Any, Any]:
    return facts_of(values, path="x"), target_shape(values, where="x")


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)), tied=st.booleans(), layers=st.integers(1, 9), heads=st.sampled_from([1, 2, 4, 8]),
    others=st.sets(st.sampled_from(sorted(OTHERS))), interval=st.integers(1, 5), new_rotation=st.booleans(),
)
def test_it_means_what_transformers_makes_of_it(
    kind: str, tied: bool, layers: int, heads: int, others: set[str], interval: int, new_rotation: bool
) -> None:
    rotation = {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}} if new_rotation else {}
    if kind == "qwen3_5_text":
        rotation["full_attention_interval"] = interval
    values = config(kind, tie_word_embeddings=tied, num_hidden_layers=layers, num_attention_heads=heads,
                    **{key: OTHERS[key] for key in others}, **rotation)
    found = values_of(values)
    assert found is not None
    assert told(found) == told(by_transformers(values))


def test_the_born_from_target_and_a_llama_that_names_no_head_dim() -> None:
    values = json.loads((BORN_FROM / "config.json").read_text())
    found = read_stated(BORN_FROM)
    assert found is not None
    assert told(found) == told(by_transformers(values))
    llama = config("llama", head_dim=...)
    found = values_of(llama)
    assert found is not None
    assert told(found) == told(by_transformers(llama))


@pytest.mark.parametrize("changes", [
    {"model_type": "qwen3_moe"}, {"model_type": "gemma2"}, {"model_type": ["qwen3"]}, {"model_type": ...},
    {"use_sliding_window": True}, {"layer_types": ["full_attention"] * 6},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}, "rope_theta": ...}, {"rope_theta": ...},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, {"quantization_config": {"quant_method": "gptq"}},
    {"auto_map": {"AutoConfig": "own.Config"}}, {"num_experts": 4}, {"hidden_size": "64"}, {"hidden_size": 0},
    {"hidden_size": True}, {"num_hidden_layers": 6.0}, {"vocab_size": None}, {"tie_word_embeddings": ...}, {"head_dim": ...},
    {"rms_norm_eps": "small"}, {"dtype": "float9"}, {"hidden_act": "gelu"}, {"use_cache": 1}, {"eos_token_id": "2"},
    {"final_logit_softcapping": 30.0},
])
def test_anything_else_is_left_to_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    values = {key: value for key, value in (config("qwen3") | changes).items() if value is not ...}
    assert values_of(config("qwen3")) is not None, "without the change it is read"
    assert values_of(values) is None
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_stated(tmp_path) is None


def test_heads_that_do_not_share_the_width_out_are_transformers_to_refuse() -> None:
    assert values_of(config("llama", num_attention_heads=3)) is None


@pytest.mark.parametrize("text", ["", "[1]", "{", "null"])
def test_a_damaged_file(text: str, tmp_path: Path) -> None:
    assert read_stated(tmp_path) is None
    (tmp_path / "config.json").write_text(text)
    assert read_stated(tmp_path) is None


def test_read_text_config_takes_either_way(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("qwen3")))
    plain = told(read_text_config(str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(config("qwen3", problem_type=None)))  # a key that is not known here
    assert read_stated(tmp_path) is None
    assert told(read_text_config(str(tmp_path))) == plain
