"""The frozen-head loss is the plain loss: same value, same gradient, same counts, without the logits."""

import dataclasses

import pytest
import torch

from outrider.objective.frozen_head import frozen_head_loss, rows_per_chunk
from outrider.objective.losses import plain_loss
from outrider.records import DraftBlocks, FrozenHead, LossTerms

B, A, K, D, V = 2, 7, 5, 32, 391
COUNTS = ("weight_sum", "correct_K", "count_K", "run_sum", "block_count")

# fp32: both roads take the same products and differ in the order of sums over V = 391 terms, a few ulp (6e-8 each).
# bf16: the loss comes from the same bf16 logits and fp32 sums, so it is as close as in fp32. The gradient is rounded to bf16
# (relative half-ulp 2^-9 = 2e-3) once as logits' gradient and once as rows; the plain road rounds at other places.
TOLERANCE = {torch.float32: (2e-6, 2e-6), torch.bfloat16: (2e-6, 8e-3)}
DEVICES = ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")])]


def case(dtype: torch.dtype, device: str, softcap: float | None) -> tuple[torch.Tensor, DraftBlocks, FrozenHead]:
    weights = torch.exp(-torch.arange(K) / 3.0).expand(B, A, K).clone()
    weights[..., 0] = 0.0
    weights[0, 2, 3:] = 0.0  # cut at an unsupervised position
    weights[1, -2:] = 0.0  # dropped blocks
    head = FrozenHead((torch.randn(V, D) / D**0.5 * 3).to(dtype).to(device), softcap)
    hidden = torch.randn(B, A * K, D).to(dtype).to(device)
    labels = torch.randint(V, (B, A, K), device=device)
    hit = head.logits(hidden).argmax(-1).view(B, A, K)  # half of the labels right, or runs and hits would all be 0
    labels = torch.where(torch.rand(B, A, K, device=device) < 0.5, hit, labels)
    zeros = torch.zeros(B, A, dtype=torch.int64, device=device)
    return hidden, DraftBlocks(zeros, zeros == 0, labels, labels, labels, weights.to(device)), head


def value_and_gradient(hidden: torch.Tensor, terms: LossTerms) -> tuple[torch.Tensor, torch.Tensor]:
    (terms.loss_sum * 0.125).backward()  # a factor as the optimizer step applies it
    gradient, hidden.grad = hidden.grad, None
    assert gradient is not None
    return terms.loss_sum.detach().double(), gradient.double()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 6, 10_000])
def test_equals_plain_loss(dtype: torch.dtype, softcap: float | None, rows: int, device: str) -> None:
    hidden, blocks, head = case(dtype, device, softcap)
    hidden.requires_grad_()
    plain = plain_loss(hidden, blocks, head)
    fast = frozen_head_loss(hidden, blocks, head, budget_bytes=rows * V * head.weight_VD.element_size())
    # capping in bf16 on the plain road makes ties that fp32 has not: the hits may then differ, all other counts may not
    exact = COUNTS if softcap is None or dtype == torch.float32 else ("weight_sum", "count_K", "block_count")
    for name in exact:
        torch.testing.assert_close(getattr(fast, name), getattr(plain, name), rtol=1e-6, atol=0, msg=name)
    assert fast.run_sum > 0
    plain_value, plain_gradient = value_and_gradient(hidden, plain)
    fast_value, fast_gradient = value_and_gradient(hidden, fast)
    of_value, of_gradient = TOLERANCE[dtype]
    if softcap is not None and dtype == torch.bfloat16:
        of_value = 4e-3  # the plain road rounds the capped logits to bf16 once more, half-ulp 2^-9 of each
        of_gradient = 2e-2
    assert abs(fast_value - plain_value) <= of_value * plain_value
    assert (fast_gradient - plain_gradient).norm() <= of_gradient * plain_gradient.norm()


def test_gradient_in_float64() -> None:
    """Against numerical differences, so that a mistake shared by both roads would show."""
    hidden, blocks, head = case(torch.float32, "cpu", 5.0)
    hidden, head = hidden.double().requires_grad_(), FrozenHead(head.weight_VD.double(), 5.0)
    (gradient,) = torch.autograd.grad(frozen_head_loss(hidden, blocks, head, budget_bytes=V * 8 * 4).loss_sum, hidden)
    direction, step = torch.randn_like(hidden), 1e-2
    with torch.no_grad():
        up, down = (plain_loss(hidden + s * direction, blocks, head).loss_sum.double() for s in (step, -step))
    # central differences: error step^2 times the third derivative, 1e-4 relative; the fp32 softmax adds 1e-7 / step = 1e-5
    torch.testing.assert_close((gradient * direction).sum(), (up - down) / (2 * step), rtol=1e-3, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_weight_neither_count_nor_move(device: str) -> None:
    hidden, blocks, head = case(torch.float32, device, None)
    hidden[:, ::K] = float("nan")  # slot 0 is never read
    hidden.requires_grad_()
    terms = frozen_head_loss(hidden, blocks, head, budget_bytes=2**20)
    terms.loss_sum.backward()
    assert torch.isfinite(terms.loss_sum)
    assert torch.isfinite(hidden.grad).all()
    assert not hidden.grad.view(B, A, K, D)[blocks.weights_BAK == 0].any()


def test_nothing_supervised_gives_zero() -> None:
    hidden, blocks, head = case(torch.float32, "cpu", None)
    blocks = dataclasses.replace(blocks, weights_BAK=torch.zeros_like(blocks.weights_BAK))
    hidden.requires_grad_()
    terms = frozen_head_loss(hidden, blocks, head, budget_bytes=2**20)
    terms.loss_sum.backward()
    assert terms.loss_sum == terms.weight_sum == 0
    assert not hidden.grad.any()


def test_autocast_does_not_change_the_products() -> None:
    hidden, blocks, head = case(torch.float32, "cpu", None)
    outside = frozen_head_loss(hidden, blocks, head, budget_bytes=2**20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = frozen_head_loss(hidden, blocks, head, budget_bytes=2**20)
    assert torch.equal(outside.loss_sum, inside.loss_sum)


def test_chunks_fit_the_budget_and_are_even() -> None:
    head = torch.empty(1000, 4, dtype=torch.bfloat16)
    assert rows_per_chunk(7680, head, 1000 * 2 * 1700) == 1536  # 5 chunks of 1536, not 4 of 1700 and one of 880
    assert rows_per_chunk(3, head, 1) == 1
    assert rows_per_chunk(0, head, 10**6) == 1
