"""Takes an exported folder and the drafter it was made from, loads it afresh, gives what differs; writes nothing."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from outrider.errors import UserError
from outrider.features.target import TargetFacts
from outrider.files import read_json
from outrider.model.attention import dense_attention
from outrider.model.drafter import ContextCache, Drafter
from outrider.weights.opening import open_drafter
from outrider.weights.published import CONFIG_NAME, WEIGHTS_NAME, tensor_shapes, to_config

HIDDEN_TOLERANCE = 1e-6  # relative norm; both sides run the same float32 code on the same bf16-rounded weights
ROTARY_TOLERANCE = 1e-6  # float32 rounding of cos and sin at the positions compared
CONTEXT_TOKENS = 24


def selfcheck(folder: Path, trained: Drafter, facts: TargetFacts) -> tuple[bool, list[str]]:
    """Whether the folder holds `trained`, rounded to bf16, for the target of `facts`; and every reason why not."""
    try:
        loaded = open_drafter(folder, dtype="float32", device="cpu")
    except UserError as error:
        return False, [f"it cannot be loaded: {error}"]
    config = read_json(folder / CONFIG_NAME, what="the drafter's config")
    reasons = _compare_tensors(folder, trained)
    if loaded.shape != trained.shape:
        return False, [*reasons, f"its shape is {loaded.shape}, the checkpoint's is {trained.shape}"]
    leaked = sorted(config.keys() - to_config(trained.shape, embedding_scale=1.0, softcap=None).keys())
    if leaked:
        reasons.append(f"its config has the key '{leaked[0]}', which is not on the allow-list")
    if config["vocab_size"] != facts.vocab_size:
        reasons.append(f"its vocab_size is {config['vocab_size']}, the target's is {facts.vocab_size}")
    reasons += _compare_rotary(config, trained)
    difference = _relative(_sample_output(loaded), _sample_output(_rounded(trained)))
    if not difference <= HIDDEN_TOLERANCE:
        reasons.append(f"its hidden states differ from the checkpoint's by {difference:.2e} (relative)")
    return not reasons, reasons


def _compare_tensors(folder: Path, trained: Drafter) -> list[str]:
    with safe_open(folder / WEIGHTS_NAME, framework="pt") as file:
        found = {name: (file.get_slice(name).get_dtype(), tuple(file.get_slice(name).get_shape())) for name in file.keys()}  # noqa: SIM118
    expected = {name: ("BF16", size) for name, size in tensor_shapes(trained.shape).items()}
    wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    return [f"tensor '{name}' is {found.get(name)}, must be {expected.get(name)}" for name in wrong]


def _compare_rotary(config: dict[str, Any], trained: Drafter) -> list[str]:
    """cos and sin as a loader of the Qwen3 kind builds them from the saved JSON, against those used in training."""
    positions_1X = torch.tensor([[0, 1, 17, 1000, trained.shape.max_position_embeddings - 1]])
    theirs = Qwen3RotaryEmbedding(Qwen3Config(**config))(torch.zeros(1), positions_1X)
    ours = trained.rotary(positions_1X)
    differences = [float((a - b[:, 0]).abs().max()) for a, b in zip(theirs, ours, strict=True)]
    if max(differences) <= ROTARY_TOLERANCE:
        return []
    return [f"cos and sin rebuilt from {CONFIG_NAME} differ from those used in training by {max(differences):.2e}"]


def _rounded(drafter: Drafter) -> Drafter:
    """A float32 copy whose weights are rounded to bf16, as the file holds them."""
    copy = Drafter(drafter.shape, dense_attention)
    copy.load_state_dict({name: tensor.detach().cpu().bfloat16().float() for name, tensor in drafter.state_dict().items()})
    return copy.eval()


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
