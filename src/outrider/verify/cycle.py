"""Takes a target, a drafter and options, gives the steps of a cycle on fixed buffers, rows side by side; knows no prompts' text.

Draft, verify and the bookkeeping of both stay on the device: a cycle waits for nothing until its report is read.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.errors import UserError
from outrider.features.target import Target
from outrider.model.drafter import Drafter
from outrider.verify.drafting import DraftReader
from outrider.verify.execution import Execution
from outrider.verify.reading import TargetReader, read_prompts
from outrider.verify.rollback import LINEAR
from outrider.verify.sampling import DecodeOptions, Luck, draw, judge_greedy, judge_sampled, warp
from outrider.verify.tree import Tree, contenders, follow, likeliest_tree


class Lanes:
    """`rows` texts under way. Without a drafter K is 1: the target alone, by the same machinery.

    A row's text is settled up to `reader.length_B`, where its anchor stands: a token known, but not yet read by the target.
    `room_B`: tokens that may still follow the anchor. A row that is not `alive_B` idles: it keeps 0 tokens a cycle.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None, options: DecodeOptions, *, rows: int, capacity: int, execution: Execution
    ) -> None:
        self.options, self.rows, self.device = options, rows, target.device
        self.target, self.K = target, drafter.shape.block_size if drafter else 1
        layer_ids = drafter.shape.target_layer_ids if drafter else ()
        self.reader = TargetReader(target, layer_ids, rows=rows, capacity=capacity, execution=execution)
        self.drafts = DraftReader(target, drafter, rows=rows, capacity=capacity, execution=execution) if drafter else None
        K, V = self.K, target.facts.vocab_size
        self.anchor_B, self.room_B, self.kept_B = (self._zeros(rows) for _ in range(3))
        self.alive_B = self._zeros(rows, dtype=torch.bool)
        self.tokens_Bk = self._zeros(rows, K - 1)
        self.features_BKF = self._zeros(rows, K, len(layer_ids) * target.facts.hidden_size, dtype=target.dtype)
        self.q_BkV = self._zeros(rows, K - 1, 0 if options.greedy_choice else V, dtype=torch.float32)
        self.luck_BX = self._zeros(rows, 2 * K - 1, dtype=torch.float64)
        self.report_BX = self._zeros(rows, 4 + K)  # kept, accepted, drafted, alive, then the tokens given
        self.stop_ids = torch.tensor(options.stop_ids, dtype=torch.int64, device=self.device)

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def begin(self, prompts: Sequence[Sequence[int]], luck: Luck | None) -> Tensor:
        """Read one prompt a row and choose the token after each, the first anchors; gives the logits they were chosen from."""
        logits_BV = read_prompts(self.reader, prompts, self._absorb if self.drafts else None)
        if luck is None:
            anchor_B = logits_BV.argmax(-1)
        else:
            anchor_B = draw(warp(logits_BV, self.options), luck.throw()[:, -1].to(self.device))
        self.anchor_B.copy_(anchor_B)
        self.kept_B.zero_()
        self.room_B.fill_(self.options.max_new_tokens - 1)
        self.alive_B.copy_(~self._stops(anchor_B) & (self.room_B > 0))
        return logits_BV

    def _absorb(self, features_BXF: Tensor, count_B: Tensor) -> None:
        assert self.drafts is not None
        self.drafts.absorb(features_BXF, count_B, self.reader.length_B)

    def _stops(self, tokens_X: Tensor) -> Tensor:
        return (tokens_X[..., None] == self.stop_ids).any(-1)

    def slots(self) -> Tensor:
        """Slots of each row's next block, `[B]`: no block reaches beyond the limit."""
        return (self.room_B + 1).clamp(max=self.K)

    def width(self) -> int:
        """Slots to draft and verify: K, or where shapes may change no more than some row still has room for."""
        return self.K if self.reader.fixed_shapes else max(1, int((self.slots() * self.alive_B).max()))

    @torch.no_grad()
    def draft(self) -> None:
        """Draft a block from each anchor, after taking in the context that the last cycle settled."""
        assert self.drafts is not None
        newest = self.K if self.reader.fixed_shapes else int(self.kept_B.max())
        self.drafts.absorb(self.features_BKF[:, :newest], self.kept_B, self.reader.length_B)
        self.propose(self.drafts.draft(self.anchor_B, self.reader.length_B, self.slots(), width=self.width()))

    def propose(self, logits_BkV: Tensor) -> None:
        """Choose the draft tokens that will be verified, as many as logits are given."""
        k = logits_BkV.shape[1]
        if self.options.greedy_choice:
            self.tokens_Bk[:, :k] = logits_BkV.argmax(-1)
        else:
            self.q_BkV[:, :k] = warp(logits_BkV, self.options)
            self.tokens_Bk[:, :k] = draw(self.q_BkV[:, :k], self.luck_BX[:, :k])

    @torch.no_grad()
    def verify(self) -> None:
        """Read the blocks by the target, accept what it would have written, and report."""
        X = self.width()
        tokens_Bk = self.tokens_Bk[:, : X - 1]
        block_BX = torch.cat((self.anchor_B[:, None], tokens_Bk), dim=1)
        if self.K == 1:  # its one token is part of the text already
            hidden_BXD, _ = self.reader.read_settled(block_BX, self.alive_B.to(torch.int64))
        else:
            hidden_BXD, features_BXF = self.reader.read(block_BX)
            assert features_BXF is not None
            self.features_BKF[:, :X] = features_BXF
        logits_BXV = self.target.head.logits(hidden_BXD)
        if self.options.greedy_choice:
            accepted_B, bonus_B = judge_greedy(tokens_Bk, logits_BXV, self.slots())
        else:
            p_BXV = warp(logits_BXV, self.options)
            proposals_Bk, acceptances_Bk, replacement_B1 = self.luck_BX.split((self.K - 1, self.K - 1, 1), dim=1)
            luck_BX = torch.cat((proposals_Bk[:, : X - 1], acceptances_Bk[:, : X - 1], replacement_B1), dim=1)
            accepted_B, bonus_B = judge_sampled(tokens_Bk, self.q_BkV[:, : X - 1], p_BXV, self.slots(), luck_BX)
        self.settle(tokens_Bk, accepted_B, bonus_B, self.slots() - 1)
        if self.K > 1:
            self.reader.keep(self.kept_B, X)

    def settle(self, path_Bk: Tensor, accepted_B: Tensor, bonus_B: Tensor, drafted_B: Tensor) -> None:
        """The first `accepted_B` of `path_Bk` and then `bonus_B` are the text, up to the first stop token and the limit.

        Sets how many of them are kept, the next anchors and the report. As many tokens of the block that was read are settled:
        the last one given is the next anchor.
        """
        X = path_Bk.shape[1] + 1
        offset_X = torch.arange(X, device=self.device)
        given_BX = torch.cat((path_Bk, bonus_B[:, None]), dim=1)
        given_BX = torch.where(offset_X == accepted_B[:, None], bonus_B[:, None], given_BX)
        count_B = torch.minimum(accepted_B + 1, self.room_B)
        stops_BX = self._stops(given_BX) & (offset_X < count_B[:, None])
        first_B = torch.where(stops_BX, offset_X, X).amin(1)
        self.kept_B.copy_(torch.minimum(count_B, first_B + 1) * self.alive_B)
        last_B = given_BX.gather(1, (self.kept_B - 1).clamp(min=0)[:, None])[:, 0]
        self.anchor_B.copy_(torch.where(self.alive_B, last_B, self.anchor_B))
        self.room_B -= self.kept_B
        self.alive_B &= (first_B >= count_B) & (self.room_B > 0)
        self.report_BX[:, :4] = torch.stack((self.kept_B, accepted_B, drafted_B, self.alive_B.to(torch.int64)), dim=1)
        self.report_BX[:, 4 : 4 + X] = given_BX


class TreeLanes(Lanes):
    """Lanes that verify the likeliest continuations as a tree, `options.tree_budget` nodes beside each anchor.

    Sampled, the target draws a token at every node and goes on where that is a child: the text is the target's own whatever the
    tree holds, and no draft probabilities are needed. Raises UserError for a target with recurrent layers.
    """

    def __init__(
        self, target: Target, drafter: Drafter, options: DecodeOptions, *, rows: int, capacity: int, execution: Execution
    ) -> None:
        super().__init__(target, drafter, options, rows=rows, capacity=capacity, execution=execution)
        if LINEAR in self.reader.kinds:
            raise UserError(f"tree_budget = {options.tree_budget}: this target has '{LINEAR}' layers, whose state follows one "
                            "text and cannot branch: use 0, which verifies one chain")
        self.tree = Tree.blank(rows, options.tree_budget, self.device)
        self.ranks = contenders(self.K - 1, target.facts.vocab_size, options.tree_budget, self.device)

    def width(self) -> int:
        return self.K  # a tree has as many nodes whatever its depth

    def propose(self, logits_BkV: Tensor) -> None:
        self.tree.copy_(likeliest_tree(self.anchor_B, logits_BkV, self.slots(), self.ranks, budget=self.options.tree_budget))

    @torch.no_grad()
    def verify(self) -> None:
        """Read the trees by the target, accept the paths that it would have written, and report."""
        hidden_BND, features_BNF = self.reader.read_tree(self.tree.tokens_BN, self.tree.depth_BN, self.tree.seen_BNN)
        assert features_BNF is not None
        logits_BNV = self.target.head.logits(hidden_BND)
        if self.options.greedy_choice:
            choice_BN = logits_BNV.argmax(-1)
        else:  # one number a slot: of the nodes of a slot one at most is on the path, and which one earlier slots decide
            choice_BN = draw(warp(logits_BNV, self.options), self.luck_BX[:, self.K - 1 :].gather(1, self.tree.depth_BN))
        path = follow(self.tree, choice_BN, K=self.K)
        self.features_BKF.copy_(features_BNF.gather(1, path.nodes_BK[:, :, None].expand_as(self.features_BKF)))
        self.settle(self.tree.tokens_BN.gather(1, path.nodes_BK[:, 1:]), path.accepted_B, path.bonus_B, path.drafted_B)
        self.reader.keep_path(path.nodes_BK, self.kept_B)
