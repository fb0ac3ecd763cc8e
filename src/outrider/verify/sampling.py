"""Takes logits of drafter and target, gives tokens by greedy choice or rejection sampling; knows nothing of models or caches.

Every function works on a batch of blocks at fixed shapes and waits for nothing, so that it can be part of a CUDA graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from outrider.errors import UserError

MOST_NODES = 1024  # of a tree: all pairs of them have a mark in its mask
LEAST_TEMPERATURE = 1e-3  # logits of some hundreds, divided by less, leave what float32 can hold


@dataclass(frozen=True)
class DecodeOptions:
    """How a text is continued. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off; `stop_ids` end the text.

    `tree_budget`: draft tokens verified at a time, as a tree; 0 verifies the one chain that a block is.

    Raises UserError on a value out of range.
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    tree_budget: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens = {self.max_new_tokens}: must be at least 1")
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature < float("inf"):
            raise UserError(f"temperature = {self.temperature}: must be 0 (greedy) or at least {LEAST_TEMPERATURE}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p = {self.top_p}: must be above 0 and at most 1 (1 keeps every token)")
        if self.top_k < 0:
            raise UserError(f"top_k = {self.top_k}: must be 0 (keeps every token) or a positive count")
        if self.seed < 0:
            raise UserError(f"seed = {self.seed}: must not be negative")
        if not 0 <= self.tree_budget <= MOST_NODES:
            raise UserError(f"tree_budget = {self.tree_budget}: must be 0 (one chain) or at most {MOST_NODES} draft tokens")

    @property
    def greedy_choice(self) -> bool:
        return self.temperature == 0

    @classmethod
    def greedy(cls, *, max_new_tokens: int, stop_ids: tuple[int, ...]) -> Self:
        """The options of a greedy continuation, which draws nothing."""
        return cls(max_new_tokens=max_new_tokens, stop_ids=stop_ids, temperature=0.0, top_p=1.0, top_k=0, seed=0)


def warp(logits_XV: Tensor, options: DecodeOptions) -> Tensor:
    """Probabilities `[..., V]` float32 after temperature, then top-k, then top-p: the one warper of both sides.

    Top-k keeps exactly k tokens; top-p the fewest most likely ones whose probability reaches p.
    """
    scores_XV = logits_XV.float() / options.temperature
    if 0 < options.top_k < scores_XV.shape[-1]:
        kept = scores_XV.topk(options.top_k, dim=-1)
        scores_XV = torch.full_like(scores_XV, float("-inf")).scatter(-1, kept.indices, kept.values)
    p_XV = scores_XV.softmax(dim=-1)
    if options.top_p < 1:
        sorted_XV, order_XV = p_XV.sort(dim=-1, descending=True, stable=True)
        before_XV = sorted_XV.cumsum(dim=-1) - sorted_XV
        p_XV = torch.zeros_like(p_XV).scatter(-1, order_XV, sorted_XV * (before_XV < options.top_p))
        p_XV = p_XV / p_XV.sum(dim=-1, keepdim=True)
    return p_XV


class Luck:
    """Uniform numbers in [0, 1) for each row, in three streams: proposals, acceptance, replacement.

    With one stream a replacement would depend on the proposal it replaces. Each row has generators of its own, made from its
    seed, so what it draws depends on no other row.
    """

    def __init__(self, seeds: Sequence[int], *, K: int) -> None:
        self.draws = (K - 1, K - 1, 1)
        self.streams = [[np.random.Generator(np.random.Philox(child)) for child in np.random.SeedSequence(seed).spawn(3)]
                        for seed in seeds]

    def throw(self) -> Tensor:
        """The next numbers of every row, `[B, 2 K - 1]` float64 on the CPU: K - 1 proposals, K - 1 acceptances, 1 replacement."""
        return torch.from_numpy(np.stack([
            np.concatenate([stream.random(n) for stream, n in zip(streams, self.draws, strict=True)]) for streams in self.streams
        ]))


def draw(p_XV: Tensor, luck_X: Tensor) -> Tensor:
    """Tokens `[...]` drawn from weights `[..., V]` by inverting their running sum in float64; never one of weight 0."""
    sum_XV = p_XV.double().cumsum(dim=-1)
    total_X1 = sum_XV[..., -1:]
    last_X = (sum_XV < total_X1).sum(-1)  # the last token with any weight
    return torch.minimum((sum_XV <= luck_X[..., None] * total_X1).sum(-1), last_X)


def count_right(right_Bk: Tensor) -> Tensor:
    """How many slots come before the first wrong one, `[B]`."""
    return right_Bk.to(torch.int64).cumprod(dim=1).sum(dim=1)


def judge_greedy(tokens_Bk: Tensor, target_logits_BKV: Tensor, slots_B: Tensor) -> tuple[Tensor, Tensor]:
    """How many draft tokens of slots 1, 2, .. are the target's own choice, and its next token: accepted, bonus `[B]`.

    Row k of the logits is the target's prediction for slot k + 1; only slots below `slots_B` were drafted.
    """
    choice_BK = target_logits_BKV.argmax(-1)
    accepted_B = count_right((tokens_Bk == choice_BK[:, :-1]) & _drafted(tokens_Bk, slots_B))
    return accepted_B, choice_BK.gather(1, accepted_B[:, None])[:, 0]


def judge_sampled(
    tokens_Bk: Tensor, q_BkV: Tensor, p_BKV: Tensor, slots_B: Tensor, luck_BX: Tensor
) -> tuple[Tensor, Tensor]:
    """Rejection sampling (arXiv 2211.17192): accepted with min(1, p / q), at the first rejection replaced from max(p - q, 0).

    `q_BkV`: what the draft tokens were drawn from. `p_BKV`: the target's probabilities, warped alike. `luck_BX`: see Luck.
    """
    K = p_BKV.shape[1]
    p_Bk, q_Bk = (x.gather(2, tokens_Bk[:, :, None])[:, :, 0] for x in (p_BKV[:, :-1], q_BkV))
    accepted_B = count_right((luck_BX[:, K - 1 : -1] * q_Bk < p_Bk) & _drafted(tokens_Bk, slots_B))
    q_BKV = torch.cat((q_BkV * _drafted(tokens_Bk, slots_B)[:, :, None], torch.zeros_like(p_BKV[:, :1])), dim=1)
    row_B11 = accepted_B[:, None, None].expand(-1, 1, p_BKV.shape[2])
    p_BV, q_BV = (x.gather(1, row_B11)[:, 0] for x in (p_BKV, q_BKV))
    residual_BV = (p_BV - q_BV).clamp(min=0)
    # p and q equal to rounding: a rejection of probability near 0, any of p will do
    residual_BV = torch.where(residual_BV.sum(-1, keepdim=True) > 0, residual_BV, p_BV)
    return accepted_B, draw(residual_BV, luck_BX[:, -1])


def _drafted(tokens_Bk: Tensor, slots_B: Tensor) -> Tensor:
    """Which of slots 1, 2, .. were drafted, `[B, K - 1]` bool."""
    return torch.arange(1, tokens_Bk.shape[1] + 1, device=slots_B.device) < slots_B[:, None]


def count_equal(draft: Sequence[int], choice: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    for i, (drafted, chosen) in enumerate(zip(draft, choice, strict=False)):
        if drafted != chosen:
            return i
    return min(len(draft), len(choice))
