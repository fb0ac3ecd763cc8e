"""Takes a config.json, gives its values where it states all that its class in transformers would; loads no library.

That class takes 3 to 6 s to import, torch with it, and a plan needs a dozen numbers of it. A config of one of KINDS, with no key
that is not known here and no value that is not plain, means the same without its class. All others are left to transformers.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outrider.errors import UserError
from outrider.files import read_json


def _count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1


def _flag(value: Any) -> bool:
    return type(value) is bool


def _token(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 0) or (isinstance(value, list) and all(map(_count, value)))


def _word(*words: object) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(word) and value == word for word in words)


def _rotation(value: Any) -> bool:
    return (isinstance(value, Mapping) and value.get("rope_type", "default") == "default"
            and value.keys() <= {"rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
            and type(value.get("rope_theta")) in (int, float) and value["rope_theta"] > 0)


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
         "max_position_embeddings")
# What must stand there: of all, and of one kind besides
NEEDED: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(SIZES, _count), "tie_word_embeddings": _flag,
    "rms_norm_eps": lambda value: type(value) is float and 0 < value < 1,
}
LINEAR_SIZES = ("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim",
                "linear_conv_kernel_dim", "full_attention_interval")
KINDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "llama": {}, "qwen3": {"head_dim": _count}, "qwen3_5_text": dict.fromkeys(("head_dim", *LINEAR_SIZES), _count),
}
# What may stand there, and changes nothing that is read here
ALLOWED: dict[str, Callable[[Any], bool]] = {
    "model_type": _word(*KINDS), "head_dim": _count,
    "architectures": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    "transformers_version": lambda value: isinstance(value, str), "hidden_act": _word("silu"),
    **dict.fromkeys(("dtype", "torch_dtype"), _word("float32", "bfloat16", "float16")),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_cache"), _flag), "use_sliding_window": _word(False),
    "sliding_window": lambda value: value is None or _count(value), "max_window_layers": lambda value: type(value) is int,
    **dict.fromkeys(("attention_dropout", "initializer_range"), _share), "rope_scaling": _word(None),
    "rope_theta": lambda value: type(value) in (int, float) and value > 0, "rope_parameters": _rotation,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _token), "pretraining_tp": _word(1),
}
ATTENTION, RECURRENCE = "full_attention", "linear_attention"


def read_stated(folder: Path) -> dict[str, Any] | None:
    """The text config's values by the config.json in `folder` alone; None where transformers must read it."""
    try:
        values = read_json(folder / "config.json", what="the target's config")
    except UserError:  # which transformers will word
        return None
    return values_of(values) if isinstance(values, dict) else None


def values_of(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """As `read_stated`, of what stood in the file."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in KINDS or ("rope_theta" in values) == ("rope_parameters" in values):
        return None
    needed = NEEDED | KINDS[kind]
    known = ALLOWED | needed
    plain = all(key in values for key in needed) and all(key in known and known[key](value) for key, value in values.items())
    if not plain or (kind == "llama" and values["hidden_size"] % values["num_attention_heads"]):
        return None
    every = values.get("full_attention_interval", 1)
    kinds = [RECURRENCE if (i + 1) % every else ATTENTION for i in range(values["num_hidden_layers"])]
    return {**values, "layer_types": kinds, "sliding_window": None}
