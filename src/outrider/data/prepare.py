"""Takes files of conversations and the target's tokenizer, gives a folder of prepared rows and the audit; knows no model."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from outrider.data.chat import SUPERVISE, ChatFormat, Document, chat_format, document_of, tokenizer_digest
from outrider.data.conversations import NO_ASSISTANT_TURN, RecordError, check_files, count_records, read_conversations
from outrider.data.info import DROPPED_FILE, FORMAT, INFO_FILE, ROWS_FILE, read_info
from outrider.data.mask_token import mask_token_ids
from outrider.data.packing import build_row, has_anchor, pack
from outrider.data.rows import as_ranges, check_rows_file, write_rows_file
from outrider.errors import UserError
from outrider.files import atomic_folder, digest, explain_os_errors, set_aside, sha256_file, write_json
from outrider.progress import ProgressBar, say

ON_BAD_RECORD = ("stop", "drop")

MOST_ROW_LENGTH = 2**20  # beyond any target's positions; packing keeps a queue for each amount of room

NOTHING_SUPERVISED = "nothing supervised"
NO_PAIR = "no two neighbouring supervised tokens"
LOST_TO_CLIPPING = "supervised tokens lost to clipping"
NOTHING_TO_LEARN = (NO_ASSISTANT_TURN, NOTHING_SUPERVISED, NO_PAIR, LOST_TO_CLIPPING)


@dataclass(frozen=True)
class PrepareOptions:
    """How conversations become rows. Raises UserError on a bad value.

    `vocab_size`: of the target's embedding. `row_length`: tokens a row (S). `supervise`: "all" assistant turns or the "last".
    `on_bad_record`: "stop" at the first record that cannot be used, or "drop" and count it. `max_unsupervised_share`: refuse when
    a larger share of the documents (0..1) has nothing to learn; `max_bad_share`: stop when a larger share of the records cannot
    be used at all. `stop_token_ids`: where the target stops; empty means the
    tokenizer's end token and the template's end of turn. `template_options`: passed to the chat template.
    """

    vocab_size: int
    row_length: int
    supervise: str
    on_bad_record: str
    max_unsupervised_share: float
    max_bad_share: float
    stop_token_ids: tuple[int, ...]
    template_options: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not 2 <= self.row_length <= MOST_ROW_LENGTH:
            raise UserError(f"row_length = {self.row_length}: must be at least 2, an anchor and a token to draft, and at most "
                            f"{MOST_ROW_LENGTH}")
        if self.supervise not in SUPERVISE:
            raise UserError(f"supervise = {self.supervise!r}: must be one of {', '.join(SUPERVISE)}")
        if self.on_bad_record not in ON_BAD_RECORD:
            raise UserError(f"on_bad_record = {self.on_bad_record!r}: must be one of {', '.join(ON_BAD_RECORD)}")
        for name in ("max_unsupervised_share", "max_bad_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} = {getattr(self, name)}: must lie in 0..1, a share of documents")


def prepare(conversations: Sequence[Path], *, tokenizer: PreTrainedTokenizerBase, out: Path,
            options: PrepareOptions) -> dict[str, Any]:
    """Turn conversations into rows under `out`, or reuse the rows there if they came from the very same things.

    Gives `documents_in`, `documents_kept`, `dropped` {reason: count}, `rows`, `tokens` (in rows, padding excluded),
    `supervised_tokens` (in rows), `clipped_share` (tokens cut off at `row_length` / all tokens of the rendered documents before
    the cut), `clipped_documents`, `unsupervised_turns` {reason: count}, `mask_token_ids` (for drafter.mask_token_id), `folder`,
    `reused`. documents_in == documents_kept + sum(dropped.values()). `out` is written whole or not at all. Raises UserError.
    """
    check_files(conversations)
    _check_out(out)
    ingredients = key_ingredients(conversations, tokenizer=tokenizer, options=options)
    key = digest(ingredients)
    audit = _reusable(out, key)
    reused = audit is not None
    if audit is not None:
        say(f"prepare: {out} was made from the same data, tokenizer and options: reused")
    else:
        with atomic_folder(out) as temporary:
            chat = chat_format(tokenizer, stop_token_ids=options.stop_token_ids, template_options=options.template_options)
            documents, audit = _collect(conversations, chat, options, temporary / DROPPED_FILE)
            present = _tokens_present(documents, options.vocab_size)
            audit["mask_token_ids"] = mask_token_ids(tokenizer, vocab_size=options.vocab_size, stop_ids=chat.stop_token_ids,
                                                     occurs=lambda id: bool(present[id]))
            _write(temporary, documents, present, audit, options, {"key": key, **ingredients})
    _say_audit(audit)
    return {**audit, "folder": str(out), "reused": reused}


def code_digest() -> str:
    """Digest of the source of this room: rows made by other code are not the same rows."""
    return digest({path.name: sha256_file(path) for path in Path(__file__).parent.glob("*.py")})


def key_ingredients(conversations: Sequence[Path], *, tokenizer: PreTrainedTokenizerBase,
                    options: PrepareOptions) -> dict[str, Any]:
    """Everything that the rows depend on; its digest is the cache key. File names are not in it, their bytes are."""
    return {
        "format": FORMAT,
        "files_sha256": [sha256_file(path) for path in conversations],
        "tokenizer_digest": tokenizer_digest(tokenizer),
        "options": asdict(options),
        "code": code_digest(),
        "versions": {name: version(name) for name in ("transformers", "tokenizers", "jinja2", "pyarrow")},
    }


def _check_out(out: Path) -> None:
    """Never replace a folder that holds anything but prepared rows."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file: name a folder for the prepared rows")
    foreign = sorted({path.name for path in out.iterdir()} - {ROWS_FILE, INFO_FILE, DROPPED_FILE}) if out.is_dir() else []
    if foreign:
        raise UserError(f"{out}: holds {foreign[0]}, which outrider prepare did not write: name a folder that is new, empty "
                        "or holds prepared rows only")


def _reusable(out: Path, key: str) -> dict[str, Any] | None:
    if not (out / INFO_FILE).exists():
        return None
    try:
        info = read_info(out)
        if info["key"] != key:
            say(f"prepare: {out} was made from other data, another tokenizer, other options or other code: made again")
            return None
        check_rows_file(out, info)
    except UserError as error:
        say(f"prepare: {error}; renamed to {set_aside(out).name}, made again")
        return None
    audit: dict[str, Any] = info["audit"]
    return audit


def _collect(
    conversations: Sequence[Path], chat: ChatFormat, options: PrepareOptions, dropped_file: Path
) -> tuple[list[Document], dict[str, Any]]:
    """All documents that can be learned from, clipped to the row, and the audit of the others, each a line in `dropped_file`."""
    dropped: Counter[str] = Counter()
    turns: Counter[str] = Counter()
    kept: list[Document] = []
    documents_in = tokens_before = tokens_clipped = clipped_documents = 0
    bad, records = 0, count_records(conversations)
    with (ProgressBar("prepare", total=records, unit="conversations") as bar, explain_os_errors(dropped_file),
          dropped_file.open("w", encoding="utf-8") as quarantine):
        for document in _documents(conversations, chat, options):
            documents_in += 1
            bar.advance(1)
            if isinstance(document, RecordError):
                dropped[document.reason] += 1
                print(json.dumps({"reason": document.reason, "record": str(document)}), file=quarantine)
                bad += document.reason not in NOTHING_TO_LEARN
                if bad > options.max_bad_share * records:
                    raise UserError(f"max_bad_share = {options.max_bad_share}: {bad} of {records} records cannot be used "
                                    f"({_counts(dropped)}), the last of them {document}: mend them, or raise the share")
                continue
            turns.update(document.unsupervised_turns)
            whole, document = document, _clip(document, options.row_length)
            tokens_before += len(whole.input_ids)
            tokens_clipped += len(whole.input_ids) - len(document.input_ids)
            clipped_documents += len(document.input_ids) < len(whole.input_ids)
            if has_anchor(document.loss_mask):
                kept.append(document)
            else:
                dropped[_why_nothing(whole)] += 1
                print(json.dumps({"reason": _why_nothing(whole), "record": whole.where}), file=quarantine)
    audit = {"documents_in": documents_in, "documents_kept": len(kept), "dropped": dict(sorted(dropped.items())),
             "clipped_share": tokens_clipped / max(tokens_before, 1), "clipped_documents": clipped_documents,
             "unsupervised_turns": dict(sorted(turns.items()))}
    _check_share(audit, options.max_unsupervised_share)
    return kept, audit


def _documents(conversations: Sequence[Path], chat: ChatFormat, options: PrepareOptions) -> Iterator[Document | RecordError]:
    for conversation in read_conversations(conversations):
        try:
            if isinstance(conversation, RecordError):
                raise conversation
            yield document_of(conversation, chat=chat, vocab_size=options.vocab_size, supervise=options.supervise)
        except RecordError as error:
            if options.on_bad_record == "stop":
                raise
            yield error


def _clip(document: Document, row_length: int) -> Document:
    return replace(document, input_ids=document.input_ids[:row_length], loss_mask=document.loss_mask[:row_length])


def _why_nothing(whole: Document) -> str:
    if has_anchor(whole.loss_mask):
        return LOST_TO_CLIPPING
    return NO_PAIR if whole.loss_mask.any() else NOTHING_SUPERVISED


def _check_share(audit: dict[str, Any], most: float) -> None:
    nothing = sum(audit["dropped"].get(reason, 0) for reason in NOTHING_TO_LEARN)
    share = nothing / audit["documents_in"]
    if share <= most and audit["documents_kept"]:
        return
    turns = f"; assistant turns left unsupervised: {_counts(audit['unsupervised_turns'])}" if audit["unsupervised_turns"] else ""
    way_out = ("look at these records, raise row_length if they are clipped, or have the target answer the prompts itself "
               "(outrider respond)")
    if share > most:
        raise UserError(f"max_unsupervised_share = {most}: {nothing} of {audit['documents_in']} documents ({share:.0%}) have "
                        f"nothing to learn ({_counts(audit['dropped'])}{turns}): {way_out}")
    raise UserError(f"none of {audit['documents_in']} documents is left ({_counts(audit['dropped'])}{turns}): {way_out}")


def _write(folder: Path, documents: list[Document], present: npt.NDArray[np.bool_], audit: dict[str, Any],
           options: PrepareOptions, made_from: dict[str, Any]) -> None:
    """Pack, write `rows.parquet` and `rows.json`, and complete the audit with what the rows hold."""
    packed = pack([len(document.input_ids) for document in documents], row_length=options.row_length)
    rows = (build_row([(documents[index].input_ids, documents[index].loss_mask) for index in row], row_length=options.row_length)
            for row in packed)
    write_rows_file(folder / ROWS_FILE, rows, row_length=options.row_length)
    audit["rows"] = len(packed)
    audit["tokens"] = sum(len(document.input_ids) for document in documents)
    audit["supervised_tokens"] = sum(int(document.loss_mask.sum()) for document in documents)
    write_json(folder / INFO_FILE, {
        **made_from, "rows_sha256": sha256_file(folder / ROWS_FILE), "num_rows": len(packed), "row_length": options.row_length,
        "vocab_size": options.vocab_size, "token_ids": as_ranges(present), "audit": audit,
    })


def _tokens_present(documents: Sequence[Document], vocab_size: int) -> npt.NDArray[np.bool_]:
    present = np.zeros(vocab_size, dtype=np.bool_)
    for document in documents:
        present[document.input_ids] = True
    return present


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items()) or "none"


def _say_audit(audit: dict[str, Any]) -> None:
    say(f"prepare: {audit['documents_kept']} of {audit['documents_in']} documents kept; dropped: {_counts(audit['dropped'])}")
    if audit["unsupervised_turns"]:
        say(f"prepare: assistant turns left unsupervised: {_counts(audit['unsupervised_turns'])}")
    say(f"prepare: {audit['rows']} rows, {audit['tokens']} tokens, {audit['supervised_tokens']} supervised, "
        f"{audit['clipped_share']:.2%} of all tokens clipped ({audit['clipped_documents']} documents)")
    ids = ", ".join(map(str, audit["mask_token_ids"])) or "there is none, free a special token of the tokenizer"
    say(f"prepare: for drafter.mask_token_id, ids that stand for nothing here: {ids}")
