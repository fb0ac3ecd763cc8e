"""Drafting and verifying: greedy text equals the target's own whatever the drafter drafts, and ends where it must."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from overfit import overfit_drafter, random_drafter
from scripted import script_drafts
from torch import Tensor
from toys import KINDS, MASK, VOCAB, rows_of, toy_shape

from outrider.errors import UserError
from outrider.features.capture import capture
from outrider.features.target import Target
from outrider.verify.decode import Decoder, speculate, target_alone
from outrider.verify.drafting import DraftReader
from outrider.verify.execution import EAGER
from outrider.verify.reading import TargetReader
from outrider.verify.sampling import DecodeOptions

K = 4
PROMPTS = ([5], [72, 101, 108, 108, 111, 32, 104], list(range(40, 52)))  # shorter and longer than the toy's window of 5
ToyTarget = Callable[..., Target]


def greedy(max_new_tokens: int, *stop_ids: int) -> DecodeOptions:
    return DecodeOptions.greedy(max_new_tokens=max_new_tokens, stop_ids=stop_ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_a_random_drafter_leaves_the_text_as_it_is(toy_target: ToyTarget, kind: str, prompt: list[int]) -> None:
    target, drafter = toy_target(kind), random_drafter(toy_shape(), seed=3)
    ours = speculate(target, drafter, prompt, greedy(24))
    assert ours.tokens == target_alone(target, prompt, greedy(24)).tokens
    assert len(ours.tokens) == 24


def test_the_target_alone_writes_what_transformers_writes(toy_target: ToyTarget) -> None:
    target = toy_target("llama")
    theirs = target.answer([PROMPTS[1]], max_new_tokens=24, stop_ids=[VOCAB - 1], temperature=0.0, top_p=1.0, top_k=0, seed=0)
    assert target_alone(target, PROMPTS[1], greedy(24, VOCAB - 1)).tokens == theirs[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("runs", [[0], [1], [2], [3], [3, 0, 1, 2, 0, 3], [0, 3, 2, 1]], ids=str)
def test_every_accepted_length_leaves_the_text_as_it_is(
    toy_target: ToyTarget, monkeypatch: pytest.MonkeyPatch, kind: str, runs: list[int]
) -> None:
    target, drafter, prompt = toy_target(kind), random_drafter(toy_shape(), seed=3), PROMPTS[1]
    truth = target_alone(target, prompt, greedy(30)).tokens
    script_drafts(monkeypatch, [prompt], [truth], [runs])
    ours = speculate(target, drafter, prompt, greedy(30))
    assert ours.tokens == truth
    expected = [runs[min(i, len(runs) - 1)] for i in range(len(ours.runs))]
    assert ours.runs[:-1] == expected[:-1]  # the last block may be cut by the limit
    assert ours.acceptance_lengths[:-1] == [run + 1 for run in expected[:-1]]


@pytest.mark.parametrize("right", [K - 1, 0], ids=["always right", "always wrong"])
@pytest.mark.parametrize("limit", range(1, 2 * K + 1))
def test_the_limit_is_kept_exactly(toy_target: ToyTarget, monkeypatch: pytest.MonkeyPatch, limit: int, right: int) -> None:
    target, drafter, prompt = toy_target("llama"), random_drafter(toy_shape(), seed=3), PROMPTS[1]
    truth = target_alone(target, prompt, greedy(2 * K)).tokens
    script_drafts(monkeypatch, [prompt], [truth], [[right]])
    ours = speculate(target, drafter, prompt, greedy(limit))
    assert ours.tokens == truth[:limit]
    assert sum(ours.acceptance_lengths) == limit - 1  # only kept tokens are counted
    assert all(cycle.drafted <= K - 1 for cycle in ours.cycles)


def first_places(tokens: list[int]) -> list[int]:
    """Indices at which a token stands for the first time."""
    return [i for i, token in enumerate(tokens) if token not in tokens[:i]]


@pytest.mark.parametrize("right", range(K))
def test_a_stop_token_ends_the_text_at_every_slot(toy_target: ToyTarget, monkeypatch: pytest.MonkeyPatch, right: int) -> None:
    target, drafter, slots = toy_target("llama"), random_drafter(toy_shape(), seed=3), set()
    for prompt in PROMPTS:
        truth = target_alone(target, prompt, greedy(3 * K)).tokens
        for place in first_places(truth):
            with monkeypatch.context() as patch:
                script_drafts(patch, [prompt], [truth], [[right]])
                ours = speculate(target, drafter, prompt, greedy(3 * K, truth[place], VOCAB - 1))
            assert ours.tokens == truth[: place + 1]
            assert target_alone(target, prompt, greedy(3 * K, truth[place])).tokens == ours.tokens
            assert sum(ours.acceptance_lengths) == place
            slots.add((place - 1) % (right + 1) if place else None)
    assert slots == {None, *range(right + 1)}, "the toy's texts must end in the prompt's forward and at every slot of a run"


def test_a_stop_token_that_was_drafted_and_rejected_ends_nothing(toy_target: ToyTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter, prompt = toy_target("llama"), random_drafter(toy_shape(), seed=3), PROMPTS[1]
    truth = target_alone(target, prompt, greedy(12)).tokens
    script_drafts(monkeypatch, [prompt], [truth], [[1]])
    wrong = next((t + 1) % VOCAB for t in truth if (t + 1) % VOCAB not in truth)
    assert speculate(target, drafter, prompt, greedy(12, wrong)).tokens == truth


def test_cycles_stream_the_text_as_it_grows(toy_target: ToyTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter, prompt = toy_target("llama"), random_drafter(toy_shape(), seed=3), PROMPTS[1]
    truth = target_alone(target, prompt, greedy(10)).tokens
    script_drafts(monkeypatch, [prompt], [truth], [[2, 0, 3]])
    decoder = Decoder(target, drafter, greedy(10), rows=1, longest=len(prompt), execution=EAGER)
    cycles = [cycle for (cycle,) in decoder.cycles([prompt], seeds=[0], stops=None) if cycle]
    assert [(list(c.accepted), c.bonus, c.drafted) for c in cycles] == [
        ([], truth[0], 0), (truth[1:3], truth[3], 3), ([], truth[4], 3), (truth[5:8], truth[8], 3), (truth[9:10], None, 1)]


@pytest.mark.parametrize("kind", ["sliding", "qwen3_5"])
def test_context_is_the_features_of_what_was_kept(toy_target: ToyTarget, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Cycle by cycle, the context fed so far is the target's features of all tokens before the anchor, and of no other."""
    target, drafter, prompt, fed = toy_target(kind), random_drafter(toy_shape(), seed=3), PROMPTS[1], []
    truth = target_alone(target, prompt, greedy(20)).tokens
    script_drafts(monkeypatch, [prompt], [truth], [[1, 0, 2, 3, 0, 1]])
    absorb = DraftReader.absorb

    def watched(self: DraftReader, features_BJF: Tensor, count_B: Tensor, end_B: Tensor) -> None:
        fed.append(features_BJF[:, : int(count_B[0])].clone())
        assert sum(part.shape[1] for part in fed) == end_B[0]
        absorb(self, features_BJF, count_B, end_B)

    monkeypatch.setattr(DraftReader, "absorb", watched)
    speculate(target, drafter, prompt, greedy(20))
    seen = torch.cat(fed, dim=1)
    rows = rows_of([[[*prompt, *truth][: seen.shape[1]]]], length=seen.shape[1])
    # float32 rounding of forwards over other widths, on features of size 1 to 30
    torch.testing.assert_close(seen, capture(target, rows, drafter.shape.target_layer_ids).values_BSF, atol=1e-4, rtol=1e-4)


def test_an_overfit_drafter_is_accepted_by_whole_blocks(toy_target: ToyTarget) -> None:
    """Labels, positions and context of training are those of drafting: one slot off anywhere and this is 1.0 (04-pitfalls, 2)."""
    target, prompt, blocks = toy_target("qwen3"), PROMPTS[1], 8
    text = target_alone(target, prompt, greedy(1 + blocks * K)).tokens
    drafter = overfit_drafter(target, toy_shape(), (*prompt, *text), prompt=len(prompt), steps=150)
    ours = speculate(target, drafter, prompt, greedy(1 + blocks * K))
    assert ours.tokens == text
    assert ours.acceptance_lengths == [K] * blocks


@pytest.mark.parametrize("change", [{"hidden_size": 64}, {"vocab_size": VOCAB + 8}, {"num_target_layers": 8}], ids=str)
def test_a_drafter_made_for_another_target_is_refused(toy_target: ToyTarget, change: dict[str, Any]) -> None:
    drafter = random_drafter(toy_shape(**change), seed=0)
    (value,) = change.values()
    with pytest.raises(UserError, match=f"is {value}, this target's is "):
        speculate(toy_target("llama"), drafter, [1, 2], greedy(4))


@pytest.mark.parametrize(("prompt", "limit", "message"), [
    ([], 4, "is empty"),
    ([1, VOCAB], 4, f"token {VOCAB} is outside"),
    ([1] * 2040, 9, "leave room for 2039 beside 9"),
])
def test_a_prompt_that_cannot_be_continued_is_refused(toy_target: ToyTarget, prompt: list[int], limit: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        speculate(toy_target("llama"), random_drafter(toy_shape(), seed=0), prompt, greedy(limit))


def test_the_last_position_can_be_used(toy_target: ToyTarget) -> None:
    assert len(speculate(toy_target("llama"), random_drafter(toy_shape(), seed=0), [1] * 2040, greedy(8)).tokens) == 8


@pytest.mark.parametrize("change", [
    {"max_new_tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1},
    {"seed": -1},
], ids=str)
def test_options_out_of_range_are_refused(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(UserError, match=f"^{name} = "):
        DecodeOptions(**{"max_new_tokens": 4, "stop_ids": (), "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0, **change})


def test_the_mask_token_is_what_slots_hold(toy_target: ToyTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    target, seen = toy_target("llama"), []
    embed = target.embed
    monkeypatch.setattr(target, "embed", lambda ids: seen.append(ids.tolist()) or embed(ids))
    text = speculate(target, random_drafter(toy_shape(), seed=0), [9, 8], greedy(9)).tokens
    assert seen[0] == [[text[0], MASK, MASK, MASK]]


def test_a_block_is_no_wider_than_the_room_that_is_left(toy_target: ToyTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    target, read = toy_target("llama"), []
    real = TargetReader.read
    monkeypatch.setattr(TargetReader, "read", lambda self, ids_BX: read.append(ids_BX.shape[1]) or real(self, ids_BX))
    decoded = speculate(target, random_drafter(toy_shape(), seed=0), [9, 8], greedy(7))
    left = [7 - sum(len(cycle.tokens) for cycle in decoded.cycles[:i]) for i in range(1, len(decoded.cycles))]
    assert read == [min(4, room + 1) for room in left]
    assert min(read) < 4
