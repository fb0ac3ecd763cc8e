"""Takes the times and LossTerms of a step, gives a StepReport and its line; knows nothing of models."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from outrider.records import LossTerms, StepReport


class Stopwatch:
    """Adds up seconds by part. On an accelerator the parts overlap the device's work; only their sum is then exact.

    `part`: the one begun last.
    """

    def __init__(self) -> None:
        self.part: str | None = None
        self.seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start, self.part = time.perf_counter(), part
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start


def report_step(
    terms: LossTerms, *, step: int, gradient_norm: float, learning_rate: float, anchors: int, eligible: int,
    seconds: dict[str, float],
) -> StepReport:
    """Divide the step's sums, once."""
    count_K = terms.count_K.tolist()
    return StepReport(
        step=step,
        loss=float(terms.loss_sum / terms.weight_sum.clamp(min=1e-12)),
        slot_accuracy=[c / n if n else 0.0 for c, n in zip(terms.correct_K.tolist()[1:], count_K[1:], strict=True)],
        tau_proxy=1.0 + float(terms.run_sum / terms.block_count.clamp(min=1.0)),
        gradient_norm=gradient_norm,
        learning_rate=learning_rate,
        supervised_slots=int(sum(count_K)),
        anchors=anchors,
        eligible=eligible,
        seconds={part: round(value, 4) for part, value in seconds.items()},
    )


def as_metrics(report: StepReport) -> dict[str, Any]:
    """The report as one line of metrics.jsonl, tokens per second and anchor coverage included."""
    line = asdict(report)
    line["supervised_slots_per_s"] = round(report.supervised_slots / max(sum(report.seconds.values()), 1e-9), 1)
    line["anchor_coverage"] = round(report.anchors / report.eligible, 4) if report.eligible else 0.0
    return line


def as_note(report: StepReport) -> str:
    """The report in one line, for the progress: every number that metrics.jsonl has of a step, slots in percent."""
    rate = report.supervised_slots / max(sum(report.seconds.values()), 1e-9)
    slots = " ".join(f"{100 * share:.0f}" for share in report.slot_accuracy)
    parts = " ".join(f"{part} {seconds:.2f}" for part, seconds in report.seconds.items())
    return (f"loss {report.loss:.3f}, right by slot {slots} %, tau proxy {report.tau_proxy:.2f}, {rate:,.0f} supervised slots/s, "
            f"s: {parts}")
