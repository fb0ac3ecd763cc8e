"""Measuring a drafter: fixed keys, conditions beside every number, every side on the same prompts, and a page of it."""

import errno
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import at_each_file_operation
from overfit import overfit_drafter, random_drafter
from toys import VOCAB, toy_shape

from outrider.errors import UserError
from outrider.features.target import Target
from outrider.verify.cycle import Lanes
from outrider.verify.decode import Cycle, Decoded, Decoder, target_alone
from outrider.verify.evaluate import Trial, acceptance_rate, by_bins, evaluate
from outrider.verify.page import EVALUATION_NAME, check_page, markdown, write_page
from outrider.verify.sampling import DecodeOptions

PROMPTS = [[5, 6, 7], [72, 101, 108, 108, 111], [9]]
GREEDY = DecodeOptions.greedy(max_new_tokens=12, stop_ids=(VOCAB - 1,))
SAMPLED = DecodeOptions(max_new_tokens=6, stop_ids=(), temperature=1.0, top_p=1.0, top_k=0, seed=0)
EAGER = Trial(batch_sizes=(1,), execution="eager", grade=None)
ToyTarget = Callable[..., Target]


def measure(target: Target, options: DecodeOptions = GREEDY, trial: Trial = EAGER, **changes: Any) -> dict[str, Any]:
    return evaluate(target, random_drafter(toy_shape(), seed=3), PROMPTS, options, trial,
                    **{"kinds": None, "rivals": {}, **changes})


def test_the_fixed_keys_and_the_conditions(toy_target: ToyTarget) -> None:
    result = measure(toy_target("llama"), kinds=["a", "b", "a"])
    assert set(result) >= {
        "tau", "acceptance_by_slot", "identical", "speedup", "tokens_per_s", "baseline_tokens_per_s", "conditions"}
    assert result["identical"] is True
    assert result["first_difference"] is None
    assert result["speedup"] == pytest.approx(result["baseline_seconds"] / result["seconds"])
    assert sum(result["accepted_run_histogram"]) == result["forwards"]
    assert result["tau"] == result["tokens"] / result["forwards"]
    assert {kind: row["prompts"] for kind, row in result["by_kind"].items()} == {"a": 2, "b": 1}
    assert set(result["conditions"]) >= {
        "prompts", "kinds", "temperature", "top_p", "top_k", "max_new_tokens", "stop_ids", "target_dtype", "drafter_dtype",
        "device", "torch", "threads", "baseline", "batch_sizes", "execution"}
    assert result["conditions"]["kinds"] == {"a": 2, "b": 1}
    assert result["accuracy"] is None
    assert 0 <= result["acceptance_rate"] < 1


def test_texts_of_one_token_have_no_speed_after_their_prompts(toy_target: ToyTarget) -> None:
    result = measure(toy_target("llama"), DecodeOptions.greedy(max_new_tokens=1, stop_ids=()))
    assert result["identical"]
    assert result["speedup"] > 0
    assert [row["speedup_after_prompts"] for row in result["speed_by_batch"]] == [None]
    assert measure(toy_target("llama"))["speed_by_batch"][0]["speedup_after_prompts"] > 0


def test_each_batch_size_has_its_speed_and_the_same_texts(toy_target: ToyTarget) -> None:
    target = toy_target("qwen3_5")
    one, several = measure(target), measure(target, trial=Trial((2, 1), "eager", None))
    assert [row["batch"] for row in several["speed_by_batch"]] == [2, 1]
    assert all(row["identical"] and row["draft_ms"] > 0 and row["target_ms"] > 0 for row in several["speed_by_batch"])
    assert several["tau"] == one["tau"]
    assert several["speedup"] == several["speed_by_batch"][0]["speedup"]


def test_nothing_is_said_of_identity_when_sampling(toy_target: ToyTarget) -> None:
    result = measure(toy_target("llama"), SAMPLED, rivals={"lookup": None})
    assert result["identical"] is None
    assert result["first_difference"] is None
    assert "tau_by_kind" not in result
    assert result["rivals"]["lookup"] == {"refused": "greedy only"}


def test_a_wrong_token_is_found(toy_target: ToyTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Decoder.decode

    def wrong(self: Decoder, prompts: Sequence[Sequence[int]], **options: Any) -> list[Decoded]:
        (text,) = real(self, prompts, **options)
        if self.drafter is None or prompts != PROMPTS[1:2]:
            return [text]
        return [Decoded([*text.tokens[:7], (text.tokens[7] + 1) % VOCAB, *text.tokens[8:]], text.cycles, text.seconds)]

    monkeypatch.setattr(Decoder, "decode", wrong)
    target = toy_target("llama")
    result = measure(target)
    truth = target_alone(target, PROMPTS[1], GREEDY).tokens[7]
    found = result["first_difference"]
    assert result["identical"] is False
    assert (found["prompt"], found["position"]) == (1, 7)
    assert (found["speculative_token"], found["target_token"]) == ((truth + 1) % VOCAB, truth)
    assert found["kind"] == "error"
    assert found["gap"] > found["resolution"]


def test_rivals_meet_the_same_prompts(toy_target: ToyTarget) -> None:
    target = toy_target("qwen3")
    text = target_alone(target, PROMPTS[1], GREEDY).tokens
    good = overfit_drafter(target, toy_shape(), (*PROMPTS[1], *text), prompt=len(PROMPTS[1]), steps=100)
    result = measure(target, rivals={"good": good, "lookup": None})
    good_row, lookup = result["rivals"]["good"], result["rivals"]["lookup"]
    assert good_row["identical"] is lookup["identical"] is True
    assert good_row["tau"] > result["tau"]
    assert lookup["tau"] >= 1


@pytest.mark.parametrize(("family", "size", "reason"), [("qwen3_5", 1, "recurrent"), ("qwen3", 2, "one prompt at a time")])
def test_what_lookup_cannot_do_is_said(toy_target: ToyTarget, family: str, size: int, reason: str) -> None:
    result = measure(toy_target(family), trial=Trial((size,), "eager", None), rivals={"lookup": None})
    assert reason in result["rivals"]["lookup"]["refused"]


def test_right_answers_are_counted_on_both_sides(toy_target: ToyTarget) -> None:
    trial = Trial((1,), "eager", lambda i, tokens: None if i == 2 else i == 0)
    result = measure(toy_target("llama"), trial=trial, kinds=["a", "b", "b"])
    assert result["accuracy"] == {"drafted": 0.5, "alone": 0.5}
    assert (result["by_kind"]["a"]["accuracy"], result["by_kind"]["b"]["accuracy"]) == (1.0, 0.0)


def test_the_rate_is_of_what_was_verified() -> None:
    """The prompt's own forward drafts nothing; the last draft was cut to one slot."""
    text = Decoded([0] * 7, (Cycle((), 1, 0), Cycle((1, 1), 2, 3), Cycle((), 2, 3), Cycle((1,), 2, 1)), 1.0)
    assert acceptance_rate([text, text]) == 3 / 7
    assert acceptance_rate([Decoded([0], (Cycle((), 1, 0),), 1.0)]) is None


def test_bins_hold_sums() -> None:
    """Anchors stand at 4, 6, 9, 10 and, in a text that starts at 7, at 7: the first bin ends before 8."""
    first = Decoded([0] * 9, (Cycle((), 1, 0), *(Cycle((1,) * run, 2, 3) for run in (1, 2, 0, 2))), 1.0)
    second = Decoded([0] * 4, (Cycle((), 1, 0), Cycle((1, 1), 2, 3)), 1.0)
    assert by_bins([first, second], [3, 6], first=8) == [
        {"from": 0, "below": 8, "forwards": 3, "tau": (2 + 3 + 3) / 3},
        {"from": 8, "below": 16, "forwards": 2, "tau": (1 + 3) / 2}]


@pytest.mark.parametrize("name", ["page.html", "page.md"])
def test_the_page_holds_every_number_and_escapes_names(toy_target: ToyTarget, tmp_path: Path, name: str) -> None:
    trial = Trial((1, 2), "eager", None)
    result = measure(toy_target("llama"), kinds=["<b>|", "b", "b"], trial=trial, rivals={"lookup": None})
    write_page(tmp_path / name, result)
    text = (tmp_path / name).read_text()
    for expected in (f"{result['tau']:.3f}", "Speed by batch size", "Other ways to draft", "torch", "Acceptance by slot"):
        assert expected in text
    assert ("| &lt;b>\\| |" if name.endswith("md") else "&lt;b&gt;|") in text


def test_what_is_kept_beside_a_run_is_what_its_card_shows(toy_target: ToyTarget, tmp_path: Path) -> None:
    result = measure(toy_target("llama"), kinds=["a", "b", "b"])
    write_page(tmp_path / EVALUATION_NAME, result)
    kept = json.loads((tmp_path / EVALUATION_NAME).read_text())
    assert kept["tau"] == result["tau"]
    assert markdown(kept) == markdown(result)
    assert f"{result['tau']:.3f}" in markdown(kept)


def test_a_page_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"must end in \.html, \.md or \.json"):
        check_page(tmp_path / "page.pdf")
    with pytest.raises(UserError, match="does not exist"):
        check_page(tmp_path / "none" / "page.md")
    (tmp_path / "folder.md").mkdir()
    with pytest.raises(UserError, match="it is a folder"):
        check_page(tmp_path / "folder.md")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="exists and is no evaluation: name another file"):
        check_page(tmp_path / "config.json")
    check_page(tmp_path / "page.md")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "folder.md"]


@pytest.mark.parametrize(("number", "words"), [(errno.EROFS, "read-only file system"), (errno.EACCES, "permission is denied")])
def test_a_page_in_a_folder_that_refuses_is_refused_before_any_work(tmp_path: Path, number: int, words: str) -> None:
    def refuse(event: str) -> None:
        if event == "tempfile.mkstemp":
            raise OSError(number, os.strerror(number))

    with at_each_file_operation(refuse), pytest.raises(UserError, match=f"cannot write .*page.html: .*{words}"):
        check_page(tmp_path / "page.html")


def test_the_reading_of_prompts_can_be_left_out_of_the_speed(toy_target: ToyTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Lanes.begin

    def slow(self: Lanes, *args: Any) -> torch.Tensor:
        time.sleep(0.5 if self.drafts else 0.0)
        return begin(self, *args)

    monkeypatch.setattr(Lanes, "begin", slow)
    (row,) = measure(toy_target("llama"))["speed_by_batch"]
    assert row["speedup_after_prompts"] > 1.2 * row["speedup"]


def test_kinds_have_a_speed_of_their_own_where_batches_do_not_mix_them(toy_target: ToyTarget) -> None:
    target, kinds = toy_target("llama"), ["a", "b", "a"]
    alone, mixed = (measure(target, kinds=kinds, trial=Trial((size,), "eager", None))["by_kind"] for size in (1, 2))
    assert all(row["speedup"] > 0 for row in alone.values())
    assert [row["speedup"] for row in mixed.values()] == [None, None]
