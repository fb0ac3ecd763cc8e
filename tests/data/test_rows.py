"""The prepared folder gives back what was written, refuses what was changed, and orders rows by (seed, epoch) alone."""

import errno
import json

import numpy as np
import pytest
import torch

from outrider.data import rows as rows_room
from outrider.data.packing import PackedRow
from outrider.data.rows import RowError, as_ranges, in_ranges, load_rows, positions_in_documents, write_rows_file
from outrider.errors import UserError
from outrider.files import explain_os_errors, sha256_file
from outrider.records import TokenRows

S = 8


def some_rows(count):
    draw = np.random.default_rng(0)
    return [PackedRow(draw.integers(0, 50, S, dtype=np.int32), np.sort(draw.integers(0, 3, S)).astype(np.int32),
                      draw.random(S) < 0.5) for _ in range(count)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_room, "GROUP_TOKENS", 3 * S)  # three rows a group, so that 10 rows span several
    monkeypatch.setattr(rows_room, "GROUPS_KEPT", 2)
    place = tmp_path / "rows"
    place.mkdir()
    write_rows_file(place / "rows.parquet", some_rows(10), row_length=S)
    info = {"format": 1, "key": "k", "rows_sha256": sha256_file(place / "rows.parquet"), "num_rows": 10, "row_length": S,
            "vocab_size": 50, "tokenizer_digest": "t", "token_ids": "0-3,7", "audit": {"rows": 10}}
    (place / "rows.json").write_text(json.dumps(info))
    return place


def test_batches_give_back_the_rows(folder):
    prepared, written = load_rows(folder), some_rows(10)
    assert (len(prepared), prepared.row_length, prepared.vocab_size, prepared.key) == (10, S, 50, "k")
    assert prepared.audit == {"rows": 10}
    for ids in ([0], [9, 0, 4], [3, 3], list(range(10)), [2, 8, 5, 1]):
        batch = prepared.batch(ids)
        assert torch.equal(batch.row_ids_B, torch.tensor(ids))
        for place, row in enumerate(ids):
            assert batch.input_ids_BS[place].tolist() == written[row].input_ids.tolist()
            assert batch.document_ids_BS[place].tolist() == written[row].document_ids.tolist()
            assert batch.loss_mask_BS[place].tolist() == written[row].loss_mask.tolist()
        assert {batch.input_ids_BS.dtype, batch.document_ids_BS.dtype, batch.positions_BS.dtype} == {torch.int64}
        assert batch.loss_mask_BS.dtype == torch.bool
        assert len(prepared._groups) <= 2
    with pytest.raises(AssertionError):
        prepared.batch([10])


def test_positions_count_within_the_document():
    documents = np.array([[0, 0, 0, 1, 2, 2, -1, -1], [0] * 8, [-1] * 8, [0, 1, 2, 3, 4, 5, 6, 7]], dtype=np.int32)
    assert positions_in_documents(documents).tolist() == [[0, 1, 2, 0, 0, 1, 0, 0], list(range(8)), [0] * 8, [0] * 8]


def test_row_order_is_fresh_each_epoch_and_the_same_each_time(folder):
    prepared = load_rows(folder)
    orders = [prepared.row_order(seed, epoch) for seed in (0, 1, -1) for epoch in range(4)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 12
    assert prepared.row_order(1, 2) == load_rows(folder).row_order(1, 2)
    assert prepared.row_order(0, 0) == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]  # frozen: a resumed run on another machine must agree


def test_contains_token(folder):
    assert [token for token in range(-1, 12) if load_rows(folder).contains_token(token)] == [0, 1, 2, 3, 7]


@pytest.mark.parametrize("present", [[], [0], [49], [0, 1, 2, 48, 49], [3, 5, 7, 8], list(range(50))])
def test_ranges(present):
    mask = np.isin(np.arange(50), present)
    assert [token for token in range(-2, 60) if in_ranges(as_ranges(mask), token)] == present


def test_a_cut_or_changed_or_missing_file_is_one_sentence(folder):
    table = folder / "rows.parquet"
    whole = table.read_bytes()
    for damaged in (whole[:-1], whole[:len(whole) // 2], b"", whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]):
        table.write_bytes(damaged)
        with pytest.raises(UserError, match=r"rows\.parquet: is not the file that prepare wrote"):
            load_rows(folder)
    table.unlink()
    with pytest.raises(UserError, match=r"rows\.parquet: the prepared rows are missing"):
        load_rows(folder)


def test_a_broken_description_is_one_sentence(folder, tmp_path):
    for text, words in [('{"format": 1', "is not valid JSON"), ("[]", "was not written by this version"),
                        ('{"format": 1}', "was not written by this version")]:
        (folder / "rows.json").write_text(text)
        with pytest.raises(UserError, match=rf"rows\.json: .*{words}"):
            load_rows(folder)
    (folder / "rows.json").unlink()
    with pytest.raises(UserError, match=r"rows\.json: the description of the prepared rows is missing"):
        load_rows(folder)
    with pytest.raises(UserError, match="nowhere: there is no folder of prepared rows"):
        load_rows(tmp_path / "nowhere")


def test_a_full_disk_under_the_parquet_writer_keeps_its_error_number(tmp_path):
    full = tmp_path / "rows.parquet"
    full.symlink_to("/dev/full")  # every write there fails as on a full disk
    with pytest.raises(OSError) as caught:  # noqa: PT011 the number is the check
        write_rows_file(full, some_rows(10), row_length=S)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(UserError, match="the disk is full"), explain_os_errors(full):
        write_rows_file(full, some_rows(10), row_length=S)


def test_a_row_that_fails_later_is_named(folder, monkeypatch):
    """The checksum held at the start; then the disk fails, or a bit of the file turns."""
    prepared = load_rows(folder)
    with monkeypatch.context() as patch:
        patch.setattr(prepared._file, "read_row_group", raise_io_error)
        with pytest.raises(RowError, match=r"\.parquet:row 5: cannot be read any more \(\[Errno 5\] Input/output") as bad:
            prepared.batch([4])
        assert bad.value.row == 4
    assert len(prepared.batch([4]).row_ids_B) == 1, "nothing bad is kept"
    prepared._groups[1][0] = np.full((3, S), 50, dtype=np.int32)
    with pytest.raises(RowError, match=r"rows\.parquet:row 5: holds a token outside 0\.\.49"):
        prepared.batch([4])
    whole = (folder / "rows.parquet").read_bytes()
    later = load_rows(folder)
    (folder / "rows.parquet").write_bytes(bytes(len(whole)))  # the same file, its bytes gone
    with pytest.raises(RowError, match=r"row 1: cannot be read any more"):
        later.batch([0])


def raise_io_error(*args, **kwargs):
    raise OSError(errno.EIO, "Input/output error")


def test_an_empty_row_stands_for_a_lost_one(folder):
    prepared = load_rows(folder)
    joined = TokenRows.joined([prepared.batch([3]), prepared.empty(4)])
    assert torch.equal(joined.row_ids_B, torch.tensor([3, 4]))
    assert torch.equal(joined.input_ids_BS[0], prepared.batch([3]).input_ids_BS[0])
    assert (joined.document_ids_BS[1] == -1).all()
    assert not joined.loss_mask_BS[1].any()
    assert joined.positions_BS.dtype == torch.int64
