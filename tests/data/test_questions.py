"""Questions from a file or a public set, and their grading."""

from pathlib import Path

import pytest
from toys import toy_tokenizer

from outrider.data import questions
from outrider.data.questions import Questions, read_questions
from outrider.data.sets import Task, final_number
from outrider.errors import UserError


def test_a_set_brings_kinds_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "read_set", lambda name: [Task("1 + 1?", "math", answer="2"), Task("hi", "talk")])
    read = read_questions(None, "gsm8k", toy_tokenizer(), limit=None, thinking=None)
    assert (read.kinds, read.answers, len(read.prompts)) == (["math", "talk"], ["2", None], 2)
    assert "GSM8K" in read.source
    assert len(read_questions(None, "gsm8k", toy_tokenizer(), limit=1, thinking=None).prompts) == 1


def test_grades() -> None:
    tokenizer = toy_tokenizer()
    read = Questions([[1], [1]], ["a:1", "a:2"], None, ["1,200", None], "", tokenizer)
    assert read.grade(0, tokenizer.encode("so it is 1200.", add_special_tokens=False)) is True
    assert read.grade(0, tokenizer.encode("1200 or 7", add_special_tokens=False)) is False
    assert read.grade(0, tokenizer.encode("no idea", add_special_tokens=False)) is False
    assert read.grade(1, [5]) is None
    assert final_number("5 eggs #### 1,234.5") == 1234.5


@pytest.mark.parametrize(("changes", "message"), [
    ({"name": None}, "either a file of prompts or --prompt-set"), ({"path": Path("x")}, "either a file"),
    ({"limit": 0}, "--limit 0: must be at least 1"), ({"thinking": True}, "no 'enable_thinking'"),
    ({"name": "mmlu"}, "--prompt-set mmlu: must be one of humaneval, gsm8k, mtbench"),
])
def test_refusals(changes: dict[str, object], message: str) -> None:
    given = {"path": None, "name": "gsm8k", "limit": None, "thinking": None, **changes}
    path, name = given.pop("path"), given.pop("name")
    with pytest.raises(UserError, match=message):
        read_questions(path, name, toy_tokenizer(), **given)  # type: ignore[arg-type]
