"""Takes a run file, gives a trained drafter, its checkpoints and metrics; the acceptance check comes as an argument."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from outrider.config import RunConfig
from outrider.errors import UserError
from outrider.features.target import Target
from outrider.files import only_writer, write_json
from outrider.model.drafter import Drafter
from outrider.progress import ProgressBar, say
from outrider.records import AcceptReport
from outrider.train.checkpoint import list_checkpoints
from outrider.train.feed import agree_on_bad_rows, micro_batches, rows_after
from outrider.train.folder import check_place
from outrider.train.forecast import MEMORY_NAME, CardOf, card_of
from outrider.train.incidents import logits_bytes, look_at, skip
from outrider.train.initial import OpenInitial
from outrider.train.masters import whole_drafter
from outrider.train.meter import Stopwatch, as_metrics, as_note, report_step
from outrider.train.optim import learning_rate_at, set_rate
from outrider.train.out_of_memory import recorded
from outrider.train.processes import Processes, join
from outrider.train.rehearsal import rehearse
from outrider.train.signals import StopRequests
from outrider.train.start import Run, start
from outrider.train.step import run_step
from outrider.train.tracing import keep_trace
from outrider.train.watchdog import Watchdog

AcceptanceCheck = Callable[[Target, Drafter], AcceptReport]


def train(
    config: RunConfig, *, check: AcceptanceCheck | None, initial: OpenInitial | None = None, card_of: CardOf = card_of
) -> dict[str, Any]:
    """Train a drafter as `config` says; returns the keys of `outrider train --json`.

    A run that its folder holds already goes on from its newest checkpoint, exactly. `check` measures the real accepted length
    every `train.accept_every` steps and at the end. `initial` opens the drafter of `train.init_from`, if the run has one. A stop
    signal or the end of `train.max_hours` ends it early, saved: `stopped` then says why. Raises UserError before anything is
    written when the run cannot start or cannot fit on its cards, which `card_of` tells of; where it can, a step on the worst rows
    comes first and is held against the plan. Where torchrun or srun started this process it takes part with the others, and only
    the first one writes, measures and speaks.
    """
    with join(accelerator=config.train.device != "cpu", timeout_s=config.placement.timeout_s) as processes:
        return take_part(config, processes, check=check, initial=initial, card_of=card_of)


def take_part(
    config: RunConfig, processes: Processes, *, check: AcceptanceCheck | None, initial: OpenInitial | None, card_of: CardOf
) -> dict[str, Any]:
    """`train` in one of the processes that train together."""
    check_place(config)
    with only_writer(config.train.folder) if processes.leads else contextlib.nullcontext():
        return _train(config, processes, check, initial, card_of)


def _train(
    config: RunConfig, processes: Processes, check: AcceptanceCheck | None, initial: OpenInitial | None, card_of: CardOf
) -> dict[str, Any]:
    began = time.monotonic()
    run = start(config, processes, initial, card_of)
    with (StopRequests(began=began, max_hours=config.train.max_hours) as stops,  # until the last checkpoint is written
          run.keeper, Watchdog(run.folder, minutes=config.guards.stuck_minutes, rank=processes.rank) as watchdog,
          ProgressBar("train", total=run.steps, unit="steps") as bar):
        bar.skip(run.position.step)
        if run.forecast and run.position.step < run.steps:
            watch = Stopwatch()
            with recorded(run, watch):
                rehearse(run, watch)
            say(run.forecast.compared())
            if processes.leads:
                write_json(run.folder / MEMORY_NAME, run.forecast.facts())
        stopped = _iterate(run, stops, bar, check, watchdog)
    run.metrics.tracker.close()
    if stopped and stopped not in stops.reasons:
        raise UserError(f"{stopped}; stopped and saved after step {run.position.step} of {run.steps}, the same command goes on")
    if stopped:
        say(f"stopped by {stopped} after step {run.position.step} of {run.steps}: the same command goes on from there")
    saved = list_checkpoints(run.folder)
    return {
        "run": str(run.folder), "steps": run.position.step, "loss": run.metrics.last_loss, "tau": run.position.tau,
        "seconds": round(time.monotonic() - began, 1),
        "peak_bytes_predicted": run.forecast.ledger.peak_bytes if run.forecast else None,
        "peak_bytes_measured": peak_bytes(), "checkpoint": str(saved[-1]) if saved else None, "stopped": stopped,
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
        # The one place where a stop is asked for, once a step, before anything of the next: all processes stop at the same one
        stopped = stops.reason(needed_s=slowest_s + run.keeper.copy_seconds + run.keeper.write_seconds)
        stopped = run.processes.first(stopped or (run.disk.short() if run.position.step < run.steps else None))
        if check and not stopped and _measurement_due(run):
            _measure(run, check)
            watchdog.alive()
        due = run.processes.any(run.keeper.due(run.position, total=run.steps))
        if due or (stopped and run.position.step > run.keeper.last.step):
            _save(run)
        if stopped or run.position.step == run.steps:
            return stopped
        started = time.monotonic()
        _one_step(run, run.position.step, bar)
        keep_trace(run)
        slowest_s = max(slowest_s, time.monotonic() - started)


def _one_step(run: Run, step: int, bar: ProgressBar) -> None:
    config, watch = run.resolved.config, Stopwatch()
    with watch("data"):
        known_bad = run.position.bad_rows
        batches, coming = micro_batches(run, step), rows_after(run, step)
        agree_on_bad_rows(run, before=known_bad)
    rate = learning_rate_at(step, run.steps, config.optimizer)
    set_rate(run.learner.optimizer, rate)
    try:
        with recorded(run, watch):
            sums = run_step(run.learner, run.relay, batches, coming, clip_norm=config.optimizer.clip_norm,
                            logits_bytes=logits_bytes(run), watch=watch)
    except FloatingPointError:
        skip(run, step, batches)
        bar.advance(1)
        return
    run.position = replace(run.position, step=step + 1, seconds=round(time.monotonic() - run.clock_zero, 3), bad_in_row=0)
    if (step + 1) % config.train.log_every and step + 1 != run.steps:
        bar.advance(1)
        return
    report = report_step(
        sums.terms, step=step + 1, gradient_norm=float(sums.norm), learning_rate=rate, anchors=int(sums.anchors),
        eligible=int(sums.eligible), seconds=watch.seconds,
    )
    before = list(run.metrics.losses)
    run.metrics.log(as_metrics(report))
    look_at(run, report, before, batches)
    bar.advance(1, note=as_note(report))


def _measurement_due(run: Run) -> bool:
    every, step = run.resolved.config.train.accept_every, run.position.step
    return every is not None and step > 0 and (step % every == 0 or step == run.steps) and run.position.tau_step != step


def _measure(run: Run, check: AcceptanceCheck) -> None:
    run.relay.settle()
    drafter, step = whole_drafter(run.drafter, run.source.target.device), run.position.step
    with recorded(run, Stopwatch(), phase="check"):
        report = run.processes.from_first(lambda: check(run.source.target, drafter))
    run.metrics.log({"step": step, "tau": round(report.tau, 4), "acceptance_by_slot": report.acceptance_by_slot,
                     "tokens": report.tokens, "forwards": report.forwards, "seconds": round(report.seconds, 2)})
    say(f"step {step}: real accepted length tau {report.tau:.3f} on held-out prompts ({report.tokens} tokens, greedy)")
    run.position = replace(run.position, tau=report.tau, tau_step=step, best_tau=max(report.tau, run.position.best_tau or 0.0))


def _save(run: Run) -> None:
    run.metrics.sync()
    run.keeper.save(run.drafter, run.learner.optimizer, replace(run.position, metrics_bytes=run.metrics.size))


def peak_bytes() -> int:
    """Peak device memory (allocated) on a GPU, peak resident memory of the process on a CPU."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
