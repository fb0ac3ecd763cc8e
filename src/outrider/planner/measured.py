"""Takes a run's trace, or a small file of times, gives measured stage times for the simulator; measures nothing itself."""

import difflib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import UserError
from outrider.files import read_json
from outrider.planner.timeline import STAGES, TRACE_NAME, read_trace

KEYS = tuple(f"{stage}_ms" for stage in STAGES)
NEEDED = ("capture_ms", "learn_ms", "update_ms")
MOST_MS = 24 * 3_600_000  # a day
LEAST_MS = 0.001  # of capturing and learning together: a step has a length


@dataclass(frozen=True)
class Measured:
    """Stage times in ms by the names of StageTimes, and where they are from. What is absent (`copy`, `sum`) was not measured."""

    source: str
    stages: dict[str, float]


def read_measured(path: Path) -> Measured:
    """The stage times of a traced run (its folder or trace) or of a TOML or JSON file with the keys of KEYS. Raises UserError."""
    if path.is_dir():
        return _traced(path / TRACE_NAME)
    values: Any = _read_toml(path) if path.suffix == ".toml" else read_json(path, what="the file of stage times")
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold keys and numbers, such as capture_ms = 690.0")
    if "spans" in values:
        return _traced(path)
    return _checked(values, where=str(path), source=str(path))


def _traced(path: Path) -> Measured:
    trace = read_trace(path)
    stages = trace.stages()
    if trace.processes == 1:
        stages.pop("sum", None)  # nothing was summed
    return _checked({f"{stage}_ms": value for stage, value in stages.items()},
                    where=str(path), source=f"medians of {path}, traced on {trace.device}")


def _checked(values: dict[str, Any], *, where: str, source: str) -> Measured:
    for key, value in values.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(KEYS)}"
            raise UserError(f"{where}: unknown key '{key}': {hint}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_MS:
            raise UserError(f"{where}: {key} = {value!r}: must be a time in ms, from 0 to {MOST_MS:,} (a day)")
    absent = [key for key in NEEDED if key not in values]
    if absent:
        raise UserError(f"{where}: '{absent[0]}' is missing: add it, in ms")
    if values["capture_ms"] + values["learn_ms"] < LEAST_MS:
        raise UserError(f"{where}: capture_ms = {values['capture_ms']!r}, learn_ms = {values['learn_ms']!r}: must be at least "
                        f"{LEAST_MS} ms together: give them as measured")
    return Measured(source, {key.removesuffix("_ms"): float(value) for key, value in values.items()})


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path}: the file of stage times cannot be read ({error.strerror}): check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from error
