"""Batches: each row's text is what it would be alone and what the target writes alone, however unequal the rows are."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from overfit import overfit_drafter, random_drafter
from scripted import plain_greedy, script_drafts, until_stop
from toys import KINDS, toy_shape

from outrider.errors import UserError
from outrider.features.target import Target
from outrider.model.drafter import Drafter
from outrider.records import FULL, SLIDING
from outrider.verify import reading
from outrider.verify.decode import DecodedBatch, decode
from outrider.verify.execution import COMPILED, EAGER
from outrider.verify.sampling import DecodeOptions

K = 4
PROMPTS = [[5], [72, 101, 108, 108, 111, 32, 104], list(range(40, 52)), [9, 9], list(range(100, 131))]
SHAPES = {"full": toy_shape(), "sliding": toy_shape(layer_types=(SLIDING, SLIDING), sliding_window=6),
          "mixed": toy_shape(layer_types=(FULL, SLIDING), sliding_window=6)}
ToyTarget = Callable[..., Target]


def greedy(max_new_tokens: int, *stop_ids: int) -> DecodeOptions:
    return DecodeOptions.greedy(max_new_tokens=max_new_tokens, stop_ids=stop_ids)


def run(
    target: Target, drafter: Drafter | None, prompts: list[list[int]], options: DecodeOptions, batch_size: int
) -> DecodedBatch:
    return decode(target, drafter, prompts, options, batch_size=batch_size, execution=EAGER, stops=None)


@pytest.mark.parametrize("kind", KINDS)
def test_every_accepted_length_in_every_row(toy_target: ToyTarget, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Rows accept different lengths in the same cycle, all of 0..K-1 after one another."""
    target, truths = toy_target(kind), plain_greedy(toy_target(kind), PROMPTS, 30)
    runs = [[0], [1, 3, 0, 2], [3], [2, 0, 0, 3, 1], [0, 1, 2, 3]]
    script_drafts(monkeypatch, PROMPTS, truths, runs)
    batch = run(target, random_drafter(toy_shape(), seed=3), PROMPTS, greedy(30), len(PROMPTS))
    assert [text.tokens for text in batch.texts] == truths
    for text, script in zip(batch.texts, runs, strict=True):
        assert text.runs[:-1] == [script[min(i, len(script) - 1)] for i in range(len(text.runs) - 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_a_batch_is_its_rows(toy_target: ToyTarget, kind: str, name: str) -> None:
    """A half-trained drafter; stop tokens end the rows at different cycles; batches of 5, of 2 (one half empty) and of 1."""
    target = toy_target(kind)
    truths = plain_greedy(target, PROMPTS, 28)
    trained = overfit_drafter(target, SHAPES[name], (*PROMPTS[1], *truths[1]), prompt=len(PROMPTS[1]), steps=40)
    options = greedy(28, truths[0][5], truths[2][12])
    batches = [run(target, trained, PROMPTS, options, size) for size in (5, 2, 1)]
    for batch in batches:
        assert [text.tokens for text in batch.texts] == [until_stop(truth, options.stop_ids) for truth in truths]
        assert [text.cycles for text in batch.texts] == [text.cycles for text in batches[0].texts]
    assert len({len(text.tokens) for text in batches[0].texts}) >= 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_target_alone_in_a_batch(toy_target: ToyTarget, kind: str) -> None:
    target, truths = toy_target(kind), plain_greedy(toy_target(kind), PROMPTS, 20)
    batch = run(target, None, PROMPTS, greedy(20, truths[1][3]), 3)
    assert [text.tokens for text in batch.texts] == [until_stop(truth, [truths[1][3]]) for truth in truths]
    assert all(text.runs == [0] * (len(text.tokens) - 1) for text in batch.texts)


@pytest.mark.parametrize("kind", ["sliding", "qwen3_5"])
def test_prompts_read_in_chunks(toy_target: ToyTarget, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Rows end in different chunks, one exactly at a chunk's end; the drafter's window is shorter than a chunk and longer."""
    target, truths = toy_target(kind), plain_greedy(toy_target(kind), PROMPTS, 16)
    expected = run(target, random_drafter(SHAPES["mixed"], seed=3), PROMPTS, greedy(16), 5)
    for chunk in (3, 7, 12):
        monkeypatch.setattr(reading, "PROMPT_CHUNK", chunk)
        batch = run(target, random_drafter(SHAPES["mixed"], seed=3), PROMPTS, greedy(16), 5)
        assert [text.tokens for text in batch.texts] == truths
        assert [text.cycles for text in batch.texts] == [text.cycles for text in expected.texts]


def test_sampled_rows_depend_on_their_seed_alone(toy_target: ToyTarget) -> None:
    target, drafter = toy_target("qwen3"), random_drafter(toy_shape(), seed=3)
    options = DecodeOptions(max_new_tokens=16, stop_ids=(), temperature=1.0, top_p=0.9, top_k=50, seed=7)
    together = run(target, drafter, PROMPTS, options, 5).texts
    for i, prompt in enumerate(PROMPTS):
        assert run(target, drafter, [prompt], replace(options, seed=7 + i), 1).texts[0].cycles == together[i].cycles


def test_the_clock_has_an_entry_a_cycle_and_a_batch(toy_target: ToyTarget) -> None:
    batch = run(toy_target("llama"), random_drafter(toy_shape(), seed=3), PROMPTS, greedy(6), 2)
    cycles = sum(max(len(text.runs) for text in batch.texts[i : i + 2]) for i in (0, 2, 4))
    assert (len(batch.prompt_seconds), len(batch.draft_seconds), len(batch.target_seconds)) == (3, cycles, cycles)
    parts = sum(batch.prompt_seconds) + sum(batch.draft_seconds) + sum(batch.target_seconds)
    assert 0 < parts <= batch.seconds
    assert max(text.seconds for text in batch.texts) <= batch.seconds


def test_a_window_bounds_the_drafters_cache(toy_target: ToyTarget) -> None:
    from outrider.verify.drafting import DraftReader
    from outrider.verify.execution import Execution

    def held(name: str, capacity: int) -> int:
        drafts = DraftReader(toy_target("llama"), random_drafter(SHAPES[name], seed=3), rows=1, capacity=capacity,
                             execution=Execution(EAGER, torch.device("cpu")))
        return sum(ring.keys.shape[2] for ring in drafts.rings)

    assert held("sliding", 1000) == held("sliding", 100) == 2 * 7
    assert held("full", 1000) == 2 * 1001


def test_what_needs_a_gpu_is_refused_without_one(toy_target: ToyTarget) -> None:
    with pytest.raises(UserError, match="needs a CUDA device"):
        decode(toy_target("llama"), None, [[1]], greedy(2), batch_size=1, execution=COMPILED, stops=None)
