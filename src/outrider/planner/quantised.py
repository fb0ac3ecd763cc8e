"""Takes what a config says of how its weights came quantised, gives the bits of one weight and which parts have them; loads none.

Bits count what is stored with the weights: a group's scale and zero point, shared out over the group. Where the method is not
known here, or the config leaves its bits out, nothing is given, and the weights are counted in the run's dtype: too many.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SCALE = 16  # bits of a group's scale where it is half precision
ATTENTION, FEED_FORWARD = ("attn", "attention", "linear_attn"), ("mlp", "experts", "feed_forward", "ffn")
ROUTERS = ("router", "gate.", ".gate", "shared_expert_gate", "gate_proj.bias")


@dataclass(frozen=True)
class Quantised:
    """`bits` of one weight of the layers' projections, in attention (or recurrence) and in the feed-forward, each or not."""

    method: str
    bits: float
    attention: bool
    feed_forward: bool


def read_quantised(values: Mapping[str, Any]) -> Quantised | None:
    """Of a text config's values; None for plain weights and for what is not known here."""
    found = values.get("quantization_config")
    if not isinstance(found, Mapping):
        return None
    method = str(found.get("quant_method"))
    bits = BITS[method](found) if method in BITS else None
    if bits is None or not 0 < bits <= 32:
        return None
    spared = [str(name) for key in ("modules_to_not_convert", "ignore", "llm_int8_skip_modules") for name in found.get(key) or ()]
    return Quantised(method, bits, not _whole(spared, ATTENTION), not _whole(spared, FEED_FORWARD))


def _whole(spared: list[str], parts: tuple[str, ...]) -> bool:
    """Is a part of every layer spared, not just the layers of some numbers or its router?"""
    return any(any(part in name for part in parts) and not any(router in name for router in ROUTERS)
               and not any(piece.isdigit() for piece in name.split(".")) for name in spared)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _grouped(found: Mapping[str, Any]) -> float | None:
    """GPTQ and AWQ: whole numbers of `bits`, a scale and a zero point a group."""
    bits, group = _number(found.get("bits", found.get("w_bit"))), _number(found.get("group_size", found.get("q_group_size", 128)))
    return None if bits is None else bits + ((SCALE + bits) / group if group and group > 0 else 0.0)


def _blocks(found: Mapping[str, Any]) -> float:
    """8 bits, and one fp32 scale a block of rows and columns."""
    block = found.get("weight_block_size")
    return 8 + (32 / (block[0] * block[1]) if isinstance(block, list) and len(block) == 2 and all(block) else 0.0)


def _bits_and_bytes(found: Mapping[str, Any]) -> float | None:
    """LLM.int8 has a scale a row; 4 bits have one for 64 weights, in 8 bits where it is quantised again (QLoRA)."""
    if found.get("load_in_8bit"):
        return 8.0
    if found.get("load_in_4bit"):
        return 4 + (8 / 64 + 32 / (64 * 256) if found.get("bnb_4bit_use_double_quant") else 32 / 64)
    return None


def _compressed(found: Mapping[str, Any]) -> float | None:
    """compressed-tensors: the first group of layers speaks for all."""
    groups = found.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping):
        return None
    bits, group = _number(weights.get("num_bits")), _number(weights.get("group_size"))
    return None if bits is None else bits + (SCALE / group if group and group > 0 else 0.0)


BITS: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
    "gptq": _grouped, "awq": _grouped, "fp8": _blocks, "bitsandbytes": _bits_and_bytes, "compressed-tensors": _compressed,
    "fbgemm_fp8": lambda found: 8.0, "mxfp4": lambda found: 4 + 8 / 32,
}
