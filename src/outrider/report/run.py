"""Takes a run folder, gives its page: curves, real accepted length, times, settings; knows nothing of how they were made."""

import json
import math
from pathlib import Path
from typing import Any

from outrider.errors import UserError
from outrider.files import check_out_file, write_atomic
from outrider.report.drawings import by_slot, lines, stacked
from outrider.report.memory import memory
from outrider.report.metrics import METRICS_NAME, Metrics, StepLine, read_bytes, read_metrics, series
from outrider.report.page import Section, note, page, table, verbatim
from outrider.report.timeline import traced

RESOLVED_NAME = "resolved.toml"  # as train/ writes it
SLOTS_DRAWN = 5  # curves by slot: more than these cannot be told apart


def report(run: Path, out: Path | None = None) -> dict[str, Any]:
    """Write the page (by default `report.html` in the run) and give where it is and what stands first in it.

    Raises UserError when the folder is no run, or nothing was logged yet.
    """
    metrics, destination = read_metrics(run), out or run / "report.html"
    check_out_file(destination, "--out", endings=[".html"])
    if not metrics.steps:
        raise UserError(f"{run / METRICS_NAME}: holds no finished step yet: wait for train.log_every steps, or name another run")
    resolved = read_bytes(run / RESOLVED_NAME).decode(errors="replace")
    sections = [_summary(metrics), _accepted(metrics), _learning(metrics), _time(metrics.steps), traced(run), memory(run),
                _incidents(metrics),
                Section("Settings", [note("The run file with every default and derived value."), verbatim(resolved)])]
    text = page(f"Run {run.resolve().name}", sections)
    write_atomic(destination, lambda path: path.write_text(text, encoding="utf-8"))
    last, tau = metrics.steps[-1], metrics.measured[-1].tau if metrics.measured else None
    loss = last.loss if math.isfinite(last.loss) else None
    return {"report": str(destination), "steps": last.step, "loss": loss, "tau": tau, "bytes": len(text.encode())}


def _summary(metrics: Metrics) -> Section:
    last = metrics.steps[-1]
    rows: list[tuple[str, str | int | float]] = [("steps", last.step), ("loss, nats a token", last.loss)]
    if metrics.measured:
        best = max(metrics.measured, key=lambda line: line.tau)
        now = metrics.measured[-1]
        rows += [("accepted length tau, last", f"{now.tau:.3f} tokens per target forward (step {now.step})"),
                 ("accepted length tau, best", f"{best.tau:.3f} (step {best.step})"),
                 ("measured on", f"{now.tokens:,} tokens of held-out answers, greedy, {now.forwards:,} target forwards")]
    rows += [("supervised slots a second", float(last.supervised_slots_per_s)),
             ("anchors / eligible positions", f"{100 * last.anchor_coverage:.1f} %")]
    parts = [table(rows)]
    if metrics.unreadable:
        parts.append(note(f"{metrics.unreadable} lines of {METRICS_NAME} could not be read and are left out."))
    return Section("Summary", parts)


def _incidents(metrics: Metrics) -> Section:
    rows = [(line.step, line.event, json.dumps(line.facts)) for line in metrics.events]
    return Section("Incidents", [table(rows, header=("step", "what", "facts"))] if rows else [])


def _accepted(metrics: Metrics) -> Section:
    proxy = "proxy (teacher-forced, on training text)"
    real = "real (decoding held-out prompts)"
    curves = {proxy: series(metrics.steps, lambda line: line.tau_proxy)}
    if not metrics.measured:
        return Section("Accepted length", [lines(curves, x="step", y="tau"), note(
            "Only the proxy: no real accepted length was measured. Set data.heldout and train.accept_every to measure it.")])
    curves[real] = series(metrics.measured, lambda line: line.tau)
    last = metrics.measured[-1]
    return Section("Accepted length", [
        lines(curves, x="step", y="tau", points=[real]),
        note("Tokens per target forward, the target's own bonus token included: 1 is no help. The proxy is a hint, not a "
             "measurement."),
        by_slot({f"accepted, given all slots before (step {last.step})": last.acceptance_by_slot,
                 "right, teacher-forced (last step)": metrics.steps[-1].slot_accuracy}, y="share"),
    ])


def _learning(metrics: Metrics) -> Section:
    steps, slots = metrics.steps, len(metrics.steps[-1].slot_accuracy)
    chosen = sorted({round(i * (slots - 1) / (SLOTS_DRAWN - 1)) for i in range(SLOTS_DRAWN)})
    with_all = [line for line in steps if len(line.slot_accuracy) == slots]
    curves = {f"slot {k + 1}": series(with_all, lambda line, k=k: line.slot_accuracy[k]) for k in chosen}  # type: ignore[misc]
    return Section("Learning", [
        lines({"loss": series(steps, lambda line: line.loss)}, x="step", y="loss, nats a token"),
        lines(curves, x="step", y="share right"),
        lines({"norm": series(steps, lambda line: line.gradient_norm)}, x="step", y="gradient norm"),
        lines({"rate": series(steps, lambda line: line.learning_rate)}, x="step", y="learning rate"),
    ])


def _time(steps: list[StepLine]) -> Section:
    names = list(dict.fromkeys(name for line in steps for name in line.seconds))
    at = [float(line.step) for line in steps]
    parts = {name: [1000 * line.seconds.get(name, 0.0) for line in steps] for name in names}
    means = [(name, sum(values) / len(values)) for name, values in parts.items()]
    return Section("Time", [
        *([stacked(at, parts, x="step", y="ms a step")] if parts else []),
        table([*means, ("all", sum(mean for _, mean in means))], header=("part", "mean ms a step")),
        lines({"rate": series(steps, lambda line: line.supervised_slots_per_s)}, x="step", y="supervised slots/s"),
    ])
