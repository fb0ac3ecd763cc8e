"""What SGLang, vLLM and speculators make of an exported folder, in our words after their published loaders; runs none of them.

SGLang 0.5.23: srt/speculative/dflash_utils.py (config), srt/models/dflash.py (layers, weights), srt/models/qwen3.py (capture).
vLLM 0.32: model_executor/models/qwen3_dflash.py (layers, weights), v1/worker/gpu_model_runner.py (capture),
transformers_utils/configs/speculators (its reading of the speculators format).
speculators 0.9: models/dflash/config.py (config), models/dflash/core.py (weights), models/dflash/attention.py (causality).
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import AutoConfig, Qwen3Config

from outrider.records import SLIDING, DrafterShape

Sizes = dict[str, tuple[int, ...]]


class RefusedError(Exception):
    """The engine would not start, and says why."""


@dataclass(frozen=True)
class Understood:
    """One engine's idea of a drafter.

    `layers`: 0-based, whose outputs it feeds. `block_size`: None where it is not read and the command line decides. `causal` and
    `windows`: one a layer; a key is seen when query position - key position < window. `filled`: tensors that reached a parameter,
    `unfilled`: parameters left as they were made, `ignored`: tensors dropped without a word.
    """

    layers: tuple[int, ...]
    block_size: int | None
    mask_token_id: int
    rope_theta: float
    rms_norm_eps: float
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    filled: frozenset[str]
    unfilled: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()


def meant(shape: DrafterShape, *, block_size: int | None) -> Understood:
    """What an engine must understand of a drafter of this shape."""
    sliding = tuple(kind == SLIDING for kind in shape.layer_types)
    wanted = _parameters(shape.num_layers, shape.hidden_size, shape.intermediate_size,
                         (shape.num_heads, shape.num_kv_heads, shape.head_dim), len(shape.target_layer_ids))
    return Understood(
        shape.target_layer_ids, block_size, shape.mask_token_id, shape.rope_theta, shape.rms_norm_eps, sliding,
        tuple(shape.sliding_window if one else None for one in sliding), frozenset(wanted),
    )


def sglang(folder: Path, target_vocabulary: int, target_layers: int) -> Understood:
    """The published format. Unknown tensors are dropped in silence, missing ones are not noticed."""
    config, inner = _published(folder)
    layers = [int(i) for i in inner["target_layer_ids"]] if "target_layer_ids" in inner else _sglang_spread(config)
    depth = inner.get("num_target_layers", getattr(config, "num_target_layers", None)) or max(layers) + 1
    for bound in (depth, target_layers):
        if any(not 0 <= i < bound for i in layers):
            raise RefusedError(f"a layer id is outside 0..{bound - 1}")
    block_size = inner.get("block_size", getattr(config, "block_size", None))
    mask = inner.get("mask_token_id")
    if mask is None:
        raise RefusedError("no mask_token_id: it would look for '<|MASK|>' in the tokenizer")
    if mask >= target_vocabulary:
        raise RefusedError("the mask token is outside the target's vocabulary")
    if config.hidden_act != "silu":
        raise RefusedError("an activation that it does not have")
    kinds = config.layer_types
    if len(kinds) < config.num_hidden_layers:
        raise RefusedError("layer_types is too short")
    if SLIDING in kinds and config.sliding_window is None:
        raise RefusedError("sliding layers without a window")
    whole = getattr(config, "is_causal", None)
    # It keeps window - 1 keys to the left of the query's own: the same rule as here.
    return _placed(folder, config, layers, block_size or 16, mask,
                   [(kind == SLIDING) if whole is None else whole for kind in kinds],
                   [(config.sliding_window - 1) + 1 if kind == SLIDING else None for kind in kinds], unknown="ignored")


def _sglang_spread(config: Any) -> list[int]:
    count, depth = config.num_hidden_layers, config.num_target_layers
    return [round(1 + i * (depth - 4) / (count - 1)) for i in range(count)]


def vllm(folder: Path, target_vocabulary: int, target_layers: int) -> Understood:
    """The published format, or speculators' turned into it. block_size is not read; missing tensors are not noticed."""
    raw = json.loads((folder / "config.json").read_text())
    if "speculators_model_type" in raw:
        return _vllm_of_speculators(folder, raw, target_layers)
    config, inner = _published(folder)
    if not config.architectures[0].startswith("DFlash"):
        raise RefusedError("another architecture")
    captured = [i + 1 for i in inner.get("target_layer_ids") or []]  # its ids name a layer's input
    return _vllm(folder, config, inner, captured, target_layers, whole=getattr(config, "is_causal", None))


def _vllm_of_speculators(folder: Path, raw: dict[str, Any], target_layers: int) -> Understood:
    methods = raw["speculators_config"]["proposal_methods"]
    if methods[0]["speculative_tokens"] != raw["block_size"] - 1:
        raise RefusedError("it would draft as many tokens as the first proposal method says, not the block's")
    layer = raw["transformer_layer_config"]
    if raw.get("draft_vocab_size") != layer["vocab_size"]:
        raise RefusedError("a vocabulary of its own needs tables that are not here")
    inner = {"mask_token_id": raw["mask_token_id"], "causal": not raw.get("sliding_window_non_causal", True)}
    config = Qwen3Config(**layer)
    config.sliding_window = layer.get("sliding_window")  # it takes the JSON's value as it is
    return _vllm(folder, config, inner, list(raw["aux_hidden_state_layer_ids"]), target_layers, whole=None)


def _vllm(
    folder: Path, config: Any, inner: dict[str, Any], captured: list[int], target_layers: int, *, whole: bool | None
) -> Understood:
    if not captured or any(not 0 <= i <= target_layers for i in captured):
        raise RefusedError("the captured layers do not exist in the target")
    kinds = config.layer_types
    override = inner.get("causal") if whole is None else whole
    causal = [(kind == SLIDING) if override is None else override for kind in kinds]
    window = inner.get("swa_window_size", config.sliding_window)
    if SLIDING in kinds and window is None:
        raise RefusedError("sliding layers without a window")
    return _placed(folder, config, [i - 1 for i in captured], None, inner["mask_token_id"], causal,
                   [window if kind == SLIDING else None for kind in kinds], unknown="refused")


def speculators(folder: Path, target_vocabulary: int, target_layers: int) -> Understood:
    """The speculators format. Embedding and head come from the verifier; whatever else is missing is made anew with a warning."""
    raw = json.loads((folder / "config.json").read_text())
    if raw.get("speculators_model_type") != "dflash":
        raise RefusedError("not a DFlash drafter of this format")
    shared = raw["speculators_config"]
    if shared["default_proposal_method"] not in [method["proposal_type"] for method in shared["proposal_methods"]]:
        raise RefusedError("the default proposal method is not among the methods")
    config = Qwen3Config(**raw["transformer_layer_config"])
    if raw["draft_vocab_size"] != config.vocab_size:
        raise RefusedError("a vocabulary of its own needs tables that are not here")
    sliding = [kind == SLIDING for kind in config.layer_types]
    return _placed(folder, config, [i - 1 for i in raw["aux_hidden_state_layer_ids"]], raw["block_size"], raw["mask_token_id"],
                   [one and not raw["sliding_window_non_causal"] for one in sliding],
                   [config.sliding_window if one else None for one in sliding], unknown="ignored")


ENGINES: dict[str, Callable[[Path, int, int], Understood]] = {"sglang": sglang, "vllm": vllm, "speculators": speculators}


def _published(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The config as transformers builds it (which both engines do), and its inner section."""
    config = AutoConfig.from_pretrained(folder)
    return config, getattr(config, "dflash_config", None) or {}


def _parameters(num_layers: int, D: int, inner: int, heads: tuple[int, int, int], features: int) -> Sizes:
    """Name and shape of every parameter that a loader wants, before it fuses q, k, v and gate, up."""
    H, G, C = heads
    sizes: Sizes = {"fc.weight": (D, features * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    for n in range(num_layers):
        attention = {"q_proj": (H * C, D), "k_proj": (G * C, D), "v_proj": (G * C, D), "o_proj": (D, H * C), "q_norm": (C,),
                     "k_norm": (C,)}
        feedforward = {"gate_proj": (inner, D), "up_proj": (inner, D), "down_proj": (D, inner)}
        sizes |= {f"layers.{n}.self_attn.{name}.weight": size for name, size in attention.items()}
        sizes |= {f"layers.{n}.mlp.{name}.weight": size for name, size in feedforward.items()}
        sizes |= {f"layers.{n}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
    return sizes


def _placed(
    folder: Path, config: Any, layers: list[int], block_size: int | None, mask: int, causal: Iterable[bool],
    windows: Iterable[int | None], *, unknown: str,
) -> Understood:
    """The same with the weights put where they go; a shape that does not fit stops every one of these loaders."""
    wanted = _parameters(config.num_hidden_layers, config.hidden_size, config.intermediate_size,
                         (config.num_attention_heads, config.num_key_value_heads, config.head_dim), len(layers))
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    strange = found.keys() - wanted.keys()
    if strange and unknown == "refused":
        raise RefusedError(f"no parameter is called {min(strange)}")
    for name in found.keys() & wanted.keys():
        if found[name] != wanted[name]:
            raise RefusedError(f"{name} is {found[name]}, its parameter {wanted[name]}")
    return Understood(
        tuple(layers), block_size, mask, config.rope_parameters["rope_theta"], config.rms_norm_eps, tuple(causal), tuple(windows),
        frozenset(found.keys() & wanted.keys()), frozenset(wanted.keys() - found.keys()), frozenset(strange),
    )
