"""The visibility rule against plain loops, over all anchor sets of a short row, and the power of that comparison."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from toys import MASK, rows_of

from outrider.layout import mask as mask_module
from outrider.layout.anchors import eligible_positions
from outrider.layout.blocks import build_blocks
from outrider.layout.mask import dense_mask, visibility
from outrider.records import PADDING_DOCUMENT, DraftBlocks, TokenRows

S, K, A = 24, 4, 3
HOLE = -3  # tokens of padding between documents: prepared rows never have it, but there the rule's word on padding is seen
DOCUMENTS = {"one": [24], "one and padding": [19], "two": [10, 14], "three and padding": [5, 7, 8],
             "padding between": [6, HOLE, 9]}
WINDOWS = (None, 3, 6)
IDLE_ANCHOR = 11  # where dropped blocks are put here (build gives 0), so that the rule alone must keep them from context


def every_anchor_set(lengths: list[int]) -> tuple[TokenRows, DraftBlocks]:
    """One row for each set of 0 to A eligible anchors; the slots that are left are dropped blocks."""
    one = rows_of([[list(range(abs(n))) for n in lengths]], length=S)
    if HOLE in lengths:
        hole = one.document_ids_BS == lengths.index(HOLE)
        one = replace(one, document_ids_BS=one.document_ids_BS.masked_fill(hole, PADDING_DOCUMENT),
                      loss_mask_BS=one.loss_mask_BS & ~hole)
    eligible = torch.nonzero(eligible_positions(one.document_ids_BS, one.loss_mask_BS)[0]).flatten().tolist()
    sets = [chosen for size in range(A + 1) for chosen in combinations(eligible, size)]
    rows = TokenRows(*(getattr(one, name).expand(len(sets), S).contiguous() for name in (
        "input_ids_BS", "document_ids_BS", "positions_BS", "loss_mask_BS")), torch.arange(len(sets)))
    anchors = torch.tensor([[*chosen, *[IDLE_ANCHOR] * (A - len(chosen))] for chosen in sets])
    keep = torch.tensor([[i < len(chosen) for i in range(A)] for chosen in sets])
    return rows, build_blocks(rows, anchors, keep, block_size=K, mask_token_id=MASK, gamma=4.0)


def oracle(rows: TokenRows, blocks: DraftBlocks, window: int | None) -> torch.Tensor:
    """01-dflash, "Who sees whom", sentence by sentence, in plain loops: `[B, Q, N]`."""
    table = []
    documents, anchors_B, keep_B = rows.document_ids_BS.tolist(), blocks.anchors_BA.tolist(), blocks.keep_BA.tolist()
    for document, anchors, keep in zip(documents, anchors_B, keep_B, strict=True):
        row = []
        for block in range(A):
            for slot in range(K):
                seen = []
                for j in range(S):  # 1. context of the same document, strictly before the anchor
                    sees = keep[block] and document[j] == document[anchors[block]] and j < anchors[block]
                    if window is not None and anchors[block] + slot - j >= window:
                        sees = False
                    seen.append(sees)
                for other in range(A):  # 2. its own block  3. nothing else
                    for key_slot in range(K):
                        sees = other == block
                        if window is not None and key_slot > slot:
                            sees = False
                        seen.append(sees)
                row.append(seen)
        table.append(row)
    return torch.tensor(table)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_rule_equals_plain_loops_for_every_anchor_set(lengths: list[int], window: int | None) -> None:
    rows, blocks = every_anchor_set(lengths)
    assert torch.equal(dense_mask(rows, blocks, window=window)[:, 0], oracle(rows, blocks, window))


BROKEN_RULES = {
    "the anchor's own state is seen": ("(n < anchor)", "(n <= anchor)"),
    "the state before the anchor is not seen": ("(n < anchor)", "(n < anchor - 1)"),
    "context up to the end of the block is seen": ("(n < anchor)", "(n < anchor + block_size)"),
    "visible by block number, not by position": ("(n < anchor)", "(n < (block + 1) * block_size)"),
    "another document is seen": (" & same_document", ""),
    "padding is seen": (" & same_document", " & (same_document | (document_ids_BS[b, position] < 0))"),
    "other blocks are seen": ("(key_slot // block_size == block)", "(key_slot // block_size <= block)"),
    "blocks do not see themselves": ("(key_slot // block_size == block)", "(key_slot // block_size != block)"),
    "a full layer is causal within the block": ("(key_slot // block_size == block)",
                                                "(key_slot // block_size == block) & (key_slot % block_size <= slot)"),
    "a dropped block sees context": ("keep_BA[b, block] & ", ""),
    "a dropped block sees nothing": ("(n >= S) & ", "(n >= S) & keep_BA[b, block] & "),
    "the window is one too wide": ("< window)", "<= window)"),
    "the window is one too narrow": ("< window)", "< window - 1)"),
    "the window is counted from the anchor": ("anchor + slot - n < window", "anchor - n < window"),
    "a window does not hide later slots": ("key_slot % block_size <= slot", "key_slot % block_size <= block_size"),
    "a window hides the own slot": ("key_slot % block_size <= slot", "key_slot % block_size < slot"),
}


def broken_visibility(old: str, new: str) -> Callable[..., object]:
    """`visibility` with one fragment of its source replaced."""
    source = inspect.getsource(visibility)
    assert source.count(old) == 1, f"{old!r} must stand once in the rule: bring BROKEN_RULES up to date with it"
    names: dict[str, Callable[..., object]] = {}
    exec(source.replace(old, new), vars(mask_module).copy(), names)
    return names["visibility"]


@pytest.mark.parametrize(("old", "new"), BROKEN_RULES.values(), ids=BROKEN_RULES.keys())
def test_every_broken_rule_is_caught(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_module, "visibility", broken_visibility(old, new))
    rows, blocks = every_anchor_set(DOCUMENTS["padding between"])
    assert any(not torch.equal(dense_mask(rows, blocks, window=w)[:, 0], oracle(rows, blocks, w)) for w in WINDOWS)


def test_every_query_sees_something() -> None:
    for window in WINDOWS:
        for lengths in DOCUMENTS.values():
            assert dense_mask(*every_anchor_set(lengths), window=window).any(-1).all()
