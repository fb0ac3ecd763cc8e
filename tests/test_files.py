"""Writes are whole or absent, whatever operation fails; disk errors read as one sentence."""

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import count_file_operations, fail_at

from outrider import files
from outrider.errors import UserError
from outrider.files import (
    atomic_folder,
    digest,
    explain_os_errors,
    only_writer,
    read_json,
    set_aside,
    sha256_file,
    write_atomic,
    write_json,
)


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def write_folder(folder: Path, text: str) -> None:
    with atomic_folder(folder) as temporary:
        (temporary / "a").write_text(text)
        (temporary / "sub").mkdir()
        (temporary / "sub" / "b").write_text(text)


def test_folder_is_replaced_whole_and_nothing_is_left(tmp_path: Path) -> None:
    write_folder(tmp_path / "out", "1")
    (tmp_path / "out" / "stale").write_text("x")
    write_folder(tmp_path / "out", "2")
    assert contents(tmp_path) == {"out/a": "2", "out/sub/b": "2"}


def test_body_error_leaves_the_old_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "out", "1")

    def write_half() -> None:
        with atomic_folder(tmp_path / "out") as temporary:
            (temporary / "a").write_text("2")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_half()
    assert contents(tmp_path) == {"out/a": "1", "out/sub/b": "1"}


@pytest.mark.parametrize("swap", ["exchange", "two renames"])
def test_folder_with_a_full_disk_at_every_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap: str) -> None:
    """Either the whole old folder or the whole new one is there, and a failure is one sentence."""
    if swap == "two renames":
        no_exchange(monkeypatch)
    operations = count_file_operations(lambda: write_folder(tmp_path / "counted", "1"))
    assert operations > 8
    for number in range(operations + 6):
        base = tmp_path / str(number)
        write_folder(base / "out", "old")
        sentence = user_error_of(lambda n=number, base=base: fail_at(n, lambda: write_folder(base / "out", "new")))
        assert sentence is None or "the disk is full: free some space" in sentence
        found = contents(base / "out")
        assert found in ({"a": "old", "sub/b": "old"}, {"a": "new", "sub/b": "new"})
        assert sentence or found["a"] == "new", "a quiet failure"


def user_error_of(work: Callable[[], object]) -> str | None:
    try:
        work()
    except UserError as error:
        return str(error)
    return None


def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that cannot swap two folders in one step."""
    class Libc:
        def renameat2(self, *args: object) -> int:
            return -1

    monkeypatch.setattr(files.ctypes, "CDLL", lambda *args, **kwargs: Libc())
    monkeypatch.setattr(files.ctypes, "get_errno", lambda: errno.EINVAL)


def test_file_with_a_full_disk_at_every_operation(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    operations = count_file_operations(lambda: write_json(path, {"v": 0}))
    for number in range(operations):
        sentence = user_error_of(lambda n=number: fail_at(n, lambda: write_json(path, {"v": n + 1})))
        assert sentence is None or sentence.startswith(f"cannot write {path}: the disk is full")
        assert read_json(path, what="x")["v"] in (0, *range(1, number + 2))
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"], "no temporary file is left"


def test_every_file_is_flushed_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power cut leaves a renamed file without its bytes."""
    order: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        order.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink()}")
        real_fsync(descriptor)

    def rename(self: Path, to: Path) -> Path:
        order.append("rename")
        return real_rename(self, to)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    write_folder(tmp_path / "out", "1")
    before, after = order[: order.index("rename")], order[order.index("rename"):]
    assert [entry.split("/")[-1] for entry in before[:3]] == ["a", "sub", "b"]
    assert len(before) == 4
    assert after == ["rename", f"sync {tmp_path}"]
    order.clear()
    write_atomic(tmp_path / "f", lambda temporary: temporary.write_text("x"))
    assert order[0].startswith(f"sync {tmp_path}/.f.")
    assert order[1:] == ["rename", f"sync {tmp_path}"]


@pytest.mark.parametrize(("code", "sentence"), [
    (errno.ENOSPC, "the disk is full"), (errno.EROFS, "read-only"), (errno.EACCES, "permission is denied"),
    (errno.EDQUOT, "quota"), (errno.ENOTDIR, "is a file, not a folder"), (errno.EFBIG, "larger than"),
    (errno.EIO, "input/output error"),
])
def test_disk_errors_are_one_sentence(code: int, sentence: str) -> None:
    with pytest.raises(UserError, match=rf"^cannot write some/place: .*{sentence}"), explain_os_errors(Path("some/place")):
        raise OSError(code, os.strerror(code))

    class RustError(Exception):
        """As safetensors raises it: not an OSError."""

    with pytest.raises(UserError, match=sentence), explain_os_errors(Path("some/place")):
        raise RustError(f"Error while serializing: I/O error: some words (os error {code})")


def test_other_errors_pass_through() -> None:
    for error in (OSError(errno.ENOTEMPTY, "not empty"), ValueError("x"), UserError("said already (os error 28)")):
        with pytest.raises(type(error)) as raised, explain_os_errors(Path("p")):
            raise error
        assert raised.value is error


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"cannot write .*a file is in the way of a folder"):
        write_json(tmp_path / "file" / "x.json", 1)


def test_read_json_says_what_is_wrong(tmp_path: Path) -> None:
    for name, data, sentence in (("a", b"{", "the list is not valid JSON"), ("b", b"\xff", "is not valid JSON"),
                                 ("c", b"[" * 100_000, "is not valid JSON"), ("d", b"9" * 5_000, "is not valid JSON")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=sentence):
            read_json(tmp_path / name, what="the list")
    with pytest.raises(UserError, match="the list is missing"):
        read_json(tmp_path / "none", what="the list")
    with pytest.raises(UserError, match="the list cannot be read"):
        read_json(tmp_path, what="the list")


def test_digests(tmp_path: Path) -> None:
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1}) != digest({"a": 1, "b": [3]})
    (tmp_path / "f").write_bytes(b"abc")
    assert sha256_file(tmp_path / "f") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    """flock belongs to the open file, so a second holder in this process is refused as one in another process is."""
    with (
        only_writer(tmp_path / "answers.jsonl"),
        pytest.raises(UserError, match=r"answers.jsonl: another process is writing there"),
        only_writer(tmp_path / "answers.jsonl"),
    ):
        pass
    with only_writer(tmp_path / "answers.jsonl"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_writer_that_waits_comes_after(tmp_path: Path) -> None:
    """Two of a cache's users at once: the second waits, then sees what the first made."""
    order: list[str] = []

    def second() -> None:
        with only_writer(tmp_path / "cache", wait=True):
            order.append("second")

    thread = threading.Thread(target=second)
    with only_writer(tmp_path / "cache", wait=True):
        thread.start()
        time.sleep(0.2)
        order.append("first")
    thread.join(timeout=10)
    assert order == ["first", "second"]
    assert not list(tmp_path.iterdir())


def test_set_aside_never_overwrites(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        (tmp_path / "x.json").write_text("bad")
        names.append(set_aside(tmp_path / "x.json").name)
    assert names == ["x.json.damaged", "x.json.damaged-2", "x.json.damaged-3"]


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with atomic_folder(tmp_path / "link") as temporary:
        (temporary / "a").write_text("new", encoding="utf-8")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "a").read_text(encoding="utf-8") == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_files_of_an_atomic_folder_can_be_read_by_others(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "out") as temporary:
        (temporary / "a").touch(mode=0o600)
    assert (tmp_path / "out" / "a").stat().st_mode & 0o777 == 0o644


def test_a_full_disk_below_names_the_folder_that_was_asked_for(tmp_path: Path) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(UserError, match=r"disk is full") as refused, atomic_folder(tmp_path / "rows") as temporary:
        write_atomic(temporary / "rows.json", full)
    assert f"{tmp_path}/rows/rows.json" in str(refused.value)


def test_new_folders_are_flushed_into_those_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut leaves of a checkpoint in a folder whose own name was never flushed is nothing."""
    flushed: list[Path] = []
    real = files.sync_folder

    def sync(folder: Path) -> None:
        flushed.append(folder)
        real(folder)

    monkeypatch.setattr(files, "sync_folder", sync)
    write_atomic(tmp_path / "run" / "deep" / "file", lambda path: path.write_text("x"))
    assert flushed == [tmp_path, tmp_path / "run", tmp_path / "run" / "deep"]
    flushed.clear()
    with atomic_folder(tmp_path / "run" / "checkpoints" / "one") as folder:
        (folder / "file").write_text("x")
    assert (flushed[0], flushed[-1]) == (tmp_path / "run", tmp_path / "run" / "checkpoints")


@pytest.mark.parametrize(("code", "passes"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)])
def test_a_file_system_that_cannot_flush_a_folder_is_no_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, *, passes: bool
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with contextlib.nullcontext() if passes else pytest.raises(UserError, match="the disk reports an error"):
        write_atomic(tmp_path / "file", lambda path: path.write_text("x"))
        with atomic_folder(tmp_path / "folder") as folder:
            (folder / "file").write_text("x")
    assert (tmp_path / "folder" / "file").exists() == passes


def test_a_file_system_without_locks_is_said_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(handle: object, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))  # Lustre, mounted without -o flock

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with only_writer(tmp_path / "run"):
        pass
    assert f"{tmp_path / 'run'}: its file system has no locks" in capsys.readouterr().err


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe, heard = tmp_path / "pipe.json", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: heard.append(pipe.read_text()), daemon=True)
    reader.start()
    files.check_out_file(pipe, "--out", endings=(".json",))
    write_json(pipe, {"a": 1})
    reader.join(timeout=20)
    assert heard == ['{\n  "a": 1\n}\n']
    assert stat.S_ISFIFO(pipe.stat().st_mode)
