"""Takes logits of drafter and target, gives tokens by greedy choice or rejection sampling; knows nothing of models or caches."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from outrider.errors import UserError

LEAST_TEMPERATURE = 1e-3  # logits of some hundreds, divided by less, leave what float32 can hold


@dataclass(frozen=True)
class DecodeOptions:
    """How a text is continued. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off; `stop_ids` end the text.

    Raises UserError on a value out of range.
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float
    top_p: float
    top_k: int
    seed: int

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

    @classmethod
    def greedy(cls, *, max_new_tokens: int, stop_ids: tuple[int, ...]) -> Self:
        """The options of a greedy continuation, which draws nothing."""
        return cls(max_new_tokens=max_new_tokens, stop_ids=stop_ids, temperature=0.0, top_p=1.0, top_k=0, seed=0)


def warp(logits_XV: Tensor, options: DecodeOptions) -> Tensor:
    """Probabilities `[X, V]` float32 after temperature, then top-k, then top-p: the one warper of both sides.

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


@dataclass(frozen=True)
class Proposal:
    """Draft tokens for slots 1, 2, .. and, when sampled, the distributions `q` `[X, V]` they were drawn from."""

    tokens: list[int]
    q: Tensor | None


class Chooser:
    """Chooses tokens: greedily, or by rejection sampling (arXiv 2211.17192) with three random streams.

    Proposals, acceptance and replacement draw from generators of their own, all derived from `options.seed`: with one
    stream a replacement would depend on the proposal it replaces.
    """

    def __init__(self, options: DecodeOptions, device: torch.device) -> None:
        self.options = options
        seeds = np.random.SeedSequence(options.seed).generate_state(3, np.uint32).tolist()
        self.proposing, self.accepting, self.replacing = (torch.Generator(device).manual_seed(seed) for seed in seeds)

    def propose(self, draft_logits_XV: Tensor) -> Proposal:
        """Draft tokens from the drafter's logits of slots 1, 2, .."""
        if self.options.temperature == 0:
            return Proposal(draft_logits_XV.argmax(-1).tolist(), None)
        q_XV = warp(draft_logits_XV, self.options)
        return Proposal(_draw(q_XV, self.proposing), q_XV)

    def judge(self, proposal: Proposal, target_logits_XV: Tensor) -> tuple[int, int]:
        """How many draft tokens are accepted, and the token that follows them.

        Row i of `target_logits_XV` is the target's prediction for draft token i; one more row follows the last.
        """
        if proposal.q is None:
            choice = target_logits_XV.argmax(-1).tolist()
            accepted = count_equal(proposal.tokens, choice)
            return accepted, choice[accepted]
        p_XV = warp(target_logits_XV, self.options)
        accepted = self._accept(proposal, p_XV)
        if accepted == len(proposal.tokens):
            return accepted, _draw(p_XV[accepted:], self.replacing)[0]
        residual_V = (p_XV[accepted] - proposal.q[accepted]).clamp(min=0)
        if not residual_V.sum() > 0:  # p and q equal to rounding: a rejection of probability near 0, any of p will do
            residual_V = p_XV[accepted]
        return accepted, _draw(residual_V[None], self.replacing)[0]

    def _accept(self, proposal: Proposal, p_XV: Tensor) -> int:
        """The number of leading draft tokens accepted, each with probability min(1, p / q)."""
        assert proposal.q is not None
        tokens_X1 = torch.tensor(proposal.tokens, device=p_XV.device)[:, None]
        p_X, q_X = p_XV[: len(tokens_X1)].gather(1, tokens_X1)[:, 0], proposal.q.gather(1, tokens_X1)[:, 0]
        luck_X = torch.rand(len(tokens_X1), generator=self.accepting, device=p_XV.device)
        return int((luck_X * q_X < p_X).to(torch.int32).cumprod(0).sum())

    def next_token(self, logits_V: Tensor) -> int:
        """A token from the target's logits alone."""
        if self.options.temperature == 0:
            return int(logits_V.argmax())
        return _draw(warp(logits_V[None], self.options), self.replacing)[0]


def count_equal(draft: list[int], choice: list[int]) -> int:
    """The length of the longest common prefix."""
    for i, (drafted, chosen) in enumerate(zip(draft, choice, strict=False)):
        if drafted != chosen:
            return i
    return min(len(draft), len(choice))


def _draw(p_XV: Tensor, generator: torch.Generator) -> list[int]:
    return torch.multinomial(p_XV, 1, generator=generator)[:, 0].tolist()
