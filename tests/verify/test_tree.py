"""Trees: the heap's own prefixes, ancestors alone in the mask, and texts that are the target's own, greedy and sampled."""

import heapq
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from overfit import overfit_drafter, random_drafter
from scripted import plain_greedy, script_drafts, until_stop
from three_tokens import PROMPT, p_value_of, three_tokens
from torch import Tensor
from toys import VOCAB, toy_shape

from outrider.errors import UserError
from outrider.features.target import Target
from outrider.records import FULL, SLIDING
from outrider.verify.decode import DecodedBatch, decode
from outrider.verify.drafting import DraftReader
from outrider.verify.execution import EAGER
from outrider.verify.reading import TargetReader
from outrider.verify.sampling import DecodeOptions
from outrider.verify.tree import Tree, contenders, follow, likeliest_tree

K = 4
PROMPTS = [[5], [72, 101, 108, 108, 111, 32, 104], list(range(40, 52)), [9, 9], list(range(100, 131))]
MIXED = toy_shape(layer_types=(FULL, SLIDING), sliding_window=6)
DENSE = ("llama", "qwen3", "sliding")
ToyTarget = Callable[..., Target]


def options(budget: int, limit: int = 24, *stop_ids: int) -> DecodeOptions:
    return replace(DecodeOptions.greedy(max_new_tokens=limit, stop_ids=stop_ids), tree_budget=budget)


def run(target: Target, drafter: object, given: DecodeOptions, batch_size: int = 5) -> DecodedBatch:
    return decode(target, drafter, PROMPTS, given, batch_size=batch_size, execution=EAGER, stops=None)  # type: ignore[arg-type]


def grown(logits_BkV: Tensor, slots_B: Tensor, budget: int) -> Tree:
    B, k, V = logits_BkV.shape
    return likeliest_tree(torch.full((B,), 7), logits_BkV, slots_B, contenders(k, V, budget, logits_BkV.device), budget=budget)


def by_heap(logits_kV: Tensor, budget: int) -> list[tuple[float, tuple[int, ...]]]:
    """The likeliest prefixes, best first: the next in line of a prefix are its first child and its next sibling."""
    ranked = [sorted(((-float(q), t) for t, q in enumerate(row))) for row in logits_kV.double().log_softmax(-1)]
    heap, found = [(ranked[0][0][0], (0,))], []
    while heap and len(found) < budget:
        cost, ranks = heapq.heappop(heap)
        found.append((-cost, tuple(ranked[slot][rank][1] for slot, rank in enumerate(ranks))))
        slot, rank = len(ranks) - 1, ranks[-1]
        if rank + 1 < len(ranked[slot]):
            heapq.heappush(heap, (cost - ranked[slot][rank][0] + ranked[slot][rank + 1][0], (*ranks[:-1], rank + 1)))
        if len(ranks) < len(ranked):
            heapq.heappush(heap, (cost + ranked[slot + 1][0][0], (*ranks, 0)))
    return found


def prefixes(tree: Tree, row: int) -> list[tuple[int, ...]]:
    """Each real node's tokens from the anchor's child on."""
    found = []
    for node in range(1, tree.tokens_BN.shape[1]):
        path, at = [], node
        while at:
            path.append(int(tree.tokens_BN[row, at]))
            at = int(tree.parent_BN[row, at])
        if tree.real_BN[row, node]:
            found.append(tuple(reversed(path)))
    return found


@pytest.mark.parametrize("V", [3, 40])
@pytest.mark.parametrize("budget", [1, 2, 7, 33, 64])
def test_the_tree_is_the_heaps(V: int, budget: int) -> None:
    logits = 3 * torch.randn(6, 4, V, generator=torch.Generator().manual_seed(budget))
    tree = grown(logits, torch.full((6,), 5), budget)
    for row in range(6):
        expected = by_heap(logits[row], budget)
        assert sorted(prefixes(tree, row)) == sorted(prefix for _, prefix in expected)
        assert prefixes(tree, row)[0] == expected[0][1]


def test_parents_come_first_and_a_node_sees_its_ancestors_alone() -> None:
    logits = torch.randn(3, 5, 20)
    logits[1] = 0.0  # all prefixes of a length equal
    logits[2, :, 4] = 1e4  # probability 1: child and parent equal
    tree = grown(logits, torch.full((3,), 6), 30)
    for row in range(3):
        for node in range(31):
            parent = int(tree.parent_BN[row, node])
            assert parent < node or node == 0
            ancestors = {node}
            while node:
                node = int(tree.parent_BN[row, node])
                ancestors.add(node)
            first = max(ancestors)
            assert set(tree.seen_BNN[row, first].nonzero()[:, 0].tolist()) == ancestors
            assert tree.depth_BN[row, first] == len(ancestors) - 1


def test_no_node_reaches_beyond_the_limit_and_damaged_logits_make_no_node() -> None:
    logits = torch.randn(4, 3, 5)
    logits[3] = float("nan")
    tree = grown(logits, torch.tensor([1, 2, 4, 4]), 12)
    assert tree.real_BN.sum(1).tolist() == [1, 6, 13, 1]
    assert tree.depth_BN[1].max() == 1


def test_the_followed_path() -> None:
    logits = torch.zeros(1, 2, 3)
    logits[0, 0] = torch.tensor([3.0, 2.0, -9.0])
    logits[0, 1] = torch.tensor([-9.0, 2.0, 1.5])
    tree = grown(logits, torch.tensor([3]), 5)  # (0), (0, 1), (0, 2), (1), (1, 1): whatever their order
    node = {prefix: i for i, prefix in enumerate(prefixes(tree, 0), start=1)}
    choice = torch.full((1, 6), 2)
    choice[0, 0], choice[0, node[1,]] = 1, 1  # the target writes 1, then 1, then 2
    path = follow(tree, choice, K=3)
    assert path.nodes_BK.tolist() == [[0, node[1,], node[1, 1]]]
    assert (path.accepted_B.tolist(), path.bonus_B.tolist(), path.drafted_B.tolist()) == ([2], [2], [2])
    choice[0, 0] = 0  # 0, then 2 (a child), then 2
    assert follow(tree, choice, K=3).nodes_BK.tolist() == [[0, node[0,], node[0, 2]]]
    choice[0, node[0,]] = 0  # 0, then a token that no child has
    path = follow(tree, choice, K=3)
    assert (path.accepted_B.tolist(), path.bonus_B.tolist(), path.drafted_B.tolist()) == ([1], [0], [2])


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("budget", [1, 5, 16])
def test_a_trees_text_is_the_targets_own(toy_target: ToyTarget, kind: str, budget: int) -> None:
    """A half-trained drafter, whose paths branch; rows end at a stop token or at the limit; batches of 5 and of 2."""
    target = toy_target(kind)
    truths = plain_greedy(target, PROMPTS, 24)
    trained = overfit_drafter(target, MIXED, (*PROMPTS[1], *truths[1]), prompt=len(PROMPTS[1]), steps=30)
    given = options(budget, 24, truths[0][5], truths[2][12])
    for drafter in (trained, random_drafter(MIXED, seed=3)):
        batch = run(target, drafter, given)
        assert [text.tokens for text in batch.texts] == [until_stop(truth, given.stop_ids) for truth in truths]
        assert [text.cycles for text in run(target, drafter, given, 2).texts] == [text.cycles for text in batch.texts]


@pytest.mark.parametrize("limit", range(1, 2 * K + 1))
def test_the_limit_is_kept_exactly(toy_target: ToyTarget, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    target, truths = toy_target("llama"), plain_greedy(toy_target("llama"), PROMPTS, 2 * K)
    script_drafts(monkeypatch, PROMPTS, truths, [[K - 1]] * 5)
    batch = run(target, random_drafter(toy_shape(), seed=3), options(9, limit))
    assert [text.tokens for text in batch.texts] == [truth[:limit] for truth in truths]


def test_a_larger_tree_is_followed_further(toy_target: ToyTarget) -> None:
    target = toy_target("qwen3")
    truths = plain_greedy(target, PROMPTS, 24)
    drafter = overfit_drafter(target, MIXED, (*PROMPTS[1], *truths[1]), prompt=len(PROMPTS[1]), steps=30)
    forwards = [sum(len(text.runs) for text in run(target, drafter, options(budget)).texts) for budget in (1, 8, 64)]
    assert forwards[0] > forwards[1] > forwards[2]


def second_choices(monkeypatch: pytest.MonkeyPatch, truths: list[list[int]]) -> None:
    """Draft so that the target's own tokens are the second choice of every slot, behind one wrong token."""
    script_drafts(monkeypatch, PROMPTS, truths, [[K - 1], [1, 3, 2], [0, 2], [3, 0], [2]])
    scripted = DraftReader.draft

    def draft(self: DraftReader, anchor_B: Tensor, end_B: Tensor, slots_B: Tensor, *, width: int) -> Tensor:
        logits = scripted(self, anchor_B, end_B, slots_B, width=width)
        wrong_Bk1 = (logits.argmax(-1, keepdim=True) + 2) % VOCAB
        return (20 * logits).scatter(-1, wrong_Bk1, 21.0)

    monkeypatch.setattr(DraftReader, "draft", draft)


@pytest.mark.parametrize("kind", DENSE)
def test_paths_between_other_branches(toy_target: ToyTarget, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """14 nodes hold all continuations of two tokens a slot; each right path has wrong branches before and after its nodes."""
    target, truths = toy_target(kind), plain_greedy(toy_target(kind), PROMPTS, 24)
    second_choices(monkeypatch, truths)
    batch = run(target, random_drafter(toy_shape(), seed=3), options(14))
    assert [text.tokens for text in batch.texts] == truths
    assert batch.texts[0].runs[:-1] == [K - 1] * (len(batch.texts[0].runs) - 1)
    assert batch.texts[1].runs[:3] == [1, 3, 2]


BROKEN = {
    "sees other branches": ("read_tree", lambda read: lambda self, ids, depth, seen: read(
        self, ids, depth, torch.ones_like(seen).tril())),
    "sees no ancestors": ("read_tree", lambda read: lambda self, ids, depth, seen: read(
        self, ids, depth, torch.eye(seen.shape[1], dtype=torch.bool).expand_as(seen))),
    "stands at its index": ("read_tree", lambda read: lambda self, ids, depth, seen: read(
        self, ids, torch.arange(ids.shape[1]).expand_as(ids), seen)),
    "is kept where it was read": ("keep_path", lambda keep: lambda self, nodes, kept: keep(
        self, torch.arange(nodes.shape[1]).expand_as(nodes), kept)),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_the_test_sees_a_broken_rule(toy_target: ToyTarget, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    target, truths = toy_target("qwen3"), plain_greedy(toy_target("qwen3"), PROMPTS, 24)
    name, rule = BROKEN[broken]
    monkeypatch.setattr(TargetReader, name, rule(getattr(TargetReader, name)))
    second_choices(monkeypatch, truths)
    try:
        texts = [text.tokens for text in run(target, random_drafter(toy_shape(), seed=3), options(14)).texts]
    except AssertionError:  # the script saw an anchor that is not the target's
        return
    assert texts != truths


def test_a_recurrent_target_is_refused(toy_target: ToyTarget) -> None:
    with pytest.raises(UserError, match="tree_budget = 8: this target has 'linear_attention' layers"):
        run(toy_target("qwen3_5"), random_drafter(toy_shape(), seed=3), options(8))


@pytest.mark.parametrize("budget", [-1, 1025])
def test_a_budget_out_of_range_is_refused(budget: int) -> None:
    with pytest.raises(UserError, match=f"tree_budget = {budget}"):
        options(budget)


@pytest.mark.parametrize("budget", [2, 12])
def test_sampled_by_a_tree_three_tokens_follow_the_target(toy_target: ToyTarget, budget: int) -> None:
    target, N = toy_target("qwen3"), 600
    given = DecodeOptions(max_new_tokens=3, stop_ids=(), temperature=1.5, top_p=1.0, top_k=2, seed=11, tree_budget=budget)
    batch = decode(target, random_drafter(toy_shape(), seed=3), [PROMPT] * N, given, batch_size=N, execution=EAGER, stops=None)
    assert p_value_of(batch.texts, three_tokens(target, given)) > 1e-3
