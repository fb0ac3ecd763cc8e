"""Every record form is read as it is meant; every mistake is one sentence with file and line."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from outrider.data.conversations import (
    Chat,
    PromptResponse,
    Ready,
    RecordError,
    count_records,
    parse_json,
    parse_record,
    read_conversations,
)
from outrider.errors import UserError

GOOD = {"prompt": "a", "response": "b"}


def turns(*roles):
    return [{"role": role, "content": "text"} for role in roles]


def test_three_forms_and_their_precedence(write_jsonl, talk):
    ready = {"input_ids": [3, 4], "loss_mask": [False, True]}
    path = write_jsonl(talk("s", "be kind", "u", "hi", "a", "hello"), GOOD, ready, "", {**talk("u", "x", "a", "y"), **ready},
                       {"prompt": turns("user"), "response": "b"}, {**GOOD, "messages": None})
    chat, pair, tokens, both, listed, null = read_conversations([path])
    assert isinstance(chat, Chat)
    assert chat.messages[0] == {"role": "system", "content": "be kind"}
    assert isinstance(pair, PromptResponse)
    assert (pair.prompt, pair.response) == ("a", "b")
    for made in (tokens, both):  # ids are the exact tokens, text may not give them back
        assert isinstance(made, Ready)
        assert made.input_ids.tolist() == [3, 4]
        assert made.loss_mask.tolist() == [False, True]
        assert made.loss_mask.dtype == np.bool_
    assert both.where == f"{path}:5"  # the blank line is counted
    assert isinstance(listed, Chat)
    assert [message["role"] for message in listed.messages] == ["user", "assistant"]
    assert isinstance(null, PromptResponse)
    assert count_records([path]) == 6


def test_tool_turns_between_assistant_turns(write_jsonl):
    path = write_jsonl({"messages": turns("user", "assistant", "tool", "tool", "assistant", "user", "assistant")})
    (chat,) = read_conversations([path])
    assert isinstance(chat, Chat)


@pytest.mark.parametrize(("record", "reason", "words"), [
    ('{"prompt": "a", ', "broken JSON", "broken JSON (Expecting"),
    ("[1, 2]", "unknown form", "the record is a list: it must be a JSON object"),
    ({"conversations": []}, "unknown form", "has the keys conversations: it must have messages"),
    ({"prompt": "a"}, "unknown form", "has the keys prompt"),
    ({"messages": "hi"}, "bad content", "messages is text: it must be a list"),
    ({"messages": []}, "bad content", "messages is a list: it must be a list of at least one"),
    ({"messages": ["hi"]}, "bad content", "messages[0] is text: must be an object"),
    ({"messages": [{"role": "human", "content": "a"}]}, "wrong role order", "messages[0].role is 'human': it must be one"),
    ({"messages": turns("assistant", "user")}, "wrong role order", "messages[0].role is 'assistant': a conversation begins with"),
    ({"messages": turns("user", "user", "assistant")}, "wrong role order", "messages[1].role is 'user': after 'user' comes"),
    ({"messages": turns("user", "system", "assistant")}, "wrong role order", "messages[1].role is 'system'"),
    ({"messages": turns("user", "assistant", "assistant")}, "wrong role order", "after 'assistant' comes 'user' or 'tool'"),
    ({"messages": turns("user", "tool", "assistant")}, "wrong role order", "messages[1].role is 'tool'"),
    ({"messages": turns("user")}, "no assistant turn", "no assistant turn"),
    ({"messages": [*turns("user"), {"role": "assistant", "content": None}]}, "bad content", "messages[1].content is null"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "bad content", "messages[0].content is a list: it must be"),
    ({"messages": [{"role": "user", "content": " "}, *turns("assistant")]}, "empty prompt", "messages[0].content is empty"),
    ({"messages": [*turns("user"), {"role": "assistant", "content": "", "tool_calls": [1]}]}, "bad content", "tool_calls is set"),
    ('{"prompt": "a", "response": "\\ud83d"}', "bad content", "response holds half a character at 0"),
    ({"prompt": "", "response": "b"}, "empty prompt", "prompt is empty"),
    ({"prompt": 7, "response": "b"}, "bad content", "prompt is a number: it must be text"),
    ({"input_ids": [1, 2]}, "bad ids", "input_ids comes without loss_mask"),
    ({"loss_mask": [1, 0]}, "bad ids", "loss_mask comes without input_ids"),
    ({"input_ids": [1, 2], "loss_mask": [True]}, "bad ids", "loss_mask has 1 entries for 2 input_ids"),
    ({"input_ids": [1, 2.5], "loss_mask": [0, 1]}, "bad ids", "input_ids is a list that is not a list of at least one"),
    ({"input_ids": [True, False], "loss_mask": [0, 1]}, "bad ids", "input_ids is a list that is not"),
    ({"input_ids": [1, [2]], "loss_mask": [0, 1]}, "bad ids", "input_ids is a list that is not"),
    ({"input_ids": [1, None], "loss_mask": [0, 1]}, "bad ids", "input_ids is a list that is not"),
    ({"input_ids": [], "loss_mask": []}, "bad ids", "input_ids is a list that is not"),
    ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "bad ids", "neither 0 nor 1"),
])
def test_each_mistake_is_given_with_its_line_and_the_rest_is_read(write_jsonl, record, reason, words):
    path = write_jsonl(GOOD, record, GOOD)
    first, bad, last = read_conversations([path])
    assert isinstance(bad, RecordError)
    assert bad.reason == reason
    assert str(bad).startswith(f"{path}:2: ")
    assert words in str(bad)
    assert "\n" not in str(bad)
    assert isinstance(first, PromptResponse)
    assert isinstance(last, PromptResponse)


def test_broken_json_at_line_7(write_jsonl):
    path = write_jsonl(*[GOOD] * 6, '{"prompt": "cut of')
    assert str(list(read_conversations([path]))[6]).startswith(f"{path}:7: broken JSON")


def test_not_text(tmp_path):
    path = tmp_path / "packed.jsonl"
    path.write_bytes(b"\x1f\x8b\x08\x00\xff\n")
    (bad,) = read_conversations([path])
    assert f"{path}:1: the line is not UTF-8 text" in str(bad)


def test_byte_order_mark(tmp_path):
    path = tmp_path / "marked.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "response": "b"}\n')
    assert isinstance(next(read_conversations([path])), PromptResponse)


def test_files_that_cannot_be_read_at_all(tmp_path):
    empty, blank, cut = tmp_path / "empty.jsonl", tmp_path / "blank.jsonl", tmp_path / "cut.parquet"
    empty.touch()
    blank.write_text("\n\n")
    pq.write_table(pa.table({"prompt": ["a"], "response": ["b"]}), cut)
    cut.write_bytes(cut.read_bytes()[:-20])
    norows = tmp_path / "norows.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), norows)
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"text": ["a"]}), other)
    for path, words in [(tmp_path / "missing.jsonl", "there is no such file"), (tmp_path, "is a folder"),
                        (empty, "the file is empty"),
                        (blank, "the file holds no record"), (cut, "cannot be read as Parquet"), (norows, "holds no record"),
                        (other, "has the columns text: a record needs messages")]:
        with pytest.raises(UserError) as caught:
            list(read_conversations([path]))
        assert str(caught.value).startswith(f"{path}: ")
        assert words in str(caught.value)
    with pytest.raises(UserError, match="no conversations were given"):
        list(read_conversations([]))


def test_a_file_that_may_not_be_read(write_jsonl, monkeypatch):
    path = write_jsonl(GOOD)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(UserError, match=r"conversations\.jsonl: may not be read: change its permissions"):
        list(read_conversations([path]))


def test_parquet_is_read_as_jsonl_is(tmp_path: Path):
    path = tmp_path / "rows.parquet"
    messages = [turns("user", "assistant"), turns("assistant"), None]
    pq.write_table(pa.table({"messages": messages, "input_ids": [None, None, [1, 2]], "loss_mask": [None, None, [True, False]],
                             "other": ["x", "y", "z"]}), path)
    chat, bad, ready = read_conversations([path])
    assert isinstance(chat, Chat)
    assert str(bad).startswith(f"{path}:row 2: messages[0].role")
    assert isinstance(ready, Ready)
    assert ready.input_ids.tolist() == [1, 2]
    assert count_records([path, path]) == 6


@pytest.mark.parametrize("line", [b'{"prompt": ' + b"[" * 100_000, b'{"prompt": 1' + b"0" * 5000 + b"}"])
def test_json_that_python_will_not_read_is_broken_json(line):
    with pytest.raises(RecordError, match=r"^x.jsonl:1: broken JSON"):
        parse_json(line, "x.jsonl:1")


@pytest.mark.parametrize("huge", [2**63, -2**63 - 1, 2**64, 10**30])
def test_a_token_beyond_64_bits_is_named_by_its_place(huge):
    with pytest.raises(RecordError, match=r"f:1: input_ids\[2\] is a number of \d+ bits: it must be a token's number"):
        parse_record({"input_ids": [1, 2, huge], "loss_mask": [1, 1, 1]}, "f:1")
