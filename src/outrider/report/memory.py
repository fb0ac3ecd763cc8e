"""Takes a run folder, gives the section on its memory: the peak as planned, by phase and by kind, against the one measured."""

from pathlib import Path
from typing import Any

from outrider.errors import UserError
from outrider.files import read_json
from outrider.report.drawings import levels
from outrider.report.page import Section, note, table

MEMORY_NAME = "memory.json"  # as train/ writes it, where the run was planned
GIB = 2**30


def memory(run: Path) -> Section:
    """Predicted against measured; empty where the run was not planned (on a CPU) or its file cannot be read."""
    if not (run / MEMORY_NAME).is_file():
        return Section("Memory", [])
    try:
        found: dict[str, Any] = read_json(run / MEMORY_NAME, what="the run's memory")
        predicted, measured, allowed = (found[key] / GIB for key in ("predicted_bytes", "measured_bytes", "allowed_bytes"))
        phases = {str(phase): size / GIB for phase, size in found["by_phase"].items()}
        kinds = [(str(kind), size / GIB) for kind, size in found["groups_at_peak"].items()]
        peak_phase, card = str(found["peak_phase"]), str(found["card"])
    except (UserError, KeyError, TypeError, AttributeError):
        return Section("Memory", [note(f"{MEMORY_NAME} could not be read and is left out.")])
    off = f" ({predicted / measured - 1:+.1%})" if measured else ""
    return Section("Memory", [
        table([("peak as predicted", f"{predicted:.2f} GiB{off}, in '{peak_phase}'"),
               ("peak measured", f"{measured:.2f} GiB, in a step of the worst rows before the first"),
               ("card", f"{card}, {allowed:.1f} GiB allowed")]),
        levels(phases, {"measured peak": measured, "allowed": allowed}, x="GiB allocated, as planned"),
        table(kinds, header=("at the predicted peak", "GiB")),
    ])
