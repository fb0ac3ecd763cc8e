"""Takes the text of a log, gives what it states of an out-of-memory: numbers, frames, who else was there; judges nothing."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import UserError

MOST_BYTES = 64 * 2**20  # the end of a longer log is read: what killed the run stands there
TRACE_LINES = 400  # looked back for the head of a traceback
SIZE = r"(\d+(?:\.\d+)?) ?(bytes|B|KiB|MiB|GiB|TiB|KB|MB|GB)"
UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
# What torch has written since 1.x, under its names of each time; the typo "capacty" is torch 2.0's and 2.1's
OUT_OF_MEMORY = re.compile(r"(?:CUDA|HIP|XPU|MPS backend) out of memory\b|has a total capaci?ty of " + SIZE + " of which")
NUMBERS = {
    "requested": (rf"Tried to allocate {SIZE}",),
    "capacity": (rf"total capaci?ty of {SIZE}", rf"{SIZE} total capacity"),
    "free": (rf"of which {SIZE} is free", rf"already allocated; {SIZE} free"),
    "mine": (rf"this process has {SIZE} memory in use",),
    "allowed": (rf"{SIZE} allowed;",),
    "allocated": (rf"allocated memory {SIZE} is allocated by PyTorch", rf"{SIZE} already allocated"),
    "pools": (rf"with {SIZE} allocated in private pools",),
    "unallocated": (rf"{SIZE} is reserved by PyTorch but unallocated",),
    "reserved": (rf"{SIZE} reserved in total by PyTorch",),
}
PROCESS = re.compile(rf"Process (\d+) has {SIZE} memory in use")
# A row of nvidia-smi's table of processes
LISTED = re.compile(r"\|\s+\d+\s+\S+\s+\S+\s+(\d+)\s+[CGM+]+\s+(\S.*?)\s+(\d+)MiB\s*\|")
# Python's own; a notebook's (`File x.py:12, in f(..)`, older `x.py in f(..)`); rich's, in a box (`x.py:12 in f`)
FRAME = re.compile(r'File "(?P<plain>[^"]+)", line \d+, in (?P<f>\S+)|(?P<other>[^\s"]+\.py)(?::\d+,?)? in (?P<g>[\w.<>]+)')
MARKED = re.compile(r"^(?:❱|-+>)\s*\d+\s*")  # the line of a frame's code that was running, where several are shown
BOX = re.compile(r"[│╭╮╰╯─]+")
FRAME_LINES = 12  # looked through for it
MESSAGE_LINES = 8  # over which some printers wrap one
RANK = re.compile(r"^\s*(\[rank\d+\]:|\[default\d+\]:|\(\w+ pid=\d+\)|\d+:(?= ))\s?")
STEP = re.compile(r"\b(?:step|it|iter|iteration|global_step)\b\D{0,3}(\d+)|\b(\d+)/\d+ \[", re.IGNORECASE)  # or a progress bar
# A meter of what the device holds at the moment: its highest value so far always grows, and the host's is another matter
HELD = re.compile(rf"(?<![\w/])(?!\w*(?:max|peak|cpu|host|ram|rss))(\w*(?:mem|allocated)\w*)(?::cuda:\d+)?[ =:]{{1,3}}{SIZE}",
                  re.IGNORECASE)


@dataclass(frozen=True)
class Frame:
    """One frame of a traceback: `number` of its line in the log (1, 2, ..), function, file, and the source line below it."""

    number: int
    function: str
    file: str
    code: str


@dataclass(frozen=True)
class Listed:
    """A process as nvidia-smi lists it in line `number` of a log."""

    number: int
    pid: int
    name: str
    used_bytes: int


@dataclass(frozen=True)
class Evidence:
    """What a log states; None and empty stand for what it does not. Sizes in bytes, rounded as the message rounds them.

    `error`: the line (1, 2, ..) of the first out-of-memory of a device, 0 without one. `frames`: of the traceback that ends
    there, outermost first; in a log without one, of the last traceback. `others`: (pid, bytes) of the processes that the message
    names, `listed`: those of nvidia-smi's tables. `step`: the last step named before. `held`: (step, allocated bytes) of the
    log's own step lines.
    """

    lines: tuple[str, ...]
    error: int = 0
    requested: int | None = None
    capacity: int | None = None
    free: int | None = None
    mine: int | None = None
    allowed: int | None = None
    allocated: int | None = None
    pools: int | None = None
    unallocated: int | None = None
    others: tuple[tuple[int, int], ...] = ()
    listed: tuple[Listed, ...] = ()
    frames: tuple[Frame, ...] = ()
    step: int | None = None
    held: tuple[tuple[int, int], ...] = ()

    def find(self, *patterns: str) -> int:
        """The number of the first line that one of the patterns is found in, 0 for none."""
        found = re.compile("|".join(patterns))
        return next((i for i, line in enumerate(self.lines, 1) if found.search(line)), 0)

    def frame(self, *functions: str, code: str = "", file: str = "") -> Frame | None:
        """The innermost frame of one of these functions, or whose source line or file holds a pattern."""
        for frame in reversed(self.frames):
            if frame.function in functions or (code and re.search(code, frame.code)) or (file and re.search(file, frame.file)):
                return frame
        return None


def read_log(path: Path) -> Evidence:
    """What the log at `path` states. Raises UserError where there is no text to read."""
    try:
        with path.open("rb") as handle:
            handle.seek(max(0, path.stat().st_size - MOST_BYTES))
            content = handle.read()
    except FileNotFoundError as error:
        raise UserError(f"{path}: the log is missing: check the path") from error
    except OSError as error:
        raise UserError(f"{path}: the log cannot be read ({error.strerror}): name a text file") from error
    if b"\0" in content:
        raise UserError(f"{path}: a binary file, not a log: name the text that the run printed, or a record with --record")
    if not content.strip():
        raise UserError(f"{path}: the log is empty: name the file that holds what the run printed to stderr")
    return read_text(content.decode("utf-8", errors="replace"))


def read_text(text: str) -> Evidence:
    """What a log's text states."""
    lines = tuple(line.rstrip() for line in text.replace("\r", "\n").split("\n"))
    error = next((i for i, line in enumerate(lines, 1) if OUT_OF_MEMORY.search(line)), 0)
    if not error:
        last = max((i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line), default=-1)
        return Evidence(lines, frames=_frames(lines, range(last, len(lines)) if last >= 0 else range(0)),
                        listed=_listed(lines), **_course(lines))
    message = " ".join(_bare(line) for line in lines[error - 1: error + MESSAGE_LINES])
    first = OUT_OF_MEMORY.search(message)
    assert first is not None
    again = OUT_OF_MEMORY.search(message, first.end())
    if again is not None and again.group(0).endswith("memory"):  # the next rank's
        message = message[: again.start()]
    numbers: dict[str, Any] = {name: _size(message, patterns) for name, patterns in NUMBERS.items()}
    reserved = numbers.pop("reserved")
    if reserved is not None and numbers["allocated"] is not None:
        numbers["unallocated"] = max(0, reserved - numbers["allocated"])
    others = tuple((int(pid), _bytes(value, unit)) for pid, value, unit in PROCESS.findall(message))
    return Evidence(lines, error, others=others, listed=_listed(lines), frames=_frames(lines, _trace(lines, error - 1)),
                    **numbers, **_course(lines[: error - 1]))


def _listed(lines: Sequence[str]) -> tuple[Listed, ...]:
    found = ((i, LISTED.search(line)) for i, line in enumerate(lines, 1))
    return tuple(Listed(i, int(match[1]), match[2], int(match[3]) * 2**20) for i, match in found if match)


def _bytes(value: str, unit: str) -> int:
    return round(float(value) * UNITS[unit])


def _size(text: str, patterns: Sequence[str]) -> int | None:
    found = next((match for match in (re.search(pattern, text) for pattern in patterns) if match), None)
    return None if found is None else _bytes(found[1], found[2])


def _rank(line: str) -> str:
    found = RANK.match(line)
    return found[1] if found else ""


def _trace(lines: Sequence[str], error: int) -> list[int]:
    """Indices of the lines of the traceback that ends in line `error`, those of its own rank alone."""
    mine, found = _rank(lines[error]), []
    for i in range(error, max(-1, error - TRACE_LINES), -1):
        if _rank(lines[i]) == mine:
            found.append(i)
            if "Traceback (most recent call last)" in lines[i]:
                break
    return found[::-1]


def _frames(lines: Sequence[str], numbers: Sequence[int]) -> tuple[Frame, ...]:
    found = []
    for at, i in enumerate(numbers):
        match = FRAME.search(lines[i])
        if match:
            name = (match["f"] or match["g"]).rpartition(".")[2]
            found.append(Frame(i + 1, name, match["plain"] or match["other"], _code(lines, numbers[at + 1: at + FRAME_LINES])))
    return tuple(found)


def _code(lines: Sequence[str], numbers: Sequence[int]) -> str:
    """The source line below a frame: the one that is marked before the next frame comes, or else the next line."""
    shown = [_bare(lines[i]) for i in numbers]
    end = next((i for i, line in enumerate(shown) if FRAME.search(line)), len(shown))
    marked = [MARKED.sub("", line).strip() for line in shown[:end] if MARKED.match(line)]
    return (marked or shown[:end] or [""])[0].lstrip("│ ").strip()


def _bare(line: str) -> str:
    """A line without its rank and without the box that some printers draw around it."""
    return BOX.sub(" ", RANK.sub("", line)).strip()


def _course(lines: Sequence[str]) -> dict[str, Any]:
    """The steps that the log counts, and the memory that it states beside them."""
    step, held = None, []
    for line in lines:
        counted = STEP.search(line)
        if counted and not FRAME.search(line):
            step = int(counted[1] or counted[2])
            size = HELD.search(line)
            if size:
                held.append((step, _bytes(size[2], size[3])))
    return {"step": step, "held": tuple(held)}
