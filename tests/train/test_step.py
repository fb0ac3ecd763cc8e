"""One optimizer step: what a block's loss may depend on, accumulation, precision, empty rows and bad gradients."""

import inspect
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from learning import LOGITS_BYTES, colocated, make_drafter, make_learner, micro_batch_of
from torch import Tensor
from toys import noise, random_rows, toy_shape

from outrider.config import OptimizerConfig
from outrider.features.capture import capture
from outrider.features.target import DTYPES, Target
from outrider.layout import mask as mask_module
from outrider.model.drafter import Drafter
from outrider.objective.losses import plain_loss
from outrider.records import DraftBlocks, DrafterShape, Features, LossTerms, TokenRows
from outrider.train import step as step_module
from outrider.train.meter import Stopwatch
from outrider.train.roads import DenseRoad
from outrider.train.step import MicroBatch, drafter_terms, run_step

ToyTarget = Callable[..., Target]
SHAPES = {"full": toy_shape(), "sliding": toy_shape(layer_types=("sliding_attention", "full_attention"), sliding_window=6)}


def batch_of(lengths: list[list[int]], *, seed: int, per_row: int = 10, length: int = 32, first_row: int = 0) -> MicroBatch:
    rows = random_rows(lengths, length=length, seed=seed)
    rows = replace(rows, row_ids_B=rows.row_ids_B + first_row)
    return micro_batch_of(rows, per_row=per_row)


def step(drafter: Drafter, target: Target, batches: list[MicroBatch], *, precision: str = "float32", learning_rate: float = 1e-3,
         clip_norm: float = 1.0) -> tuple[LossTerms, Tensor]:
    learner = make_learner(drafter, target, dtype=DTYPES[precision], learning_rate=learning_rate)
    sums = run_step(learner, colocated(target, drafter.shape), batches, [], clip_norm=clip_norm, logits_bytes=LOGITS_BYTES,
                    watch=Stopwatch())
    return sums.terms, sums.norm


def loss_of_block(drafter: Drafter, target: Target, batch: MicroBatch, values: Tensor, block: int) -> float:
    """The loss of one block of row 0, the others' weights set to 0."""
    weights = torch.zeros_like(batch.blocks.weights_BAK)
    weights[0, block] = batch.blocks.weights_BAK[0, block]
    blocks = replace(batch.blocks, weights_BAK=weights)
    with torch.no_grad():
        road = DenseRoad(drafter, dtype=torch.float32)
        return float(drafter_terms(road, target.ends, batch.rows, Features(values), blocks, logits_bytes=LOGITS_BYTES).loss_sum)


def moved_by_noise(drafter: Drafter, target: Target, batch: MicroBatch) -> list[bool]:
    """For each kept block: does its loss move when all that it must not see is noise?

    Features at or after its anchor, of other documents and of padding; the tokens of other blocks.
    """
    values = capture(target, batch.rows, drafter.shape.target_layer_ids).values_BSF
    document = batch.rows.document_ids_BS[0]
    moved = []
    for block in batch.blocks.keep_BA[0].nonzero().flatten().tolist():
        anchor = int(batch.blocks.anchors_BA[0, block])
        unseen = (torch.arange(len(document)) >= anchor) | (document != document[anchor])
        noisy = values.clone()
        noisy[0, unseen] = 30 * noise(int(unseen.sum()), values.shape[2], seed=anchor)
        ids = batch.blocks.noise_ids_BAK.clone()
        ids[0, torch.arange(ids.shape[1]) != block] = 7
        other = replace(batch, blocks=replace(batch.blocks, noise_ids_BAK=ids))
        moved.append(loss_of_block(drafter, target, batch, values, block) != loss_of_block(drafter, target, other, noisy, block))
    return moved


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_noise_in_what_a_block_must_not_see_moves_no_bit(toy_target: ToyTarget, shape: DrafterShape) -> None:
    moved = moved_by_noise(make_drafter(shape), toy_target("llama"), batch_of([[12, 3, 9]], seed=0, per_row=16))
    assert len(moved) == 16
    assert not any(moved)


@pytest.mark.parametrize(("old", "new"), [
    ("(n < anchor)", "(n <= anchor)"), (" & same_document", ""), ("(key_slot // block_size == block)", "(key_slot >= 0)"),
], ids=["own state", "other document", "other blocks"])
def test_noise_finds_a_broken_rule(toy_target: ToyTarget, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    source = inspect.getsource(mask_module.visibility)
    assert source.count(old) == 1
    names: dict[str, Callable[..., object]] = {}
    exec(source.replace(old, new), vars(mask_module).copy(), names)
    monkeypatch.setattr(mask_module, "visibility", names["visibility"])
    assert any(moved_by_noise(make_drafter(SHAPES["full"]), toy_target("llama"), batch_of([[12, 3, 9]], seed=0, per_row=16)))


def gradients(drafter: Drafter) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


def merged(batches: list[MicroBatch]) -> MicroBatch:
    def cat(kind: type, get: Callable[[MicroBatch], object]) -> object:
        return kind(**{f.name: torch.cat([getattr(get(b), f.name) for b in batches]) for f in fields(kind)})

    rows, blocks = cat(TokenRows, lambda b: b.rows), cat(DraftBlocks, lambda b: b.blocks)
    return MicroBatch(rows, rows, blocks, sum(b.eligible for b in batches))  # type: ignore[arg-type]


def test_accumulated_micro_batches_equal_one_batch(toy_target: ToyTarget) -> None:
    """Uneven rows, one of them empty: one division by the step's weight. Float32 sums in another order: 1e-5 of the norm."""
    target = toy_target("llama")
    parts = [batch_of([[30]], seed=1), batch_of([[2, 3]], seed=2), batch_of([[]], seed=3), batch_of([[9, 9, 9], [5]], seed=4)]
    together, apart = make_drafter(SHAPES["full"]), make_drafter(SHAPES["full"])
    big_terms, big_norm = step(together, target, [merged(parts)], clip_norm=1e9)
    terms, norm = step(apart, target, parts, clip_norm=1e9)
    assert float(norm) == pytest.approx(float(big_norm), rel=1e-5)
    for name, gradient in gradients(apart).items():
        expected = gradients(together)[name]
        assert (gradient - expected).norm() < 1e-5 * expected.norm(), name
    for f in fields(LossTerms):
        torch.testing.assert_close(getattr(terms, f.name), getattr(big_terms, f.name), rtol=1e-5, atol=1e-6, msg=f.name)


def test_every_parameter_moves_under_bf16_and_masters_stay_fp32(toy_target: ToyTarget) -> None:
    """50 steps under autocast: bf16 norms would stay exactly 1, since 1 +- 6e-4 rounds to 1."""
    target = toy_target("llama", dtype="bfloat16")
    drafter = make_drafter(toy_shape())
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    learner = make_learner(drafter, target, dtype=torch.bfloat16, learning_rate=OptimizerConfig().learning_rate)
    optimizer, supply = learner.optimizer, colocated(target, drafter.shape, keep="memory")
    batches = [batch_of([[12]], seed=s, first_row=s, per_row=4, length=12) for s in range(5)]
    first = last = None
    for number in range(50):
        terms = run_step(learner, supply, [batches[number % 5]], [], clip_norm=1.0, logits_bytes=LOGITS_BYTES,
                         watch=Stopwatch()).terms
        last = float(terms.loss_sum / terms.weight_sum)
        first = last if first is None else first
    for name, parameter in drafter.named_parameters():
        assert parameter.dtype == torch.float32
        assert not torch.equal(parameter, before[name]), name
        assert (parameter != before[name]).float().mean() > 0.9, name
        assert all(state.dtype == torch.float32 for state in optimizer.state[parameter].values())
    assert last < first


def test_a_step_without_anchors_is_legal_and_training_goes_on(toy_target: ToyTarget) -> None:
    target, drafter = toy_target("llama"), make_drafter(SHAPES["sliding"])
    empty = batch_of([[1, 1], []], seed=0)
    assert empty.eligible == 0
    terms, norm = step(drafter, target, [empty])
    assert (float(terms.loss_sum), float(terms.weight_sum), float(norm)) == (0.0, 0.0, 0.0)
    found = gradients(drafter)
    assert found.keys() == dict(drafter.named_parameters()).keys(), "a parameter without one would hang others"
    assert all(torch.isfinite(g).all() and not g.any() for g in found.values())
    terms, norm = step(drafter, target, [empty, batch_of([[20]], seed=1)])
    assert float(norm) > 0
    assert all(torch.isfinite(p).all() for p in drafter.parameters())


@pytest.mark.parametrize("bad", ["layers.1.self_attn.k_norm.weight", "norm.weight", "fc.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_gradient_is_named_and_leaves_the_parameters(toy_target: ToyTarget, bad: str, value: float) -> None:
    drafter = make_drafter(SHAPES["full"])
    before = [p.detach().clone() for p in drafter.parameters()]
    parameter = dict(drafter.named_parameters())[bad]
    parameter.register_hook(lambda gradient: torch.full_like(gradient, value))
    with pytest.raises(FloatingPointError, match=f"the gradient of {bad} is not finite"):
        step(drafter, toy_target("llama"), [batch_of([[20]], seed=1)])
    assert all(torch.equal(a, b) for a, b in zip(before, drafter.parameters(), strict=True))


def test_a_norm_that_overflows_is_caught(toy_target: ToyTarget) -> None:
    """Each gradient is finite, their norm is not."""
    drafter = make_drafter(SHAPES["full"])
    for parameter in drafter.parameters():
        parameter.register_hook(lambda gradient: torch.full_like(gradient, 3e38))
    with pytest.raises(FloatingPointError, match="the gradient of all parameters together is not finite"):
        step(drafter, toy_target("llama"), [batch_of([[20]], seed=1)])


def test_gradients_are_clipped_to_the_norm(toy_target: ToyTarget) -> None:
    drafter = make_drafter(SHAPES["full"])
    _, norm = step(drafter, toy_target("llama"), [batch_of([[20]], seed=1)], clip_norm=1e-3)
    clipped = torch.nn.utils.get_total_norm(list(gradients(drafter).values()))
    assert float(norm) > 1e-2, "the norm before clipping is reported"
    assert float(clipped) == pytest.approx(1e-3, rel=1e-3)


def test_the_loss_in_use_equals_the_plain_one(toy_target: ToyTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, target = batch_of([[30], [4, 9]], seed=1), toy_target("llama")
    fast, plain = make_drafter(SHAPES["full"]), make_drafter(SHAPES["full"])
    terms, _ = step(fast, target, [batch])
    monkeypatch.setattr(step_module, "frozen_head_loss", lambda hidden, blocks, head, **_: plain_loss(hidden, blocks, head))
    expected, _ = step(plain, target, [batch])
    for f in fields(LossTerms):
        torch.testing.assert_close(getattr(terms, f.name), getattr(expected, f.name), rtol=1e-5, atol=1e-5, msg=f.name)
    for name, gradient in gradients(fast).items():
        assert (gradient - gradients(plain)[name]).norm() < 1e-5 * gradient.norm(), name
