"""Takes decoded texts, gives accepted lengths and where two texts part; knows nothing of clocks, files or training."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.errors import UserError
from outrider.features.target import Target
from outrider.model.drafter import Drafter
from outrider.records import AcceptReport
from outrider.verify.decode import Decoded, check_fit, check_prompt, speculate
from outrider.verify.rollback import layer_kinds
from outrider.verify.sampling import DecodeOptions, count_equal

FLOAT32_TIE = 1e-5  # of the largest logit: about 100 times the rounding of a float32 forward, far below what a wrong token shows


def count_acceptance(decoded: Sequence[Decoded], block_size: int) -> AcceptReport:
    """Add up what the forwards of several texts gave. The prompts' own forwards and tokens that were not kept do not count.

    A slot counts as drafted when all before it were accepted, it was verified, and the text had not ended.
    """
    drafted_K, accepted_K = [0] * block_size, [0] * block_size
    for text in decoded:
        for cycle in text.cycles[1:]:
            run = len(cycle.accepted)
            reached = run + 1 if cycle.bonus is not None and run < cycle.drafted else run
            for slot in range(1, reached + 1):
                drafted_K[slot] += 1
                accepted_K[slot] += slot <= run
    return AcceptReport(
        runs=[text.runs for text in decoded],
        tokens=sum(sum(text.acceptance_lengths) for text in decoded),
        forwards=sum(len(text.runs) for text in decoded),
        drafted_K=drafted_K,
        accepted_K=accepted_K,
        seconds=sum(text.seconds for text in decoded),
    )


def check_prompts(target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], options: DecodeOptions) -> None:
    """Raises UserError before any work when target, drafter and prompts do not fit."""
    check_fit(drafter.shape, target.facts)
    layer_kinds(target.model.config)
    if not prompts:
        raise UserError("prompts: there are none: give at least one")
    for i, prompt in enumerate(prompts):
        check_prompt(prompt, options, target.facts, name=f"prompt {i + 1}")


def measure_acceptance(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], options: DecodeOptions
) -> AcceptReport:
    """The real accepted length over prompts. Draws from generators of its own and leaves the drafter as it is."""
    check_prompts(target, drafter, prompts, options)
    decoded = [speculate(target, drafter, prompt, _for_prompt(options, i)) for i, prompt in enumerate(prompts)]
    return count_acceptance(decoded, drafter.shape.block_size)


def run_histogram(report: AcceptReport, block_size: int) -> list[int]:
    """How many target forwards accepted 0, 1, .. K-1 draft tokens."""
    counts = [0] * block_size
    for runs in report.runs:
        for run in runs:
            counts[run] += 1
    return counts


def first_difference(
    target: Target, prompts: Sequence[Sequence[int]], decoded: Sequence[Decoded], alone: Sequence[Decoded]
) -> dict[str, Any] | None:
    """Where speculative and target-alone text first part, over all prompts, or None.

    `gap` is the difference of the two tokens' logits, from a forward of its own over the common text. `kind` is "tie" when it
    is at most `resolution`, what the target's precision resolves at the largest logit, else "error".
    A text that ends where the other goes on shows as token None, gap None and kind "error".
    """
    for i, (ours, theirs) in enumerate(zip(decoded, alone, strict=True)):
        if ours.tokens == theirs.tokens:
            continue
        at = count_equal(ours.tokens, theirs.tokens)
        place = {"prompt": i, "position": at}
        if at == min(len(ours.tokens), len(theirs.tokens)):
            return {**place, "speculative_token": ours.tokens[at] if at < len(ours.tokens) else None,
                    "target_token": theirs.tokens[at] if at < len(theirs.tokens) else None,
                    "gap": None, "resolution": None, "kind": "error"}
        ours_token, theirs_token = ours.tokens[at], theirs.tokens[at]
        logits = next_logits(target, [*prompts[i], *theirs.tokens[:at]])
        pair = logits[[ours_token, theirs_token]].double()
        gap, resolved = float((pair[0] - pair[1]).abs()), resolution(float(logits.abs().max()), target.dtype)
        return {**place, "speculative_token": ours_token, "target_token": theirs_token, "gap": gap, "resolution": resolved,
                "kind": "tie" if gap <= resolved else "error"}
    return None


@torch.no_grad()
def next_logits(target: Target, ids: Sequence[int]) -> Tensor:
    """The target's logits `[V]` of what follows `ids`, by a forward of its own."""
    return target.model(torch.tensor([list(ids)], device=target.device), use_cache=False, logits_to_keep=1).logits[0, -1]


def resolution(largest_logit: float, dtype: torch.dtype) -> float:
    """The gap between two logits below which their order is chance: one bf16 ulp of the row's largest, or FLOAT32_TIE of it.

    Of the largest, because rounding enters through the hidden state and reaches all logits alike: SmolLM2 in bf16, its largest
    logit 35 and its winning one 1.8, differs by 0.25 between a forward over one token and one over all, 32 ulps of 1.8.
    """
    if dtype == torch.float32:
        return FLOAT32_TIE * largest_logit
    exponent = math.frexp(largest_logit)[1] - 1  # logit = m * 2**exponent, 1 <= m < 2
    return torch.finfo(dtype).eps * 2.0**exponent


def _for_prompt(options: DecodeOptions, index: int) -> DecodeOptions:
    """A seed of its own for each prompt, so that equal prompts are drawn independently."""
    return replace(options, seed=options.seed + index)

