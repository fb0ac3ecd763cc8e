"""What is printed: the text as it grows, guesses in colour, nothing of a stop string, and turns that see what was said."""

from collections.abc import Callable
from typing import Any

import pytest
from overfit import overfit_drafter, random_drafter
from toys import VOCAB, toy_shape, toy_tokenizer

from outrider.errors import UserError
from outrider.features.target import Target
from outrider.verify.decode import target_alone
from outrider.verify.execution import EAGER
from outrider.verify.sampling import DecodeOptions
from outrider.verify.stops import StopStrings
from outrider.verify.stream import GREEN, PLAIN, TextStream, Writer

K, PROMPT = 4, [72, 101, 108, 108, 111, 32, 104]
TOKENIZER = toy_tokenizer()
ToyTarget = Callable[..., Target]


def printed(text: str, stops: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What stdout holds after each byte of `text`, and after the end."""
    out, seen = TextStream(TOKENIZER, StopStrings(TOKENIZER, stops) if stops else None, colour=False), []
    whole = ""
    for byte in TOKENIZER(text)["input_ids"]:
        out.add(byte, guessed=False)
        whole += capsys.readouterr().out
        seen.append(whole)
    out.close()
    return [*seen, whole + capsys.readouterr().out]


def test_letters_come_whole_and_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed("aéb", (), capsys) == ["a", "a", "aé", "aéb", "aéb\n"]


def test_what_may_begin_a_stop_string_is_held_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed("a##b###c", ("###", "zz"), capsys) == ["a", "a", "a", "a##b", "a##b", "a##b", "a##b", "a##b", "a##b\n"]


def test_what_was_held_back_comes_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed("a##", ("###",), capsys)[-2:] == ["a", "a##\n"]


def test_guesses_are_green(capsys: pytest.CaptureFixture[str]) -> None:
    out = TextStream(TOKENIZER, None, colour=True)
    for token, guessed in zip(TOKENIZER("abc")["input_ids"], (False, True, False), strict=True):
        out.add(token, guessed=guessed)
    assert capsys.readouterr().out == f"a{GREEN}b{PLAIN}c"


def writer(target: Target, drafter: Any, limit: int, **changes: Any) -> Writer:
    options = DecodeOptions(limit, (VOCAB - 1,), 0.0, 1.0, 0, 0)
    return Writer(**{"target": target, "drafter": drafter, "tokenizer": TOKENIZER, "options": options, "stops": None,
                     "execution": EAGER, "colour": False, **changes})


def test_an_answer_and_how_it_came(toy_target: ToyTarget, capsys: pytest.CaptureFixture[str]) -> None:
    target = toy_target("qwen3")
    text = target_alone(target, PROMPT, DecodeOptions.greedy(max_new_tokens=25, stop_ids=())).tokens
    drafter = overfit_drafter(target, toy_shape(), (*PROMPT, *text), prompt=len(PROMPT), steps=150)
    result = writer(target, drafter, 25).answer(PROMPT)
    shown = capsys.readouterr()
    assert result["text"] == TOKENIZER.decode(text, skip_special_tokens=True)
    assert shown.out.rstrip("\n") == result["text"].rstrip("\n")
    assert (result["tokens"], result["forwards"], result["accepted"], result["tau"]) == (25, 6, 18, 4.0)
    assert result["accepted_run_histogram"] == [0, 0, 0, 6]
    assert 0 < result["draft_seconds"] + result["target_seconds"] <= result["seconds"]
    assert "6 cycles, by draft tokens kept 0: 0, 1: 0, 2: 0, 3: 6" in shown.err


def test_a_stop_string_ends_the_answer_and_is_left_out(toy_target: ToyTarget, capsys: pytest.CaptureFixture[str]) -> None:
    target = toy_target("llama")
    tokens = target_alone(target, PROMPT, DecodeOptions.greedy(max_new_tokens=25, stop_ids=())).tokens
    whole = TOKENIZER.decode(tokens, skip_special_tokens=True)
    stop = whole[6:8]
    result = writer(target, random_drafter(toy_shape(), seed=3), 25, stops=StopStrings(TOKENIZER, (stop,))).answer(PROMPT)
    assert result["text"] == whole[: whole.index(stop)]
    assert result["tokens"] < 25
    assert capsys.readouterr().out == result["text"] + "\n"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UserError, match="an empty string"):
        StopStrings(TOKENIZER, ("a", ""))


def test_turns_see_what_was_said(toy_target: ToyTarget) -> None:
    seen: list[list[dict[str, str]]] = []

    def prompt_of(messages: list[dict[str, str]]) -> list[int]:
        seen.append([dict(message) for message in messages])
        return list(TOKENIZER(" ".join(message["content"] for message in messages))["input_ids"])

    result = writer(toy_target("llama"), random_drafter(toy_shape(), seed=3), 6).converse(prompt_of, iter(["one", "two"]))
    answers = [turn["text"] for turn in result["turns"]]
    assert seen == [[{"role": "user", "content": "one"}],
                    [{"role": "user", "content": "one"}, {"role": "assistant", "content": answers[0]},
                     {"role": "user", "content": "two"}]]
    assert result["messages"][-1] == {"role": "assistant", "content": answers[1]}
    assert result["tokens"] == sum(turn["tokens"] for turn in result["turns"]) == 12
    assert result["tau"] == (result["tokens"] - 2) / result["forwards"]


def test_a_chat_of_no_turns(toy_target: ToyTarget) -> None:
    result = writer(toy_target("llama"), random_drafter(toy_shape(), seed=3), 6).converse(lambda messages: [1], iter([]))
    assert (result["turns"], result["tokens"], result["tau"]) == ([], 0, 1.0)
