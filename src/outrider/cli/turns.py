"""Takes what was typed, gives a prompt or the turns of a chat; knows nothing of who answers."""

import sys
from collections.abc import Iterator

from outrider.errors import UserError


def turns(first: str | None) -> Iterator[str]:
    """The turns of a chat: `first`, then each line of stdin that is not blank."""
    if first is not None:
        yield first
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield as_text(line.strip())


def as_text(given: str) -> str:
    """`given` itself. Raises UserError where it is not UTF-8."""
    if any(0xD800 <= ord(letter) <= 0xDFFF for letter in given):  # how Python holds bytes that were not text
        raise UserError("prompt: is not UTF-8 text: give it in UTF-8")
    return given
