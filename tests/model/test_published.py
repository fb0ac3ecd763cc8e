"""The published format: an allow-list both ways; what is missing or does not fit is one sentence, never a guess."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from overfit import random_drafter
from safetensors.torch import load_file, save_file
from toys import VOCAB, toy_shape

from outrider.errors import UserError
from outrider.model.published import CONFIG_NAME, WEIGHTS_NAME, from_config, tensor_shapes, to_config
from outrider.records import FULL, SLIDING, DrafterShape
from outrider.weights.export import write_published
from outrider.weights.opening import open_drafter

KEYS = {
    "architectures", "model_type", "dtype", "block_size", "dflash_config", "num_target_layers", "vocab_size", "hidden_size",
    "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "attention_bias", "rms_norm_eps", "rope_theta", "rope_parameters", "max_position_embeddings", "layer_types",
    "use_sliding_window", "sliding_window", "tie_word_embeddings", "is_causal",
}
Change = Callable[[dict[str, Any]], object]


def config_of(shape: DrafterShape) -> dict[str, Any]:
    return to_config(shape, embedding_scale=1.0, softcap=None, dtype="bfloat16")


@pytest.fixture
def published(tmp_path: Path) -> Path:
    write_published(tmp_path, random_drafter(toy_shape(), seed=0), config_of(toy_shape()))
    return tmp_path


def test_the_config_has_the_listed_keys_and_no_other() -> None:
    config = config_of(toy_shape())
    assert set(config) == KEYS
    assert set(config["dflash_config"]) == {"block_size", "mask_token_id", "target_layer_ids"}
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": config["rope_theta"]}


@pytest.mark.parametrize("shape", [
    toy_shape(),
    toy_shape(rope_theta=5e6, tie_word_embeddings=True, mask_token_id=0, block_size=16, rms_norm_eps=1e-5),
    toy_shape(layer_types=(SLIDING, SLIDING), sliding_window=8),
    toy_shape(layer_types=(SLIDING, FULL), sliding_window=2048),
    toy_shape(num_layers=3, num_heads=6, num_kv_heads=3, head_dim=8, intermediate_size=40, target_layer_ids=(3,)),
], ids=["full", "values", "sliding", "mixed", "sizes"])
def test_a_shape_comes_back_as_it_was(shape: DrafterShape) -> None:
    assert from_config(json.loads(json.dumps(config_of(shape))), where="config.json") == shape


def test_causality_is_written_where_one_word_holds_for_all_layers() -> None:
    """Full layers see their whole block, sliding ones the slots up to their own (01-dflash)."""
    assert config_of(toy_shape())["is_causal"] is False
    assert config_of(toy_shape(layer_types=(SLIDING, SLIDING), sliding_window=8))["is_causal"] is True
    assert "is_causal" not in config_of(toy_shape(layer_types=(SLIDING, FULL), sliding_window=8))


def test_a_window_shorter_than_the_block_is_refused() -> None:
    with pytest.raises(UserError, match=r"sliding_window = 3: must be at least drafter.block_size = 4"):
        config_of(toy_shape(layer_types=(SLIDING, FULL), sliding_window=3))


def test_a_target_that_scales_and_caps_is_written_down() -> None:
    config = to_config(toy_shape(), embedding_scale=5.5, softcap=30.0, dtype="bfloat16")
    assert config["dflash_config"]["input_embedding_scale"] == 5.5
    assert config["dflash_config"]["final_logit_softcapping"] == 30.0
    assert from_config(config, where="config.json") == toy_shape()


@pytest.mark.parametrize("key", sorted(KEYS - {"dtype", "is_causal", "sliding_window", "rope_theta", "rope_parameters"}))
def test_every_key_is_mandatory(key: str) -> None:
    config = config_of(toy_shape())
    del config[key]
    with pytest.raises(UserError, match=rf"^config.json: ('{key}' is missing|{key} = None)"):
        from_config(config, where="config.json")


def test_the_rotary_base_stands_in_one_of_two_keys_or_in_both() -> None:
    config = config_of(toy_shape(rope_theta=5e5))
    for key in ("rope_theta", "rope_parameters"):
        assert from_config({k: v for k, v in config.items() if k != key}, where="c").rope_theta == 5e5
    with pytest.raises(UserError, match="'rope_theta' is missing"):
        from_config({k: v for k, v in config.items() if "rope" not in k}, where="c")
    with pytest.raises(UserError, match=r"rope_parameters = \[5\]: must be"):
        from_config({**config, "rope_parameters": [5]}, where="c")


@pytest.mark.parametrize("key", ["target_layer_ids", "mask_token_id"])
def test_layer_ids_and_mask_token_are_never_guessed(key: str) -> None:
    config = config_of(toy_shape())
    del config["dflash_config"][key]
    with pytest.raises(UserError, match=f"dflash_config: '{key}' is missing: it is mandatory"):
        from_config(config, where="config.json")


@pytest.mark.parametrize(("change", "message"), [
    (lambda c: c.update(block_size="8"), "block_size = '8': must be of type int"),
    (lambda c: c.update(block_size=True), "block_size = True: must be of type int"),
    (lambda c: c["dflash_config"].update(block_size=8), "dflash_config.block_size = 8: must equal block_size = 4"),
    (lambda c: c["dflash_config"].update(target_layer_ids=[1, 2, 5]), "target_layer_ids has 5: must lie in 0..4"),
    (lambda c: c["dflash_config"].update(mask_token_id=VOCAB), f"mask_token_id = {VOCAB}: must lie in"),
    (lambda c: c.update(architectures=["Qwen3ForCausalLM"]), "architectures = "),
    (lambda c: c["rope_parameters"].update(partial_rotary_factor=0.5), "rope_parameters = .*partial_rotary_factor"),
    (lambda c: c["rope_parameters"].update(rope_theta=5.0), "rope_parameters = "),
    (lambda c: c["rope_parameters"].update(rope_type="yarn"), "rope_parameters = .*yarn"),
    (lambda c: c.update(layer_types=[FULL, SLIDING]), "use_sliding_window = False: must be True"),
    (lambda c: c.update(use_sliding_window=True), "use_sliding_window = True: must be False"),
    (lambda c: c.update(layer_types=[SLIDING] * 2, use_sliding_window=True, sliding_window=8), "is_causal = False: does not fit"),
    (lambda c: c.update(layer_types=[SLIDING, FULL], use_sliding_window=True), "sliding_window = None: must be of type int"),
    (lambda c: c.update(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5: engines read it differently"),
    (lambda c: c.update(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling = "),
    (lambda c: c.update(is_causal=True), "is_causal = True: does not fit"),
    (lambda c: c.update(layer_types=[FULL]), "must name 2 layers"),
])
def test_a_config_that_does_not_fit_together_is_refused(change: Change, message: str) -> None:
    config = config_of(toy_shape())
    change(config)
    with pytest.raises(UserError, match=message):
        from_config(config, where="config.json")


def test_the_tensors_are_those_of_the_drafter() -> None:
    shape = toy_shape(num_layers=3, num_heads=6, num_kv_heads=3, head_dim=8, intermediate_size=40, target_layer_ids=(3,))
    drafter = random_drafter(shape, seed=0)
    assert {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()} == tensor_shapes(shape)


def test_an_export_comes_back_rounded_to_bf16(published: Path) -> None:
    drafter, loaded = random_drafter(toy_shape(), seed=0), open_drafter(published, dtype="float32", device="cpu")
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16().float()), name
    assert loaded.shape == drafter.shape
    assert not loaded.training
    assert open_drafter(published, dtype="bfloat16", device="cpu").norm.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.update({"lm_head.weight": torch.zeros(VOCAB, 32)}), "has the unknown tensor 'lm_head.weight'"),
    (lambda t: t.update({"embed_tokens.weight": torch.zeros(VOCAB, 32)}), "has the unknown tensor 'embed_tokens.weight'"),
    (lambda t: t.pop("layers.1.self_attn.k_norm.weight"), "lacks tensor 'layers.1.self_attn.k_norm.weight'"),
    (lambda t: t.update({"fc.weight": torch.zeros(32, 64)}), r"'fc.weight' has shape \[32, 64\], the config asks for \[32, 96\]"),
    (lambda t: t["norm.weight"].fill_(float("nan")), "tensor 'norm.weight' holds values that are not finite"),
    (lambda t: t["layers.0.mlp.up_proj.weight"][0].fill_(float("inf")), "holds values that are not finite"),
])
def test_wrong_tensors_are_refused(published: Path, change: Change, message: str) -> None:
    tensors = load_file(published / WEIGHTS_NAME)
    change(tensors)
    save_file(tensors, published / WEIGHTS_NAME)
    with pytest.raises(UserError, match=message):
        open_drafter(published, dtype="float32", device="cpu")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_weights_cut_short_are_refused(published: Path, share: float) -> None:
    file = published / WEIGHTS_NAME
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(UserError, match=r"model.safetensors: the drafter's weights cannot be read"):
        open_drafter(published, dtype="float32", device="cpu")


@pytest.mark.parametrize("name", [CONFIG_NAME, WEIGHTS_NAME])
def test_a_missing_file_is_one_sentence(published: Path, name: str) -> None:
    (published / name).unlink()
    with pytest.raises(UserError, match=r"missing|holds no drafter"):
        open_drafter(published, dtype="float32", device="cpu")


@pytest.mark.parametrize("text", ["", "{", "[]", "7"])
def test_a_damaged_config_is_refused(published: Path, text: str) -> None:
    (published / CONFIG_NAME).write_text(text)
    with pytest.raises(UserError, match=r"config\.json: (the drafter's config )?is not"):
        open_drafter(published, dtype="float32", device="cpu")


def test_a_folder_that_is_not_there_or_holds_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        open_drafter(tmp_path / "nothing", dtype="float32", device="cpu")
    with pytest.raises(UserError, match="holds no drafter"):
        open_drafter(tmp_path, dtype="float32", device="cpu")


@pytest.mark.parametrize(("change", "message"), [
    ({"num_key_value_heads": 0}, "num_key_value_heads = 0: must be positive"),
    ({"layer_types": [["full_attention"], {}]}, "layer_types = "),
    ({"dflash_config": {"block_size": 4, "mask_token_id": 3, "target_layer_ids": ["a", "b"]}}, "target_layer_ids = "),
])
def test_values_edited_by_hand_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_config({**config_of(toy_shape()), **change}, where="config.json")
