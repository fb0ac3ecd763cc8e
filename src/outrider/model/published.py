"""Takes a drafter's shape, gives its config.json and tensor names in the published (z-lab) format, and back; reads no weights."""

from typing import Any

from outrider.errors import UserError
from outrider.records import FULL, SLIDING, DrafterShape

CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
ARCHITECTURE = "DFlashDraftModel"


def to_config(shape: DrafterShape, *, embedding_scale: float, softcap: float | None, dtype: str) -> dict[str, Any]:
    """The config: an allow-list, nothing is copied from the target (a leaked rotary field has cost others all acceptance).

    `embedding_scale` and `softcap` are the target's; loaders feed the raw embedding and read the raw head, so a target that
    scales or caps them is written down. `dtype`: of the weights beside it.
    """
    sliding = SLIDING in shape.layer_types
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": dtype,
        "block_size": shape.block_size,
        "dflash_config": {
            "block_size": shape.block_size,
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
            **({"input_embedding_scale": embedding_scale} if embedding_scale != 1 else {}),
            **({"final_logit_softcapping": softcap} if softcap is not None else {}),
        },
        "num_target_layers": shape.num_target_layers,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": shape.max_position_embeddings,
        "layer_types": list(shape.layer_types),
        "use_sliding_window": sliding,
        "sliding_window": shape.sliding_window,
        "tie_word_embeddings": shape.tie_word_embeddings,
        **_causality(shape),
    }


def _causality(shape: DrafterShape) -> dict[str, bool]:
    """`is_causal`, the one key that all loaders read: full layers see their whole block, sliding ones the slots up to their own.

    It holds for all layers at once, so it is left out where both kinds are mixed; loaders then go by the kind of the layer.
    """
    kinds = set(shape.layer_types)
    return {"is_causal": kinds == {SLIDING}} if len(kinds) == 1 else {}


def from_config(config: Any, *, where: str) -> DrafterShape:
    """The shape that a published config describes. Raises UserError naming the key that is missing or not understood."""
    if not isinstance(config, dict):
        raise UserError(f"{where}: is not a JSON object: export the drafter again")
    reader = _Reader(config, where)
    dflash = _Reader(reader.take("dflash_config", dict), f"{where}: dflash_config")
    layer_ids, layer_types = dflash.take("target_layer_ids", list), reader.take("layer_types", list)
    block_size, theta = reader.take("block_size", int), _theta(reader)
    for key, values, kind in (("target_layer_ids", layer_ids, int), ("layer_types", layer_types, str)):
        if not all(type(value) is kind for value in values):
            raise UserError(f"{where}: {key} = {values!r}: must be a list of {kind.__name__}")
    expected = {
        "architectures": [ARCHITECTURE], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False,
        "use_sliding_window": SLIDING in layer_types,
    }
    for key, value in expected.items():
        if config.get(key) != value:
            raise UserError(f"{where}: {key} = {config.get(key)!r}: must be {value!r} here: export the drafter again")
    for key in ("partial_rotary_factor", "rope_scaling"):
        if config.get(key) is not None:
            raise UserError(f"{where}: {key} = {config[key]!r}: engines read it differently and drafters here do without: remove "
                            "it if the drafter was trained without it")
    inner_size = dflash.values.get("block_size", block_size)
    if inner_size != block_size:
        raise UserError(f"{where}: dflash_config.block_size = {inner_size!r}: must equal block_size = {block_size}")
    shape = DrafterShape(
        hidden_size=reader.take("hidden_size", int),
        intermediate_size=reader.take("intermediate_size", int),
        num_layers=reader.take("num_hidden_layers", int),
        num_heads=reader.take("num_attention_heads", int),
        num_kv_heads=reader.take("num_key_value_heads", int),
        head_dim=reader.take("head_dim", int),
        rms_norm_eps=reader.number("rms_norm_eps"),
        rope_theta=theta,
        vocab_size=reader.take("vocab_size", int),
        max_position_embeddings=reader.take("max_position_embeddings", int),
        block_size=block_size,
        mask_token_id=dflash.take("mask_token_id", int),
        target_layer_ids=tuple(layer_ids),
        num_target_layers=reader.take("num_target_layers", int),
        tie_word_embeddings=reader.take("tie_word_embeddings", bool),
        layer_types=tuple(layer_types),
        sliding_window=reader.take("sliding_window", int) if SLIDING in layer_types else None,
    )
    causality = _causality(shape)
    if config.get("is_causal", causality.get("is_causal")) != causality.get("is_causal"):
        raise UserError(f"{where}: is_causal = {config['is_causal']!r}: does not fit layer_types: '{FULL}' layers are not causal "
                        f"inside the block and '{SLIDING}' layers are; export the drafter again")
    return shape


def _theta(reader: "_Reader") -> float:
    """The rotary base, from `rope_parameters` (transformers 5), `rope_theta` (transformers 4) or both, which must agree."""
    values, where = reader.values, reader.where
    parameters = values.get("rope_parameters")
    if parameters is None:
        return reader.number("rope_theta")
    inner = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    expected = {"rope_type": "default", "rope_theta": values.get("rope_theta", inner)}
    if parameters != expected:
        raise UserError(f"{where}: rope_parameters = {parameters!r}: must be {expected!r} here, engines read other rotary "
                        "fields differently: export the drafter again")
    return _Reader(expected, f"{where}: rope_parameters").number("rope_theta")


class _Reader:
    """Keys of one JSON object, all mandatory: a guessed layer id or block size drafts nonsense without a word."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def take(self, key: str, kind: type) -> Any:
        if key not in self.values:
            raise UserError(f"{self.where}: '{key}' is missing: it is mandatory, export the drafter again or add it")
        value = self.values[key]
        if type(value) is not kind:
            raise UserError(f"{self.where}: {key} = {value!r}: must be of type {kind.__name__}")
        if isinstance(value, int) and kind is int and value < (0 if key == "mask_token_id" else 1):
            raise UserError(f"{self.where}: {key} = {value}: must be positive")
        return value

    def number(self, key: str) -> float:
        if type(self.values.get(key)) is int:
            return float(self.values[key])
        return self.take(key, float)


def tensor_shapes(shape: DrafterShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the file and its shape: the allow-list. No embedding and no head, those are the target's."""
    D, inner, C = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_heads * C, shape.num_kv_heads * C
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (D, len(shape.target_layer_ids) * D), "hidden_norm.weight": (D,), "norm.weight": (D,),
    }
    for n in range(shape.num_layers):
        found |= {f"layers.{n}.{name}.weight": size for name, size in (
            ("input_layernorm", (D,)), ("post_attention_layernorm", (D,)),
            ("self_attn.q_proj", (queries, D)), ("self_attn.k_proj", (keys, D)), ("self_attn.v_proj", (keys, D)),
            ("self_attn.o_proj", (D, queries)), ("self_attn.q_norm", (C,)), ("self_attn.k_norm", (C,)),
            ("mlp.gate_proj", (inner, D)), ("mlp.up_proj", (inner, D)), ("mlp.down_proj", (D, inner)),
        )}
    return found
