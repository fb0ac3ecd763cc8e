"""Gives toy tokenizers built in code (byte-level, so that any text works) and writers of JSONL; knows no real model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

START, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: thinking is cut from answers before the last question, and the last answer always shows a think block.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% elif m.role == 'assistant' and '</think>' not in m.content %}"
    "<think>{{ '\n\n' }}</think>{{ '\n\n' }}{{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>{{ '\n\n' }}</think>{{ '\n\n' }}{% endif %}{% endif %}"
)


def _make_tokenizer(template: str | None = CHATML, *, eos: str | None = END,
                    merges: tuple[tuple[str, str], ...] = (("Ċ", "Ċ"),),
                    special: tuple[str, ...] = (START, END)) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token=eos,  # pad is eos, as in the real target
                                   extra_special_tokens=list(special))
    made.chat_template = template
    return made


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """`make_tokenizer(template, eos=, merges=, special=)`: 256 bytes, a merge of two newlines, the ChatML markers."""
    return _make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A toy ChatML tokenizer; do not change it."""
    return _make_tokenizer()


@pytest.fixture(scope="session")
def thinking_template() -> str:
    return THINKING


@pytest.fixture(scope="session")
def chatml_template() -> str:
    return CHATML


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """`write_jsonl(*records, name=)`: a JSONL file; a record that is text is written as it is."""

    def write(*records: Any, name: str = "conversations.jsonl") -> Path:
        path = tmp_path / name
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def talk() -> Callable[..., dict[str, Any]]:
    """`talk("u", "hi", "a", "hello")`: a record of messages; s, u, a, t are the roles."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}

    def make(*parts: str) -> dict[str, Any]:
        turns = zip(parts[::2], parts[1::2], strict=True)
        return {"messages": [{"role": roles[role], "content": content} for role, content in turns]}

    return make
