"""A real small target on real text, in float32: the folder that OUTRIDER_REAL_TARGET names, such as the demo's (SmolLM2-135M)."""

import argparse
import json
import os

import pytest
import torch

from outrider.features.capture import capture, documents_of
from outrider.features.packed import PackedCapture
from outrider.features.startcheck import check_capture
from outrider.features.target import Target, load_target, load_tokenizer
from outrider.records import TokenRows

NAMED = os.environ.get("OUTRIDER_REAL_TARGET")
IDS = (1, 8, 14, 20, 27)
pytestmark = pytest.mark.skipif(not NAMED, reason="OUTRIDER_REAL_TARGET names no target's folder (`make demo` builds one)")


@pytest.fixture(scope="module")
def real() -> tuple[Target, TokenRows]:
    """The target, and two rows: three documents of unequal lengths of Python's own documentation, and one."""
    tokenizer = load_tokenizer(str(NAMED))
    texts = [(argparse.__doc__, 60), (json.__doc__, 150), (str.format_map.__doc__ or "", 15), (json.__doc__, 230)]
    tokens = [tokenizer(text)["input_ids"][:most] for text, most in texts]
    rows, length = ([tokens[0], tokens[1], tokens[2]], [tokens[3]]), 260
    ids, documents = torch.zeros(2, length, dtype=torch.int64), torch.full((2, length), -1)
    positions = torch.zeros(2, length, dtype=torch.int64)
    for b, row in enumerate(rows):
        start = 0
        for d, document in enumerate(row):
            at = slice(start, start + len(document))
            ids[b, at], documents[b, at], positions[b, at] = torch.tensor(document), d, torch.arange(len(document))
            start = at.stop
    return (load_target(str(NAMED), dtype="float32", device="cpu", last_layer=None, head=True),
            TokenRows(ids, documents, positions, documents >= 0, torch.arange(2)))


def hidden_states(target: Target, rows: TokenRows) -> torch.Tensor:
    """transformers' own, of each document alone, 0 on padding."""
    expected = torch.zeros(*rows.input_ids_BS.shape, len(IDS) * target.facts.hidden_size)
    for document in documents_of(rows.document_ids_BS):
        at = slice(document.start, document.start + document.length)
        with torch.no_grad():
            out = target.model(rows.input_ids_BS[document.b, at][None], output_hidden_states=True, use_cache=False)
        expected[document.b, at] = torch.cat([out.hidden_states[i + 1][0] for i in IDS], dim=-1)
    return expected


def test_features_are_hidden_states(real: tuple[Target, TokenRows]) -> None:
    target, rows = real
    expected = hidden_states(target, rows)
    for row in range(2):  # documents whose lengths differ by more than a quarter run alone: nothing is rounded differently
        one = TokenRows(*(getattr(rows, name)[row : row + 1] for name in rows.__dataclass_fields__))
        assert torch.equal(capture(target, one, IDS).values_BSF[0], expected[row])
    packed = PackedCapture(target, IDS, compiled=False)(rows).values_BSF
    for j in range(len(IDS)):
        found, truth = (v.unflatten(-1, (len(IDS), -1))[..., j, :] for v in (packed, expected))
        assert float((found - truth).norm() / truth.norm()) < 1e-5


def test_the_start_up_check_passes(real: tuple[Target, TokenRows]) -> None:
    target, rows = real
    first = TokenRows(*(getattr(rows, name)[:1] for name in rows.__dataclass_fields__))
    check_capture(target, lambda asked: capture(target, asked, IDS), first, IDS)
    check_capture(target, PackedCapture(target, IDS, compiled=False), first, IDS)
