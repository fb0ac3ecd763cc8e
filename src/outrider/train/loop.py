"""Takes a resolved run, gives a trained drafter, its checkpoints and metrics; the acceptance check comes as an argument."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.config import RunConfig, load_run, to_toml
from outrider.data.rows import PreparedRows, load_rows, read_info
from outrider.errors import UserError
from outrider.features.capture import FeatureSource
from outrider.features.target import Target, load_target, load_tokenizer, read_facts, read_stop_ids, target_digest
from outrider.files import explain_os_errors, write_atomic
from outrider.model.attention import dense_attention
from outrider.model.drafter import Drafter, count_parameters, initialise
from outrider.progress import ProgressBar, say
from outrider.records import AcceptReport
from outrider.train.checkpoint import Position, list_checkpoints, resume_checkpoint, save_checkpoint
from outrider.train.meter import Stopwatch, as_metrics, as_note, report_step
from outrider.train.optim import build_optimizer, learning_rate_at
from outrider.train.resolve import Resolved, resolve
from outrider.train.roads import Road, open_road
from outrider.train.step import MicroBatch, lay_out, run_step
from outrider.train.tracker import Tracker, open_tracker

AcceptanceCheck = Callable[[Target, Drafter], AcceptReport]
RESOLVED_NAME, METRICS_NAME = "resolved.toml", "metrics.jsonl"
FREE_TO_CHANGE = {"folder", "log_every", "checkpoint_every", "keep_checkpoints", "tracker", "accept_every", "accept_prompts",
                  "accept_tokens"}


@dataclass
class Run:
    """Everything one training run holds while it lasts."""

    resolved: Resolved
    rows: PreparedRows
    source: FeatureSource
    road: Road
    optimizer: torch.optim.AdamW
    steps: int
    inputs: dict[str, str]
    position: Position
    tracker: Tracker

    @property
    def drafter(self) -> Drafter:
        return self.road.drafter

    @property
    def folder(self) -> Path:
        return self.resolved.config.train.folder


def train(config: RunConfig, *, resume: bool, check: AcceptanceCheck | None) -> dict[str, Any]:
    """Train a drafter as `config` says; returns the keys of `outrider train --json`.

    `check` measures the real accepted length every `train.accept_every` steps and at the end. With `resume` the run goes
    on from its newest checkpoint, exactly. Raises UserError before anything is written when the run cannot start.
    """
    run = start(config, resume=resume)
    began = time.monotonic()
    first = run.position.step
    report = None
    with ProgressBar("train", total=run.steps, unit="steps") as bar:
        bar.skip(first)
        for step in range(first, run.steps):
            report = _one_step(run, step, bar, report)
            done = step + 1
            settings = run.resolved.config.train
            if check and settings.accept_every and (done % settings.accept_every == 0 or done == run.steps):
                run.position = _measure(run, done, check)
            if done % settings.checkpoint_every == 0 or done == run.steps:
                _save(run)
    run.tracker.close()
    return {
        "run": str(run.folder), "steps": run.steps, "loss": report["loss"] if report else None, "tau": run.position.tau,
        "seconds": round(time.monotonic() - began, 1), "peak_bytes_predicted": None, "peak_bytes_measured": peak_bytes(),
        "checkpoint": str(list_checkpoints(run.folder)[-1]),
    }


def start(config: RunConfig, *, resume: bool) -> Run:
    """Load, check and print everything a run needs; write the resolved run file."""
    resolved = resolve(config, read_facts(config.target.path))
    settings = resolved.config.train
    checkpoints = list_checkpoints(settings.folder)
    _check_folder(resolved, checkpoints, resume=resume)
    rows = load_rows(config.data.rows)
    _check_data(resolved, rows)
    device = _device(settings.device)
    target = load_target(config.target.path, dtype=config.target.dtype, device=settings.device, last_layer=None,
                         head=True)
    source = FeatureSource(target, resolved.shape.target_layer_ids, keep=config.features.keep)
    drafter = build_drafter(resolved, target).to(device)
    optimizer = build_optimizer(drafter, config.optimizer)
    inputs = {"data.rows": read_info(config.data.rows)["rows_sha256"], "target.path": target_digest(config.target.path)}
    position = Position(step=0, tau=None, tau_step=None)
    if resume and checkpoints:
        position = resume_checkpoint(checkpoints[-1], drafter, optimizer, inputs=inputs)
        say(f"resuming from {checkpoints[-1]}, {position.step} steps done")
    per_step = settings.rows_per_batch * settings.accumulation
    steps = settings.steps or -(-settings.epochs * len(rows) // per_step)
    tracker = open_tracker(settings.tracker, settings.folder, first_step=position.step)
    run = Run(resolved, rows, source, open_road(drafter, settings), optimizer, steps, inputs, position, tracker)
    with explain_os_errors(settings.folder):
        settings.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(settings.folder / RESOLVED_NAME, lambda path: path.write_text(to_toml(resolved.config), encoding="utf-8"))
    _trim_metrics(settings.folder, position.step)
    _announce(run)
    return run


def build_drafter(resolved: Resolved, target: Target) -> Drafter:
    """A drafter from scratch, at the scale of the target's head."""
    drafter = Drafter(resolved.shape, dense_attention)
    head_scale = float(target.head.weight_VD.float().norm(dim=1).mean())
    initialise(drafter, seed=resolved.config.train.seed, head_scale=head_scale)
    return drafter


def _one_step(run: Run, step: int, bar: ProgressBar, last: dict[str, Any] | None) -> dict[str, Any] | None:
    config, watch = run.resolved.config, Stopwatch()
    with watch("data"):
        batches = [_micro_batch(run, step, m) for m in range(config.train.accumulation)]
    rate = learning_rate_at(step, run.steps, config.optimizer)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    terms, norm = run_step(
        run.road, run.source, run.optimizer, batches, clip_norm=config.optimizer.clip_norm,
        logits_bytes=config.objective.logits_mib * 2**20, watch=watch,
    )
    run.position = Position(step + 1, run.position.tau, run.position.tau_step)
    if (step + 1) % config.train.log_every and step + 1 != run.steps:
        bar.advance(1)
        return last
    report = report_step(
        terms, step=step + 1, gradient_norm=float(norm), learning_rate=rate,
        anchors=sum(int(batch.blocks.keep_BA.sum()) for batch in batches), eligible=sum(batch.eligible for batch in batches),
        seconds=watch.seconds,
    )
    line = as_metrics(report)
    _log(run, line)
    bar.advance(1, note=as_note(report))
    return line


def _micro_batch(run: Run, step: int, micro: int) -> MicroBatch:
    """The rows of one micro-batch: the epochs' permutations end to end, so that the step number alone says which."""
    settings = run.resolved.config.train
    first = (step * settings.accumulation + micro) * settings.rows_per_batch
    places = [divmod(index, len(run.rows)) for index in range(first, first + settings.rows_per_batch)]
    orders = {epoch: run.rows.row_order(settings.seed, epoch) for epoch, _ in places}
    rows = run.rows.batch([orders[epoch][at] for epoch, at in places])
    return lay_out(rows, run.resolved, [epoch for epoch, _ in places], run.drafter.norm.weight.device)


def _measure(run: Run, step: int, check: AcceptanceCheck) -> Position:
    report = check(run.source.target, run.drafter)
    _log(run, {"step": step, "tau": round(report.tau, 4), "acceptance_by_slot": report.acceptance_by_slot,
               "tokens": report.tokens, "forwards": report.forwards, "seconds": round(report.seconds, 2)})
    say(f"step {step}: real accepted length tau {report.tau:.3f} on held-out prompts ({report.tokens} tokens, greedy)")
    return Position(run.position.step, report.tau, step)


def _save(run: Run) -> None:
    config = run.resolved.config
    save_checkpoint(run.folder, run.drafter, run.optimizer, run.position, target=config.target.path,
                    inputs=run.inputs, keep=config.train.keep_checkpoints)


def _log(run: Run, line: dict[str, Any]) -> None:
    run.tracker.log(line)
    path = run.folder / METRICS_NAME
    with explain_os_errors(path), path.open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(line) + "\n")


def _trim_metrics(folder: Path, step: int) -> None:
    """Drop the lines of steps after the checkpoint: they will be made again."""
    path = folder / METRICS_NAME
    if path.exists():
        kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
        write_atomic(path, lambda temporary: temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8"))


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return float("inf")  # a line cut by a kill


def _check_folder(resolved: Resolved, checkpoints: list[Path], *, resume: bool) -> None:
    folder = resolved.config.train.folder
    if checkpoints and not resume:
        raise UserError(f"train.folder = '{folder}': already holds checkpoints of a run: add --resume to go on, or choose "
                        "another folder")
    if not checkpoints and (folder / METRICS_NAME).exists() and not (folder / RESOLVED_NAME).exists():
        raise UserError(f"train.folder = '{folder}': holds a {METRICS_NAME} that no run wrote: choose another folder")
    if resume and not checkpoints:
        raise UserError(f"train.folder = '{folder}': holds no checkpoint to resume from: leave out --resume to start")
    if resume:
        before = load_run(folder / RESOLVED_NAME).model_dump(mode="json")
        now = resolved.config.model_dump(mode="json")
        changed = [f"{s}.{k} ({before[s][k]} -> {now[s][k]})" for s in now for k in now[s]
                   if before[s][k] != now[s][k] and not (s == "train" and k in FREE_TO_CHANGE)]
        if changed:
            raise UserError(f"train.folder = '{folder}': the run file changed since its checkpoint: {', '.join(changed)}: undo "
                            "the change, or choose another folder")


def _check_data(resolved: Resolved, rows: PreparedRows) -> None:
    """Refuse rows made for another vocabulary and a mask token that means something else (04-pitfalls, 8)."""
    shape, tokenizer = resolved.shape, load_tokenizer(resolved.config.target.path)
    if rows.vocab_size != shape.vocab_size:
        raise UserError(f"data.rows = '{resolved.config.data.rows}': made for a vocabulary of {rows.vocab_size}, the target has "
                        f"{shape.vocab_size}: prepare them again with this target")
    for name, size in (("layout.anchors", resolved.config.layout.anchors), ("drafter.block_size", shape.block_size)):
        if size > rows.row_length:
            raise UserError(f"{name} = {size}: must be at most the rows' length, {rows.row_length} tokens: lower it, or prepare "
                            "longer rows")
    mask = shape.mask_token_id
    special = {tokenizer.pad_token_id: "pad", tokenizer.bos_token_id: "bos", tokenizer.eos_token_id: "eos",
               **dict.fromkeys(read_stop_ids(resolved.config.target.path, tokenizer), "eos")}
    if mask in special:
        raise UserError(f"drafter.mask_token_id = {mask}: is the target's {special[mask]} token: choose an id that never occurs "
                        "in text")
    if rows.contains_token(mask):
        raise UserError(f"drafter.mask_token_id = {mask}: occurs in the data: choose an id that never occurs in text")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"train.device = {name!r}: not a device: use 'cpu' or 'cuda'") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"train.device = {name!r}: not supported: use 'cpu' or 'cuda'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"train.device = {name!r}: {torch.cuda.device_count()} CUDA devices were found here: use one of them, or "
                        "'cpu'")
    return device


def _announce(run: Run) -> None:
    for key, value in run.resolved.derived.items():
        say(f"derived: {key} = {value}")
    layout = run.resolved.config.layout
    per_step = run.resolved.config.train.rows_per_batch * run.resolved.config.train.accumulation
    say(f"drafter: {count_parameters(run.resolved.shape) / 1e6:.1f} M parameters; {len(run.rows)} rows of {run.rows.row_length} "
        f"tokens; {run.steps} steps of up to {per_step} x {layout.anchors} blocks; free disk "
        f"{shutil.disk_usage(run.folder).free / 2**30:.0f} GiB")


def peak_bytes() -> int:
    """Peak device memory (allocated) on a GPU, peak resident memory of the process on a CPU."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
