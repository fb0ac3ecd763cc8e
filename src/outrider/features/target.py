"""Takes a folder or hub id, gives the frozen target: its layers, embedding, head and answers; knows nothing of drafters."""

import contextlib
import hashlib
import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import transformers
from accelerate.hooks import remove_hook_from_submodules  # type: ignore[import-untyped]
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from outrider.errors import UserError
from outrider.features.facts import TargetFacts, check_folder, read_facts
from outrider.features.guards import lock_autotuner
from outrider.features.trust import code_of, first_line, is_trusted, unusable
from outrider.files import digest, read_json, sha256_file
from outrider.records import FrozenHead

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HEAD_CHECK_TOKENS = 32


@dataclass(frozen=True)
class Ends:
    """The target's two ends, what a drafter borrows of it: `embedding` (its scale included) and `head`, one tensor where tied."""

    embedding: nn.Module
    head: FrozenHead

    @torch.no_grad()
    def embed(self, ids_X: Tensor) -> Tensor:
        """Token embeddings `[..., D]` as the target itself feeds them to its first layer."""
        return self.embedding(ids_X)


@dataclass(frozen=True)
class Stretch:
    """Consecutive layers of a target, by number, and the device that they stand on."""

    device: torch.device
    layers: range


class Layers(Protocol):
    """Consecutive layers that `decoder` runs one after another, `facts` of them: a target's, or a share of them."""

    @property
    def decoder(self) -> nn.Module: ...

    @property
    def layers(self) -> nn.ModuleList: ...

    @property
    def facts(self) -> TargetFacts: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...


class Target:
    """A frozen causal language model and the parts of it that drafting needs.

    `layers` may end early (see `load_target`); `facts` are always those of the whole. `device`: of its two ends, and of all its
    layers unless it is spread.
    """

    def __init__(self, model: PreTrainedModel, facts: TargetFacts) -> None:
        self.model, self.facts = model, facts
        self.decoder = find_decoder(model)
        self.layers = cast(nn.ModuleList, self.decoder.layers)
        self._ends: Ends | None = find_ends(model, facts)
        # of the embedding: a quantised model's other tensors may be whole numbers or 8 bits wide
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.dtype: torch.dtype = model.get_input_embeddings().weight.dtype

    @property
    def whole(self) -> bool:
        """Whether every layer and the head are loaded, so that the target can answer."""
        return self._ends is not None and len(self.layers) == self.facts.num_layers

    @property
    def attention(self) -> str:
        """Which attention transformers runs the layers on ("sdpa", "eager", ...)."""
        return cast(str, cast(Any, self.decoder.config)._attn_implementation)

    @property
    def ends(self) -> Ends:
        assert self._ends is not None, "loaded without its head"
        return self._ends

    @property
    def head(self) -> FrozenHead:
        return self.ends.head

    def embed(self, ids_X: Tensor) -> Tensor:
        """Token embeddings `[..., D]` as the target itself feeds them to its first layer."""
        return self.ends.embed(ids_X)

    def drop_head(self) -> None:
        """Free the head, where no other part of the model shares its memory. The target then only captures."""
        self.model.set_output_embeddings(nn.Identity())
        self._ends = None

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
    local = Path(path).expanduser() / "generation_config.json"
    if local.is_file() and not isinstance(read_json(local, what="the target's generation config"), dict):
        raise UserError(f"{local}: the target's generation config is not a JSON object: fetch or save the model again")
    try:
        config = GenerationConfig.from_pretrained(path)
    except OSError:  # it has none
        config = None
    except (TypeError, ValueError, AttributeError) as error:  # a key of a kind that transformers did not expect
        raise UserError(f"target.path = {path!r}: no usable generation_config.json: {first_line(error)}") from error
    return _stop_ids(config, tokenizer)


def _stop_ids(config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    configured = config.eos_token_id if config else None
    if configured is None:
        configured = tokenizer.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    if not all(i is None or type(i) is int for i in ids):
        raise UserError(f"the target's eos_token_id is {ids!r}: must be a token's number or a list of them: mend its "
                        "generation_config.json")
    found = sorted({i for i in ids if i is not None})
    if not found:
        raise UserError("the target names no token that ends an answer: set eos_token_id in its generation_config.json")
    return found


def embedding_scale(embedding: nn.Module, *, where: str) -> float:
    """What an input embedding multiplies its table by: 1 for a plain one. Raises UserError; `where` names the target in it."""
    if type(embedding) is nn.Embedding:
        return 1.0
    scale = getattr(embedding, "scalar_embed_scale", None)  # not ours: Gemma's scaled embedding in transformers
    if not isinstance(scale, float):
        raise UserError(f"target.path = {where!r}: its input embedding is a {type(embedding).__name__}, whose scaling "
                        "other engines cannot be told: this architecture cannot be exported")
    return scale


def cut_at_stop(tokens: list[int], stop_ids: Sequence[int]) -> list[int]:
    """The tokens up to and including the first stop token."""
    for i, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: i + 1]
    return tokens


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """The text decoder (of a multimodal wrapper too): a module with `layers`, a final `norm` and `embed_tokens`.

    Raises UserError naming what was looked for.
    """
    decoder = model.get_decoder()
    sought = {"layers": nn.ModuleList, "norm": nn.Module, "embed_tokens": nn.Module}
    absent = [name for name, kind in sought.items() if not isinstance(getattr(decoder, name, None), kind)]
    if absent:
        raise UserError(f"target {type(model).__name__}: its decoder, {type(decoder).__name__}, has no {' and no '.join(absent)} "
                        f"(looked for the decoder layers, the final norm and the embedding as {', '.join(sought)}): this "
                        "architecture is not supported")
    return decoder


def find_ends(model: PreTrainedModel, facts: TargetFacts) -> Ends:
    """The embedding and the head. Raises UserError when the head is no linear layer without bias."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or not isinstance(head, nn.Linear) or head.bias is not None:
        raise UserError(f"target {type(model).__name__}: needs an input embedding and a linear output head without bias, "
                        "and these were not found: this architecture is not supported")
    return Ends(embedding, FrozenHead(weight_VD=head.weight.detach(), softcap=facts.softcap))


def load_target(
    path: str, *, dtype: str, device: str | Sequence[Stretch], last_layer: int | None, head: bool
) -> Target:
    """Load a target, frozen, in `dtype` straight to `device`, and check that its logits are head(final norm(last layer)).

    `device`: one for all, or stretches that cover the layers in order, whose first device gets everything but layers too.
    `last_layer`: the layers after it are neither read nor made (None loads all of them). Without `head` the target cannot
    answer or lend its ends, only capture. Raises UserError when the folder is missing or damaged or the architecture is not
    supported.
    """
    lock_autotuner()  # transformers imports flash-linear-attention while it loads
    facts = read_facts(path)
    config = AutoConfig.from_pretrained(path, **code_of(path))
    if last_layer is not None:
        _cut(config.get_text_config(), last_layer + 1)
    # transformers' default, sdpa, leaves a cap on the scores out without a word (5.17); None is its default
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None  # not ours: Gemma 2's
    loud = transformers.logging.get_verbosity()
    if last_layer is not None:  # its report would list every tensor of the layers left out
        transformers.logging.set_verbosity_error()
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=DTYPES[dtype], device_map=_device_map(device, config, path),
            output_loading_info=True, use_safetensors=True, attn_implementation="eager" if capped else None,
            **code_of(path),
        )
    except Exception as error:  # safetensors, OSError, ValueError, RuntimeError: whatever a damaged folder provokes
        raise unusable(path, "the weights cannot be loaded", error) from error
    finally:
        transformers.logging.set_verbosity(loud)
    absent = sorted(found["missing_keys"])
    if absent:  # transformers only warns, and fills them with random numbers
        raise UserError(f"target.path = {path!r}: {absent[0]} and {len(absent) - 1} more tensors are not in its weights files: "
                        "fetch or save the model again")
    model.eval().requires_grad_(False)
    # generate() would mix the published sampling defaults (a repetition penalty, a top_k) into what we call greedy or sampled
    model.generation_config = GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    target = Target(model, facts)
    if not isinstance(device, str):
        _without_hooks(model)
        join_up(target, device)
    try:
        check_head(target)
    except ImportError as error:  # quantised layers ask for their kernels when they first run
        raise UserError(f"target.path = {path!r}: its layers cannot run here: {first_line(error)}") from error
    if not head:
        target.drop_head()
    return target


def load_ends(path: str, *, dtype: str, device: str) -> Ends:
    """The target's embedding and head alone, on `device`: a target of no layers. Raises UserError as `load_target` does."""
    return load_target(path, dtype=dtype, device=device, last_layer=-1, head=True).ends


def _device_map(device: str | Sequence[Stretch], config: PreTrainedConfig, path: str) -> dict[str, Any] | None:
    """Where each part of the model goes, by its name, as transformers takes it; None for the CPU."""
    if isinstance(device, str):
        return None if device == "cpu" else {"": device}
    if len({stretch.device for stretch in device}) == 1:
        return _device_map(str(device[0].device), config, path)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, **code_of(path))
    layers = cast(nn.ModuleList, find_decoder(empty).layers)
    places = {layers[i]: stretch.device for stretch in device for i in stretch.layers}
    return dict(_places("", empty, places, device[0].device))


def _places(
    name: str, module: nn.Module, places: dict[nn.Module, torch.device], rest: torch.device
) -> Iterator[tuple[str, torch.device]]:
    """A module's place, or those of its parts where it holds some of `places` further down."""
    within = [child for child in module.modules() if child in places]
    if not within or module in places:
        yield name, places.get(module, rest)
        return
    for part, child in module.named_children():
        yield from _places(f"{name}.{part}" if name else part, child, places, rest)


def _without_hooks(model: nn.Module) -> None:
    """Take off what accelerate puts on every module where a device map names several: `join_up` asks for less."""
    remove_hook_from_submodules(model)
    for module in model.modules():  # it leaves their own forward on each module, as if a library had put one there
        if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
            del module.forward


def join_up(target: Target, stretches: Sequence[Stretch]) -> None:
    """Let a target whose layers stand on these stretches run as one model: what comes to a layer, and to the final norm, is
    brought to its device first. The plain way, one layer after another; `spread.SpreadCapture` is the fast one."""
    if len({stretch.device for stretch in stretches}) == 1:
        return
    for stretch in stretches:
        for i in stretch.layers:
            target.layers[i].register_forward_pre_hook(_bring_to(stretch.device), with_kwargs=True)
    cast(nn.Module, target.decoder.norm).register_forward_pre_hook(_bring_to(target.device), with_kwargs=True)


def _bring_to(device: torch.device) -> Any:
    """A forward pre-hook that moves tensors, alone and in tuples, lists and dictionaries; caches keep to their layers."""
    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        if isinstance(value, tuple | list):
            return type(value)(map(moved, value))
        return {key: moved(item) for key, item in value.items()} if isinstance(value, dict) else value

    return lambda module, args, kwargs: (moved(args), moved(kwargs))


def _cut(config: PreTrainedConfig, num_layers: int) -> None:
    """Make the text config one of the first `num_layers` layers."""
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = num_layers
    if kinds is not None:
        config.layer_types = kinds[:num_layers]


@torch.no_grad()
def check_head(target: Target) -> None:
    """Rebuild the logits of a few tokens from the last hidden state and the head; refuse a target where they differ.

    Catches logit scaling and any other step after the final norm that a drafter using this head would miss.
    """
    ids_1X = torch.arange(HEAD_CHECK_TOKENS, device=target.device)[None] % target.facts.vocab_size
    with plain_delta_rule(target):
        out = target.model(ids_1X, output_hidden_states=True, use_cache=False)
    rebuilt = target.head.logits(out.hidden_states[-1]).float()
    error = (rebuilt - out.logits.float()).norm() / out.logits.float().norm()
    if not error < 0.02:
        raise UserError(f"target {type(target.model).__name__}: its logits are not head(final hidden state) (relative difference "
                        f"{error:.3f}): this architecture is not supported")


@contextlib.contextmanager
def plain_delta_rule(target: Target) -> Iterator[None]:
    """While open, transformers' gated delta nets run its readable reference: flash-linear-attention would first tune itself, 29 s
    for checks over a few hundred tokens, where our own kernels then do the work (`kernels.has_own_delta_rule`)."""
    name = "torch_chunk_gated_delta_rule"  # what transformers calls it, whichever of the two it has chosen
    modules = {sys.modules[type(layer.linear_attn).__module__] for layer in target.layers if hasattr(layer, "linear_attn")}
    chosen = {module: getattr(module, name) for module in modules if hasattr(module, name)}
    try:
        for module, function in chosen.items():
            setattr(module, name, inspect.unwrap(function))
        yield
    finally:
        for module, function in chosen.items():
            setattr(module, name, function)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The target's tokenizer. Raises UserError when it is missing or damaged."""
    check_folder(path)
    try:
        return AutoTokenizer.from_pretrained(path, **code_of(path))
    except Exception as error:  # tokenizers raises bare Exception on a damaged file
        raise unusable(path, "no usable tokenizer", error) from error


def target_digest(path: str) -> str:
    """A cheap identity of a local target: its config, name, size, first and last MiB of each weights file, and its own code where
    that may run.

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
    if is_trusted(path):
        parts |= {file.name: sha256_file(file) for file in sorted(folder.glob("*.py"))}
    return digest(parts)
