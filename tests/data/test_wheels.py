"""Wheels: checked, kept, and a download that broke off goes on from its length. The index is a small server here."""

import hashlib
import http.server
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.data.wheels import Wheel, fetch_wheel
from outrider.errors import UserError

BODY = bytes(range(256)) * 12_000  # 3 MB
WHEEL = Wheel("some-package", "1.2", hashlib.sha256(BODY).hexdigest(), "a thing")


class Index(http.server.BaseHTTPRequestHandler):
    """A simple package index that resumes and, while `cuts` lasts, breaks each answer off after 1 MB."""

    cuts = 0
    ranges: list[str | None]

    def do_GET(self) -> None:
        if self.path.endswith(f"/{WHEEL.package}/"):
            page = f'<a href="../files/{WHEEL.file}#sha256=x">{WHEEL.file}</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)
            return
        wanted = self.headers.get("Range")
        type(self).ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(BODY) - start))
        self.end_headers()
        stop = len(BODY)
        if type(self).cuts:
            type(self).cuts -= 1
            stop = start + 2**20
        self.wfile.write(BODY[start:stop])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Index]]:
    Index.cuts, Index.ranges = 0, []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    yield Index
    server.shutdown()
    thread.join()
    server.server_close()


def test_fetched_once_then_kept(index: type[Index], tmp_path: Path) -> None:
    wheel = fetch_wheel(tmp_path, WHEEL)
    assert wheel.read_bytes() == BODY
    assert fetch_wheel(tmp_path, WHEEL) == wheel
    assert index.ranges == [None]


def test_a_broken_download_goes_on(index: type[Index], tmp_path: Path) -> None:
    index.cuts = 2
    assert fetch_wheel(tmp_path, WHEEL).read_bytes() == BODY
    assert index.ranges == [None, f"bytes={2**20}-", f"bytes={2 * 2**20}-"]


def test_a_later_call_goes_on_too(index: type[Index], tmp_path: Path) -> None:
    (tmp_path / f"{WHEEL.file}.partial").write_bytes(BODY[:1000])
    assert fetch_wheel(tmp_path, WHEEL).read_bytes() == BODY
    assert index.ranges == ["bytes=1000-"]


def test_wrong_bytes_are_refused(index: type[Index], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="SHA-256"):
        fetch_wheel(tmp_path, replace(WHEEL, sha256="0" * 64))
    assert not list(tmp_path.iterdir())


def test_a_damaged_wheel_is_set_aside(index: type[Index], tmp_path: Path) -> None:
    (tmp_path / WHEEL.file).write_bytes(b"cut")
    assert fetch_wheel(tmp_path, WHEEL).read_bytes() == BODY
    assert (tmp_path / f"{WHEEL.file}.damaged").read_bytes() == b"cut"


def test_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(UserError, match="by hand"):
        fetch_wheel(tmp_path, WHEEL)


def test_a_password_of_the_index_is_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:s3cret@127.0.0.1:9/simple")
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9/simple") as refused:
        fetch_wheel(tmp_path, WHEEL)
    assert "s3cret" not in str(refused.value)
    assert not list(tmp_path.iterdir()), "nor does a lock stay behind"
