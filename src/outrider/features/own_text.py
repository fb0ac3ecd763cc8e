"""Takes a whole target and rows, says how much of what they teach the target would write itself; trains nothing."""

from collections.abc import Iterable

import torch

from outrider.features.capture import documents_of
from outrider.features.startcheck import MOST_TOKENS
from outrider.features.target import Target
from outrider.progress import say
from outrider.records import TokenRows

LEAST_OWN = 0.6  # of the labels; text that the target sampled itself at temperature 1 lies above
MOST_LABELS = 4096


@torch.no_grad()
def own_labels(target: Target, rows: TokenRows) -> tuple[int, int]:
    """How many supervised tokens of `rows` (B = 1) are the target's own likeliest next token, and how many were looked at: those
    among the first MOST_TOKENS of each document, which bounds the logits in memory."""
    own = looked_at = 0
    for document in documents_of(rows.document_ids_BS):
        at = slice(document.start, document.start + min(document.length, MOST_TOKENS))
        ids_1X = rows.input_ids_BS[:, at].to(target.device)
        learned_X = rows.loss_mask_BS[0, at][1:]
        likeliest_X = target.model(input_ids=ids_1X, use_cache=False).logits[0, :-1].argmax(-1).cpu()
        own += int(((likeliest_X == rows.input_ids_BS[0, at][1:]) & learned_X).sum())
        looked_at += int(learned_X.sum())
    return own, looked_at


def say_own_share(target: Target, rows: Iterable[TokenRows]) -> float | None:
    """Print the share over rows, one after another up to MOST_LABELS labels, and warn below LEAST_OWN; None without labels."""
    own = looked_at = 0
    for row in rows:
        found = own_labels(target, row)
        own, looked_at = own + found[0], looked_at + found[1]
        if looked_at >= MOST_LABELS:
            break
    if not looked_at:
        return None
    share = own / looked_at
    say(f"labels: {share:.0%} of {looked_at:,} looked at are the target's own likeliest token")
    if share < LEAST_OWN:
        say(f"WARNING: under {LEAST_OWN:.0%} of what these rows teach is what the target itself would write: a drafter of other "
            "text is accepted far less often than its training says; have the target answer the prompts (outrider respond)")
    return share
