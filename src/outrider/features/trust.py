"""Takes the user's word for a target, gives whether Python code in its folder may run; runs none."""

from collections.abc import Mapping

from outrider.config import TargetConfig
from outrider.errors import UserError
from outrider.progress import say

_trusted: set[str] = set()  # paths of targets, in this process


def trust_code(path: str) -> None:
    """Let Python code in the target's folder (or hub repository) run from now on, in this process. Says so, once.

    Only for what a user asked for by name, in a run file or on the command line: never for what a file of a checkpoint or an
    export says, which may come from somebody else.
    """
    if path not in _trusted:
        say(f"trust_remote_code: Python code in {path} may run on this machine, as you asked")
    _trusted.add(path)


def trust_as_asked(target: TargetConfig) -> None:
    """`trust_code` where a run file says so."""
    if target.trust_remote_code:
        trust_code(target.path)


def is_trusted(path: str) -> bool:
    return path in _trusted


def code_of(path: str) -> Mapping[str, bool]:
    """What transformers is to be told of a target's own code; left unsaid it would ask on the terminal."""
    return {"trust_remote_code": is_trusted(path)}


def unusable(path: str, what: str, error: BaseException) -> UserError:
    """The refusal of a target in one sentence: that it needs its own code, where that is what stopped transformers."""
    if "trust_remote_code" in str(error) and not is_trusted(path):
        return UserError(f"target.path = {path!r}: needs Python code of its own to load, which would run on this machine: read "
                         "it, and if you trust it set target.trust_remote_code = true in the run file, or give "
                         "--trust-remote-code")
    return UserError(f"target.path = {path!r}: {what}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """What an error says, without the lines of advice below it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
