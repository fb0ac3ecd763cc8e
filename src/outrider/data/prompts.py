"""Takes a JSONL file of prompts and the target's tokenizer, gives prompts in tokens; knows nothing of who answers them.

A line is {"prompt": text} or {"messages": [{role, content}, ...]} ending in a user (or tool) turn, with any other keys beside.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.data.chat import ChatFormat, chat_format, render_prompt
from outrider.data.conversations import (
    EMPTY_PROMPT,
    UNKNOWN_FORM,
    WRONG_ROLE_ORDER,
    Messages,
    RecordError,
    check_files,
    check_user_turns,
    json_lines,
    parse_json,
    parse_messages,
    parse_text,
)
from outrider.errors import UserError


@dataclass(frozen=True)
class PromptLine:
    """One line of a prompts file. `text` or `messages` is set. `extra`: the line's other keys."""

    where: str
    text: str | None
    messages: Messages | None
    extra: Mapping[str, Any]


@dataclass(frozen=True)
class Prompt:
    """A prompt as the target receives it: `ids`, generation prompt included. `where`: file:line. `kind` is what the line says it
    is, or None."""

    where: str
    ids: list[int]
    text: str | None
    messages: Messages | None
    kind: str | None


def read_prompt_lines(path: Path) -> list[PromptLine]:
    """All lines of a prompts file, not yet in tokens; an empty prompt is let through. Raises UserError with file:line."""
    check_files([path])
    lines = [_parse_line(parse_json(line, where), where) for where, line in json_lines(path)]
    if not lines:
        raise UserError(f"{path}: the file holds no prompt: it must hold at least one")
    return lines


def prompt_ids(line: PromptLine, chat: ChatFormat) -> list[int]:
    """The ids that the target is given. Raises RecordError for an empty prompt or one that the template refuses."""
    if line.messages is not None:
        check_user_turns(line.messages, line.where)
        return render_prompt(line.messages, chat=chat, where=line.where)
    assert line.text is not None, "a line has text or messages"
    if not line.text.strip():
        raise RecordError(line.where, "prompt is empty: it needs text", reason=EMPTY_PROMPT)
    if chat.has_template:
        return render_prompt(({"role": "user", "content": line.text},), chat=chat, where=line.where)
    return chat.encode_prompt(line.text)


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase, *, template_options: Mapping[str, Any]) -> list[Prompt]:
    """All prompts of a file in tokens, in order. Raises UserError with file:line at the first that cannot be used."""
    chat = chat_format(tokenizer, stop_token_ids=(), template_options=template_options)
    return [Prompt(line.where, prompt_ids(line, chat), line.text, line.messages, line.extra.get("kind"))
            for line in read_prompt_lines(path)]


def _parse_line(record: Any, where: str) -> PromptLine:
    if not isinstance(record, dict) or (record.get("prompt") is None) == (record.get("messages") is None):
        keys = f"has the keys {', '.join(sorted(record)) or '(none)'}" if isinstance(record, dict) else "is not a JSON object"
        raise RecordError(where, f"the prompt {keys}: it must have either prompt (text) or messages (a list of role and content)",
                          reason=UNKNOWN_FORM)
    extra = {key: value for key, value in record.items() if key not in ("prompt", "messages")}
    if extra.get("kind") is not None:
        parse_text(extra["kind"], where, "kind")
    if record.get("prompt") is not None:
        return PromptLine(where, parse_text(record["prompt"], where, "prompt"), None, extra)
    messages = parse_messages(record["messages"], where)
    if messages[-1]["role"] not in ("user", "tool"):
        raise RecordError(where, f"messages[{len(messages) - 1}].role is {messages[-1]['role']!r}: a prompt ends with a user or "
                          "tool turn, which the target then answers", reason=WRONG_ROLE_ORDER)
    return PromptLine(where, None, messages, extra)
