"""Takes the address of an HTTP server and what to ask it, gives its answer; knows nothing of what is asked."""

import base64
import html
import http.client
import json
import netrc
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.errors import UserError

MARKUP = re.compile(r"(?is)<!--.*?-->|<(script|style)\b.*?</\1>|<[^>]*>")


class Unreachable(UserError):  # noqa: N818 - a state that may pass
    """No connection, one that broke off, or a server that says it cannot now (429, 5xx): asking again may help."""


def call(url: str, body: Mapping[str, Any] | None, *, timeout_s: float) -> str:
    """What the server answers to a POST of `body` as JSON, or to a GET. Raises UserError naming the address and the fault."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    if login := _login(urllib.parse.urlsplit(url).hostname):
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return str(answer.read().decode("utf-8"))
    except urllib.error.HTTPError as error:
        said = error.read().decode("utf-8", errors="replace").strip()
        kind = Unreachable if error.code == 429 or error.code >= 500 else UserError
        if said.startswith("<"):
            raise kind(f"{url}: refused with status {error.code} and {_page(said)}") from error
        said = " ".join(said[:300].split()) or error.reason
        raise kind(f"{url}: the server refused with status {error.code}: {said}") from error
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{url}: the server cannot be reached or broke off ({error}): check the address") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{url}: the server's answer is not text ({error}): check the address") from error


def _page(text: str) -> str:
    """What a web page in place of an answer says first, and what to make of it."""
    lines = (line.strip() for line in html.unescape(MARKUP.sub("\n", text)).splitlines())
    return (f"a web page ({next(filter(None, lines), '')[:80]!r}): no inference server answers there, or a proxy does for it: "
            "check host and port")


def _login(host: str | None) -> str | None:
    """`user:password` for the host from $NETRC or ~/.netrc, as curl reads it; None where it names none. Raises UserError."""
    place = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        found = netrc.netrc(str(place)).authenticators(host or "")
    except FileNotFoundError:
        return None
    except netrc.NetrcParseError as error:  # its words may hold a password
        raise UserError(f"{place}:{error.lineno}: cannot be understood: correct the file") from None
    except OSError as error:
        raise UserError(f"{place}: cannot be read ({error.strerror}): correct its permissions") from error
    return f"{found[0]}:{found[2] or ''}" if found else None


def call_json(url: str, body: Mapping[str, Any] | None, *, timeout_s: float) -> Any:
    """As `call`, parsed."""
    text = call(url, body, timeout_s=timeout_s).strip()
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if text.startswith("<"):
            raise UserError(f"{url}: answered with {_page(text)}") from error
        raise UserError(f"{url}: the server's answer is not JSON ({text[:80]!r}): check the address and which engine serves "
                        "there") from error
