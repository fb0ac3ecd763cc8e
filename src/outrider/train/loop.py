"""Takes a run file, gives a trained drafter, its checkpoints and metrics; the acceptance check comes as an argument."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from outrider.config import RunConfig
from outrider.errors import UserError
from outrider.features.target import Target
from outrider.model.drafter import Drafter
from outrider.progress import ProgressBar, say
from outrider.records import AcceptReport
from outrider.train.checkpoint import list_checkpoints
from outrider.train.incidents import logits_bytes, look_at, read_rows, skip
from outrider.train.meter import Stopwatch, as_metrics, as_note, report_step
from outrider.train.optim import learning_rate_at
from outrider.train.signals import StopRequests
from outrider.train.start import Run, start
from outrider.train.step import MicroBatch, lay_out, run_step
from outrider.train.watchdog import Watchdog

AcceptanceCheck = Callable[[Target, Drafter], AcceptReport]


def train(config: RunConfig, *, check: AcceptanceCheck | None) -> dict[str, Any]:
    """Train a drafter as `config` says; returns the keys of `outrider train --json`.

    A run that its folder holds already goes on from its newest checkpoint, exactly. `check` measures the real accepted length
    every `train.accept_every` steps and at the end. A stop signal or the end of `train.max_hours` ends it early, saved: `stopped`
    then says why. Raises UserError before anything is written when the run cannot start.
    """
    began = time.monotonic()
    run = start(config)
    with (run.keeper, Watchdog(run.folder, minutes=config.guards.stuck_minutes) as watchdog,
          StopRequests(began=began, max_hours=config.train.max_hours) as stops,
          ProgressBar("train", total=run.steps, unit="steps") as bar):
        bar.skip(run.position.step)
        stopped = _iterate(run, stops, bar, check, watchdog)
    run.metrics.tracker.close()
    if stopped and stopped not in stops.reasons:
        raise UserError(f"{stopped}; stopped and saved after step {run.position.step} of {run.steps}, the same command goes on")
    if stopped:
        say(f"stopped by {stopped} after step {run.position.step} of {run.steps}: the same command goes on from there")
    saved = list_checkpoints(run.folder)
    return {
        "run": str(run.folder), "steps": run.position.step, "loss": run.metrics.last_loss, "tau": run.position.tau,
        "seconds": round(time.monotonic() - began, 1), "peak_bytes_predicted": None, "peak_bytes_measured": peak_bytes(),
        "checkpoint": str(saved[-1]) if saved else None, "stopped": stopped,
    }


def _iterate(
    run: Run, stops: StopRequests, bar: ProgressBar, check: AcceptanceCheck | None, watchdog: Watchdog
) -> str | None:
    """Step until the end or a reason to stop, which is returned. What is due follows from the position alone, so that a resumed
    run comes to the same measurements and checkpoints."""
    slowest_s = 0.0
    while True:
        watchdog.alive()
        run.keeper.check()
        # The one place where a stop is asked for, once a step, before anything of the next: processes can agree on it here.
        stopped = stops.reason(needed_s=slowest_s + run.keeper.copy_seconds + run.keeper.write_seconds)
        stopped = stopped or (run.disk.short() if run.position.step < run.steps else None)
        if check and not stopped and _measurement_due(run):
            _measure(run, check)
            watchdog.alive()
        if run.keeper.due(run.position, total=run.steps) or (stopped and run.position.step > run.keeper.last.step):
            _save(run)
        if stopped or run.position.step == run.steps:
            return stopped
        started = time.monotonic()
        _one_step(run, run.position.step, bar)
        slowest_s = max(slowest_s, time.monotonic() - started)


def _one_step(run: Run, step: int, bar: ProgressBar) -> None:
    config, watch = run.resolved.config, Stopwatch()
    with watch("data"):
        batches = [_micro_batch(run, step, m) for m in range(config.train.accumulation)]
    rate = learning_rate_at(step, run.steps, config.optimizer)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    try:
        terms, norm = run_step(
            run.road, run.source, run.optimizer, batches, clip_norm=config.optimizer.clip_norm,
            logits_bytes=logits_bytes(run), watch=watch,
        )
    except FloatingPointError:
        skip(run, step, batches)
        bar.advance(1)
        return
    run.position = replace(run.position, step=step + 1, seconds=round(time.monotonic() - run.clock_zero, 3), bad_in_row=0)
    if (step + 1) % config.train.log_every and step + 1 != run.steps:
        bar.advance(1)
        return
    report = report_step(
        terms, step=step + 1, gradient_norm=float(norm), learning_rate=rate,
        anchors=sum(int(batch.blocks.keep_BA.sum()) for batch in batches), eligible=sum(batch.eligible for batch in batches),
        seconds=watch.seconds,
    )
    before = list(run.metrics.losses)
    run.metrics.log(as_metrics(report))
    look_at(run, report, before, batches)
    bar.advance(1, note=as_note(report))


def _micro_batch(run: Run, step: int, micro: int) -> MicroBatch:
    """The rows of one micro-batch: the epochs' permutations end to end, so that the step number alone says which."""
    settings = run.resolved.config.train
    first = (step * settings.accumulation + micro) * settings.rows_per_batch
    places = [divmod(index, len(run.rows)) for index in range(first, first + settings.rows_per_batch)]
    orders = {epoch: run.rows.row_order(settings.seed, epoch) for epoch, _ in places}
    rows = read_rows(run, [orders[epoch][at] for epoch, at in places])
    return lay_out(rows, run.resolved, [epoch for epoch, _ in places], run.drafter.norm.weight.device)


def _measurement_due(run: Run) -> bool:
    every, step = run.resolved.config.train.accept_every, run.position.step
    return every is not None and step > 0 and (step % every == 0 or step == run.steps) and run.position.tau_step != step


def _measure(run: Run, check: AcceptanceCheck) -> None:
    step, report = run.position.step, check(run.source.target, run.drafter)
    run.metrics.log({"step": step, "tau": round(report.tau, 4), "acceptance_by_slot": report.acceptance_by_slot,
                     "tokens": report.tokens, "forwards": report.forwards, "seconds": round(report.seconds, 2)})
    say(f"step {step}: real accepted length tau {report.tau:.3f} on held-out prompts ({report.tokens} tokens, greedy)")
    run.position = replace(run.position, tau=report.tau, tau_step=step, best_tau=max(report.tau, run.position.best_tau or 0.0))


def _save(run: Run) -> None:
    run.metrics.sync()
    run.keeper.save(run.drafter, run.optimizer, replace(run.position, metrics_bytes=run.metrics.size))


def peak_bytes() -> int:
    """Peak device memory (allocated) on a GPU, peak resident memory of the process on a CPU."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
