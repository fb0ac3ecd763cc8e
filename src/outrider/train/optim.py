"""Takes a drafter and the optimizer's settings, gives AdamW on fp32 masters and its schedule; knows nothing of losses."""

import importlib.util
import math
from typing import Any

import torch
from torch import Tensor

from outrider.config import OptimizerConfig, RunConfig
from outrider.errors import UserError
from outrider.model.drafter import Drafter

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # by name: may be negative
BLOCK = 256  # elements of a moment in 8 bits that share a scale
PARTS = ("codes", "scale")  # of a moment in 8 bits; its table of values is a constant


def check_optimizer(config: RunConfig) -> None:
    """Raise UserError where `optimizer.state` cannot be had on this machine or with this sharding."""
    if config.optimizer.state != "8bit":
        return
    if importlib.util.find_spec("torchao") is None:
        raise UserError("optimizer.state = '8bit': needs torchao, which is not installed: pip install torchao, or use "
                        "optimizer.state = 'float32'")
    if config.placement.sharding == "fsdp2":
        raise UserError("optimizer.state = '8bit': cannot be shared out, placement.sharding is 'fsdp2': use one of them, each "
                        "saves most of the optimizer's memory")


def build_optimizer(drafter: Drafter, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over the drafter's fp32 parameters; no weight decay on norms (one-dimensional parameters).

    `state` "8bit": both moments in blocks of 256 with one fp32 scale each (arXiv 2110.02861), by torchao; parameters whose
    size is under 4,096 or no multiple of 256 keep theirs in fp32. The update itself is made in fp32 either way.
    """
    assert all(p.dtype == torch.float32 for p in drafter.parameters()), "masters are fp32"
    matrices = [p for p in drafter.parameters() if p.dim() > 1]
    norms = [p for p in drafter.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": config.weight_decay},
                                    {"params": norms, "weight_decay": 0.0}]
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2), "eps": config.epsilon}
    if config.state == "8bit":
        from torchao.optim import AdamW8bit  # optional: check_optimizer has said so where it is missing

        eight_bit: torch.optim.Optimizer = AdamW8bit(groups, block_size=BLOCK, **settings)
        return eight_bit
    return torch.optim.AdamW(groups, fused=True, **settings)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of the next update."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # compiled into the 8-bit update as a tensor, so that it may change
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def coming_state(parameter: Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What `plain_state` will give of the parameter once it has moved, but its counter: shapes and dtypes, on the meta device."""
    if isinstance(optimizer, torch.optim.AdamW) or not _in_8_bits(parameter):
        return {key: torch.empty(parameter.shape, device="meta") for key in MOMENTS}
    codes = torch.empty(parameter.shape, dtype=torch.uint8, device="meta")
    scale = torch.empty(parameter.numel() // BLOCK, device="meta")
    return {f"{key}.{part}": tensor for key in MOMENTS for part, tensor in zip(PARTS, (codes, scale), strict=True)}


def plain_state(state: dict[str, Any]) -> dict[str, Tensor]:
    """One parameter's optimizer state as plain tensors, not copied: a moment in 8 bits as `exp_avg.codes`, `exp_avg.scale`."""
    plain: dict[str, Tensor] = {}
    for key, value in state.items():
        if hasattr(value, "codes"):
            plain |= {f"{key}.{part}": getattr(value, part) for part in PARTS}
        else:
            plain[key] = value
    return plain


def rebuilt_state(plain: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What `plain_state` took apart. Raises UserError when the other kind of optimizer wrote it."""
    if isinstance(optimizer, torch.optim.AdamW):
        if any("." in key for key in plain):
            raise _other_kind(wanted="float32", found="8bit")
        return plain
    from torchao.optim.subclass_8bit import OptimState8bit

    state: dict[str, Tensor] = {"step": plain["step"].cpu()} if plain else {}  # where torchao begins it; a GPU rounds otherwise
    for key, signed in MOMENTS.items():
        if f"{key}.codes" in plain:
            codes, scale = (plain[f"{key}.{part}"] for part in PARTS)
            moment = OptimState8bit.zeros(codes.shape, signed, BLOCK, codes.device, dtype=torch.float32)
            moment.codes.copy_(codes)
            moment.scale.copy_(scale)
            state[key] = moment
        elif key in plain:
            if _in_8_bits(plain[key]):
                raise _other_kind(wanted="8bit", found="float32")
            state[key] = plain[key]
    return state


def _in_8_bits(moment: Tensor) -> bool:
    """Does torchao keep a moment of this size in 8 bits?"""
    return moment.numel() >= 4096 and moment.numel() % BLOCK == 0


def _other_kind(*, wanted: str, found: str) -> UserError:
    return UserError(f"optimizer.state = '{wanted}': the checkpoint's moments are '{found}': go on with "
                     f"--set optimizer.state={found}, or start a new run with --set train.folder=...")


def learning_rate_at(step: int, total: int, config: OptimizerConfig) -> float:
    """Rate of step 0..total-1: linear warm-up over `warmup_share`, then cosine down to `final_share` of the peak."""
    warmup = max(1, round(total * config.warmup_share))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, total - 1 - warmup)
    share = config.final_share + (1 - config.final_share) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return config.learning_rate * share
