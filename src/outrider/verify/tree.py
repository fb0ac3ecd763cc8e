"""Takes draft logits, gives the tree of the likeliest continuations and the path that a target follows in it; knows no models.

DDTree (arXiv 2604.12989). The slots of a block are drafted independently of one another, so a prefix of a block has the product
of its tokens' probabilities. The tree holds the likeliest prefixes: no other tree of as many nodes is expected to be followed
further, where the drafter's probabilities are true. Everything works at fixed shapes and waits for nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """N nodes a row, `[B, N]`, parents before their children; node 0 is the anchor, its own parent.

    `depth_BN`: the slot at which a node stands. `real_BN` bool: nodes that are not real fill the tree up. `seen_BNN` bool:
    `[b, i, j]` says that node j is node i or before it on its path.
    """

    tokens_BN: Tensor
    parent_BN: Tensor
    depth_BN: Tensor
    real_BN: Tensor
    seen_BNN: Tensor

    @classmethod
    def blank(cls, rows: int, budget: int, device: torch.device) -> Self:
        """A buffer for trees of `budget` nodes beside the anchor."""
        tokens, parent, depth = (torch.zeros(rows, budget + 1, dtype=torch.int64, device=device) for _ in range(3))
        seen = torch.zeros(rows, budget + 1, budget + 1, dtype=torch.bool, device=device)
        return cls(tokens, parent, depth, torch.zeros_like(tokens, dtype=torch.bool), seen)

    def copy_(self, other: "Tree") -> None:
        """Take over another tree of the same shape."""
        for one in fields(self):
            getattr(self, one.name).copy_(getattr(other, one.name))


def contenders(k: int, vocab_size: int, budget: int, device: torch.device) -> list[Tensor]:
    """For each of k slots the prefixes that can be among the `budget` best, `[2, P]`: rank of the parent, rank of the token.

    A prefix among the best has its parent among the best of the slot before. Where that is the j-th best there and the token the
    r-th best of its slot, counted from 1, j * r prefixes of the same length are no worse, itself included: j * r <= budget.
    """
    found, width = [], 1  # of the slot before: the anchor alone
    for _ in range(k):
        pairs = [(j, r) for j in range(width) for r in range(min(vocab_size, budget // (j + 1)))]
        found.append(torch.tensor(pairs, device=device).T)
        width = min(budget, len(pairs))
    return found


def likeliest_tree(anchor_B: Tensor, logits_BkV: Tensor, slots_B: Tensor, ranks: Sequence[Tensor], *, budget: int) -> Tree:
    """The `budget` likeliest prefixes of blocks whose slots 1, 2, .. below `slots_B` have these logits.

    `ranks`: see `contenders`. What the paper finds by a heap is found here slot by slot. Of equal prefixes the shorter comes
    first, so a parent stands before its children.
    """
    B, k, V = logits_BkV.shape
    device = logits_BkV.device
    best = logits_BkV.float().log_softmax(-1).topk(min(budget, V), dim=-1)
    drafted_Bk = torch.arange(1, k + 1, device=device) < slots_B[:, None]
    log_q_BkW = best.values.masked_fill(~drafted_Bk[:, :, None], float("-inf"))
    score_Bn, first = torch.zeros(B, 1, device=device), 0  # of the slot before, and where it begins, counted with the anchor as 0
    found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for slot, (parent_P, token_P) in enumerate(ranks):
        score_BP = score_Bn[:, parent_P] + log_q_BkW[:, slot, token_P]
        chosen = score_BP.topk(min(budget, score_BP.shape[1]), dim=-1)
        found.append((chosen.values, best.indices[:, slot].gather(1, token_P[chosen.indices]), parent_P[chosen.indices] + first,
                      torch.full_like(chosen.indices, slot + 1)))
        score_Bn, first = chosen.values, first + score_Bn.shape[1]
    score_BM, token_BM, parent_BM, depth_BM = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    order_BM = score_BM.sort(dim=-1, descending=True, stable=True).indices
    place_BM = order_BM.argsort(dim=-1) + 1
    place_BM = torch.cat((torch.zeros_like(place_BM[:, :1]), place_BM), dim=1)
    kept_BM = order_BM[:, :budget]
    real_BM = score_BM.gather(1, kept_BM) > float("-inf")
    parent_BM = torch.where(real_BM, place_BM.gather(1, parent_BM.gather(1, kept_BM)), 0)
    depth_BM = torch.where(real_BM, depth_BM.gather(1, kept_BM), 1)
    return _planted(anchor_B, token_BM.gather(1, kept_BM), parent_BM, depth_BM, real_BM)


def _planted(anchor_B: Tensor, tokens_BM: Tensor, parent_BM: Tensor, depth_BM: Tensor, real_BM: Tensor) -> Tree:
    """The tree of these nodes with the anchor before them."""
    anchor_B1 = anchor_B[:, None]
    zero_B1 = torch.zeros_like(anchor_B1)
    parent_BN = torch.cat((zero_B1, parent_BM), dim=1)
    B, N = parent_BN.shape
    seen_BNN = torch.eye(N, dtype=torch.bool, device=anchor_B.device).expand(B, N, N)
    ancestor_BN = parent_BN
    for _ in range((N - 1).bit_length()):  # after m rounds the nodes up to 2**m - 1 before are marked, and the next is at hand
        seen_BNN = seen_BNN | seen_BNN.gather(1, ancestor_BN[:, :, None].expand(B, N, N))
        ancestor_BN = ancestor_BN.gather(1, ancestor_BN)
    return Tree(torch.cat((anchor_B1, tokens_BM), dim=1), parent_BN, torch.cat((zero_B1, depth_BM), dim=1),
                torch.cat((torch.ones_like(real_BM[:, :1]), real_BM), dim=1), seen_BNN)


@dataclass(frozen=True)
class Path:
    """How a target goes through a tree: nodes `[B, K]` by slot, the first `accepted_B` after the anchor right; then `bonus_B`.

    `drafted_B`: the slots that were verified: one more than accepted where the last right node has children, all of them wrong.
    """

    nodes_BK: Tensor
    accepted_B: Tensor
    bonus_B: Tensor
    drafted_B: Tensor


def follow(tree: Tree, choice_BN: Tensor, *, K: int) -> Path:
    """The path on which each node is what the target chose (`choice_BN`) after its parent."""
    right_BN = tree.real_BN & (tree.tokens_BN == choice_BN.gather(1, tree.parent_BN))
    right_BN[:, 0] = True
    followed_BN = ~(tree.seen_BNN & ~right_BN[:, None]).any(-1)
    B, N = choice_BN.shape
    node_BN = torch.arange(N, device=choice_BN.device).expand(B, N)
    nodes_BK = torch.zeros(B, K + 1, dtype=torch.int64, device=choice_BN.device).scatter(
        1, torch.where(followed_BN, tree.depth_BN, K), node_BN)[:, :K]
    accepted_B = followed_BN.sum(-1) - 1
    last_B1 = nodes_BK.gather(1, accepted_B[:, None])
    children_BN = tree.real_BN & (tree.parent_BN == last_B1) & (node_BN > 0)
    return Path(nodes_BK, accepted_B, choice_BN.gather(1, last_B1)[:, 0], accepted_B + children_BN.any(-1))
