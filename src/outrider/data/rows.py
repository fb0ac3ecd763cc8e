"""Takes packed rows, gives the prepared folder and, from it, batches of TokenRows in a resumable order; knows no tokenizer.

The folder holds `rows.parquet` (columns input_ids, document_ids: list<int32>; loss_mask: list<bool>; one entry a row) and
`rows.json` (what the rows are, what was dropped and why, the cache key, the checksum of `rows.parquet`). `dropped.jsonl` names
each dropped record and why.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from outrider.data.info import ROWS_FILE, read_info
from outrider.data.packing import PackedRow
from outrider.errors import UserError
from outrider.files import sha256_file
from outrider.records import PADDING_DOCUMENT, TokenRows

GROUP_TOKENS = 1 << 18  # tokens decoded together: about 2 ms, 2.4 MB in memory
GROUPS_KEPT = 16
SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("document_ids", pa.list_(pa.int32())),
                    ("loss_mask", pa.list_(pa.bool_()))])


def write_rows_file(path: Path, rows: Iterable[PackedRow], *, row_length: int) -> None:
    """Write `rows.parquet`, a group of rows at a time."""
    group_rows = max(1, GROUP_TOKENS // row_length)
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        group: list[PackedRow] = []
        for row in rows:
            group.append(row)
            if len(group) == group_rows:
                writer.write_table(_table(group))
                group = []
        if group:
            writer.write_table(_table(group))


def _table(group: Sequence[PackedRow]) -> pa.Table:
    columns = [pa.array([getattr(row, name) for row in group], type=SCHEMA.field(name).type) for name in SCHEMA.names]
    return pa.table(columns, schema=SCHEMA)


def as_ranges(present: npt.NDArray[np.bool_]) -> str:
    """The token ids that are True, as "0-5,7,9-12": short whatever the vocabulary."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], present, [False])).astype(np.int8)))
    return ",".join(f"{first}" if first == end - 1 else f"{first}-{end - 1}" for first, end in edges.reshape(-1, 2).tolist())


def in_ranges(ranges: str, token_id: int) -> bool:
    """Is `token_id` in a text written by `as_ranges`?"""
    bounds = (part.partition("-") for part in ranges.split(",") if part)
    return any(int(first) <= token_id <= int(last or first) for first, _, last in bounds)


def check_rows_file(folder: Path, info: dict[str, Any]) -> None:
    """Raises UserError unless `rows.parquet` is byte for byte what prepare wrote."""
    path = folder / ROWS_FILE
    if not path.is_file():
        raise UserError(f"{path}: the prepared rows are missing: prepare them again")
    if sha256_file(path) != info["rows_sha256"]:
        raise UserError(f"{path}: is not the file that prepare wrote (its checksum differs, it was cut or changed): prepare the "
                        "rows again")


def load_rows(folder: Path) -> "PreparedRows":
    """Open a prepared folder after checking its checksum; rows are decoded as they are asked for. Raises UserError."""
    info = read_info(folder)
    check_rows_file(folder, info)
    return PreparedRows(folder, info)


class RowError(UserError):
    """A prepared row that cannot be used although its file was whole at the start. `row`: its number."""

    def __init__(self, where: str, sentence: str, *, row: int) -> None:
        super().__init__(f"{where}: {sentence}")
        self.row = row


class PreparedRows:
    """Rows on disk, by number; holds a few decoded groups in memory (about 40 MB), never the whole data.

    `num_rows`, `row_length` (S), `vocab_size`, `tokenizer_digest`, `key` (of everything the rows came from), `audit` (what was
    kept and dropped, as `prepare` gives it).
    """

    def __init__(self, folder: Path, info: dict[str, Any]) -> None:
        self.folder = folder
        self.num_rows: int = info["num_rows"]
        self.row_length: int = info["row_length"]
        self.vocab_size: int = info["vocab_size"]
        self.tokenizer_digest: str = info["tokenizer_digest"]
        self.key: str = info["key"]
        self.audit: dict[str, Any] = info["audit"]
        self._token_ids: str = info["token_ids"]
        self._file = pq.ParquetFile(folder / ROWS_FILE)
        self._group_rows: int = self._file.metadata.row_group(0).num_rows  # as written; only the last group is shorter
        assert self._file.metadata.num_rows == self.num_rows, "the checksum holds, so the count must"
        self._groups: dict[int, list[npt.NDArray[Any]]] = {}
        self._orders: dict[tuple[int, int], list[int]] = {}

    def __len__(self) -> int:
        return self.num_rows

    def contains_token(self, token_id: int) -> bool:
        """Does the token occur in any document? (A mask token must not.)"""
        return in_ranges(self._token_ids, token_id)

    def row_order(self, seed: int, epoch: int) -> list[int]:
        """All row numbers in an order of their own for each (seed, epoch): to resume, (epoch, position) is enough.

        Sorts the raw output of a Philox generator keyed by (seed, epoch), which no version of numpy changes.
        """
        if (seed, epoch) not in self._orders:
            key = np.array([seed % 2**64, epoch % 2**64], dtype=np.uint64)
            order = np.argsort(np.random.Philox(key=key).random_raw(self.num_rows), kind="stable").tolist()
            newest = list(self._orders.items())[-1:]  # a micro-batch may stand across two epochs
            self._orders = {**dict(newest), (seed, epoch): order}
        return self._orders[seed, epoch]

    def batch(self, row_ids: list[int]) -> TokenRows:
        """The rows of these numbers as TokenRows [B, S] on the CPU. Raises RowError."""
        rows = [self._row(row) for row in row_ids]
        ids, documents, mask = (np.stack([row[column] for row in rows]) for column in range(3))
        return TokenRows(
            input_ids_BS=torch.from_numpy(ids.astype(np.int64)),
            document_ids_BS=torch.from_numpy(documents.astype(np.int64)),
            positions_BS=torch.from_numpy(positions_in_documents(documents)),
            loss_mask_BS=torch.from_numpy(mask.astype(np.bool_)),
            row_ids_B=torch.tensor(row_ids, dtype=torch.int64),
        )

    def empty(self, row: int) -> TokenRows:
        """A row of padding in place of row number `row`, B = 1: it has no anchor and weighs nothing."""
        shape = (1, self.row_length)
        return TokenRows(
            input_ids_BS=torch.zeros(shape, dtype=torch.int64), document_ids_BS=torch.full(shape, PADDING_DOCUMENT),
            positions_BS=torch.zeros(shape, dtype=torch.int64), loss_mask_BS=torch.zeros(shape, dtype=torch.bool),
            row_ids_B=torch.tensor([row]),
        )

    def _row(self, row: int) -> tuple[npt.NDArray[Any], ...]:
        assert 0 <= row < self.num_rows, f"row {row} of {self.num_rows}"
        number, place = divmod(row, self._group_rows)
        if number not in self._groups:
            self._groups[number] = self._read_group(number, row)
            if len(self._groups) > GROUPS_KEPT:
                del self._groups[next(iter(self._groups))]  # the oldest: a shuffled order asks for none sooner than another
        columns = tuple(column[place] for column in self._groups[number])
        if columns[0].min() < 0 or columns[0].max() >= self.vocab_size:  # on a GPU it would end the process
            raise RowError(self._where(row), f"holds a token outside 0..{self.vocab_size - 1}: prepare the rows again", row=row)
        return columns

    def _read_group(self, number: int, row: int) -> list[npt.NDArray[Any]]:
        try:
            table = self._file.read_row_group(number, columns=SCHEMA.names)
            return [table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(-1, self.row_length)
                    for name in SCHEMA.names]
        except (pa.ArrowException, OSError, ValueError) as error:
            raise RowError(self._where(row), f"cannot be read any more ({' '.join(str(error).split())}): the file was whole at "
                           "the start, look at its disk and prepare the rows again", row=row) from error

    def _where(self, row: int) -> str:
        return f"{self.folder / ROWS_FILE}:row {row + 1}"


def positions_in_documents(document_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """`[B, S]` document ids to `[B, S]` positions within the document, int64; 0 on padding."""
    index = np.broadcast_to(np.arange(document_ids.shape[1], dtype=np.int64), document_ids.shape)
    starts = np.ones(document_ids.shape, dtype=np.bool_)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    return np.where(document_ids == PADDING_DOCUMENT, 0, positions)
