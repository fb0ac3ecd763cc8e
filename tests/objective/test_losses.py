"""The plain loss against loops in float64; accepted runs and accuracies as counts; sums that add up over any split."""

import math
from dataclasses import fields

import pytest
import torch
from toys import noise

from outrider.objective.acceptance import accepted_runs, slot_counts
from outrider.objective.losses import plain_loss
from outrider.records import DraftBlocks, FrozenHead, LossTerms
from outrider.train.meter import as_metrics, report_step

A, K, D, V = 5, 4, 8, 13


def blocks_of(labels: torch.Tensor, weights: torch.Tensor) -> DraftBlocks:
    B, A = labels.shape[:2]
    zeros = torch.zeros(B, A, dtype=torch.int64)
    unused = torch.zeros_like(labels)
    return DraftBlocks(zeros, torch.ones(B, A, dtype=torch.bool), unused, unused, labels, weights)


def some_blocks(B: int, *, seed: int) -> tuple[torch.Tensor, DraftBlocks]:
    """Hidden states, and blocks whose supervised part is 0 to K - 1 slots long, with uneven weights."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(V, (B, A, K), generator=generator)
    lengths = torch.randint(0, K, (B, A, 1), generator=generator)
    weights = (0.2 + torch.rand(B, A, K, generator=generator)) * ((torch.arange(K) >= 1) & (torch.arange(K) <= lengths))
    return 3 * noise(B, A * K, D, seed=seed), blocks_of(labels * (weights > 0), weights)


def loops(hidden: torch.Tensor, blocks: DraftBlocks, head: FrozenHead) -> dict[str, object]:
    """01-dflash in plain Python floats."""
    weight = head.weight_VD.double().tolist()
    B = hidden.shape[0]
    loss = weights = 0.0
    correct, count, runs, counted = [0] * K, [0] * K, 0, 0
    for b in range(B):
        for a in range(A):
            run, alive = 0, True
            for k in range(1, K):
                w = float(blocks.weights_BAK[b, a, k])
                if w == 0:
                    break
                x = hidden[b, a * K + k].double().tolist()
                logits = [sum(xi * wi for xi, wi in zip(x, row, strict=True)) for row in weight]
                if head.softcap:
                    logits = [head.softcap * math.tanh(z / head.softcap) for z in logits]
                label = int(blocks.labels_BAK[b, a, k])
                top = max(logits)
                loss += w * (top + math.log(sum(math.exp(z - top) for z in logits)) - logits[label])
                weights += w
                right = logits[label] == top
                count[k] += 1
                correct[k] += right
                alive = alive and right
                run += alive
            counted += bool(blocks.weights_BAK[b, a, 1] > 0)
            runs += run
    return {"loss_sum": loss, "weight_sum": weights, "correct_K": correct, "count_K": count, "run_sum": runs,
            "block_count": counted}


def make_it_often_right(hidden: torch.Tensor, blocks: DraftBlocks, head: FrozenHead) -> torch.Tensor:
    """Turn two thirds of the slots towards their label, so that runs of every length occur."""
    towards = 4 * head.weight_VD[blocks.labels_BAK.flatten(1)]
    chosen = noise(*hidden.shape[:2], 1, seed=8) > -0.4
    return torch.where(chosen, towards, hidden)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_loss_equals_plain_loops(softcap: float | None) -> None:
    head = FrozenHead(noise(V, D, seed=5), softcap)
    hidden, blocks = some_blocks(3, seed=1)
    hidden = make_it_often_right(hidden, blocks, head)
    expected = loops(hidden, blocks, head)
    terms = plain_loss(hidden, blocks, head)
    assert float(terms.loss_sum) == pytest.approx(expected["loss_sum"], rel=1e-5)
    assert float(terms.weight_sum) == pytest.approx(expected["weight_sum"], rel=1e-6)
    for name in ("correct_K", "count_K"):
        assert getattr(terms, name).tolist() == expected[name]
    assert (float(terms.run_sum), float(terms.block_count)) == (expected["run_sum"], expected["block_count"])
    assert 0 < expected["run_sum"] < sum(expected["count_K"])  # type: ignore[arg-type]


def test_gradient_equals_finite_differences() -> None:
    head = FrozenHead(noise(V, D, seed=5).double(), None)
    hidden, blocks = some_blocks(1, seed=2)

    def loss(x: torch.Tensor) -> float:
        return float(loops(x, blocks, head)["loss_sum"])  # type: ignore[arg-type]

    x = hidden.double().requires_grad_()
    plain_loss(x, blocks, head).loss_sum.backward()
    for place in [(0, 1, 0), (0, 2, 3), (0, 6, 5), (0, 11, 7), (0, 0, 1), (0, 19, 2)]:
        step = torch.zeros_like(hidden, dtype=torch.float64)
        step[place] = 1e-5
        slope = (loss(x.detach() + step) - loss(x.detach() - step)) / 2e-5
        assert float(x.grad[place]) == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_slots_without_weight_are_out_of_everything() -> None:
    head = FrozenHead(noise(V, D, seed=5), None)
    hidden, blocks = some_blocks(2, seed=3)
    before = plain_loss(hidden, blocks, head)
    idle = (blocks.weights_BAK == 0).view(2, A * K, 1)
    assert idle[:, ::K].all(), "slot 0 is one of them"
    after = plain_loss(torch.where(idle, 50 * noise(2, A * K, D, seed=9), hidden), blocks, head)
    for f in fields(LossTerms):
        assert torch.equal(getattr(before, f.name), getattr(after, f.name)), f.name


def test_accepted_runs_add_up_over_uneven_batches() -> None:
    """Runs 3, 2, 1, 0 in batches of (3, 1), (2, 0): 1.5, not the product of slot accuracies and no weights in it."""
    right = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 1], [0, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]], dtype=torch.bool)
    supervised = torch.ones(4, 6, dtype=torch.bool)
    supervised[:, 0] = False
    run_sum = block_count = torch.tensor(0.0)
    for batch in ([0, 2], [1, 3]):
        runs, count = accepted_runs(right[batch], supervised[batch])
        run_sum, block_count = run_sum + runs, block_count + count
    assert float(run_sum / block_count) == 1.5
    correct, count = slot_counts(right, supervised)
    marginal = torch.cumprod(correct[1:] / count[1:], 0).sum()
    assert float(marginal) != pytest.approx(1.5, abs=0.05), "this example must tell the two apart"


def test_a_run_ends_where_supervision_ends_and_empty_blocks_do_not_count() -> None:
    right = torch.ones(3, 4, dtype=torch.bool)
    supervised = torch.tensor([[False, True, True, False], [False, False, False, False], [False, True, True, True]])
    runs, count = accepted_runs(right, supervised)
    assert (float(runs), float(count)) == (5.0, 2.0)


def test_weights_do_not_weigh_accuracies() -> None:
    head = FrozenHead(noise(V, D, seed=5), None)
    hidden, blocks = some_blocks(3, seed=1)
    light = blocks_of(blocks.labels_BAK, blocks.weights_BAK * torch.tensor([1.0, 1e-3, 5.0, 0.1]))
    terms, reweighted = plain_loss(hidden, blocks, head), plain_loss(hidden, light, head)
    for name in ("correct_K", "count_K", "run_sum", "block_count"):
        assert torch.equal(getattr(terms, name), getattr(reweighted, name))
    assert terms.loss_sum != reweighted.loss_sum


def test_sums_over_uneven_parts_equal_one_batch() -> None:
    """One division at the end: a mean of the parts' means would differ."""
    head = FrozenHead(noise(V, D, seed=5), None)
    hidden, blocks = some_blocks(6, seed=4)
    blocks.weights_BAK[3] *= 0.01
    parts = []
    for rows in (slice(0, 3), slice(3, 4), slice(4, 6)):
        part = DraftBlocks(*(getattr(blocks, f.name)[rows] for f in fields(blocks)))
        parts.append(plain_loss(hidden[rows], part, head).detach())
    whole, added = plain_loss(hidden, blocks, head), parts[0] + parts[1] + parts[2]
    for f in fields(LossTerms):
        torch.testing.assert_close(getattr(added, f.name), getattr(whole, f.name).detach(), rtol=1e-6, atol=0)
    mean_of_means = sum(float(p.loss_sum / p.weight_sum) for p in parts) / 3
    assert mean_of_means != pytest.approx(float((whole.loss_sum / whole.weight_sum).detach()), rel=1e-3)


def test_report_divides_once_and_survives_nothing() -> None:
    head = FrozenHead(noise(V, D, seed=5), None)
    hidden, blocks = some_blocks(2, seed=3)
    settings = {"step": 1, "gradient_norm": 1.0, "learning_rate": 1e-3, "anchors": 10, "eligible": 40,
                "seconds": {"forward": 0.5}}
    terms = plain_loss(hidden, blocks, head)
    report = report_step(terms, **settings)
    assert report.loss == pytest.approx(float(terms.loss_sum / terms.weight_sum))
    assert report.supervised_slots == int((blocks.weights_BAK > 0).sum())
    assert report.tau_proxy == pytest.approx(1 + float(terms.run_sum / terms.block_count))
    assert len(report.slot_accuracy) == K - 1
    assert as_metrics(report)["anchor_coverage"] == 10 / 40
    nothing = report_step(plain_loss(hidden, blocks_of(blocks.labels_BAK, 0 * blocks.weights_BAK), head), **settings)
    assert (nothing.loss, nothing.tau_proxy, nothing.supervised_slots, nothing.slot_accuracy) == (0.0, 1.0, 0, [0.0] * (K - 1))
