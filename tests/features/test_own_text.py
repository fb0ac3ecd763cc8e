"""Text that the target did not write is noticed: the share of labels that are its own likeliest token (04-pitfalls, 7)."""

import pytest
import torch
from families import family_target
from toys import random_rows, rows_of

from outrider.features.own_text import MOST_LABELS, own_labels, say_own_share
from outrider.records import TokenRows

PROMPT, WRITTEN = 5, 20


def answered(family: str, *, spoiled: int = 0) -> TokenRows:
    """A row of two prompts that the target answered greedily, the answers supervised; the last `spoiled` tokens of each are not
    the target's."""
    target = family_target(family)
    documents = []
    for seed in range(2):
        ids = random_rows([[PROMPT]], length=PROMPT, seed=seed).input_ids_BS
        for _ in range(WRITTEN):
            ids = torch.cat([ids, target.model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        ids[0, PROMPT + WRITTEN - spoiled :] = (ids[0, PROMPT + WRITTEN - spoiled :] + 1) % 200
        documents.append(ids[0].tolist())
    return rows_of([documents], length=64, masks=[[[False] * PROMPT + [True] * WRITTEN] * 2])


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_the_targets_own_text_is_all_its_own(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.no_grad():
        rows = answered(family)
    assert own_labels(family_target(family), rows) == (2 * WRITTEN, 2 * WRITTEN)
    assert say_own_share(family_target(family), [rows]) == 1.0
    said = capsys.readouterr().err
    assert "labels: 100% of 40 looked at are the target's own" in said
    assert "WARNING" not in said


def test_text_of_others_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    target = family_target("llama")
    with torch.no_grad():
        rows = answered("llama", spoiled=10)
    assert say_own_share(target, [rows]) == pytest.approx(0.5, abs=0.06)
    assert "WARNING: under 60% of what these rows teach" in capsys.readouterr().err


def test_it_looks_at_no_more_than_it_needs_and_takes_rows_without_labels(capsys: pytest.CaptureFixture[str]) -> None:
    target, seen = family_target("llama"), []

    def rows() -> object:
        for seed in range(100):
            seen.append(seed)
            yield random_rows([[512, 512]], length=1024, seed=seed)

    say_own_share(target, rows())  # type: ignore[arg-type]
    assert len(seen) == -(-MOST_LABELS // 1022)
    capsys.readouterr()
    assert say_own_share(target, [random_rows([[]], length=8, seed=0)]) is None
    assert capsys.readouterr().err == ""
