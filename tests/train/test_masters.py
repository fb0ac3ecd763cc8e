"""Masters that lend their memory learn what masters beside a copy learn, to the bit, and are whole whenever a step is over."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from learning import LOGITS_BYTES, colocated, fused_on_cpu, make_drafter, random_micro_batch
from torch import Tensor
from toys import toy_shape

from outrider.config import OptimizerConfig
from outrider.features.target import Target
from outrider.model.fused_drafter import FusedDrafter
from outrider.train import culprit as culprit_module
from outrider.train.culprit import find_culprit
from outrider.train.leak import find_leak
from outrider.train.masters import WholeMasters
from outrider.train.meter import Stopwatch
from outrider.train.optim import build_optimizer
from outrider.train.processes import ALONE
from outrider.train.step import Learner, MicroBatch, run_step

ToyTarget = Callable[..., Target]
STEPS = 20


class MastersBesideACopy(WholeMasters):
    """The compute weights in memory of their own: masters rounded to bf16 at a step's start, to nearest, ties away from zero."""

    def lend(self, fused: FusedDrafter) -> None:
        if fused.norm.weight.is_meta:
            fused.to_empty(device="cpu")
        with torch.no_grad():
            for share in fused.shares(self.drafter):
                rounded = (share.master.view(torch.int32) + 0x8000) & ~0xFFFF
                share.of(share.packed).copy_(rounded.view(torch.float32))

    def take_gradients(self, fused: FusedDrafter) -> None:
        fused.give_gradients(self.drafter)


def learner_of(target: Target, kind: type[WholeMasters] = WholeMasters) -> Learner:
    drafter = make_drafter(toy_shape())
    return Learner(fused_on_cpu(drafter, dtype=torch.bfloat16), kind(drafter, ALONE), target.ends,
                   build_optimizer(drafter, OptimizerConfig(learning_rate=1e-4)))


def batches_of(step: int, count: int) -> list[MicroBatch]:
    return [random_micro_batch([[9, 9, 9]], seed=10 * step + m) for m in range(count)]


def step(learner: Learner, target: Target, batches: list[MicroBatch]) -> Any:
    supply = colocated(target, toy_shape())
    return run_step(learner, supply, batches, [], clip_norm=1.0, logits_bytes=LOGITS_BYTES, watch=Stopwatch())


def values(learner: Learner) -> dict[str, Tensor]:
    drafter, state = learner.masters.drafter, learner.optimizer.state
    found = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    return found | {f"{name}/{key}": value.clone() for name, p in drafter.named_parameters() for key, value in state[p].items()}


@pytest.mark.parametrize("count", [1, 3])
def test_20_steps_are_those_beside_a_copy_to_the_bit(toy_target: ToyTarget, count: int) -> None:
    """Parameters and moments, one and three micro-batches a step. The rate moves a weight by about 1e-4 a step, less than half a
    unit of a bf16 above 0.05: without fp32 masters such updates would be lost."""
    target = toy_target("llama")
    lent, beside = learner_of(target), learner_of(target, MastersBesideACopy)
    before = values(lent)
    for number in range(STEPS):
        batches = batches_of(number, count)
        assert torch.equal(step(lent, target, batches).norm, step(beside, target, batches).norm)
    ours, theirs = values(lent), values(beside)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 4 * len(before)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
        assert name not in before or not torch.equal(value, before[name]), name


def test_masters_are_whole_after_what_no_update_follows(toy_target: ToyTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    target = toy_target("llama")
    learner, supply = learner_of(target), colocated(target, toy_shape())
    step(learner, target, batches_of(0, 1))
    before, batches = values(learner), batches_of(1, 2)

    def unchanged() -> bool:
        return all(torch.equal(value, before[name]) for name, value in values(learner).items())

    learner.road.begin(learner.masters)
    assert not unchanged(), "while it is lent a master is no number"
    learner.masters.rest()
    assert unchanged()

    assert find_leak(learner, supply, batches[0], logits_bytes=LOGITS_BYTES) is None
    assert unchanged()

    bad = replace(batches[0], blocks=replace(batches[0].blocks, weights_BAK=batches[0].blocks.weights_BAK * torch.nan))
    with pytest.raises(FloatingPointError, match="is not finite"):
        step(learner, target, [bad, batches[1]])
    assert unchanged()

    monkeypatch.setattr(culprit_module, "_in_batch", lambda *_: culprit_module.Culprit("found in the first of two", ()))
    assert find_culprit(learner, supply, batches, logits_bytes=LOGITS_BYTES).tensor == "found in the first of two"
    assert unchanged()

