"""Sampled decoding through real toy models: the decoder hands the right logits to the right draws."""

from collections.abc import Callable

import pytest
import torch
from overfit import random_drafter
from three_tokens import PROMPT, p_value_of, three_tokens
from toys import VOCAB, toy_shape

from outrider.features.target import Target
from outrider.verify.decode import decode, speculate
from outrider.verify.execution import EAGER
from outrider.verify.sampling import DecodeOptions

N = 600


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
@pytest.mark.parametrize("drafted", [True, False], ids=["drafted", "target alone"])
def test_three_tokens_of_real_models_follow_the_target(toy_target: Callable[..., Target], kind: str, drafted: bool) -> None:
    """Eight texts, enumerated by the target alone; the second and third token come from a draft or its replacement."""
    target, drafter = toy_target(kind), random_drafter(toy_shape(), seed=3)
    options = DecodeOptions(max_new_tokens=3, stop_ids=(), temperature=1.5, top_p=1.0, top_k=2, seed=0)
    batch = decode(target, drafter if drafted else None, [PROMPT] * N, options, batch_size=N, execution=EAGER, stops=None)
    assert p_value_of(batch.texts, three_tokens(target, options)) > 1e-3


def test_the_same_seed_gives_the_same_text(toy_target: Callable[..., Target]) -> None:
    target, drafter = toy_target("llama"), random_drafter(toy_shape(), seed=3)
    options = DecodeOptions(max_new_tokens=12, stop_ids=(VOCAB - 1,), temperature=1.0, top_p=0.9, top_k=0, seed=5)
    before = torch.random.get_rng_state()
    first = speculate(target, drafter, PROMPT, options).tokens
    assert first == speculate(target, drafter, PROMPT, options).tokens
    assert torch.equal(before, torch.random.get_rng_state())
