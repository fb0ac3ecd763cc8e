"""Counting: sums and not means, losslessness that is checked."""

from collections.abc import Callable

import pytest
import torch
from overfit import overfit_drafter, random_drafter
from toys import VOCAB, toy_shape

from outrider.errors import UserError
from outrider.features.target import Target
from outrider.verify import score
from outrider.verify.decode import Cycle, Decoded, target_alone
from outrider.verify.sampling import DecodeOptions
from outrider.verify.score import count_acceptance, first_difference, measure_acceptance, resolution

K = 4
PROMPTS = [[5, 6, 7], [72, 101, 108, 108, 111], [9]]
GREEDY = DecodeOptions.greedy(max_new_tokens=12, stop_ids=(VOCAB - 1,))
ToyTarget = Callable[..., Target]


def text_of(*cycles: Cycle) -> Decoded:
    whole = (Cycle((), 1, 0), *cycles)
    return Decoded([token for cycle in whole for token in cycle.tokens], whole, 0.5)


def cycle_of(run: int, *, drafted: int = K - 1) -> Cycle:
    return Cycle((1,) * run, 2, drafted)


def test_accepted_lengths_are_sums_over_prompts() -> None:
    """Runs 3, 2, 1, 0 in prompts (3, 1) and (2, 0): mean accepted 1.5, tau 2.5 (04-pitfalls, 10)."""
    report = count_acceptance([text_of(cycle_of(3), cycle_of(1)), text_of(cycle_of(2), cycle_of(0))], K)
    assert report.runs == [[3, 1], [2, 0]]
    assert (report.tokens, report.forwards, report.tau) == (10, 4, 2.5)
    assert (report.drafted_K, report.accepted_K) == ([0, 4, 3, 2], [0, 3, 2, 1])
    assert report.acceptance_by_slot == [3 / 4, 2 / 3, 1 / 2]
    assert report.survival_by_slot == [3 / 4, 2 / 4, 1 / 4]
    assert sum(report.survival_by_slot) == report.tau - 1
    assert score.run_histogram(report, K) == [1, 1, 1, 1]


def test_prompts_of_uneven_length_are_not_averaged() -> None:
    report = count_acceptance([text_of(cycle_of(3)), text_of(*[cycle_of(0)] * 3)], K)
    assert report.tau == 7 / 4  # the mean of the prompts' own lengths would be 2.5


def test_what_the_end_of_a_text_cuts_off_does_not_count() -> None:
    stopped = Cycle((1, 1), None, K - 1)  # the second draft token was the stop token: slot 3 was never reached
    limited = Cycle((1,), None, 1)  # a block of one draft token, the limit
    report = count_acceptance([text_of(stopped), text_of(limited)], K)
    assert (report.drafted_K, report.accepted_K) == ([0, 2, 1, 0], [0, 2, 1, 0])
    assert (report.tokens, report.forwards) == (3, 2)


def test_a_text_of_one_token_has_no_forwards() -> None:
    assert count_acceptance([text_of()], K).tau == 1.0


def test_a_gap_that_the_precision_does_not_resolve_is_a_tie(toy_target: ToyTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    target = toy_target("llama")
    ours, theirs = Decoded([1, 2], (), 1.0), Decoded([1, 3], (), 1.0)
    logits = torch.zeros(VOCAB)
    logits[0], logits[2], logits[3] = 20.0, 10.0, 10.0 + 1e-4
    monkeypatch.setattr(score, "next_logits", lambda target, ids: logits)
    found = first_difference(target, [[5]], [ours], [theirs])
    assert found is not None
    assert found["kind"] == "tie"
    logits[3] = 10.0 + 1e-3
    assert first_difference(target, [[5]], [ours], [theirs])["kind"] == "error"  # type: ignore[index]


def test_a_text_that_goes_on_after_its_end_is_an_error(toy_target: ToyTarget) -> None:
    found = first_difference(toy_target("llama"), [[5]], [Decoded([1, 2], (), 1.0)], [Decoded([1], (), 1.0)])
    assert found == {"prompt": 0, "position": 1, "speculative_token": 2, "target_token": None, "gap": None, "resolution": None,
                     "kind": "error"}


def test_one_bf16_ulp_of_the_largest_logit() -> None:
    assert resolution(35.25, torch.bfloat16) == 0.25
    assert resolution(1.8, torch.bfloat16) == 2**-7
    assert resolution(20.0, torch.float32) == pytest.approx(2e-4)


def test_measuring_leaves_the_drafter_and_the_random_state_as_they_are(toy_target: ToyTarget) -> None:
    drafter = random_drafter(toy_shape(), seed=3).requires_grad_(True)
    drafter.train()
    before, weights = torch.random.get_rng_state(), {n: p.clone() for n, p in drafter.named_parameters()}
    report = measure_acceptance(toy_target("llama"), drafter, PROMPTS, GREEDY)
    assert drafter.training
    assert all(p.requires_grad and p.grad is None for p in drafter.parameters())
    assert torch.is_grad_enabled()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(p, weights[n]) for n, p in drafter.named_parameters())
    assert report.forwards > 0


def test_a_good_drafter_measures_better_than_a_random_one(toy_target: ToyTarget) -> None:
    target = toy_target("qwen3")
    text = target_alone(target, PROMPTS[1], GREEDY).tokens
    good = overfit_drafter(target, toy_shape(), (*PROMPTS[1], *text), prompt=len(PROMPTS[1]), steps=100)
    random = random_drafter(toy_shape(), seed=3)
    assert measure_acceptance(target, random, [PROMPTS[1]], GREEDY).tau < 2
    assert measure_acceptance(target, good, [PROMPTS[1]], GREEDY).tau > 2


def test_prompts_are_checked_before_any_work(toy_target: ToyTarget) -> None:
    drafter = random_drafter(toy_shape(), seed=3)
    with pytest.raises(UserError, match="prompt 2: is empty"):
        measure_acceptance(toy_target("llama"), drafter, [[1], []], GREEDY)
    with pytest.raises(UserError, match="there are none"):
        measure_acceptance(toy_target("llama"), drafter, [], GREEDY)
