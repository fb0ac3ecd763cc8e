"""Takes a folder or hub id, gives what the target's config says of it; loads no weights, and nothing that could."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import UserError
from outrider.features.stated import read_stated
from outrider.features.trust import code_of, unusable
from outrider.files import check_name, read_json

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class TargetFacts:
    """What the drafter must fit, read from the target's text config without loading weights.

    `layer_kinds`: one name a layer ("full_attention", "sliding_attention", "linear_attention", ...).
    `quantised`: the method that the weights came quantised by, as the config names it; None for plain ones.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    softcap: float | None
    layer_kinds: tuple[str, ...]
    quantised: str | None


def read_facts(path: str) -> TargetFacts:
    """Read a target's config (local folder or hub id). Raises UserError when it is missing or not a causal text model's."""
    return facts_of(read_text_config(path), path=path)


def facts_of(values: Mapping[str, Any], *, path: str) -> TargetFacts:
    """The facts of a text config's values; `path` is named in the error when it lacks one."""
    absent = [key for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size") if values.get(key) is None]
    if absent:
        raise UserError(f"target.path = {path!r}: its config lacks {', '.join(absent)}: this architecture is not "
                        "supported")
    heads = values["num_attention_heads"]
    rope = values.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    quantisation = values.get("quantization_config")
    kinds = values.get("layer_types") or ["full_attention"] * values["num_hidden_layers"]
    return TargetFacts(
        hidden_size=values["hidden_size"],
        intermediate_size=values.get("intermediate_size") or 4 * values["hidden_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        rms_norm_eps=float(values.get("rms_norm_eps") or 1e-6),
        rope_theta=float(rope.get("rope_theta") or values.get("rope_theta") or 10000.0),
        vocab_size=values["vocab_size"],
        max_position_embeddings=values.get("max_position_embeddings") or 32768,
        tie_word_embeddings=bool(values.get("tie_word_embeddings")),
        softcap=values.get("final_logit_softcapping"),
        layer_kinds=tuple(kinds),
        quantised=str(quantisation.get("quant_method")) if isinstance(quantisation, Mapping) else None,
    )


def read_text_config(path: str) -> dict[str, Any]:
    """The text config's values, defaults included. Raises UserError when there is none."""
    check_folder(path)
    stated = read_stated(Path(path).expanduser())
    if stated is not None:
        return stated
    from transformers.models.auto.configuration_auto import AutoConfig  # with torch, seconds that few configs need

    try:
        with _undocumented():
            config = AutoConfig.from_pretrained(path, **code_of(path))
            values: dict[str, Any] = config.get_text_config().to_dict()
            values.setdefault("quantization_config", config.to_dict().get("quantization_config"))  # of a wrapper: the outer one's
    except Exception as error:  # OSError, ValueError, KeyError, TypeError: whatever a damaged config.json provokes
        raise unusable(path, "no usable model config", error) from error
    return values


@contextlib.contextmanager
def _undocumented() -> Iterator[None]:
    """While open, classes that transformers defines get no generated docstrings: for those of a config it loads its table of
    models, and with it torch's compiler: 1.4 of the 3.6 s that reading a config took."""
    module = sys.modules["transformers.utils.auto_docstring"]  # its function of the same name hides it
    document = module.auto_class_docstring
    module.auto_class_docstring = lambda cls, **options: cls  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.auto_class_docstring = document  # type: ignore[attr-defined]


def check_folder(path: str) -> None:
    """Raises UserError when `path` looks like a local folder and is none, before a hub is asked; or when its index of weights
    names files elsewhere. Links are followed: a hub's cache is made of them, and no archive that is read here makes one."""
    local = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if (looks_local or local.exists()) and not (local / "config.json").is_file():
        raise UserError(f"target.path = {path!r}: no config.json there: name a folder that holds a Hugging Face model, or a "
                        "hub id")
    if (local / INDEX_NAME).is_file():
        index = read_json(local / INDEX_NAME, what="the target's index of weights")
        places = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(places, dict):
            raise UserError(f"{local / INDEX_NAME}: has no weight_map: fetch or save the model again")
        for name in set(map(str, places.values())):
            check_name(name, where=str(local / INDEX_NAME))
