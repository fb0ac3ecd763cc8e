"""Takes conversations and the target's tokenizer, gives token ids with a loss mask; knows nothing of files or rows.

Supervised are exactly the tokens that the target itself would have produced: from the end of the generation prompt to the
end-of-turn token, included. Both ends are found by rendering and tokenising prefixes of the conversation and comparing ids:
never by patterns in the text, which user text can forge, and never by the padding id, which may be the end-of-turn token.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from outrider.data.conversations import BAD_CONTENT, Chat, Conversation, Messages, Ready, RecordError
from outrider.errors import UserError
from outrider.files import digest

SUPERVISE = ("all", "last")
PROBE = "Quillwork"  # any plain word: it is looked for in what the template renders

TEMPLATE_REFUSES = "refused by the chat template"
OUTSIDE_VOCABULARY = "token outside the vocabulary"
# Why a turn is left unsupervised (the document stays; its other turns count).
REWRITTEN = "rewritten by the template"
MERGED = "tokens merge over the boundary"
UNENDED = "no end-of-turn token"


@dataclass(frozen=True)
class Document:
    """One conversation in tokens: `input_ids` int32 [T], `loss_mask` bool [T]; why some turns of it are not supervised."""

    where: str
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    unsupervised_turns: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatFormat:
    """How the target's conversations become tokens; made by `chat_format`.

    `stop_token_ids`: where the target stops. `tail`: what the template writes after a turn's content. `template_options`:
    passed to the template, as in {"enable_thinking": False}. `has_template`: False for a tokenizer that renders no messages.
    """

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    template_options: Mapping[str, Any]
    has_template: bool
    tail: str

    def render(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """The messages as the template writes them. Raises jinja2.TemplateError where the template refuses them."""
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt,
                                                  **self.template_options)
        assert isinstance(text, str)
        return text

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Text to ids. A rendered conversation already holds its special tokens; bare text needs the tokenizer's own."""
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def encode_prompt(self, prompt: str) -> list[int]:
        """Bare text as a target without a template receives it: with a beginning token if it adds one, never an end."""
        ids = self.encode(prompt, add_special_tokens=True)
        return ids[:-1] if len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id else ids


def chat_format(tokenizer: PreTrainedTokenizerBase, *, stop_token_ids: Sequence[int],
                template_options: Mapping[str, Any]) -> ChatFormat:
    """How this tokenizer's conversations become tokens.

    `stop_token_ids`: the target's own (its generation config); when empty they are the tokenizer's end token and the first
    special token that the template writes after an assistant's content. Raises UserError if the template cannot render.
    """
    bare = ChatFormat(tokenizer, tuple(stop_token_ids), template_options, False, "")
    eos = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    if not tokenizer.chat_template:
        return replace(bare, stop_token_ids=bare.stop_token_ids or eos)
    try:
        rendered = bare.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}],
                               add_generation_prompt=False)
    except TemplateError as error:
        raise UserError(f"the tokenizer's chat template cannot render a user turn and an assistant turn ({error}): use the "
                        "template that the target was trained with") from error
    _, found, tail = rendered.rpartition(PROBE)
    if not found:
        raise UserError("the tokenizer's chat template leaves out what the assistant says: use the template that the target was "
                        "trained with")
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special} | set(tokenizer.all_special_ids)
    ends = tuple(index for index in bare.encode(tail) if index in special)[:1]
    return replace(bare, stop_token_ids=bare.stop_token_ids or tuple(dict.fromkeys(ends + eos)), has_template=True, tail=tail)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of all that the tokenizer does: vocabulary, merges, pre-tokenizer, special tokens, chat template.

    Taken from the tokenizer in memory, so that a hub id and a folder with the same files give the same digest.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else tokenizer.get_vocab()
    if tokenizer.is_fast:  # left behind by the last call that padded or truncated; not a part of the files
        backend.update(truncation=None, padding=None)
    return digest({"class": type(tokenizer).__name__, "backend": backend, "special": tokenizer.special_tokens_map,
                   "template": tokenizer.chat_template})


def document_of(conversation: Conversation, *, chat: ChatFormat, vocab_size: int, supervise: str) -> Document:
    """A conversation to ids and loss mask; `supervise` is "all" or "last" (assistant turns). Raises RecordError."""
    if supervise not in SUPERVISE:
        raise UserError(f"supervise = {supervise!r}: must be one of {', '.join(SUPERVISE)}")
    skipped: tuple[str, ...] = ()
    if isinstance(conversation, Ready):
        ids, mask = conversation.input_ids, conversation.loss_mask
    elif isinstance(conversation, Chat) or chat.has_template:
        messages = conversation.messages if isinstance(conversation, Chat) else (
            {"role": "user", "content": conversation.prompt}, {"role": "assistant", "content": conversation.response})
        ids, mask, skipped = _render_chat(messages, chat, supervise, conversation.where)
    else:
        prompt = chat.encode_prompt(conversation.prompt)
        answer = [*chat.encode(conversation.response), _end_token(chat)]
        ids = np.array(prompt + answer, dtype=np.int64)
        mask = np.arange(len(ids)) >= len(prompt)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        raise RecordError(conversation.where, f"input_ids[{outside[0]}] = {ids[outside[0]]}: must lie in 0..{vocab_size - 1}, "
                          "the target's vocabulary, prepare the data with the target's own tokenizer", reason=OUTSIDE_VOCABULARY)
    return Document(conversation.where, ids.astype(np.int32), mask, skipped)


def render_prompt(messages: Messages, *, chat: ChatFormat, where: str) -> list[int]:
    """The ids that the target is given to answer these messages. Raises RecordError."""
    _need_template(chat, where)
    try:
        return chat.encode(chat.render(messages, add_generation_prompt=True))
    except TemplateError as error:
        raise _refused(where, error) from error


def _need_template(chat: ChatFormat, where: str) -> None:
    if not chat.has_template:
        raise RecordError(where, "messages cannot be rendered, the target's tokenizer has no chat template: give prompt and "
                          "response as text, or input_ids + loss_mask, or a tokenizer with a template", reason=BAD_CONTENT)


def _refused(where: str, error: TemplateError) -> RecordError:
    return RecordError(where, f"the target's chat template refuses the messages ({error}): change them or leave the record out",
                       reason=TEMPLATE_REFUSES)


def _end_token(chat: ChatFormat) -> int:
    if not chat.stop_token_ids:
        raise UserError("the tokenizer has no end-of-text token, so a response has no end: give the target's stop_token_ids")
    eos = chat.tokenizer.eos_token_id
    return int(eos) if eos in chat.stop_token_ids else chat.stop_token_ids[0]


def _render_chat(messages: Messages, chat: ChatFormat, supervise: str,
                 where: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], tuple[str, ...]]:
    _need_template(chat, where)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    # What comes after the last answer teaches nothing, and a later user turn makes some templates rewrite that answer.
    messages = messages[:turns[-1] + 1]
    if supervise == "last":
        turns = turns[-1:]
    try:
        complete = chat.encode(chat.render(messages, add_generation_prompt=False))
        spans = [_supervised_span(messages, turn, chat, complete) for turn in turns]
    except TemplateError as error:
        raise _refused(where, error) from error
    mask = np.zeros(len(complete), dtype=np.bool_)
    for span in spans:
        if not isinstance(span, str):
            mask[slice(*span)] = True
    return np.array(complete, dtype=np.int64), mask, tuple(span for span in spans if isinstance(span, str))


def _supervised_span(messages: Messages, turn: int, chat: ChatFormat, complete: list[int]) -> tuple[int, int] | str:
    """First supervised position and the one after the end-of-turn token, or why the turn cannot be supervised.

    `complete` are the ids of the whole conversation. The turn counts only if they begin with the very ids that the conversation
    has up to this turn's end: then they hold what the target was given and what it would have answered.
    """
    prefix = chat.render(messages[:turn], add_generation_prompt=True)
    own = chat.render(messages[:turn + 1], add_generation_prompt=False)
    if not own.startswith(prefix):
        return REWRITTEN
    prefix_ids = chat.encode(prefix + _inserted(own[len(prefix):], messages[turn]["content"], chat.tail))
    own_ids = chat.encode(own)
    if own_ids[:len(prefix_ids)] != prefix_ids:
        return MERGED
    ends = (at for at in range(len(prefix_ids), len(own_ids)) if own_ids[at] in chat.stop_token_ids)
    end = next(ends, None)
    if end is None:
        return UNENDED
    if complete[:end + 1] != own_ids[:end + 1]:
        return REWRITTEN
    return len(prefix_ids), end + 1


def _inserted(rendered: str, content: str, tail: str) -> str:
    """What the template itself writes between the generation prompt and the content, such as an empty think block.

    The target did not produce it, so it is not supervised. White space alone is the target's: it would have to write it.
    """
    for said in (content, content.lstrip(), content.rstrip(), content.strip()):
        if rendered.endswith(said + tail):
            inserted = rendered[:len(rendered) - len(said + tail)]
            return inserted if inserted.strip() else ""
    return ""

