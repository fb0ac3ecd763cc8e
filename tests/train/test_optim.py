"""The schedule and the optimizer's groups."""

from itertools import pairwise

import pytest
import torch
from toys import toy_shape

from outrider.config import OptimizerConfig
from outrider.model.attention import dense_attention
from outrider.model.drafter import Drafter
from outrider.train.optim import build_optimizer, learning_rate_at


def test_warm_up_then_cosine_to_the_final_share() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_share=0.04, final_share=0.1)
    rates = [learning_rate_at(step, 1000, config) for step in range(1000)]
    assert rates[:3] == pytest.approx([1 / 40, 2 / 40, 3 / 40])
    assert rates[39] == rates[40] == max(rates) == 1.0
    assert all(a >= b for a, b in pairwise(rates[40:]))
    assert rates[-1] == pytest.approx(0.1)
    assert rates[40 + 479] == pytest.approx(0.55, abs=1e-3), "half way down at half time"


@pytest.mark.parametrize("total", [1, 2, 3, 10])
@pytest.mark.parametrize("warmup", [0.0, 0.04, 1.0])
def test_short_runs_have_positive_rates(total: int, warmup: float) -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_share=warmup, final_share=0.0)
    rates = [learning_rate_at(step, total, config) for step in range(total)]
    assert all(0 <= rate <= 1 for rate in rates)
    assert rates[0] > 0


def test_norms_do_not_decay_and_every_parameter_is_in_one_group() -> None:
    drafter = Drafter(toy_shape(), dense_attention)
    optimizer = build_optimizer(drafter, OptimizerConfig(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == sum(len(group["params"]) for group in optimizer.param_groups) == len(list(drafter.parameters()))
    for name, parameter in drafter.named_parameters():
        assert decay[id(parameter)] == (0.0 if "norm" in name else 0.3), name


def test_masters_must_be_fp32() -> None:
    with pytest.raises(AssertionError, match="masters are fp32"):
        build_optimizer(Drafter(toy_shape(), dense_attention).to(torch.bfloat16), OptimizerConfig())
