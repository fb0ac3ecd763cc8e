"""Takes a prompts file or the name of a public set, gives questions in tokens and how answers are graded; knows no models."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.data.chat import chat_format
from outrider.data.prompts import PromptLine, prompt_ids, read_prompts
from outrider.data.sets import SETS, final_number, read_set
from outrider.errors import UserError

THINKING = "enable_thinking"  # the switch that chat templates have for it


@dataclass(frozen=True)
class Questions:
    """`prompts` in tokens; `wheres`: each prompt's file:line, or place in its set; `kinds` None where the file names none;
    `answers`: the right number, or None; `source`: where from."""

    prompts: list[list[int]]
    wheres: list[str]
    kinds: list[str] | None
    answers: list[str | None]
    source: str
    tokenizer: PreTrainedTokenizerBase

    def grade(self, index: int, tokens: Sequence[int]) -> bool | None:
        """Whether the last number of an answer is the right one; None where the set has no answer for this prompt."""
        answer = self.answers[index]
        if answer is None:
            return None
        return final_number(self.tokenizer.decode(list(tokens), skip_special_tokens=True)) == final_number(answer)


def read_questions(
    path: Path | None, name: str | None, tokenizer: PreTrainedTokenizerBase, *, limit: int | None, thinking: bool | None
) -> Questions:
    """The first `limit` prompts of the file `path` or of the set `name`. Raises UserError when they cannot be used."""
    if (path is None) == (name is None):
        raise UserError("evaluate: give either a file of prompts or --prompt-set, not both and not neither")
    if limit is not None and limit < 1:
        raise UserError(f"--limit {limit}: must be at least 1")
    options = template_options(tokenizer, thinking)
    if path is not None:
        read = read_prompts(path, tokenizer, template_options=options)[:limit]
        kinds = [p.kind or "other" for p in read] if any(p.kind for p in read) else None
        return Questions([p.ids for p in read], [p.where for p in read], kinds, [None] * len(read), str(path), tokenizer)
    assert name is not None
    tasks = read_set(name)[:limit]
    chat = chat_format(tokenizer, stop_token_ids=(), template_options=options)
    wheres = [f"{name}, prompt {i + 1}" for i in range(len(tasks))]
    prompts = [prompt_ids(PromptLine(where, task.prompt, None, {}), chat) for where, task in zip(wheres, tasks, strict=True)]
    return Questions(prompts, wheres, [task.kind for task in tasks], [task.answer for task in tasks], SETS[name].note, tokenizer)


def template_options(tokenizer: PreTrainedTokenizerBase, thinking: bool | None) -> dict[str, Any]:
    """What the template is told. Raises UserError when thinking is to be switched and the template has no switch for it."""
    if thinking is None:
        return {}
    if THINKING not in str(tokenizer.chat_template or ""):
        raise UserError(f"--thinking: the target's chat template has no '{THINKING}': leave the option out")
    return {THINKING: thinking}
