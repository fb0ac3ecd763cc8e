"""A double that drafts exactly as well as a script says, and the target's own greedy text by forwards without a cache."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from toys import VOCAB

from outrider.features.target import Target
from outrider.verify.drafting import DraftReader


@torch.no_grad()
def plain_greedy(target: Target, prompts: Sequence[Sequence[int]], limit: int, stop_ids: Sequence[int] = ()) -> list[list[int]]:
    """Each prompt's greedy continuation: the whole text is read anew for each token, prompts of equal length side by side."""
    texts: dict[int, list[int]] = {}
    for length in {len(prompt) for prompt in prompts}:
        rows = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        ids_BX = torch.tensor([list(prompts[i]) for i in rows])
        for _ in range(limit):
            ids_BX = torch.cat((ids_BX, target.model(ids_BX, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
        texts |= dict(zip(rows, ids_BX[:, length:].tolist(), strict=True))
    return [until_stop(texts[i], stop_ids) for i in range(len(prompts))]


def until_stop(tokens: list[int], stop_ids: Sequence[int]) -> list[int]:
    ends = [i + 1 for i, token in enumerate(tokens) if token in stop_ids]
    return tokens[: ends[0]] if ends else tokens


def script_drafts(
    patch: pytest.MonkeyPatch, prompts: Sequence[Sequence[int]], truths: Sequence[Sequence[int]], runs: Sequence[Sequence[int]]
) -> None:
    """Draft so that row b's block i has exactly `runs[b][i]` right tokens (the last entry again and again), the next one wrong.

    The real drafter still runs, for its context. `truths` are the target's own texts.
    """
    real, blocks = DraftReader.draft, [0] * len(prompts)

    def draft(self: DraftReader, anchor_B: Tensor, end_B: Tensor, slots_B: Tensor, *, width: int) -> Tensor:
        logits = torch.zeros_like(real(self, anchor_B, end_B, slots_B, width=width))
        for b, (prompt, truth) in enumerate(zip(prompts, truths, strict=True)):
            at = int(end_B[b]) - len(prompt)
            assert truth[at] == anchor_B[b], "the anchor stands right after the context"
            run = runs[b][min(blocks[b], len(runs[b]) - 1)]
            blocks[b] += 1
            for k in range(logits.shape[1]):
                token = truth[at + 1 + k] if at + 1 + k < len(truth) else 0
                logits[b, k, token if k < run else (token + 1) % VOCAB] = 1.0
        return logits

    patch.setattr(DraftReader, "draft", draft)
