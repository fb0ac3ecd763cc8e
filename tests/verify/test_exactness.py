"""The small version of bench/exactness.py: drafters of every quality, targets of every kind, chains and trees."""

from collections.abc import Callable

import pytest
from exactness import QUALITIES, SHAPE, ask, compare
from toys import KINDS

from outrider.features.target import Target


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_differs_whatever_the_drafter(toy_target: Callable[..., Target], kind: str) -> None:
    target = toy_target(kind)
    asked, taus = ask(target, 12), {}
    for quality in QUALITIES:
        for tree_budget in (0,) if kind == "qwen3_5" else (0, 9):
            wrong, taus[quality, tree_budget] = compare(target, asked, quality, batch=12, tree_budget=tree_budget)
            assert wrong == 0, (quality, tree_budget)
    assert taus["never right", 0] == 1.0
    assert taus["always right", 0] > SHAPE.block_size - 0.7  # texts that end within a block lack a little
    assert 1.0 < taus["trained", 0] < taus["always right", 0]  # half right: on one of the texts, and by chance on others
