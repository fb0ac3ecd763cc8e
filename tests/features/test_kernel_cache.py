"""The cache of compiled kernels: damage is removed by name, a network mount and a folder that cannot be written are refused."""

import errno
import os
import tempfile
from pathlib import Path

import pytest

from outrider.errors import UserError
from outrider.features import guards
from outrider.features.guards import file_system_of, open_kernel_cache


def entry(cache: Path, name: str, content: str | bytes) -> Path:
    folder = cache / "triton" / name
    folder.mkdir(parents=True)
    (folder / f"{name}.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / f"{name}.cubin").write_bytes(b"kernel")
    return folder


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What opening a cache sets is taken back."""
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("caches")
def test_damaged_entries_are_removed_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sound = entry(tmp_path, "sound", '{"child_paths": {}}')
    damaged = [entry(tmp_path, "cut", '{"child_pa'), entry(tmp_path, "empty", ""), entry(tmp_path, "binary", b"\xff\x00")]
    place = open_kernel_cache(tmp_path)
    assert place == tmp_path / "triton"
    assert sorted(place.iterdir()) == [sound]
    said = capsys.readouterr().err
    for folder in damaged:
        assert f"kernel cache: {folder} was damaged and is removed" in said
    assert os.environ["TRITON_CACHE_DIR"] == str(place)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")


@pytest.mark.usefixtures("caches")
def test_a_network_mount_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    shared = tmp_path / "sha red"
    mounts.write_text(f"overlay / overlay rw 0 0\nnas:/x {str(shared).replace(' ', chr(92) + '040')} nfs4 rw 0 0\n")
    monkeypatch.setattr(guards, "MOUNTS", mounts)
    with pytest.raises(UserError, match=r"lies on a network mount \(nfs4\).*name a folder on a local disk"):
        open_kernel_cache(shared / "me")
    assert not shared.exists(), "nothing is made there"
    assert file_system_of(tmp_path / "elsewhere") == "overlay"
    mounts.write_text(f"nas:/x {tmp_path}/a nfs rw 0 0\n/dev/sda1 {tmp_path}/a ext4 rw 0 0\n")
    assert file_system_of(tmp_path / "a" / "b") == "ext4", "the later mount on one point hides the earlier"


@pytest.mark.usefixtures("caches")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError, match="file"):
        open_kernel_cache(file)

    def read_only(dir: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    with pytest.raises(UserError, match=r"(?i)read-only"):
        open_kernel_cache(tmp_path / "cache")


@pytest.mark.usefixtures("caches")
def test_a_folder_that_others_can_write_into_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    place = open_kernel_cache(None)
    own = place.parent
    assert own.stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("TRITON_CACHE_DIR")
    own.chmod(0o777)
    with pytest.raises(UserError, match="others may write into it"):
        open_kernel_cache(None)
    own.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o700)
    own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="another user's"):
        open_kernel_cache(None)
