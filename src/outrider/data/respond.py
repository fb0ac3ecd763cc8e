"""Takes prompts and a function that answers batches of them, gives a JSONL file of answered conversations; knows no model.

A record holds the exact tokens that the target produced (`input_ids` + `loss_mask`), because the text, tokenised again, need
not give them back. A run that was cut off goes on where it stopped and ends with the same answers: the batches, and the seed
of each, depend on the prompts and options alone.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from outrider.data.chat import ChatFormat, chat_format, tokenizer_digest
from outrider.data.conversations import RecordError
from outrider.data.prompts import PromptLine, prompt_ids, read_prompt_lines
from outrider.errors import UserError
from outrider.files import explain_os_errors, read_json, sha256_file, write_json
from outrider.progress import ProgressBar, say

FORMAT = 1
WINDOW_BATCHES = 16  # prompts are sorted by length within so many batches: even batches, yet answers arrive roughly in order
OWN_KEYS = ("prompt_id", "prompt", "messages", "response", "input_ids", "loss_mask", "finish")


class Answer(Protocol):
    """Answers a batch: new tokens for each prompt, without the prompt, ending in a stop token or cut at the token limit.

    What follows the first stop token is ignored. The same prompts and seed must give the same answers.
    """

    def __call__(self, prompt_ids: list[list[int]], *, seed: int) -> list[list[int]]: ...


@dataclass(frozen=True)
class RespondOptions:
    """How prompts are answered; all of it is part of the run's identity. Raises UserError on a bad value.

    `target`: what identifies the target (a hub id and revision, a digest). `sampling`: JSON-able, as in {"temperature": 0.0}.
    `max_prompt_tokens`: a longer prompt is counted as failed. `max_new_tokens`: the limit `answer` works under.
    `stop_token_ids`: the target's; empty means the tokenizer's end token and the template's end of turn.
    """

    target: str
    sampling: Mapping[str, Any]
    max_prompt_tokens: int
    max_new_tokens: int
    batch_size: int
    seed: int
    stop_token_ids: tuple[int, ...]
    template_options: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name in ("max_prompt_tokens", "max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)}: must be at least 1")


def respond(prompts: Path, *, answer: Answer, tokenizer: PreTrainedTokenizerBase, out: Path,
            options: RespondOptions) -> dict[str, Any]:
    """Answer every prompt and append the records to `out`; `<out>.meta.json` says what they came from.

    Gives `prompts`, `answered` and `tokens` (produced by the target), both over the whole file; `failed`; `reused` (answers that
    were there before), `seconds` (of this run), `out`. Prompts that cannot be answered are counted in `failed`, one line each on
    stderr. Raises UserError for a broken prompts file, an `out` that another run began, or a disk that is full.
    """
    started = time.monotonic()
    chat = chat_format(tokenizer, stop_token_ids=options.stop_token_ids, template_options=options.template_options)
    if not chat.stop_token_ids:
        raise UserError("the tokenizer has no end-of-text token, so an answer has no end: give the target's stop_token_ids")
    lines = read_prompt_lines(prompts)
    ids, failed = _prompt_tokens(lines, chat, options)
    done = _open_answers(out, {"format": FORMAT, "prompts_sha256": sha256_file(prompts), "tokenizer": tokenizer_digest(tokenizer),
                               **json.loads(json.dumps(asdict(options)))}, prompts=len(lines))
    reused = len(done)
    if reused:
        say(f"respond: {reused} answers are already in {out}: reused")
    with ProgressBar("respond", total=len(ids), unit="prompts") as bar:
        bar.skip(reused)
        for number, batch in enumerate(_batches({prompt: len(ids[prompt]) for prompt in ids}, options.batch_size)):
            if all(prompt in done for prompt in batch):
                continue
            answers = answer([ids[prompt] for prompt in batch], seed=_batch_seed(options.seed, number))
            assert len(answers) == len(batch), "one answer a prompt"
            # A batch that was cut off in the middle of its records is answered whole again: its answers may depend on each other.
            records = [_record(prompt, lines[prompt], ids[prompt], new, chat)
                       for prompt, new in zip(batch, answers, strict=True) if prompt not in done]
            good = [record for record in records if record["finish"] != "empty"]
            for record in records:
                if record["finish"] == "empty":
                    failed += 1
                    say(f"respond: {lines[record['prompt_id']].where}: the target produced no token")
            _append(out, good)
            done.update({record["prompt_id"]: _produced(record) for record in good})
            bar.advance(len(records), note=f"{sum(done.values())} tokens")
    return {"prompts": len(lines), "answered": len(done), "failed": failed, "tokens": sum(done.values()),
            "seconds": time.monotonic() - started, "reused": reused, "out": str(out)}


def _prompt_tokens(lines: list[PromptLine], chat: ChatFormat, options: RespondOptions) -> tuple[dict[int, list[int]], int]:
    """The ids of every prompt that can be answered, by prompt number, and how many cannot."""
    ids: dict[int, list[int]] = {}
    for number, line in enumerate(lines):
        try:
            rendered = prompt_ids(line, chat)
            if len(rendered) > options.max_prompt_tokens:
                raise RecordError(line.where, f"the prompt has {len(rendered)} tokens: max_prompt_tokens = "
                                  f"{options.max_prompt_tokens}, shorten it or raise the limit", reason="prompt too long")
            ids[number] = rendered
        except RecordError as error:
            say(f"respond: not answered: {error}")
    return ids, len(lines) - len(ids)


def _batches(lengths: Mapping[int, int], batch_size: int) -> list[list[int]]:
    """Prompt numbers in batches of nearly equal lengths, the longest first within each window."""
    numbers = sorted(lengths)
    window = WINDOW_BATCHES * batch_size
    batches = []
    for start in range(0, len(numbers), window):
        by_length = sorted(numbers[start:start + window], key=lambda number: (-lengths[number], number))
        batches += [by_length[at:at + batch_size] for at in range(0, len(by_length), batch_size)]
    return batches


def _batch_seed(seed: int, batch: int) -> int:
    """A seed in 0..2**63-1 of the batch's own, the same whichever batches ran before it."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{batch}".encode()).digest()[:8], "little") >> 1


def _record(number: int, line: PromptLine, prompt: list[int], new: list[int], chat: ChatFormat) -> dict[str, Any]:
    end = next((at for at, token in enumerate(new) if token in chat.stop_token_ids), None)
    produced = [int(token) for token in (new if end is None else new[:end + 1])]
    text = chat.tokenizer.decode(produced if end is None else produced[:-1], skip_special_tokens=True,
                                 clean_up_tokenization_spaces=False)
    record: dict[str, Any] = {"prompt_id": number}
    if line.messages is None and not chat.has_template:
        record |= {"prompt": line.text, "response": text}
    else:
        messages = line.messages if line.messages is not None else ({"role": "user", "content": line.text},)
        record["messages"] = [*messages, {"role": "assistant", "content": text}]
    record |= {"input_ids": [*prompt, *produced], "loss_mask": [False] * len(prompt) + [True] * len(produced),
               "finish": "empty" if not produced else "length" if end is None else "stop"}
    return record | {key: value for key, value in line.extra.items() if key not in OWN_KEYS}


def _produced(record: Mapping[str, Any]) -> int:
    return sum(record["loss_mask"])


def _open_answers(out: Path, identity: dict[str, Any], prompts: int) -> dict[int, int]:
    """Produced tokens of the answers already in `out`, by prompt number; begins a new file's `<out>.meta.json`.

    A last line that was cut off is removed. Raises UserError if another run began the file.
    """
    meta = out.with_name(out.name + ".meta.json")
    if not out.exists():
        write_json(meta, identity)
        with explain_os_errors(out):
            out.touch()
        return {}
    if not meta.exists():
        raise UserError(f"{out}: exists, but {meta.name}, which says what its answers came from, does not: name another file or "
                        "delete this one")
    begun = read_json(meta, what="the description of the answers")
    other = sorted(key for key in identity if not isinstance(begun, dict) or begun.get(key) != identity[key])
    if other:
        raise UserError(f"{out}: was begun with other settings ({', '.join(other)}): name another file, or delete this one to "
                        "answer all prompts anew")
    return _read_answers(out, prompts)


def _read_answers(out: Path, prompts: int) -> dict[int, int]:
    done: dict[int, int] = {}
    with explain_os_errors(out), out.open("rb+") as handle:
        whole = 0
        for number, line in enumerate(handle, 1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                if record["prompt_id"] in done or record["prompt_id"] not in range(prompts):
                    raise ValueError("a prompt answered twice, or one that was not asked")
                done[record["prompt_id"]] = _produced(record)
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(f"{out}:{number}: is not an answer that outrider respond wrote: delete that line, its prompt is "
                                "then answered again") from error
            whole += len(line)
        handle.truncate(whole)
    return done


def _append(out: Path, records: list[dict[str, Any]]) -> None:
    """Add whole lines and flush them to the disk. Raises UserError on a full disk; the cut line is removed by the next run."""
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    with explain_os_errors(out), out.open("ab") as handle:
        handle.write(text.encode("utf-8"))
        handle.flush()
        os.fsync(handle.fileno())
