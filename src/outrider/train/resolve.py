"""Takes a RunConfig and the target's facts, gives the resolved run, its drafter's shape and what was derived; loads nothing."""

from dataclasses import dataclass
from itertools import pairwise

from outrider.config import RunConfig
from outrider.errors import UserError
from outrider.features.facts import TargetFacts
from outrider.records import FULL, DrafterShape, check_block_size

GAMMA_BY_BLOCK_SIZE = ((8, 4.0), (10, 5.0), (16, 7.0))  # arXiv 2602.06036


@dataclass(frozen=True)
class Resolved:
    """A run with nothing left to derive. `derived` maps each `section.key` that the file left out to its value."""

    config: RunConfig
    shape: DrafterShape
    gamma: float
    derived: dict[str, object]


def default_layer_ids(num_target_layers: int, count: int) -> tuple[int, ...]:
    """`round(1 + j * (N - 4) / (L - 1))`, j = 0..L-1 (01-dflash); N // 2 for L = 1. Raises UserError when N is too small."""
    if count == 1 and num_target_layers > 2:
        return (num_target_layers // 2,)
    ids = tuple(round(1 + j * (num_target_layers - 4) / max(count - 1, 1)) for j in range(count))
    if num_target_layers < 5 or len(set(ids)) < count:
        most = max(num_target_layers - 3, int(num_target_layers > 2))
        lower = f"set it to at most {most}, or " if most else ""
        raise UserError(f"drafter.num_target_features = {count}: too many for a target of {num_target_layers} layers, the "
                        f"default spread repeats a layer: {lower}give drafter.target_layer_ids")
    return ids


def default_gamma(block_size: int) -> float:
    """Decay length of the slot weights, in slots: 4, 5, 7 for K = 8, 10, 16; linear between, in proportion outside."""
    (first_k, first), (last_k, last) = GAMMA_BY_BLOCK_SIZE[0], GAMMA_BY_BLOCK_SIZE[-1]
    if block_size <= first_k:
        return first * block_size / first_k
    if block_size >= last_k:
        return last * block_size / last_k
    for (k0, g0), (k1, g1) in pairwise(GAMMA_BY_BLOCK_SIZE):
        if block_size <= k1:
            return g0 + (g1 - g0) * (block_size - k0) / (k1 - k0)
    raise AssertionError("block sizes between the first and last entry are covered")


def resolve(config: RunConfig, facts: TargetFacts) -> Resolved:
    """Fill in everything that the run file left to the target and the block size. Raises UserError on what does not fit."""
    drafter = config.drafter
    check_block_size(drafter.block_size)
    layer_ids = drafter.target_layer_ids
    if layer_ids is None:
        layer_ids = default_layer_ids(facts.num_layers, drafter.num_target_features)
    filled = {
        "target_layer_ids": layer_ids,
        "num_target_features": len(layer_ids),
        "intermediate_size": drafter.intermediate_size or facts.intermediate_size,
        "num_heads": drafter.num_heads or facts.num_heads,
        "num_kv_heads": drafter.num_kv_heads or facts.num_kv_heads,
        "head_dim": drafter.head_dim or facts.head_dim,
        "rope_theta": drafter.rope_theta or facts.rope_theta,
        "layer_types": (FULL,) * drafter.num_layers if drafter.layer_types is None else drafter.layer_types,
    }
    gamma = config.objective.gamma or default_gamma(drafter.block_size)
    attention = config.train.attention or ("fused" if config.train.device.startswith("cuda") else "dense")
    derived: dict[str, object] = {
        f"drafter.{key}": value for key, value in filled.items() if getattr(drafter, key) != value
    }
    if config.objective.gamma is None:
        derived["objective.gamma"] = gamma
    if config.train.attention is None:
        derived["train.attention"] = attention
    resolved = config.model_copy(update={
        "drafter": drafter.model_copy(update=filled),
        "objective": config.objective.model_copy(update={"gamma": gamma}),
        "train": config.train.model_copy(update={"attention": attention}),
    })
    return Resolved(config=resolved, shape=_shape(resolved, facts), gamma=gamma, derived=derived)


def _shape(config: RunConfig, facts: TargetFacts) -> DrafterShape:
    d = config.drafter
    assert d.target_layer_ids is not None
    assert d.layer_types is not None
    assert d.intermediate_size
    assert d.num_heads
    assert d.num_kv_heads
    assert d.head_dim
    assert d.rope_theta
    return DrafterShape(
        hidden_size=facts.hidden_size,
        intermediate_size=d.intermediate_size,
        num_layers=d.num_layers,
        num_heads=d.num_heads,
        num_kv_heads=d.num_kv_heads,
        head_dim=d.head_dim,
        rms_norm_eps=facts.rms_norm_eps,
        rope_theta=d.rope_theta,
        vocab_size=facts.vocab_size,
        max_position_embeddings=facts.max_position_embeddings,
        block_size=d.block_size,
        mask_token_id=d.mask_token_id,
        target_layer_ids=d.target_layer_ids,
        num_target_layers=facts.num_layers,
        tie_word_embeddings=facts.tie_word_embeddings,
        layer_types=d.layer_types,
        sliding_window=d.sliding_window,
    )
