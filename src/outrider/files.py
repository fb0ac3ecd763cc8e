"""Takes paths and bytes, gives writes that are whole or absent and digests; knows nothing of what the bytes mean."""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from outrider.errors import UserError
from outrider.progress import say

CANNOT = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # how a file system says that it has no such operation


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def digest(value: Any) -> str:
    """Hex SHA-256 of a JSON-able value; equal values give equal digests whatever the order of their keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def check_name(name: str, *, where: str) -> None:
    """Raise UserError unless `name`, read from the file `where`, stays below that file's folder: it comes from outside."""
    if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise UserError(f"{where}: names the file {name!r}, which is not in its own folder: it may be made to reach other files, "
                        "fetch it again from who made it")


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries (created, renamed) to the disk, where its file system can: SMB and some FUSE cannot."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CANNOT:
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, each flushed: what is written in it later must not lose its path."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


@contextlib.contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, a read-only folder or a missing permission under `path` into one sentence (UserError).

    Also when it comes from a library in Rust (safetensors), whose errors are no OSError but carry the number in their text.
    """
    ways_out = {
        errno.ENOSPC: "the disk is full: free some space or choose a folder on another disk",
        errno.EFBIG: "the file is larger than the file system or a limit (ulimit -f) allows: choose a folder on another disk",
        errno.EDQUOT: "the disk quota is used up: free some space or choose a folder on another disk",
        errno.EROFS: "it is on a read-only file system: choose a folder that can be written",
        errno.EACCES: "permission is denied: choose a folder that you may write",
        errno.EPERM: "permission is denied: choose a folder that you may write",
        errno.ENOTDIR: "a part of this path is a file, not a folder: choose another path",
        errno.EEXIST: "a file is in the way of a folder: choose another path",
        errno.EISDIR: "it is a folder, not a file: choose another path",
        errno.EBUSY: "it is in use as a mount point: choose a folder inside it",
        errno.EIO: "the disk reports an error (input/output error): look at the disk, or choose a folder on another one",
        errno.ESTALE: "its network disk has changed underneath (stale file handle): mount it again",
        errno.EMFILE: "this process has too many files open: raise the limit (ulimit -n)",
        errno.ENAMETOOLONG: "the name is too long: choose a shorter one",
        errno.ENOENT: "a folder on the way to it cannot be made, or has gone: choose another path",
        errno.ELOOP: "its symbolic links go round in a circle: choose another path",
    }
    try:
        yield
    except Exception as error:
        number = _os_error_number(error)
        if number not in ways_out:
            raise
        raise UserError(f"cannot write {path}: {ways_out[number]}") from error


def _os_error_number(error: Exception) -> int:
    """The errno that an error stands for; 0 when it stands for none."""
    if isinstance(error, OSError):
        return error.errno or 0
    in_text = re.search(r"\(os error (\d+)\)", str(error))
    return int(in_text.group(1)) if in_text and not isinstance(error, UserError) else 0


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder beside `folder`; when the body ends well, fsync every file and rename it into place.

    An existing `folder` is replaced only then, a symbolic link to one is followed. When the body fails, or the process is
    killed, `folder` is as it was.
    """
    folder = folder.resolve()
    with explain_os_errors(folder):
        make_folder(folder.parent)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
        try:
            temporary.chmod(0o755)
            yield temporary
            for file in sorted(temporary.rglob("*")):
                if file.is_file():
                    file.chmod(0o644)  # some libraries make files that no server of another user could read
                    with file.open("rb+") as handle:
                        os.fsync(handle.fileno())
                else:
                    sync_folder(file)
            sync_folder(temporary)
            if folder.exists():
                _exchange(temporary, folder)
            else:
                temporary.rename(folder)
            sync_folder(folder.parent)
        except UserError as error:  # a file below explained itself by a path that will be gone
            raise UserError(str(error).replace(str(temporary), str(folder))) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def only_writer(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold `path` (a file or folder to be written) against other processes, by a hidden lock file beside it.

    When another process holds it: with `wait` until it ends, else raises UserError. The lock ends with the process, however
    that ends.
    """
    path = path.resolve()
    lock = path.with_name(f".{path.name}.lock")
    while (handle := _lock(lock, path, wait=wait)) is None:
        if not wait:
            raise UserError(f"{path}: another process is writing there: wait for it, stop it, or choose another place")
    with handle:
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)  # while it is still held


def _lock(lock: Path, path: Path, *, wait: bool) -> IO[str] | None:
    """The open lock file, held; None when another process holds it, or held it until just now and removed it."""
    with explain_os_errors(path):
        make_folder(lock.parent)
        handle = lock.open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        handle.close()
        return None
    except OSError as error:
        if error.errno not in (*CANNOT, errno.ENOLCK):
            raise
        say(f"{path}: its file system has no locks (Lustre: mount it with -o flock): see to it that nothing else writes there")
        return handle
    if lock.exists() and lock.stat().st_ino == os.fstat(handle.fileno()).st_ino:
        return handle
    handle.close()
    return None


def set_aside(path: Path) -> Path:
    """Rename something damaged to `<name>.damaged` (`.damaged-2` where there is one already), so that it can be made again."""
    names = (f"{path.name}.damaged{f'-{number}' if number > 1 else ''}" for number in itertools.count(1))
    place = next(place for place in map(path.with_name, names) if not place.exists())
    path.rename(place)
    return place


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders in one step (renameat2 of Linux), so that no moment is without a whole `old`.

    A file system that cannot swap (NFS) gets two renames, undone if the second fails; a kill between them leaves both folders
    beside each other under their temporary names.
    """
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(here, os.fsencode(new), here, os.fsencode(old), exchange) == 0:
        return
    if ctypes.get_errno() not in CANNOT:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(old))
    retired = new.with_suffix(".retired")
    old.rename(retired)
    try:
        new.rename(old)
    except OSError:
        retired.rename(old)
        raise
    shutil.rmtree(retired)


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` on a temporary path beside `path`, fsync what it wrote, and rename it to `path`.

    What takes bytes but is no file (a pipe, /dev/stdout) is written to instead: a rename would put a file in its place.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        with explain_os_errors(path), tempfile.TemporaryDirectory() as folder:
            write(Path(folder) / path.name)
            path.write_bytes((Path(folder) / path.name).read_bytes())
        return
    with explain_os_errors(path):
        make_folder(path.parent)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
        os.close(descriptor)
        temporary = Path(name)
        try:
            temporary.chmod(0o644)
            write(temporary)
            with temporary.open("rb+") as handle:
                os.fsync(handle.fileno())
            temporary.rename(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def check_out_file(path: Path, option: str, *, endings: Sequence[str] = ()) -> None:
    """Raises UserError when the file that a user named with `option` could not be written. For before the work; leaves no trace.

    Its folder must exist: a missing one is more often a slip of the hand than a wish. (Folders that a user names are made.)
    """
    if endings and path.suffix not in endings:
        raise UserError(f"{option} {path}: must end in {', '.join(endings[:-1])}{' or ' if endings[:-1] else ''}{endings[-1]}")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: the folder {path.parent} does not exist: create it, or check the path")
    with explain_os_errors(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if path.exists() and not path.is_file():
            return  # a pipe or a device takes bytes, and nothing is made beside it
        with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", suffix=".partial", dir=path.parent):
            pass


def write_json(path: Path, value: Any) -> None:
    """Write a JSON document atomically, indented, with a final newline."""
    write_atomic(path, lambda temporary: temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8"))


def read_json(path: Path, *, what: str, way_out: str = "restore the file or make it again") -> Any:
    """Read a JSON document; `what` names it in the error ("the drafter's config"), `way_out` ends that of a damaged one.

    Raises UserError.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: {what} is missing: check the path") from error
    except OSError as error:
        raise UserError(f"{path}: {what} cannot be read ({error.strerror}): check the path and its permissions") from error
    except (ValueError, RecursionError) as error:  # no text, no JSON, numbers or nesting that Python does not read
        raise UserError(f"{path}: {what} is not valid JSON ({error}): {way_out}") from error
