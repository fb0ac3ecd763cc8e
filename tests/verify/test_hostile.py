"""Prompts, options and drafters that are wrong or at an edge: one clear sentence (UserError), or the target's own text."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from overfit import random_drafter
from toys import VOCAB, toy_shape

from outrider.errors import UserError
from outrider.features.target import Target
from outrider.records import SLIDING
from outrider.verify.decode import decode
from outrider.verify.sampling import DecodeOptions

ToyTarget = Callable[..., Target]
FAMILIES = ("llama", "qwen3", "qwen3_5", "sliding")
GREEDY = DecodeOptions.greedy(max_new_tokens=9, stop_ids=(VOCAB - 1,))

REFUSED: dict[str, tuple[list[list[int]], str]] = {
    "no prompts": ([], "there are none"),
    "an empty prompt": ([[5], []], "prompt 2: is empty"),
    "longer than the context": ([[5] * 2048], "leave room for"),
    "one token too long": ([[5] * 2040], "leave room for 2039"),
    "a token past the vocabulary": ([[5, VOCAB]], "outside the target's vocabulary"),
    "a negative token": ([[5, -1]], "outside the target's vocabulary"),
    "the last of many": ([[5]] * 6 + [[VOCAB + 9]], "prompt 7"),
}
RIGHT: dict[str, tuple[list[list[int]], dict[str, Any]]] = {
    "one token": ([[5]], {}),
    "token 0": ([[0]], {}),
    "the mask token in the prompt": ([[5, toy_shape().mask_token_id, 6]], {}),
    "a stop token in the prompt": ([[5, VOCAB - 1, 6]], {}),
    "a prompt of stop tokens": ([[VOCAB - 1] * 3], {}),
    "one new token": ([[5, 6]], {"max_new_tokens": 1}),
    "two new tokens": ([[5, 6]], {"max_new_tokens": 2}),
    "every token stops": ([[5, 6], [7]], {"stop_ids": tuple(range(VOCAB))}),
    "no stop token": ([[5, 6]], {"stop_ids": ()}),
    "very unequal lengths": ([[5], list(range(1, 120)), [9, 9]], {}),
    "a batch that is not full": ([[5], [6], [7], [8]], {}),
    "equal prompts": ([[5, 6]] * 3, {}),
    "the last position": ([[5] * 2039], {}),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_continued_is_one_sentence(toy_target: ToyTarget, family: str, case: str) -> None:
    prompts, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as error:
        decode(toy_target(family), random_drafter(toy_shape(), seed=1), prompts, GREEDY, batch_size=3, execution="eager",
               stops=None)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", RIGHT)
def test_an_edge_gives_the_targets_own_text(toy_target: ToyTarget, family: str, case: str) -> None:
    prompts, changes = RIGHT[case]
    options, target = replace(GREEDY, **changes), toy_target(family)
    ours, alone = (decode(target, drafter, prompts, options, batch_size=3, execution="eager", stops=None)
                   for drafter in (random_drafter(toy_shape(), seed=1), None))
    assert [text.tokens for text in ours.texts] == [text.tokens for text in alone.texts]
    assert all(1 <= len(text.tokens) <= options.max_new_tokens for text in ours.texts)


@pytest.mark.parametrize("block_size", [2, 3, 7, 16, 40])
@pytest.mark.parametrize("window", [None, 40])
def test_blocks_longer_than_the_answer_change_nothing(toy_target: ToyTarget, block_size: int, window: int | None) -> None:
    sliding = {} if window is None else {"layer_types": (SLIDING, SLIDING), "sliding_window": window}
    target, drafter = toy_target("qwen3"), random_drafter(toy_shape(block_size=block_size, **sliding), seed=1)
    ours, alone = (decode(target, one, [[5, 6], [7]], GREEDY, batch_size=2, execution="eager", stops=None)
                   for one in (drafter, None))
    assert [text.tokens for text in ours.texts] == [text.tokens for text in alone.texts]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", sorted(dict(random_drafter(toy_shape(), seed=1).named_parameters()))[:6])
def test_a_weight_that_is_no_number_is_named(toy_target: ToyTarget, name: str, value: float) -> None:
    drafter = random_drafter(toy_shape(), seed=1)
    with torch.no_grad():
        dict(drafter.named_parameters())[name].view(-1)[0] = value
    with pytest.raises(UserError, match=f"tensor '{name}'"):
        decode(toy_target("llama"), drafter, [[5]], GREEDY, batch_size=1, execution="eager", stops=None)
