"""Takes a folder or hub id, gives the frozen target: its layers, embedding, head and answers; knows nothing of drafters."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from outrider.errors import UserError
from outrider.files import digest
from outrider.records import FrozenHead

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HEAD_CHECK_TOKENS = 32


@dataclass(frozen=True)
class TargetFacts:
    """What the drafter must fit, read from the target's text config without loading weights.

    `layer_kinds`: one name a layer ("full_attention", "sliding_attention", "linear_attention", ...).
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


class Target:
    """A frozen causal language model and the parts of it that drafting needs."""

    def __init__(self, model: PreTrainedModel, facts: TargetFacts) -> None:
        self.model, self.facts = model, facts
        self.layers = find_layers(model)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if embedding is None or not isinstance(head, nn.Linear) or head.bias is not None:
            raise UserError(f"target {type(model).__name__}: needs an input embedding and a linear output head without bias, "
                            "and these were not found: this architecture is not supported")
        self.embedding: nn.Module = embedding
        self.head: FrozenHead = FrozenHead(weight_VD=head.weight.detach(), softcap=facts.softcap)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @torch.no_grad()
    def embed(self, ids_X: Tensor) -> Tensor:
        """Token embeddings `[..., D]` as the target itself feeds them to its first layer."""
        return self.embedding(ids_X)

    def stop_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Tokens that end an answer (see `read_stop_ids`)."""
        return _stop_ids(self.model.generation_config, tokenizer)

    @torch.no_grad()
    def answer(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stop_ids: Sequence[int], temperature: float, top_p: float,
        top_k: int, seed: int,
    ) -> list[list[int]]:
        """New tokens for each prompt (the stop token included, none after it), greedy at temperature 0, else sampled."""
        width = max(len(prompt) for prompt in prompts)
        ids_BX = torch.zeros(len(prompts), width, dtype=torch.int64)
        present_BX = torch.zeros_like(ids_BX)
        for i, prompt in enumerate(prompts):
            ids_BX[i, width - len(prompt):] = torch.tensor(prompt)
            present_BX[i, width - len(prompt):] = 1
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k} if temperature > 0 else {}
        config = GenerationConfig(
            max_new_tokens=max_new_tokens, eos_token_id=list(stop_ids), pad_token_id=stop_ids[0], do_sample=False
        )
        config.update(**sampling)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            out_BY = self.model.generate(
                ids_BX.to(self.device), attention_mask=present_BX.to(self.device), generation_config=config
            )
        return [cut_at_stop(row, stop_ids) for row in out_BY[:, width:].tolist()]


def read_stop_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end the target's answers: those of its generation config, else the tokenizer's end of sequence."""
    try:
        config = GenerationConfig.from_pretrained(path)
    except OSError:  # it has none
        config = None
    return _stop_ids(config, tokenizer)


def _stop_ids(config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    configured = config.eos_token_id if config else None
    if configured is None:
        configured = tokenizer.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    found = sorted({i for i in ids if i is not None})
    if not found:
        raise UserError("the target names no token that ends an answer: set eos_token_id in its generation_config.json")
    return found


def cut_at_stop(tokens: list[int], stop_ids: Sequence[int]) -> list[int]:
    """The tokens up to and including the first stop token."""
    for i, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: i + 1]
    return tokens


def find_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers, found by structure. Raises UserError naming what was looked for."""
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UserError(f"target {type(model).__name__}: no decoder layers found (looked for `layers` in its decoder, "
                        f"{type(decoder).__name__}): this architecture is not supported")
    return layers


def read_facts(path: str) -> TargetFacts:
    """Read a target's config (local folder or hub id). Raises UserError when it is missing or not a causal text model's."""
    check_folder(path)
    try:
        config = AutoConfig.from_pretrained(path).get_text_config()
    except Exception as error:  # OSError, ValueError, KeyError, TypeError: whatever a damaged config.json provokes
        raise UserError(f"target.path = {path!r}: no usable model config: {_first_line(error)}") from error
    values = config.to_dict()
    absent = [key for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size") if values.get(key) is None]
    if absent:
        raise UserError(f"target.path = {path!r}: its config lacks {', '.join(absent)}: this architecture is not "
                        "supported")
    heads = values["num_attention_heads"]
    rope = values.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
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
    )


def check_folder(path: str) -> None:
    """Raises UserError when `path` looks like a local folder and is none, before a hub is asked."""
    local = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if (looks_local or local.exists()) and not (local / "config.json").is_file():
        raise UserError(f"target.path = {path!r}: no config.json there: name a folder that holds a Hugging Face model, or a "
                        "hub id")


def load_target(path: str, *, dtype: str, device: str) -> Target:
    """Load a target, frozen, in `dtype` on `device`, and check that its logits are head(final norm(last layer)).

    Raises UserError when the folder is missing or damaged or the architecture is not supported.
    """
    facts = read_facts(path)
    try:
        model, found = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], device_map=None, output_loading_info=True)
    except Exception as error:  # safetensors, OSError, ValueError, RuntimeError: whatever a damaged folder provokes
        raise UserError(f"target.path = {path!r}: the weights cannot be loaded: {_first_line(error)}") from error
    absent = sorted(found["missing_keys"])
    if absent:  # transformers only warns, and fills them with random numbers
        raise UserError(f"target.path = {path!r}: {absent[0]} and {len(absent) - 1} more tensors are not in its weights files: "
                        "fetch or save the model again")
    model.to(device)
    model.eval().requires_grad_(False)
    # generate() would mix the published sampling defaults (a repetition penalty, a top_k) into what we call greedy or sampled
    model.generation_config = GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    target = Target(model, facts)
    check_head(target)
    return target


@torch.no_grad()
def check_head(target: Target) -> None:
    """Rebuild the logits of a few tokens from the last hidden state and the head; refuse a target where they differ.

    Catches logit scaling and any other step after the final norm that a drafter using this head would miss.
    """
    ids_1X = torch.arange(HEAD_CHECK_TOKENS, device=target.device)[None] % target.facts.vocab_size
    out = target.model(ids_1X, output_hidden_states=True, use_cache=False)
    rebuilt = target.head.logits(out.hidden_states[-1]).float()
    error = (rebuilt - out.logits.float()).norm() / out.logits.float().norm()
    if not error < 0.02:
        raise UserError(f"target {type(target.model).__name__}: its logits are not head(final hidden state) (relative difference "
                        f"{error:.3f}): this architecture is not supported")


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The target's tokenizer. Raises UserError when it is missing or damaged."""
    check_folder(path)
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # tokenizers raises bare Exception on a damaged file
        raise UserError(f"target.path = {path!r}: no usable tokenizer: {_first_line(error)}") from error


def target_digest(path: str) -> str:
    """A cheap identity of a local target: its config, and name, size, first and last MiB of each weights file.

    For a hub id it is the id itself.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return digest({"hub": path})
    parts: dict[str, Any] = {"config": (folder / "config.json").read_text(encoding="utf-8")}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as handle:
            ends = hashlib.sha256(handle.read(2**20))
            handle.seek(-min(2**20, file.stat().st_size), os.SEEK_END)
            ends.update(handle.read())
        parts[file.name] = [file.stat().st_size, ends.hexdigest()]
    return digest(parts)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
