"""Takes an exported folder and the drafter it was made from, loads it afresh, gives what differs; writes nothing."""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from outrider.errors import UserError
from outrider.features.facts import TargetFacts
from outrider.features.target import DTYPES
from outrider.files import read_json
from outrider.model.attention import dense_attention
from outrider.model.drafter import ContextCache, Drafter
from outrider.model.published import CONFIG_NAME, WEIGHTS_NAME, tensor_shapes, to_config
from outrider.weights.gguf import ARCHITECTURE, metadata, read_gguf, tensor_name
from outrider.weights.opening import open_drafter
from outrider.weights.speculators import is_speculators, to_speculators

STORED = {"float32": "F32", "bfloat16": "BF16"}  # safetensors' names
HIDDEN_TOLERANCE = 1e-6  # relative norm; both sides run the same float32 code on the same rounded weights
ROTARY_TOLERANCE = 1e-6  # float32 rounding of cos and sin at the positions compared
CONTEXT_TOKENS = 24


def selfcheck(folder: Path, drafter: Drafter, facts: TargetFacts, *, dtype: str) -> list[str]:
    """Every reason why the folder does not hold `drafter` (already rounded to `dtype`) for the target of `facts`."""
    try:
        loaded = open_drafter(folder, dtype="float32", device="cpu")
    except UserError as error:
        return [f"it cannot be loaded: {error}"]
    config = read_json(folder / CONFIG_NAME, what="the drafter's config")
    reasons = _compare_tensors(folder, drafter, dtype)
    if loaded.shape != drafter.shape:
        return [*reasons, f"its shape is {loaded.shape}, the checkpoint's is {drafter.shape}"]
    reasons += _compare_keys(config, drafter, facts)
    reasons += _compare_rotary(config, drafter)
    difference = _relative(_sample_output(loaded), _sample_output(drafter))
    if not difference <= HIDDEN_TOLERANCE:
        reasons.append(f"its hidden states differ from the checkpoint's by {difference:.2e} (relative)")
    return reasons


def check_gguf_file(path: Path, drafter: Drafter, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Every reason why the GGUF file, read back, does not hold `drafter` (already rounded to the file's dtype)."""
    keys, tensors = read_gguf(path)
    expected = {**metadata(drafter.shape, tokenizer), "general.architecture": ARCHITECTURE}
    reasons = [f"{path.name}: {key} is {_short(keys.get(key))}, must be {_short(value)}" for key, value in expected.items()
               if not _same(keys.get(key), value)]
    ours = {tensor_name(name): tensor for name, tensor in drafter.state_dict().items()}
    reasons += [f"{path.name}: tensor '{name}' is missing or unknown" for name in sorted(ours.keys() ^ tensors.keys())]
    both = sorted(ours.keys() & tensors.keys())
    return reasons + [f"{path.name}: tensor '{name}' differs from the checkpoint's" for name in both
                      if not torch.equal(ours[name], tensors[name])]


def _same(found: Any, expected: Any) -> bool:
    """Equal, or equal as the 32-bit float that GGUF stores."""
    if isinstance(expected, float):
        return isinstance(found, float) and math.isclose(found, expected, rel_tol=1e-6)
    return bool(found == expected)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _compare_tensors(folder: Path, drafter: Drafter, dtype: str) -> list[str]:
    with safe_open(folder / WEIGHTS_NAME, framework="pt") as file:
        found = {name: (file.get_slice(name).get_dtype(), tuple(file.get_slice(name).get_shape())) for name in file.keys()}  # noqa: SIM118
    expected = {name: (STORED[dtype], size) for name, size in tensor_shapes(drafter.shape).items()}
    wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    return [f"tensor '{name}' is {found.get(name)}, must be {expected.get(name)}" for name in wrong]


def _compare_keys(config: dict[str, Any], drafter: Drafter, facts: TargetFacts) -> list[str]:
    if is_speculators(config):
        allowed, vocab_size = to_speculators(drafter.shape, target="", architectures=[], dtype=""), config["draft_vocab_size"]
    else:
        allowed = to_config(drafter.shape, embedding_scale=1.0, softcap=None, dtype="")
        vocab_size = config["vocab_size"]
    leaked = sorted(config.keys() - allowed.keys())
    reasons = [f"its config has the key '{leaked[0]}', which is not on the allow-list"] if leaked else []
    if vocab_size != facts.vocab_size:
        reasons.append(f"its vocab_size is {vocab_size}, the target's is {facts.vocab_size}")
    return reasons


def _compare_rotary(config: dict[str, Any], drafter: Drafter) -> list[str]:
    """cos and sin as a loader of the Qwen3 kind builds them from the saved JSON, against those used in training."""
    positions_1X = torch.tensor([[0, 1, 17, 1000, drafter.shape.max_position_embeddings - 1]])
    layer = config["transformer_layer_config"] if is_speculators(config) else config
    theirs = Qwen3RotaryEmbedding(Qwen3Config(**layer))(torch.zeros(1), positions_1X)
    ours = drafter.rotary(positions_1X)
    differences = [float((a - b[:, 0]).abs().max()) for a, b in zip(theirs, ours, strict=True)]
    if max(differences) <= ROTARY_TOLERANCE:
        return []
    return [f"cos and sin rebuilt from {CONFIG_NAME} differ from those used in training by {max(differences):.2e}"]


def rounded(drafter: Drafter, dtype: str) -> Drafter:
    """A float32 copy whose weights are rounded to `dtype`, as a file holds them."""
    copy = Drafter(drafter.shape, dense_attention)
    copy.load_state_dict({name: tensor.detach().cpu().to(DTYPES[dtype]).float() for name, tensor in drafter.state_dict().items()})
    return copy.eval().requires_grad_(False)


@torch.no_grad()
def _sample_output(drafter: Drafter) -> Tensor:
    """Hidden states of two drafts in a row on random features and blocks, the second over cached context."""
    generator = torch.Generator().manual_seed(0)
    shape, cache = drafter.shape, ContextCache()
    features = torch.randn(1, CONTEXT_TOKENS, len(shape.target_layer_ids) * shape.hidden_size, generator=generator)
    noise = torch.randn(1, shape.block_size, shape.hidden_size, generator=generator)
    first = drafter.draft(noise, features[:, :-3], cache)
    return torch.cat((first, drafter.draft(noise, features[:, -3:], cache)))


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())
