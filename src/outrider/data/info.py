"""Takes a folder of prepared rows, gives what its rows.json says of them; reads no rows, and loads no library."""

from pathlib import Path
from typing import Any

from outrider.errors import UserError
from outrider.files import read_json

ROWS_FILE, INFO_FILE, DROPPED_FILE = "rows.parquet", "rows.json", "dropped.jsonl"
FORMAT = 1
INFO_KEYS = {"format", "key", "rows_sha256", "num_rows", "row_length", "vocab_size", "tokenizer_digest", "token_ids", "audit"}


def read_info(folder: Path) -> dict[str, Any]:
    """`rows.json` of a prepared folder. Raises UserError when it is missing, broken or of another format."""
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no folder of prepared rows: make it with outrider prepare")
    path = folder / INFO_FILE
    info = read_json(path, what="the description of the prepared rows")
    if not isinstance(info, dict) or INFO_KEYS - info.keys() or info["format"] != FORMAT:
        raise UserError(f"{path}: was not written by this version of outrider prepare: prepare the rows again")
    return info
