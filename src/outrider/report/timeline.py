"""Takes the time line of a placement, simulated or traced, gives a picture or a page of it; knows nothing of how it was made."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.errors import UserError
from outrider.files import write_atomic
from outrider.planner.timeline import TRACE_NAME, TraceFile, read_trace, within
from outrider.records import Span
from outrider.report.drawings import time_line
from outrider.report.page import Section, note, page, table
from outrider.show import gpus

STEPS_DRAWN = 2
FORMS = (".html", ".svg")


def write_outlook(path: Path, simulated: Mapping[str, Any]) -> None:
    """A simulation (planner.outlook) as a page, or its time line alone as a picture."""
    picture = time_line([Span(s["lane"], s["label"], s["begin_ms"], s["end_ms"]) for s in simulated["spans"]])
    if path.suffix == ".svg":
        write_atomic(path, lambda to: to.write_text(picture + "\n", encoding="utf-8"))
        return
    best = simulated["arrangements"][0]
    rows = [(one["placement"], "yes" if one["fits"] else "no", one["step_ms"], one["supervised_tokens_per_s"],
             *(f"{100 * one['waits'][side]:.0f} %" if side in one["waits"] else "-" for side in ("learn", "capture")))
            for one in simulated["arrangements"]]
    sections = [
        Section(f"Two steps of: {best['placement']}", [picture, note(f"Stage times: {simulated['times']}.")]),
        Section(f"Arrangements of {gpus(simulated['gpus'])}", [table(rows, header=(
            "placement", "fits", "step ms", "supervised tokens/s", "drafter cards wait", "target cards wait"))]),
        Section("The best of fewer", [table(
            [(one["gpus"], one["placement"], one["step_ms"], one["supervised_tokens_per_s"]) for one in simulated["by_gpus"]],
            header=("GPUs", "placement", "step ms", "supervised tokens/s"))]),
    ]
    text = page(f"Simulated: {gpus(simulated['gpus'])}", sections)
    write_atomic(path, lambda to: to.write_text(text, encoding="utf-8"))


def traced(run: Path) -> Section:
    """What a run's trace shows: two of its steps, and how long each side waits; nothing where the run was not traced.

    A trace that cannot be read, or holds no two steps, costs the page this section and no more.
    """
    if not (run / TRACE_NAME).exists():
        return Section("Time line", [])
    try:
        trace = read_trace(run / TRACE_NAME)
    except UserError as error:
        return Section("Time line", [note(f"Left out: {error}.")])
    waits = [(f"{side} devices wait", f"{100 * share:.1f} %") for side, share in trace.waits().items()]
    stages = [(f"{stage}, median ms", round(ms, 3)) for stage, ms in trace.stages().items()]
    return Section("Time line", [draw_trace(trace), table([("step, mean ms", trace.step_ms()), *stages, *waits])])


def draw_trace(trace: TraceFile) -> str:
    """The first two steps of a trace's steady half, as <svg>."""
    began, ended = trace.steady()
    return time_line(within(trace.spans, began, min(ended, began + STEPS_DRAWN * trace.step_ms())))
