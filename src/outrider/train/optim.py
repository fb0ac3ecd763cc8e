"""Takes a drafter and the optimizer's settings, gives AdamW on fp32 masters and its schedule; knows nothing of losses."""

import math

import torch

from outrider.config import OptimizerConfig
from outrider.model.drafter import Drafter


def build_optimizer(drafter: Drafter, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the drafter's fp32 parameters; no weight decay on norms (one-dimensional parameters)."""
    assert all(p.dtype == torch.float32 for p in drafter.parameters()), "masters are fp32"
    matrices = [p for p in drafter.parameters() if p.dim() > 1]
    norms = [p for p in drafter.parameters() if p.dim() == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": norms, "weight_decay": 0.0}],
        lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.epsilon, fused=True,
    )


def learning_rate_at(step: int, total: int, config: OptimizerConfig) -> float:
    """Rate of step 0..total-1: linear warm-up over `warmup_share`, then cosine down to `final_share` of the peak."""
    warmup = max(1, round(total * config.warmup_share))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, total - 1 - warmup)
    share = config.final_share + (1 - config.final_share) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return config.learning_rate * share
