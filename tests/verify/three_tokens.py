"""The exact distribution of a target's next three tokens, and how well sampled texts follow it."""

from collections import Counter
from collections.abc import Sequence

import torch

from outrider.features.target import Target
from outrider.verify.decode import Decoded
from outrider.verify.sampling import DecodeOptions, warp
from outrider.verify.score import next_logits

PROMPT = [5, 6, 7]
Chances = dict[tuple[int, ...], float]


def three_tokens(target: Target, options: DecodeOptions) -> Chances:
    """The eight texts that follow PROMPT with top-k 2, by forwards of the target alone."""

    def following(prefix: list[int]) -> dict[int, float]:
        p_V = warp(next_logits(target, [*PROMPT, *prefix]), options)
        return {int(v): float(p_V[v]) for v in p_V.nonzero()[:, 0]}

    chance = {(a, b, c): p * q * r for a, p in following([]).items() for b, q in following([a]).items()
              for c, r in following([a, b]).items()}
    assert len(chance) == 8
    return chance


def p_value_of(texts: Sequence[Decoded], chance: Chances) -> float:
    """Chi-square of the texts against their chances; 0 where one of them cannot come."""
    counts, N = Counter(tuple(text.tokens) for text in texts), len(texts)
    if not set(counts) <= set(chance):
        return 0.0
    statistic = sum((counts[text] - N * p) ** 2 / (N * p) for text, p in chance.items())
    return float(torch.special.gammaincc(torch.tensor((len(chance) - 1) / 2), torch.tensor(statistic / 2)))
