"""Rejection sampling: what is emitted follows the target's own warped distribution exactly, whatever the drafter proposes."""

import itertools
import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outrider.verify.sampling import DecodeOptions, Luck, draw, judge_greedy, judge_sampled, warp

V, DRAFTS, N = 5, 2, 4000
SEEDS = range(100, 120 if "OUTRIDER_SLOW" in os.environ else 103)
K = DRAFTS + 1
SETTINGS = {
    "temperature 1": {"temperature": 1.0}, "temperature .5": {"temperature": 0.5},
    "top-p": {"temperature": 1.0, "top_p": 0.7}, "top-k": {"temperature": 1.0, "top_k": 2},
    "top-p .5": {"temperature": 0.5, "top_p": 0.7}, "top-k .5": {"temperature": 0.5, "top_k": 3},
    "all": {"temperature": 0.7, "top_p": 0.8, "top_k": 4},
}


def options(**changes: float) -> DecodeOptions:
    plain = DecodeOptions(max_new_tokens=K, stop_ids=(), temperature=1.0, top_p=1.0, top_k=0, seed=0)
    return replace(plain, **changes)


def target_logits(prefix: tuple[int, ...]) -> Tensor:
    """A toy target over V tokens: logits `[V]` that depend on the whole prefix."""
    generator = torch.Generator().manual_seed(1 + sum((token + 1) * (V + 1) ** i for i, token in enumerate(prefix)))
    return 1.5 * torch.randn(V, generator=generator)


LOGITS = {prefix: target_logits(prefix) for n in range(K + 1) for prefix in itertools.product(range(V), repeat=n)}
DRAFT_LOGITS = 1.5 * torch.randn(DRAFTS, V, generator=torch.Generator().manual_seed(99))


def exact(settings: DecodeOptions) -> dict[tuple[int, ...], float]:
    """The probability of each text of K tokens by the target alone, enumerated with a warper of plain Python."""
    chance = {}
    for text in itertools.product(range(V), repeat=K):
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


def rows_of(prefixes: list[tuple[int, ...]]) -> Tensor:
    return torch.stack([LOGITS[prefix] for prefix in prefixes])


Judge = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def emit(
    settings: DecodeOptions, luck: Luck, judge: Judge = judge_sampled, q_of: Callable[[Tensor], Tensor] | None = None,
    target_settings: DecodeOptions | None = None,
) -> list[tuple[int, ...]]:
    """N texts of K tokens as the decoder makes them: a block, and what is missing one by one. The rest breaks a rule."""
    rows = len(luck.streams)
    luck_BX = luck.throw()
    true_q_BkV = warp(DRAFT_LOGITS.expand(rows, -1, -1), settings)
    tokens_Bk = draw(true_q_BkV, luck_BX[:, :DRAFTS])
    q_BkV = true_q_BkV if q_of is None else q_of(true_q_BkV)
    blocks = [tuple(block) for block in tokens_Bk.tolist()]
    p_BKV = torch.stack([warp(rows_of([block[:i] for block in blocks]), target_settings or settings) for i in range(K)], dim=1)
    accepted_B, bonus_B = judge(tokens_Bk, q_BkV, p_BKV, torch.full((rows,), K), luck_BX)
    judged = zip(blocks, accepted_B.tolist(), bonus_B.tolist(), strict=True)
    texts = [(*block[:accepted], bonus) for block, accepted, bonus in judged]
    for _ in range(K - 1):
        nexts = draw(warp(rows_of(texts), settings), luck.throw()[:, -1]).tolist()
        texts = [text if len(text) == K else (*text, token) for text, token in zip(texts, nexts, strict=True)]
    return texts


def p_value(texts: list[tuple[int, ...]], chance: dict[tuple[int, ...], float]) -> float:
    """Pearson's chi-square of counts against chances; texts expected less than 5 times are one cell together.

    A text that cannot be is an infinite deviation.
    """
    n, counts = len(texts), dict.fromkeys(chance, 0)
    for text in texts:
        counts[text] += 1
    if any(chance[text] == 0 for text, count in counts.items() if count):
        return 0.0
    cells = [(counts[text], p * n) for text, p in chance.items() if p * n >= 5]
    rest = n - sum(expected for _, expected in cells)
    if rest > 1:
        cells.append((n - sum(observed for observed, _ in cells), rest))
    statistic = sum((observed - expected) ** 2 / expected for observed, expected in cells)
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2), torch.tensor(statistic / 2)))


def luck_of(seed: int) -> Luck:
    return Luck(range(seed * N, (seed + 1) * N), K=K)


@pytest.fixture(scope="module")
def lucks() -> list[Luck]:
    """Generators made once: making them takes longer than all the draws."""
    return [luck_of(seed) for seed in SEEDS]


@pytest.mark.parametrize("name", SETTINGS)
def test_emitted_tokens_follow_the_target(lucks: list[Luck], name: str) -> None:
    """No p-value below 0.001; seeded, so this is one draw, not a coin thrown at each run. With OUTRIDER_SLOW over 20 seeds."""
    settings = options(**SETTINGS[name])
    chance = exact(settings)
    assert min(p_value(emit(settings, luck), chance) for luck in lucks) > 1e-3


def replaces_from_p(tokens: Tensor, q: Tensor, p: Tensor, slots: Tensor, luck: Tensor) -> tuple[Tensor, Tensor]:
    accepted, _ = judge_sampled(tokens, q, p, slots, luck)
    return accepted, draw(p[torch.arange(len(p)), accepted], luck[:, -1])


def one_stream(tokens: Tensor, q: Tensor, p: Tensor, slots: Tensor, luck: Tensor) -> tuple[Tensor, Tensor]:
    """Acceptance by the numbers that the proposals were drawn with."""
    return judge_sampled(tokens, q, p, slots, torch.cat((luck[:, :DRAFTS], luck[:, :DRAFTS], luck[:, :1]), dim=1))


WRONG = {
    "q without top-p": ("top-p", {"q_of": lambda q: DRAFT_LOGITS.softmax(-1).expand_as(q)}),
    "q without top-k": ("top-k", {"q_of": lambda q: DRAFT_LOGITS.softmax(-1).expand_as(q)}),
    "q without temperature": ("temperature .5", {"q_of": lambda q: DRAFT_LOGITS.softmax(-1).expand_as(q)}),
    "uniform q": ("temperature 1", {"q_of": lambda q: torch.full_like(q, 1 / V)}),
    "q of the neighbouring slot": ("temperature 1", {"q_of": lambda q: q.flip(1)}),
    "replaced from p": ("temperature 1", {"judge": replaces_from_p}),
    "one stream": ("temperature 1", {"judge": one_stream}),
    "target without top-k": ("top-k", {"target_settings": options()}),
    "target without temperature": ("temperature .5", {"target_settings": options()}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_test_sees_a_wrong_rule(wrong: str) -> None:
    name, broken = WRONG[wrong]
    settings = options(**SETTINGS[name])
    assert p_value(emit(settings, luck_of(0), **broken), exact(settings)) < 1e-6


def test_the_streams_differ_and_follow_the_seed() -> None:
    def firsts(seed: int) -> list[float]:
        luck = Luck([seed], K=2).throw()
        return luck[0].tolist()

    assert firsts(3) == firsts(3)
    assert len({*firsts(3), *firsts(4)}) == 6


def test_a_rows_numbers_depend_on_its_seed_alone() -> None:
    together, alone = Luck([4, 9, 2], K=3), Luck([9], K=3)
    for _ in range(3):
        assert torch.equal(together.throw()[1], alone.throw()[0])


@pytest.mark.parametrize("name", SETTINGS)
def test_the_warper_equals_the_plain_one(name: str) -> None:
    settings = options(**SETTINGS[name])
    rows = rows_of(list(itertools.product(range(V), repeat=2)))
    expected = torch.tensor([plain_warp(row, settings) for row in rows.tolist()])
    torch.testing.assert_close(warp(rows, settings), expected, atol=1e-6, rtol=0)  # float32 against float64


@pytest.mark.parametrize(("luck", "token"), [(0.0, 1), (0.4999, 1), (0.5, 3), (0.7499, 3), (0.75, 4), (1 - 2**-53, 4)])
def test_a_draw_inverts_the_running_sum_and_never_gives_weight_zero(luck: float, token: int) -> None:
    p = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.25, 0.0])
    assert draw(p, torch.tensor(luck, dtype=torch.float64)) == token


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    settings, luck = options(), luck_of(1).throw()
    q_BkV = warp(DRAFT_LOGITS.expand(N, -1, -1), settings)
    tokens = draw(q_BkV, luck[:, :DRAFTS])
    p_BKV = torch.cat((q_BkV, q_BkV[:, :1]), dim=1)
    assert (judge_sampled(tokens, q_BkV, p_BKV, torch.full((N,), K), luck)[0] == DRAFTS).all()


def test_slots_that_were_not_drafted_are_not_accepted_and_leave_the_targets_own_choice() -> None:
    """At the end of a text: all drafted slots accepted, and what follows is drawn from p alone, not from p - q."""
    p_BKV = torch.eye(V)[[0, 1, 2]].expand(3, -1, -1)
    tokens, slots = torch.tensor([[0, 1]] * 3), torch.tensor([1, 2, 3])
    for accepted, bonus in (judge_greedy(tokens, p_BKV, slots),
                            judge_sampled(tokens, p_BKV[:, :-1], p_BKV, slots, luck_of(0).throw()[:3])):
        assert accepted.tolist() == [0, 1, 2]
        assert bonus.tolist() == [0, 1, 2]


def test_a_q_that_is_not_a_number_is_rejected_and_replaced_from_p() -> None:
    q_BkV = torch.full((1, DRAFTS, V), float("nan"))
    p_BKV = torch.eye(V)[[3, 1, 2]][None]
    accepted, bonus = judge_sampled(torch.tensor([[3, 1]]), q_BkV, p_BKV, torch.tensor([K]), luck_of(0).throw()[:1])
    assert (accepted.tolist(), bonus.tolist()) == ([0], [3])
