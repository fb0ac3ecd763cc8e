"""Takes a run and what went wrong in it, records it and goes on, or ends the run where a limit of `guards` is passed."""

import time
from collections.abc import Sequence
from dataclasses import replace

from outrider.errors import RunFailure
from outrider.progress import say
from outrider.records import StepReport
from outrider.train.culprit import find_culprit, save_rows
from outrider.train.feed import row_ids
from outrider.train.guards import leak_test_due, spike
from outrider.train.leak import find_leak
from outrider.train.start import Run
from outrider.train.step import MicroBatch


def skip(run: Run, step: int, batches: Sequence[MicroBatch]) -> None:
    """A step whose gradient was not finite: nothing has moved and nothing will. Raises RunFailure after too many in a row."""
    culprit = find_culprit(run.learner, run.relay, batches, logits_bytes=logits_bytes(run))
    place = run.folder / "bad_steps" / f"step-{step + 1:08d}.safetensors"
    save_rows(place, culprit, batches, run.processes)
    run.position = replace(
        run.position, step=step + 1, seconds=round(time.monotonic() - run.clock_zero, 3),
        bad_steps=run.position.bad_steps + 1, bad_in_row=run.position.bad_in_row + 1,
    )
    run.metrics.event(step + 1, "skipped", tensor=culprit.tensor, rows=list(culprit.rows), total=run.position.bad_steps)
    named = ", ".join(map(str, culprit.rows))
    what = f"the first tensor that was not finite is {culprit.tensor}, rows {named}, saved in {place}"
    most = run.resolved.config.guards.max_bad_steps
    if run.position.bad_in_row >= most:
        raise RunFailure(f"step {step + 1}: the gradient was not finite {most} steps in a row (guards.max_bad_steps): {what}: "
                         "lower optimizer.learning_rate or leave the rows out; the last checkpoint is whole")
    say(f"step {step + 1} skipped ({run.position.bad_steps} so far): {what}")


def look_at(run: Run, report: StepReport, before: list[float], batches: Sequence[MicroBatch]) -> None:
    """Record a spike of the loss; test for a leak when the accuracy is too good. Raises RunFailure when something leaks."""
    guards, step = run.resolved.config.guards, report.step
    usual = spike(report.loss, before, factor=guards.loss_spike)
    if usual is not None:
        rows = row_ids(run, step - 1)
        run.metrics.event(step, "loss spike", to=report.loss, median=usual, rows=rows)
        say(f"step {step}: the loss is {report.loss:.3f}, the median before it {usual:.3f} (guards.loss_spike), rows "
            f"{', '.join(map(str, rows))}")
    if not leak_test_due(report.slot_accuracy, too_good=guards.too_good, step=step, tested_at=run.position.leak_tested):
        return
    run.position = replace(run.position, leak_tested=step)
    leak = find_leak(run.learner, run.relay, batches[0], logits_bytes=logits_bytes(run))
    mean = sum(report.slot_accuracy) / len(report.slot_accuracy)
    if leak is not None:
        raise RunFailure(f"step {step}: {mean:.0%} of the slots are right (guards.too_good) because blocks see what they must "
                         f"not: noise in the features at and after positions {leak.cuts} of rows {leak.rows} moves the loss of "
                         f"the blocks before them from {leak.loss!r} to {leak.loss_with_noise!r}: what was learned is worthless, "
                         "please report this with the run's resolved.toml")
    run.metrics.event(step, "too good", slots_right=round(mean, 4), leak=False)
    say(f"step {step}: {mean:.0%} of the slots are right, which is too good for most text (guards.too_good); the leak test found "
        "nothing: is the data small or repeated?")


def logits_bytes(run: Run) -> int:
    return run.resolved.config.objective.logits_mib * 2**20
