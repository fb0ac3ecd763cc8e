"""Takes a drafter's shape, gives the config.json of the speculators format, and the published config back; reads no weights.

The tensors of both formats are the same; speculators counts a layer's output as the next layer's input, so its ids are one more.
"""

from typing import Any

from transformers import Qwen3Config

from outrider.errors import UserError
from outrider.features.facts import TargetFacts, read_facts
from outrider.model.published import ARCHITECTURE
from outrider.records import FULL, SLIDING, DrafterShape

MODEL_TYPE = "dflash"


def to_speculators(shape: DrafterShape, *, target: str, architectures: list[str], dtype: str) -> dict[str, Any]:
    """The config. `target`: the folder or hub id that speculators calls the verifier, `architectures` those of its config.

    Sliding layers are causal inside the block and full ones never are; vLLM applies the one flag to layers of both kinds, so it
    follows the kind that there is.
    """
    layer = {
        "model_type": "qwen3", "vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size, "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim,
        "hidden_act": "silu", "attention_bias": False, "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta}, "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_position_embeddings, "layer_types": list(shape.layer_types),
        "use_sliding_window": SLIDING in shape.layer_types, "sliding_window": shape.sliding_window,
        "tie_word_embeddings": False,
    }
    return {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": MODEL_TYPE,
        "dtype": dtype,
        "transformer_layer_config": layer,
        "draft_vocab_size": shape.vocab_size,
        "block_size": shape.block_size,
        "target_hidden_size": shape.hidden_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in shape.target_layer_ids],
        "mask_token_id": shape.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": SLIDING not in shape.layer_types,
        "speculators_config": {
            "algorithm": MODEL_TYPE,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": shape.block_size - 1}],
            "verifier": {"name_or_path": target, "architectures": architectures},
        },
    }


def is_speculators(config: Any) -> bool:
    """Whether a config.json is of this format."""
    return isinstance(config, dict) and "speculators_model_type" in config


def to_published(config: dict[str, Any], *, where: str) -> dict[str, Any]:
    """The same drafter in the published format, as `published.from_config` reads it; the verifier's config fills in its depth.

    Raises UserError for what a drafter here does not have: another algorithm, a vocabulary of its own, a drafted first slot.
    """
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise UserError(f"{where}: transformer_layer_config = {layer!r}: must be a JSON object")
    ids, mask, block_size = (config.get(key) for key in ("aux_hidden_state_layer_ids", "mask_token_id", "block_size"))
    try:
        full = Qwen3Config(**layer).to_dict()  # the format leaves out what is transformers' default
    except Exception as error:  # whatever its validation raises for values of a wrong type
        raise UserError(f"{where}: transformer_layer_config: {str(error).splitlines()[0]}") from error
    _check(config, full, where)
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise UserError(f"{where}: aux_hidden_state_layer_ids = {ids!r}: must be a list of int")
    facts = _verifier(config, where)
    return {
        **{key: full.get(key) for key in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "hidden_act", "attention_bias", "rms_norm_eps", "max_position_embeddings", "layer_types",
            "sliding_window",
        )},
        "architectures": [ARCHITECTURE], "model_type": "qwen3", "dtype": config.get("dtype"),
        "block_size": block_size, "num_target_layers": facts.num_layers, "tie_word_embeddings": facts.tie_word_embeddings,
        "dflash_config": {"block_size": block_size, "mask_token_id": mask, "target_layer_ids": [i - 1 for i in ids]},
        "rope_parameters": full.get("rope_parameters"), "use_sliding_window": SLIDING in (full.get("layer_types") or ()),
    }


def _check(config: dict[str, Any], layer: dict[str, Any], where: str) -> None:
    expected: dict[str, Any] = {
        "speculators_model_type": MODEL_TYPE, "projector_type": "dflash", "sample_from_anchor": False,
        "draft_vocab_size": layer.get("vocab_size"), "target_hidden_size": layer.get("hidden_size"),
    }
    optional = ("projector_type", "sample_from_anchor", "target_hidden_size")
    for key, value in expected.items():
        found = config.get(key)
        if found != value and not (key in optional and found is None):
            raise UserError(f"{where}: {key} = {found!r}: must be {value!r}: other drafters of this format are not DFlash as it "
                            "is trained here")
    if SLIDING in (layer.get("layer_types") or ()) and config.get("sliding_window_non_causal", False):
        raise UserError(f"{where}: sliding_window_non_causal = True: sliding layers here see only the slots up to their own")
    if FULL not in (layer.get("layer_types") or (FULL,)) and layer.get("sliding_window") is None:
        raise UserError(f"{where}: transformer_layer_config.sliding_window is missing: '{SLIDING}' layers need it")


def _verifier(config: dict[str, Any], where: str) -> TargetFacts:
    """Facts of the target that the drafter was made for."""
    try:
        name = config["speculators_config"]["verifier"]["name_or_path"]
        assert isinstance(name, str)
    except (KeyError, TypeError, AssertionError) as error:
        raise UserError(f"{where}: speculators_config.verifier.name_or_path is missing: name the target that the drafter was "
                        "made for, its number of layers is read there") from error
    try:
        return read_facts(name)
    except UserError as error:
        raise UserError(f"{where}: speculators_config.verifier.name_or_path: {error}") from error
