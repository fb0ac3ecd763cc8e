"""Takes JSONL or Parquet files, gives conversations, each with its file and line; knows nothing of tokenizers or rows.

Three record forms: `messages` (a list of {role, content}); `prompt` (text, or such a list) + `response`; ready `input_ids` +
`loss_mask`. A record that has both ids and text is taken by its ids: they are the exact tokens that the target produced.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from outrider.errors import UserError

Messages = tuple[dict[str, str], ...]

KNOWN_KEYS = ("messages", "prompt", "response", "input_ids", "loss_mask")
ROLES = ("system", "user", "assistant", "tool")
# A template renders these beside role and content, so leaving them out quietly would teach another text.
UNSUPPORTED_MESSAGE_KEYS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
FOLLOWERS = {"": ("system", "user"), "system": ("user",), "user": ("assistant",), "assistant": ("user", "tool"),
             "tool": ("tool", "assistant")}
PARQUET_MAGIC = b"PAR1"
PARQUET_BATCH = 1024

BROKEN_JSON = "broken JSON"
UNKNOWN_FORM = "unknown form"
WRONG_ROLE_ORDER = "wrong role order"
NO_ASSISTANT_TURN = "no assistant turn"
BAD_CONTENT = "bad content"
BAD_IDS = "bad ids"
EMPTY_PROMPT = "empty prompt"


class RecordError(UserError):
    """One record that cannot be used. `reason` is the short name it is counted under; the message is the whole sentence."""

    def __init__(self, where: str, sentence: str, *, reason: str) -> None:
        super().__init__(f"{where}: {sentence}")
        self.reason = reason


@dataclass(frozen=True)
class Chat:
    """Turns of roles in a legal order, with at least one assistant turn. `where` is file:line."""

    where: str
    messages: Messages


@dataclass(frozen=True)
class PromptResponse:
    """One prompt and its response, as text."""

    where: str
    prompt: str
    response: str


@dataclass(frozen=True)
class Ready:
    """Tokens made elsewhere: `input_ids` int64 [T], `loss_mask` bool [T]."""

    where: str
    input_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]


Conversation = Chat | PromptResponse | Ready


def check_files(paths: Sequence[Path]) -> None:
    """Raises UserError unless every path is a file that may be read and has something in it."""
    if not paths:
        raise UserError("no conversations were given: name at least one JSONL or Parquet file")
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: there is no such file: check the path")
        if path.is_dir():
            raise UserError(f"{path}: is a folder: name the JSONL or Parquet files in it")
        if not os.access(path, os.R_OK):
            raise UserError(f"{path}: may not be read: change its permissions")
        if path.stat().st_size == 0:
            raise UserError(f"{path}: the file is empty: it must hold at least one record")


def read_conversations(paths: Sequence[Path]) -> Iterator[Conversation | RecordError]:
    """Stream the records of JSONL or Parquet files, in order.

    A record that cannot be used is given as a RecordError, not raised: the caller stops or counts. Raises UserError for a file
    that is missing, empty or cannot be read at all.
    """
    check_files(paths)
    for path in paths:
        found = False
        for where, record in _records(path):
            found = True
            try:
                yield parse_record(parse_json(record, where) if isinstance(record, bytes) else record, where)
            except RecordError as error:
                yield error
        if not found:
            raise UserError(f"{path}: the file holds no record: it must hold at least one")


def count_records(paths: Sequence[Path]) -> int:
    """How many records the files hold, good or bad. Raises UserError as `read_conversations` does."""
    check_files(paths)
    return sum(_open_parquet(path).metadata.num_rows if _is_parquet(path) else sum(1 for _ in json_lines(path)) for path in paths)


def json_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines of a JSONL file that are not blank, each with its `file:line`."""
    with path.open("rb") as handle:
        for number, line in enumerate(handle, 1):
            if line.strip():
                yield f"{path}:{number}", line


def parse_json(line: bytes, where: str) -> Any:
    """One line of JSONL. Raises RecordError."""
    try:
        return json.loads(line.decode("utf-8-sig"))  # "-sig": some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise RecordError(where, f"the line is not UTF-8 text ({error.reason} at byte {error.start}): save the file as UTF-8 "
                          "JSONL (uncompressed) or Parquet", reason=BROKEN_JSON) from error
    except json.JSONDecodeError as error:
        raise RecordError(where, f"broken JSON ({error.msg} at column {error.colno}): each line must be one whole JSON object",
                          reason=BROKEN_JSON) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists thousands deep
        raise RecordError(where, "broken JSON (a number too long or lists too deep to be read): each line must be one whole JSON "
                          "object", reason=BROKEN_JSON) from error


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as handle:
        return handle.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC or path.suffix == ".parquet"


def _open_parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read as Parquet ({_one_line(error)}): the file is cut or damaged, fetch it "
                        "again") from error


def _records(path: Path) -> Iterator[tuple[str, bytes | dict[str, Any]]]:
    if not _is_parquet(path):
        yield from json_lines(path)
        return
    table = _open_parquet(path)
    columns = [name for name in table.schema_arrow.names if name in KNOWN_KEYS]
    if not columns:
        raise UserError(f"{path}: has the columns {_listed(table.schema_arrow.names)}: a record needs messages, prompt + "
                        "response, or input_ids + loss_mask, rename or convert the columns")
    number = 0
    try:
        for batch in table.iter_batches(batch_size=PARQUET_BATCH, columns=columns):
            for record in batch.to_pylist():
                number += 1
                yield f"{path}:row {number}", record
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read after row {number} ({_one_line(error)}): the file is cut or damaged, fetch it "
                        "again") from error


def parse_record(record: Any, where: str) -> Conversation:
    """A JSON value to the conversation it means; keys that are null count as absent. Raises RecordError."""
    if not isinstance(record, dict):
        raise RecordError(where, f"the record is {_kind(record)}: it must be a JSON object with messages, prompt + response, or "
                          "input_ids + loss_mask", reason=UNKNOWN_FORM)
    given = {key for key in KNOWN_KEYS if record.get(key) is not None}
    if given & {"input_ids", "loss_mask"}:
        return _parse_ready(record, where, given)
    if "messages" in given:
        messages = parse_messages(record["messages"], where)
        if all(message["role"] != "assistant" for message in messages):
            raise RecordError(where, "the conversation has no assistant turn, so nothing in it can be learned: have the target "
                              "answer it (outrider respond) or leave it out", reason=NO_ASSISTANT_TURN)
        check_user_turns(messages, where)
        return Chat(where, messages)
    if {"prompt", "response"} <= given:
        return _parse_prompt_response(record["prompt"], record["response"], where)
    way_out = "have the target answer the prompts (outrider respond)" if "prompt" in given else "rename or convert the keys"
    raise RecordError(where, f"the record has the keys {_listed(record)}: it must have messages (a list of role and content), "
                      f"prompt + response, or input_ids + loss_mask: {way_out}", reason=UNKNOWN_FORM)


def parse_messages(messages: Any, where: str) -> Messages:
    """Check roles, their order and contents; give role and content alone. Raises RecordError.

    Order: a system turn only first; then user, assistant, user, ...; tool turns only between two assistant turns.
    """
    if not isinstance(messages, list) or not messages:
        raise RecordError(where, f"messages is {_kind(messages)}: it must be a list of at least one {{role, content}}",
                          reason=BAD_CONTENT)
    before = ""
    checked = []
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RecordError(where, f"{name} is {_kind(message)}: must be an object with role and content", reason=BAD_CONTENT)
        role = message.get("role")
        if role not in ROLES:
            raise RecordError(where, f"{name}.role is {role!r}: it must be one of {', '.join(ROLES)}", reason=WRONG_ROLE_ORDER)
        if role not in FOLLOWERS[before]:
            place = f"after {before!r} comes" if before else "a conversation begins with"
            allowed = " or ".join(map(repr, FOLLOWERS[before]))
            raise RecordError(where, f"{name}.role is {role!r}: {place} {allowed}, put the turns in order or leave the "
                              "record out", reason=WRONG_ROLE_ORDER)
        for key in UNSUPPORTED_MESSAGE_KEYS:
            if message.get(key):
                raise RecordError(where, f"{name}.{key} is set: only role and content are rendered, write it into content as the "
                                  "target would or give input_ids + loss_mask", reason=BAD_CONTENT)
        content = parse_text(message.get("content"), where, f"{name}.content")
        checked.append({"role": role, "content": content})
        before = role
    return tuple(checked)


def check_user_turns(messages: Messages, where: str) -> None:
    """Raises RecordError if a user turn says nothing."""
    for index, message in enumerate(messages):
        if message["role"] == "user" and not message["content"].strip():
            raise RecordError(where, f"messages[{index}].content is empty: a user turn needs text", reason=EMPTY_PROMPT)


def parse_text(value: Any, where: str, name: str) -> str:
    """A string that can be written as UTF-8. Raises RecordError."""
    if not isinstance(value, str):
        raise RecordError(where, f"{name} is {_kind(value)}: it must be text", reason=BAD_CONTENT)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # a lone surrogate: text that was cut in the middle of a character
        raise RecordError(where, f"{name} holds half a character at {error.start}: it must be valid Unicode text",
                          reason=BAD_CONTENT) from error
    return value


def _parse_prompt_response(prompt: Any, response: Any, where: str) -> Conversation:
    answer = parse_text(response, where, "response")
    if isinstance(prompt, list):
        messages = parse_messages([*prompt, {"role": "assistant", "content": answer}], where)
        check_user_turns(messages, where)
        return Chat(where, messages)
    text = parse_text(prompt, where, "prompt")
    if not text.strip():
        raise RecordError(where, "prompt is empty: it needs text", reason=EMPTY_PROMPT)
    return PromptResponse(where, text, answer)


def _parse_ready(record: dict[str, Any], where: str, given: set[str]) -> Ready:
    for key, other in (("input_ids", "loss_mask"), ("loss_mask", "input_ids")):
        if key not in given:
            raise RecordError(where, f"{other} comes without {key}: ready tokens need both", reason=BAD_IDS)
    ids = _numbers(record["input_ids"], where, "input_ids", kinds="iu")
    mask = _numbers(record["loss_mask"], where, "loss_mask", kinds="biu")
    if len(ids) != len(mask):
        raise RecordError(where, f"loss_mask has {len(mask)} entries for {len(ids)} input_ids: it must have one a token",
                          reason=BAD_IDS)
    if not np.isin(mask, (0, 1)).all():
        raise RecordError(where, "loss_mask holds a number that is neither 0 nor 1: it is true where the token is supervised",
                          reason=BAD_IDS)
    return Ready(where, ids.astype(np.int64), mask.astype(np.bool_))


def _numbers(values: Any, where: str, name: str, *, kinds: str) -> npt.NDArray[Any]:
    wanted = "a list of at least one whole number" if "b" not in kinds else "a list of true and false, one a token"
    try:
        numbers = np.asarray(values) if isinstance(values, list) else np.empty(0)
    except (ValueError, OverflowError):  # lists of unequal lengths inside the list
        numbers = np.empty(0)
    if isinstance(values, list) and numbers.dtype.kind in "Ouf":
        huge = next((i for i, value in enumerate(values) if isinstance(value, int) and not -2**63 <= value < 2**63), None)
        if huge is not None:
            raise RecordError(where, f"{name}[{huge}] is a number of {values[huge].bit_length()} bits: it must be "
                              "a token's number", reason=BAD_IDS)
    if numbers.ndim != 1 or len(numbers) == 0 or numbers.dtype.kind not in kinds:
        raise RecordError(where, f"{name} is {_kind(values)} that is not {wanted}: give the tokens one by one", reason=BAD_IDS)
    return numbers


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list",
             dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")


def _listed(keys: Any) -> str:
    return ", ".join(sorted(map(str, keys))) or "(none)"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")
