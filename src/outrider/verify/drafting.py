"""Takes a drafter, features and anchors of several texts, gives draft logits by calls of fixed shapes; knows no target's cache.

The fast twin of Drafter.draft: rows of unequal length side by side, and a cache bounded by the window where a layer slides.
"""

import torch
from torch import Tensor

from outrider.features.target import Target
from outrider.model.drafter import Drafter
from outrider.records import SLIDING
from outrider.verify.execution import Execution
from outrider.verify.rollback import place_of, write


class ContextRing:
    """One layer's keys and values of the context, `[B, G, R + 1, C]`: position p at index p % R, and what is padding at R.

    R is the layer's window, or the capacity where it has none, so that what a slot may see is never overwritten.
    """

    def __init__(self, drafter: Drafter, *, window: int | None, rows: int, capacity: int) -> None:
        shape, weight = drafter.shape, drafter.norm.weight
        self.window, self.R = window, capacity if window is None else min(window, capacity)
        self.keys = torch.zeros(rows, shape.num_kv_heads, self.R + 1, shape.head_dim, dtype=weight.dtype, device=weight.device)
        self.values = torch.zeros_like(self.keys)

    def write(self, k_BGJC: Tensor, v_BGJC: Tensor, positions_BJ: Tensor, count_B: Tensor, end_B: Tensor) -> None:
        """Take the first `count_B` of J positions, those that the window of position `end_B` still reaches."""
        counted_BJ = torch.arange(positions_BJ.shape[1], device=end_B.device) < count_B[:, None]
        stays_BJ = counted_BJ & (positions_BJ >= end_B[:, None] - self.R)
        place = place_of(torch.where(stays_BJ, positions_BJ % self.R, self.R))
        write(self.keys, k_BGJC, place)
        write(self.values, v_BGJC, place)

    def mask(self, end_B: Tensor, slots_B: Tensor, K: int) -> Tensor:
        """`[B, 1, K, R + 1 + K]` bool: what the slots of a block anchored at `end_B` see of the context and of themselves.

        The rule of layout.mask, in positions. Slots from `slots_B` on are seen by none but themselves.
        """
        index_N = torch.arange(self.R + 1, device=end_B.device)
        slot_K = torch.arange(K, device=end_B.device)
        held_BN = end_B[:, None] - 1 - (end_B[:, None] - 1 - index_N) % self.R  # the latest position at each index
        context_BKN = ((held_BN >= 0) & (index_N < self.R))[:, None].expand(-1, K, -1)
        block_BKK = (slot_K < slots_B[:, None])[:, None] | (slot_K == slot_K[:, None])
        if self.window is not None:
            query_BK = end_B[:, None] + slot_K
            context_BKN = context_BKN & (query_BK[:, :, None] - held_BN[:, None] < self.window)
            block_BKK = block_BKK & (slot_K <= slot_K[:, None])
        return torch.cat((context_BKN, block_BKK), dim=2)[:, None]


class DraftReader:
    """Draws blocks for `rows` texts side by side, each of up to `capacity` tokens."""

    def __init__(
        self, target: Target, drafter: Drafter, *, rows: int, capacity: int, execution: Execution
    ) -> None:
        self.target, self.drafter = target, drafter
        self.rings = [ContextRing(drafter, window=drafter.shape.sliding_window if kind == SLIDING else None, rows=rows,
                                  capacity=capacity) for kind in drafter.shape.layer_types]
        self.forward, self.take_in = execution.compiled(self._forward), execution.compiled(self._absorb)

    @torch.no_grad()
    def absorb(self, features_BJF: Tensor, count_B: Tensor, end_B: Tensor) -> None:
        """The context's newest positions: the first `count_B` of J, the last of which stands right before `end_B`."""
        # prompts come in many widths: only a block's width is compiled
        take_in = self.take_in if features_BJF.shape[1] == self.drafter.shape.block_size else self._absorb
        take_in(features_BJF, count_B, end_B)

    def _absorb(self, features_BJF: Tensor, count_B: Tensor, end_B: Tensor) -> None:
        weight = self.drafter.norm.weight
        count_B, end_B = count_B.to(weight.device), end_B.to(weight.device)
        context_BJD = self.drafter.context(features_BJF.to(weight.device, weight.dtype))
        positions_BJ = (end_B - count_B)[:, None] + torch.arange(features_BJF.shape[1], device=weight.device)
        rotary = self.drafter.rotary(positions_BJ)
        for (layer, _), ring in zip(self.drafter.typed_layers(), self.rings, strict=True):
            ring.write(*layer.self_attn.keys_values(context_BJD, rotary), positions_BJ, count_B, end_B)

    @torch.no_grad()
    def draft(self, anchor_B: Tensor, end_B: Tensor, slots_B: Tensor, *, width: int) -> Tensor:
        """Logits `[B, width - 1, V]` of slots 1, 2, .. of a block whose anchor's token is `anchor_B`, at position `end_B`.

        `slots_B`: K, or less at the end of a text; logits of slots beyond mean nothing. `width`: at most K, at least all of them.
        """
        return self.forward(anchor_B, end_B, slots_B, width)

    def _forward(self, anchor_B: Tensor, end_B: Tensor, slots_B: Tensor, K: int) -> Tensor:
        drafter, weight = self.drafter, self.drafter.norm.weight
        ids_BK = torch.full((len(anchor_B), K), drafter.shape.mask_token_id, device=anchor_B.device)
        ids_BK[:, 0] = anchor_B
        x_BKD = self.target.embed(ids_BK).to(weight.device, weight.dtype)
        end_B, slots_B = end_B.to(weight.device), slots_B.to(weight.device)
        rotary = drafter.rotary(end_B[:, None] + torch.arange(K, device=weight.device))
        masks = {ring.window: ring.mask(end_B, slots_B, K) for ring in self.rings}
        for (layer, _), ring in zip(drafter.typed_layers(), self.rings, strict=True):
            x_BKD = layer(x_BKD, (ring.keys, ring.values), rotary, masks[ring.window])
        return self.target.head.logits(drafter.norm(x_BKD[:, 1:]).to(self.target.device))
