"""The schedule and the optimizer's groups."""

import importlib.util
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint
from eight_bit import uncompiled
from toys import toy_shape

from outrider.config import OptimizerConfig, parse_run
from outrider.errors import UserError
from outrider.model.attention import dense_attention
from outrider.model.drafter import Drafter
from outrider.train.checkpoint import Position, coming, load_checkpoint, moments
from outrider.train.optim import build_optimizer, check_optimizer, learning_rate_at, set_rate


def test_warm_up_then_cosine_to_the_final_share() -> None:
    config = OptimizerConfig(learning_rate=2**-4, warmup_share=0.04, final_share=0.1)
    rates = [learning_rate_at(step, 1000, config) / config.learning_rate for step in range(1000)]
    assert rates[:3] == pytest.approx([1 / 40, 2 / 40, 3 / 40])
    assert rates[39] == rates[40] == max(rates) == 1.0
    assert all(a >= b for a, b in pairwise(rates[40:]))
    assert rates[-1] == pytest.approx(0.1)
    assert rates[40 + 479] == pytest.approx(0.55, abs=1e-3), "half way down at half time"


@pytest.mark.parametrize("total", [1, 2, 3, 10])
@pytest.mark.parametrize("warmup", [0.0, 0.04, 1.0])
def test_short_runs_have_positive_rates(total: int, warmup: float) -> None:
    config = OptimizerConfig(learning_rate=2**-4, warmup_share=warmup, final_share=0.0)
    rates = [learning_rate_at(step, total, config) for step in range(total)]
    assert all(0 <= rate <= config.learning_rate for rate in rates)
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


def run_with(**sections: dict[str, Any]) -> Any:
    return parse_run({"target": {"path": "t"}, "data": {"rows": "r"}, "drafter": {"mask_token_id": 1}, "train": {"folder": "f"},
                      **sections}, where="test")


def test_8_bits_without_torchao_say_so_before_anything_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_optimizer(run_with())
    with pytest.raises(UserError, match=r"optimizer.state = '8bit': needs torchao, which is not installed: pip install torchao"):
        check_optimizer(run_with(optimizer={"state": "8bit"}))


def test_8_bits_are_not_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    check_optimizer(run_with(optimizer={"state": "8bit"}))
    with pytest.raises(UserError, match=r"cannot be shared out, placement\.sharding is 'fsdp2'"):
        check_optimizer(run_with(optimizer={"state": "8bit"}, placement={"sharding": "fsdp2"}))


SHAPE = replace(toy_shape(), intermediate_size=128)  # feed-forward weights of 4,096 elements, the least that 8 bits are for


def stepped(state: str, steps: int, *, start: int = 0) -> tuple[Drafter, torch.optim.Optimizer]:
    torch.manual_seed(0)
    drafter = Drafter(SHAPE, dense_attention)
    optimizer = build_optimizer(drafter, OptimizerConfig(state=state))  # type: ignore[arg-type]
    move(drafter, optimizer, range(start, start + steps))
    return drafter, optimizer


def move(drafter: Drafter, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps on gradients that lean one way, as real ones do, at a rate that changes."""
    for step in steps:
        set_rate(optimizer, 1e-3 / (1 + step))
        generator = torch.Generator().manual_seed(step)
        for parameter in drafter.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) + 0.5
        with uncompiled():
            optimizer.step()


def test_8_bits_move_the_weights_as_fp32_does_and_resume_to_the_bit(tmp_path: Path) -> None:
    pytest.importorskip("torchao.optim", reason="torchao is not installed")
    torch.manual_seed(0)
    start = Drafter(SHAPE, dense_attention).state_dict()
    exact, eight = stepped("float32", 6)[0].state_dict(), stepped("8bit", 6)[0].state_dict()
    for name, before in start.items():
        way = (exact[name] - before).norm()
        assert way > 0
        # 8-bit moments are right to 1e-2 of their block's largest (arXiv 2110.02861); a rate not taken over errs by its factor
        assert (eight[name] - exact[name]).norm() < 0.05 * way, name

    drafter, optimizer = stepped("8bit", 3)
    kept = moments(drafter, optimizer)
    assert kept["exp_avg.codes/layers.0.mlp.up_proj.weight"].dtype == torch.uint8
    assert kept["exp_avg_sq.scale/layers.0.mlp.up_proj.weight"].numel() * 256 == 4096
    assert kept["exp_avg/norm.weight"].dtype == torch.float32, "too small to be worth it"
    folder = save_checkpoint(tmp_path, drafter, optimizer, Position(step=3))
    other, other_optimizer = stepped("8bit", 1, start=9)
    load_checkpoint(folder, other, other_optimizer)
    move(drafter, optimizer, range(3, 6))
    move(other, other_optimizer, range(3, 6))
    ours, theirs = moments(drafter, optimizer), moments(other, other_optimizer)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(("saved", "wanted"), [("8bit", "float32"), ("float32", "8bit")])
def test_moments_of_the_other_kind_are_refused(tmp_path: Path, saved: str, wanted: str) -> None:
    pytest.importorskip("torchao.optim", reason="torchao is not installed")
    folder = save_checkpoint(tmp_path, *stepped(saved, 1), Position(step=1))
    with pytest.raises(UserError, match=f"optimizer.state = '{wanted}': the checkpoint's moments are '{saved}'"):
        load_checkpoint(folder, *stepped(wanted, 1))


@pytest.mark.parametrize("state", ["float32", "8bit"])
def test_what_a_checkpoint_will_hold_is_known_before_a_step(state: str) -> None:
    if state == "8bit":
        pytest.importorskip("torchao.optim", reason="torchao is not installed")
    expected = coming(*stepped(state, 0))
    drafter, optimizer = stepped(state, 1)
    there = {name: tensor for name, tensor in (drafter.state_dict() | moments(drafter, optimizer)).items() if tensor.dim()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in there.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in expected.items()}
