"""Takes the process that will run GPU kernels, makes it safe: autotuners, kernel caches; knows nothing of models or rows."""

import functools
import json
import os
import shutil
import stat
import tempfile
import threading
from pathlib import Path
from typing import Any

from outrider.errors import UserError
from outrider.files import explain_os_errors
from outrider.progress import say

LOCK = threading.RLock()  # one for all autotuners: they share kernels, and one run may start another
MARK = "_outrider_locked"
NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "9p", "afs", "glusterfs",
                        "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.juicefs", "fuse.s3fs", "fuse.gcsfuse"}
MOUNTS = Path("/proc/mounts")


def lock_autotuner() -> None:
    """Make Triton's autotuners take turns, for the whole process; to be called before flash-linear-attention is imported.

    `Autotuner.run` keeps its arguments on the object (`self.nargs`) and sets them to None at its end (Triton 3.6 to 3.9), so two
    threads in one autotuner crash ("'NoneType' object is not a mapping") or, worse, tune with each other's arguments. Without
    Triton there is nothing to lock.
    """
    try:
        from triton.runtime.autotuner import Autotuner  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return
    lock_runs(Autotuner)


def lock_runs(autotuner: type[Any]) -> None:
    """Put every `run` of this class and of its subclasses, those made later too, under LOCK."""
    for owner in [autotuner, *_subclasses(autotuner)]:
        _lock_own_run(owner)
    if MARK in autotuner.__dict__:
        return
    inherited = autotuner.__init_subclass__

    def init_subclass(cls: type[Any], **kwargs: Any) -> None:
        inherited(**kwargs)
        _lock_own_run(cls)

    setattr(autotuner, "__init_subclass__", classmethod(init_subclass))  # noqa: B010 - the type checker refuses the plain form
    setattr(autotuner, MARK, True)


def _subclasses(owner: type[Any]) -> list[type[Any]]:
    return [below for child in owner.__subclasses__() for below in [child, *_subclasses(child)]]


def _lock_own_run(owner: type[Any]) -> None:
    run = owner.__dict__.get("run")
    if run is None or hasattr(run, MARK):
        return

    @functools.wraps(run)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with LOCK:
            return run(*args, **kwargs)

    setattr(locked, MARK, True)
    owner.run = locked


def open_kernel_cache(folder: Path | None) -> Path:
    """Make `folder` this process's cache of compiled kernels (Triton's, Inductor's), and remove what is damaged in it.

    None: the folder that TRITON_CACHE_DIR names, else one of the user's own under the temporary folder. To be called before
    kernels are compiled. Raises UserError when the folder cannot be written or lies on a network mount, where Triton's files
    vanish or are busy.
    """
    place = kernel_cache_place(folder)
    kind = file_system_of(place)
    if kind in NETWORK_FILE_SYSTEMS:
        raise UserError(f"features.kernel_cache: {place} lies on a network mount ({kind}), where kernel caches break: name a "
                        "folder on a local disk")
    with explain_os_errors(place):
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        tempfile.TemporaryFile(dir=place).close()
    for entry in damaged_entries(place):
        shutil.rmtree(entry, ignore_errors=True)
        say(f"kernel cache: {entry} was damaged and is removed; its kernel is compiled again")
    os.environ["TRITON_CACHE_DIR"] = str(place)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(place.parent / "inductor"))
    return place


def wake_compilers() -> None:
    """Have torch's compiler start its worker processes now, on all cores, beside whatever comes before the first compilation.

    They take some seconds on a cold disk, and until they stand everything is compiled on this process's one thread. To be called
    after `open_kernel_cache`, whose folders they inherit.
    """
    from torch._inductor.async_compile import AsyncCompile  # late: it takes a second or two itself

    AsyncCompile.use_process_pool()  # asks whether they are ready, and thereby for them


def kernel_cache_place(folder: Path | None) -> Path:
    """Where `open_kernel_cache` has the cache for this `folder`."""
    named = os.environ.get("TRITON_CACHE_DIR")
    return folder / "triton" if folder is not None else Path(named) if named else _own_folder() / "triton"


def _own_folder() -> Path:
    """The user's folder under the temporary one. Raises UserError where others could put kernels, which are code, into it."""
    own = Path(tempfile.gettempdir()) / f"outrider-kernels-{os.getuid()}"
    with explain_os_errors(own):
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UserError(f"features.kernel_cache: {own} is another user's or others may write into it: remove it, or "
                        "name a folder")
    return own


def damaged_entries(cache: Path) -> list[Path]:
    """The entries (folders) of a Triton cache that hold a JSON file which cannot be read: each crashes its kernel for ever."""
    found = set()
    for file in cache.glob("*/*.json"):
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found.add(file.parent)
    return sorted(found)


def file_system_of(place: Path) -> str:
    """The type of the file system that a path (existing or not) lies on, from the table of mounts; "" where there is none."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    place = place.resolve()
    mounts = [(Path(parts[1].replace("\\040", " ")), parts[2]) for parts in (line.split() for line in lines) if len(parts) > 2]
    above = [(len(point.parts), number, kind) for number, (point, kind) in enumerate(mounts) if place.is_relative_to(point)]
    return max(above)[2] if above else ""  # the later of two mounts on one point hides the earlier
