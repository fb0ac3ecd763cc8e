"""Drafters of every quality against plain greedy decoding, token for token; for the tests and for bench/exactness.py."""

from dataclasses import dataclass, replace

import pytest
import torch
from overfit import overfit_drafter, random_drafter
from scripted import plain_greedy, script_drafts, until_stop
from toys import VOCAB, toy_shape

from outrider.features.target import Target
from outrider.records import FULL, SLIDING
from outrider.verify.decode import decode
from outrider.verify.execution import EAGER
from outrider.verify.sampling import DecodeOptions
from outrider.verify.score import count_acceptance

QUALITIES = ("never right", "always right", "random", "trained")
SHAPE = toy_shape(layer_types=(FULL, SLIDING), sliding_window=6)  # both kinds of the drafter's layers
LIMIT = 24


@dataclass(frozen=True)
class Questions:
    """Random prompts of 1 to 23 tokens, what the target writes after each by forwards without a cache, and a stop token."""

    prompts: list[list[int]]
    truths: list[list[int]]
    stop: int


def ask(target: Target, count: int) -> Questions:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 24, (count,), generator=generator).tolist()
    prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]
    truths = plain_greedy(target, prompts, LIMIT)
    return Questions(prompts, truths, truths[0][10])


def compare(target: Target, asked: Questions, quality: str, *, batch: int, tree_budget: int) -> tuple[int, float]:
    """How many texts differ from plain greedy, and the accepted length."""
    drafter = random_drafter(SHAPE, seed=3)
    if quality == "trained":
        text = (*asked.prompts[0], *asked.truths[0])
        drafter = overfit_drafter(target, SHAPE, text, prompt=len(asked.prompts[0]), steps=60)
    options = replace(DecodeOptions.greedy(max_new_tokens=LIMIT, stop_ids=(asked.stop,)), tree_budget=tree_budget)
    wrong, texts = 0, []
    for start in range(0, len(asked.prompts), batch):
        prompts, truths = (part[start : start + batch] for part in (asked.prompts, asked.truths))
        with pytest.MonkeyPatch.context() as patch:
            if quality in QUALITIES[:2]:
                right = 0 if quality == "never right" else SHAPE.block_size - 1
                script_drafts(patch, prompts, truths, [[right]] * len(prompts))
            found = decode(target, drafter, prompts, options, batch_size=batch, execution=EAGER, stops=None).texts
        wrong += sum(text.tokens != until_stop(truth, [asked.stop]) for text, truth in zip(found, truths, strict=True))
        texts += found
    return wrong, count_acceptance(texts, SHAPE.block_size).tau
