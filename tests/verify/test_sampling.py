"""Rejection sampling: what is emitted follows the target's own warped distribution exactly, whatever the drafter proposes."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.verify.sampling import Chooser, DecodeOptions, Proposal, warp

V, DRAFTS, N = 5, 2, 4000
CPU = torch.device("cpu")
SETTINGS = {
    "temperature 1": {"temperature": 1.0}, "temperature .5": {"temperature": 0.5},
    "top-p": {"temperature": 1.0, "top_p": 0.7}, "top-k": {"temperature": 1.0, "top_k": 2},
    "all": {"temperature": 0.7, "top_p": 0.8, "top_k": 4},
}


def options(seed: int = 0, **changes: float) -> DecodeOptions:
    plain = DecodeOptions(max_new_tokens=DRAFTS + 1, stop_ids=(), temperature=1.0, top_p=1.0, top_k=0, seed=seed)
    return replace(plain, **changes)


def target_logits(prefix: tuple[int, ...]) -> Tensor:
    """A toy target over V tokens: logits `[V]` that depend on the whole prefix."""
    generator = torch.Generator().manual_seed(1 + sum((token + 1) * (V + 1) ** i for i, token in enumerate(prefix)))
    return 1.5 * torch.randn(V, generator=generator)


LOGITS = {prefix: target_logits(prefix) for n in range(DRAFTS + 2) for prefix in itertools.product(range(V), repeat=n)}
DRAFT_LOGITS = 1.5 * torch.randn(DRAFTS, V, generator=torch.Generator().manual_seed(99))


def exact(settings: DecodeOptions) -> dict[tuple[int, ...], float]:
    """The probability of each text of DRAFTS + 1 tokens by the target alone, enumerated with a warper of plain Python."""
    chance = {}
    for text in itertools.product(range(V), repeat=DRAFTS + 1):
        p = 1.0
        for i, token in enumerate(text):
            p *= plain_warp(LOGITS[text[:i]].tolist(), settings)[token]
        chance[text] = p
    return chance


def plain_warp(logits: list[float], settings: DecodeOptions) -> list[float]:
    """Temperature, top-k, top-p by sorting and adding, one token at a time."""
    weights = torch.tensor(logits).double().div(settings.temperature).exp().tolist()
    order = sorted(range(V), key=lambda v: -weights[v])
    order = order[: settings.top_k] if settings.top_k else order
    total = sum(weights[v] for v in order)
    kept: list[int] = []
    for v in order:
        if sum(weights[u] for u in kept) / total >= settings.top_p:
            break
        kept.append(v)
    return [weights[v] / sum(weights[u] for u in kept) if v in kept else 0.0 for v in range(V)]


def emit(chooser: Chooser) -> tuple[int, ...]:
    """DRAFTS + 1 tokens as the decoder makes them: a block, and what is missing one by one."""
    proposal = chooser.propose(DRAFT_LOGITS)
    rows = torch.stack([LOGITS[tuple(proposal.tokens[:i])] for i in range(DRAFTS + 1)])
    accepted, bonus = chooser.judge(proposal, rows)
    text = (*proposal.tokens[:accepted], bonus)
    while len(text) < DRAFTS + 1:
        text = (*text, chooser.next_token(LOGITS[text]))
    return text


def p_value(counts: Counter[tuple[int, ...]], chance: dict[tuple[int, ...], float], n: int) -> float:
    """Pearson's chi-square of counts against chances; texts expected less than 5 times are one cell together.

    A text that cannot be is an infinite deviation.
    """
    if any(chance[text] == 0 for text in counts):
        return 0.0
    large = [text for text, p in chance.items() if p * n >= 5]
    cells = [(counts[text], chance[text] * n) for text in large]
    rest = n - sum(expected for _, expected in cells)
    if rest > 1:
        cells.append((n - sum(observed for observed, _ in cells), rest))
    statistic = sum((observed - expected) ** 2 / expected for observed, expected in cells)
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2), torch.tensor(statistic / 2)))


def p_of(chooser: Chooser, settings: DecodeOptions) -> float:
    return p_value(Counter(emit(chooser) for _ in range(N)), exact(settings), N)


@pytest.mark.parametrize("name", SETTINGS)
def test_emitted_tokens_follow_the_target(name: str) -> None:
    settings = options(seed=7, **SETTINGS[name])
    assert p_of(Chooser(settings, CPU), settings) > 1e-3  # seeded: this is one draw, not a coin thrown at each run


class UnwarpedQ(Chooser):
    """Proposes from the warped distribution and keeps the raw one as q: top-p and top-k on one side."""

    def propose(self, draft_logits_XV: Tensor) -> Proposal:
        proposal = super().propose(draft_logits_XV)
        return Proposal(proposal.tokens, draft_logits_XV.softmax(-1))


class UniformQ(Chooser):
    def propose(self, draft_logits_XV: Tensor) -> Proposal:
        proposal = super().propose(draft_logits_XV)
        return Proposal(proposal.tokens, torch.full_like(draft_logits_XV, 1 / V))


class ReplacesFromP(Chooser):
    """At a rejection draws from p instead of max(p - q, 0)."""

    def judge(self, proposal: Proposal, target_logits_XV: Tensor) -> tuple[int, int]:
        accepted, bonus = super().judge(proposal, target_logits_XV)
        return accepted, self.next_token(target_logits_XV[accepted]) if accepted < DRAFTS else bonus


class RawTarget(Chooser):
    """Judges by the unwarped target."""

    def judge(self, proposal: Proposal, target_logits_XV: Tensor) -> tuple[int, int]:
        raw = Chooser(replace(self.options, temperature=1.0, top_p=1.0, top_k=0), CPU)
        raw.accepting, raw.replacing = self.accepting, self.replacing
        return raw.judge(proposal, target_logits_XV)


@pytest.mark.parametrize(("wrong", "name"), [
    (UnwarpedQ, "top-p"), (UnwarpedQ, "top-k"), (UnwarpedQ, "temperature .5"), (UniformQ, "temperature 1"),
    (ReplacesFromP, "temperature 1"), (RawTarget, "top-k"), (RawTarget, "temperature .5"),
])
def test_the_test_sees_a_wrong_rule(wrong: type[Chooser], name: str) -> None:
    settings = options(seed=7, **SETTINGS[name])
    assert p_of(wrong(settings, CPU), settings) < 1e-6


def test_the_test_sees_streams_that_repeat_each_other() -> None:
    settings = options(seed=7, **SETTINGS["temperature 1"])
    chooser, counts = Chooser(settings, CPU), Counter()
    for seed in range(N):
        for stream in (chooser.proposing, chooser.accepting, chooser.replacing):
            stream.manual_seed(seed)
        counts[emit(chooser)] += 1
    assert p_value(counts, exact(settings), N) < 1e-6


def test_the_streams_differ_and_follow_the_seed() -> None:
    def firsts(seed: int) -> list[float]:
        chooser = Chooser(options(seed=seed), CPU)
        return [float(torch.rand(1, generator=g)) for g in (chooser.proposing, chooser.accepting, chooser.replacing)]

    assert firsts(3) == firsts(3)
    assert len({*firsts(3), *firsts(4)}) == 6


@pytest.mark.parametrize("name", SETTINGS)
def test_the_warper_equals_the_plain_one(name: str) -> None:
    settings = options(**SETTINGS[name])
    rows = torch.stack([LOGITS[prefix] for prefix in itertools.product(range(V), repeat=2)])
    expected = torch.tensor([plain_warp(row, settings) for row in rows.tolist()])
    torch.testing.assert_close(warp(rows, settings), expected, atol=1e-6, rtol=0)  # float32 against float64


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    chooser = Chooser(options(), CPU)
    for _ in range(200):
        proposal = chooser.propose(DRAFT_LOGITS)
        assert chooser.judge(proposal, torch.cat((DRAFT_LOGITS, DRAFT_LOGITS[:1])))[0] == DRAFTS
