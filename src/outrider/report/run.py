"""Takes a run folder, gives its page: curves, real accepted length, times, settings; knows nothing of how they were made."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import UserError
from outrider.files import write_atomic
from outrider.report.drawings import Series, by_slot, lines, stacked
from outrider.report.memory import memory
from outrider.report.page import Section, note, page, table, verbatim
from outrider.report.timeline import traced

METRICS_NAME, RESOLVED_NAME = "metrics.jsonl", "resolved.toml"  # as train/ writes them
SLOTS_DRAWN = 5  # curves by slot: more than these cannot be told apart


@dataclass(frozen=True)
class Metrics:
    """The lines of metrics.jsonl: `steps` of training, `measured` accepted lengths, `events` that were odd, and how many lines
    were no such thing."""

    steps: list[dict[str, Any]]
    measured: list[dict[str, Any]]
    events: list[dict[str, Any]]
    unreadable: int

    def series(self, value: Callable[[dict[str, Any]], Any]) -> Series:
        """(steps, values) of the training lines where `value` gives a finite number."""
        return _series(self.steps, value)


def report(run: Path, out: Path | None = None) -> dict[str, Any]:
    """Write the page (by default `report.html` in the run) and give where it is and what stands first in it.

    Raises UserError when the folder is no run, or nothing was logged yet.
    """
    destination = out or run / "report.html"
    if destination.suffix != ".html":
        raise UserError(f"--out {destination}: must end in .html")
    metrics = read_metrics(run)
    resolved = _text(run / RESOLVED_NAME)
    sections = [_summary(metrics), _accepted(metrics), _learning(metrics), _time(metrics), traced(run), memory(run),
                _incidents(metrics),
                Section("Settings", [note("The run file with every default and derived value."), verbatim(resolved)])]
    text = page(f"Run {run.resolve().name}", sections)
    write_atomic(destination, lambda path: path.write_text(text, encoding="utf-8"))
    last, tau = metrics.steps[-1], metrics.measured[-1]["tau"] if metrics.measured else None
    return {"report": str(destination), "steps": last["step"], "loss": last["loss"], "tau": tau, "bytes": len(text.encode())}


def read_metrics(run: Path) -> Metrics:
    """The run's metrics, in order. Raises UserError when there are none."""
    steps, measured, events, unreadable = [], [], [], 0
    for text in _text(run / METRICS_NAME).splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            line = None
        if isinstance(line, dict) and isinstance(line.get("step"), int) and {"loss", "slot_accuracy", "seconds"} <= line.keys():
            steps.append(line)
        elif isinstance(line, dict) and isinstance(line.get("step"), int) and "tau" in line:
            measured.append(line)
        elif isinstance(line, dict) and isinstance(line.get("step"), int) and isinstance(line.get("event"), str):
            events.append(line)
        else:
            unreadable += 1
    if not steps:
        raise UserError(f"{run / METRICS_NAME}: holds no finished step yet: wait for train.log_every steps, or name another run")
    return Metrics(steps, measured, events, unreadable)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): name a run folder, that of train.folder") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text ({error}): name a run folder, that of train.folder") from error


def _series(lines_: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], Any]) -> Series:
    found = [(line["step"], value(line)) for line in lines_]
    finite = [(step, number) for step, number in found if isinstance(number, int | float) and math.isfinite(number)]
    return [float(step) for step, _ in finite], [float(number) for _, number in finite]


def _summary(metrics: Metrics) -> Section:
    last = metrics.steps[-1]
    rows: list[tuple[str, str | int | float]] = [("steps", last["step"]), ("loss, nats a token", last["loss"])]
    if metrics.measured:
        best = max(metrics.measured, key=lambda line: line["tau"])
        now = metrics.measured[-1]
        rows += [("accepted length tau, last", f"{now['tau']:.3f} tokens per target forward (step {now['step']})"),
                 ("accepted length tau, best", f"{best['tau']:.3f} (step {best['step']})"),
                 ("measured on", f"{now['tokens']:,} tokens of held-out answers, greedy, {now['forwards']:,} target forwards")]
    rows += [("supervised slots a second", float(last["supervised_slots_per_s"])),
             ("anchors / eligible positions", f"{100 * last['anchor_coverage']:.1f} %")]
    parts = [table(rows)]
    if metrics.unreadable:
        parts.append(note(f"{metrics.unreadable} lines of {METRICS_NAME} could not be read and are left out."))
    return Section("Summary", parts)


def _incidents(metrics: Metrics) -> Section:
    rows = [(line["step"], line["event"], json.dumps({k: v for k, v in line.items() if k not in ("step", "event")}))
            for line in metrics.events]
    return Section("Incidents", [table(rows, header=("step", "what", "facts"))] if rows else [])


def _accepted(metrics: Metrics) -> Section:
    proxy = "proxy (teacher-forced, on training text)"
    real = "real (decoding held-out prompts)"
    series = {proxy: metrics.series(lambda line: line["tau_proxy"])}
    if not metrics.measured:
        return Section("Accepted length", [lines(series, x="step", y="tau"), note(
            "Only the proxy: no real accepted length was measured. Set data.heldout and train.accept_every to measure it.")])
    series[real] = _series(metrics.measured, lambda line: line["tau"])
    last = metrics.measured[-1]
    return Section("Accepted length", [
        lines(series, x="step", y="tau", points=[real]),
        note("Tokens per target forward, the target's own bonus token included: 1 is no help. The proxy is a hint, not a "
             "measurement."),
        by_slot({f"accepted, given all slots before (step {last['step']})": last["acceptance_by_slot"],
                 "right, teacher-forced (last step)": metrics.steps[-1]["slot_accuracy"]}, y="share"),
    ])


def _learning(metrics: Metrics) -> Section:
    slots = len(metrics.steps[-1]["slot_accuracy"])
    chosen = sorted({round(i * (slots - 1) / (SLOTS_DRAWN - 1)) for i in range(SLOTS_DRAWN)}) if slots else []
    curves = {f"slot {k + 1}": metrics.series(lambda line, k=k: line["slot_accuracy"][k]) for k in chosen}  # type: ignore[misc]
    return Section("Learning", [
        lines({"loss": metrics.series(lambda line: line["loss"])}, x="step", y="loss, nats a token"),
        lines(curves, x="step", y="share right"),
        lines({"norm": metrics.series(lambda line: line["gradient_norm"])}, x="step", y="gradient norm"),
        lines({"rate": metrics.series(lambda line: line["learning_rate"])}, x="step", y="learning rate"),
    ])


def _time(metrics: Metrics) -> Section:
    names = list(dict.fromkeys(name for line in metrics.steps for name in line["seconds"]))
    at = [float(line["step"]) for line in metrics.steps]
    parts = {name: [1000 * float(line["seconds"].get(name, 0.0)) for line in metrics.steps] for name in names}
    means = [(name, sum(values) / len(values)) for name, values in parts.items()]
    return Section("Time", [
        stacked(at, parts, x="step", y="ms a step"),
        table([*means, ("all", sum(mean for _, mean in means))], header=("part", "mean ms a step")),
        lines({"rate": metrics.series(lambda line: line["supervised_slots_per_s"])}, x="step", y="supervised slots/s"),
    ])
