"""Prompts are rendered as the target receives them; a mistake is one sentence with file and line."""

import pytest

from outrider.data.prompts import read_prompts
from outrider.errors import UserError


def read(path, tokenizer):
    return read_prompts(path, tokenizer, template_options={})


def test_both_forms_end_in_the_generation_prompt(write_jsonl, tokenizer):
    path = write_jsonl({"prompt": "hi", "kind": "small talk"}, "", {"messages": [{"role": "user", "content": "hi"}], "id": 3})
    text, messages = read(path, tokenizer)
    assert tokenizer.decode(text.ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text.ids == messages.ids
    assert (text.text, text.messages, text.kind) == ("hi", None, "small talk")
    assert (messages.text, messages.kind) == (None, None)
    assert messages.messages == ({"role": "user", "content": "hi"},)


def test_text_without_a_template_is_bare(write_jsonl, make_tokenizer):
    plain = make_tokenizer(None)
    (prompt,) = read(write_jsonl({"prompt": "hi"}), plain)
    assert plain.decode(prompt.ids) == "hi"
    with pytest.raises(UserError, match=r"jsonl:1: messages cannot be rendered"):
        read(write_jsonl({"messages": [{"role": "user", "content": "hi"}]}), plain)


@pytest.mark.parametrize(("record", "words"), [
    ('{"prompt": ', "broken JSON"), ('"hi"', "the prompt is not a JSON object"), ({"text": "hi"}, "the prompt has the keys text"),
    ({"prompt": "hi", "messages": []}, "the prompt has the keys messages, prompt: it must have either"),
    ({"prompt": 3}, "prompt is a number"),
    ({"prompt": " "}, "prompt is empty"), ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content is empty"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
     "messages[1].role is 'assistant': a prompt ends"),
    ({"messages": [{"role": "assistant", "content": "b"}]}, "messages[0].role is 'assistant': a conversation begins"),
    ({"prompt": "hi", "kind": 3}, "kind is a number: it must be text")])
def test_each_mistake_names_file_and_line(write_jsonl, tokenizer, record, words):
    path = write_jsonl({"prompt": "hi"}, record)
    with pytest.raises(UserError) as caught:
        read(path, tokenizer)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert words in str(caught.value)


def test_missing_and_empty_files(tmp_path, tokenizer, write_jsonl):
    with pytest.raises(UserError, match=r"none\.jsonl: there is no such file"):
        read(tmp_path / "none.jsonl", tokenizer)
    with pytest.raises(UserError, match=r"conversations\.jsonl: the file is empty"):
        read(write_jsonl(), tokenizer)
    with pytest.raises(UserError, match=r"conversations\.jsonl: the file holds no prompt"):
        read(write_jsonl(" "), tokenizer)
