"""Takes a target and tokens, gives logits and features with a cache that can be rolled back; knows nothing of drafts."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from outrider.errors import UserError
from outrider.features.capture import captured_layers
from outrider.features.target import Target, TargetFacts
from outrider.records import FULL, SLIDING


def check_can_roll_back(facts: TargetFacts) -> None:
    """Raises UserError for a target with recurrent layers, whose state a rejected draft would leave changed."""
    others = sorted(set(facts.layer_kinds) - {FULL, SLIDING})
    if others:
        raise UserError(f"target: has layers of kind {', '.join(repr(kind) for kind in others)}, whose state cannot be rolled "
                        f"back after a rejected draft: only targets of '{FULL}' and '{SLIDING}' layers can be decoded here")


class TargetReader:
    """One text read by the target, piece by piece, over a key/value cache; features are those of `layer_ids`."""

    def __init__(self, target: Target, layer_ids: Sequence[int]) -> None:
        check_can_roll_back(target.facts)
        self.target, self.layer_ids = target, layer_ids
        self.cache = DynamicCache(config=target.model.config)
        self.cache.activate_past_recording()  # sliding layers keep what they would drop until `keep` says it is final
        self.length = 0

    @torch.no_grad()
    def read(self, ids: Sequence[int], *, last_only: bool) -> tuple[Tensor, Tensor | None]:
        """Read `ids` after what was read: logits `[X, V]` (of the last token only with `last_only`), features `[1, X, F]`."""
        ids_1X = torch.tensor([list(ids)], device=self.target.device)
        with captured_layers(self.target, self.layer_ids, stop_after_last=False) as outputs:
            out = self.target.model(ids_1X, past_key_values=self.cache, use_cache=True, logits_to_keep=1 if last_only else 0)
        self.length += len(ids)
        return out.logits[0], torch.cat(outputs, dim=-1) if outputs else None

    def keep(self, length: int) -> None:
        """Forget all but the first `length` tokens read."""
        assert 0 < length <= self.length
        self.cache.crop(length - self.length)  # transformers: minus the number of tokens to remove
        self.length = length
