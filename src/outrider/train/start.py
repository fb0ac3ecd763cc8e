"""Takes a RunConfig, gives everything that a training run needs, from its newest checkpoint if it has one; trains nothing."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from outrider.config import RunConfig, to_toml
from outrider.data.info import read_info
from outrider.data.mask_token import mask_token_ids
from outrider.data.rows import PreparedRows, load_rows
from outrider.errors import UserError
from outrider.features.capture import FeatureSource
from outrider.features.facts import read_facts
from outrider.features.guards import open_kernel_cache, wake_compilers
from outrider.features.own_text import say_own_share
from outrider.features.source import Order, Provenance, open_served, open_source
from outrider.features.target import (
    Ends,
    Stretch,
    embedding_scale,
    load_ends,
    load_tokenizer,
    read_stop_ids,
    target_digest,
)
from outrider.features.trust import trust_as_asked
from outrider.files import digest, explain_os_errors, write_atomic
from outrider.model.attention import dense_attention
from outrider.model.drafter import Drafter, initialise
from outrider.model.flops import count_parameters
from outrider.model.published import to_config
from outrider.progress import say
from outrider.records import TokenRows
from outrider.train.checkpoint import Origin, Position, coming, coming_here, load_checkpoint, newest_sound
from outrider.train.folder import RESOLVED_NAME, check_folder, check_inputs, git_commit, versions
from outrider.train.forecast import CardOf, Forecast, foresee, stretches_of
from outrider.train.guards import DiskWatch
from outrider.train.host_memory import short_of
from outrider.train.initial import OpenInitial, check_initial
from outrider.train.keeper import Keeper
from outrider.train.lanes import Trace
from outrider.train.masters import open_masters
from outrider.train.metrics import Metrics
from outrider.train.optim import build_optimizer, check_optimizer
from outrider.train.placement import Devices, Relay, find_devices, open_relay
from outrider.train.processes import Processes
from outrider.train.resolve import Resolved, resolve
from outrider.train.rng import seed_rng
from outrider.train.roads import Road, open_road
from outrider.train.step import Learner

FEATURES_NAME = "features"


@dataclass
class Run:
    """Everything one process of a training run holds while it lasts; `position` says how far the run is, `clock_zero` when it
    would have begun had it never been interrupted (time.monotonic). `read`: rows read ahead, by step and micro-batch.
    `allocated`: bytes on the device at the end of each step. `traced`: steps in the relay's trace."""

    resolved: Resolved
    rows: PreparedRows
    relay: Relay
    learner: Learner
    processes: Processes
    steps: int
    position: Position
    metrics: Metrics
    keeper: Keeper
    disk: DiskWatch
    clock_zero: float
    forecast: Forecast | None
    read: dict[tuple[int, int], TokenRows] = field(default_factory=dict)
    allocated: list[int] = field(default_factory=list)
    traced: int = 0

    @property
    def road(self) -> Road:
        return self.learner.road

    @property
    def source(self) -> FeatureSource:
        """The first of the relay's: where the target can answer, it is this one's."""
        return self.relay.sources[0]

    @property
    def drafter(self) -> Drafter:
        return self.road.drafter

    @property
    def device(self) -> torch.device:
        return self.relay.learn

    @property
    def folder(self) -> Path:
        return self.resolved.config.train.folder


def start(config: RunConfig, processes: Processes, initial: OpenInitial | None, card_of: CardOf) -> Run:
    """Load, check and print everything a run needs, go to its newest checkpoint, and write the resolved run file.

    A fresh run begins from the drafter that `initial` opens, or from scratch; one with a checkpoint does not open it.
    Raises UserError, with nothing written, when the run cannot start, is not the one that its folder holds, or cannot fit on the
    cards that `card_of` tells of. Every process must call it; the first one looks at the disk for all.
    """
    trust_as_asked(config.target)
    resolved = resolve(config, read_facts(config.target.path))
    check_optimizer(resolved.config)
    settings = resolved.config.train
    devices = find_devices(settings.device, config.placement, processes.place)
    checkpoint = processes.from_first(lambda: newest_sound(settings.folder))
    check_folder(resolved.config, checkpoint)
    rows = load_rows(config.data.rows)
    _check_data(resolved, rows)
    _check_share(config, processes, len(rows))
    forecast = foresee(resolved, devices, card_of, row_length=rows.row_length, replicas=processes.count)
    spread = partial(stretches_of, card_of=card_of, row_length=rows.row_length)
    inputs = {"data.rows": read_info(config.data.rows)["rows_sha256"],
              "target.path": processes.from_first(lambda: target_digest(config.target.path))}
    check_inputs(checkpoint, inputs)
    begun = None if checkpoint is not None else _begin(resolved, initial, inputs["target.path"])
    provenance = Provenance(inputs["target.path"], inputs["data.rows"], len(rows), settings.folder / FEATURES_NAME)
    sources, ends = _open_features(resolved, devices, provenance, rows.batch([0]), leads=processes.leads, spread=spread)
    if checkpoint is None and config.data.heldout is not None and processes.leads:  # then the first target is whole
        say_own_share(sources[0].target, (rows.batch([row]) for row in range(len(rows))))
    relay = open_relay(sources, devices, config.placement, meeting=digest(str(settings.folder.resolve()))[:16],
                       trace=Trace(devices.all) if settings.trace_steps else None)
    learner = _build_learner(begun or build_drafter(resolved, ends), resolved, ends, devices.learn, processes)
    if checkpoint is None:
        position = Position()
        seed_rng(settings.seed)
    else:
        position = load_checkpoint(checkpoint, learner.road.drafter, learner.optimizer)
        say(f"going on from {checkpoint}, {position.step} steps done")
    steps = settings.steps or -(-settings.epochs * len(rows) // (settings.rows_per_batch * settings.accumulation))
    disk = _room_for_checkpoints(learner, config, processes)
    if processes.leads:
        _write_resolved(resolved)
    metrics = Metrics(settings.folder, settings.tracker, at_bytes=position.metrics_bytes, at_step=position.step,
                      writes=processes.leads)
    keeper = Keeper(settings.folder, resolved.config.checkpoint, _origin(resolved, ends, inputs), position, processes)
    keeper.make_room(learner.road.drafter, learner.optimizer)
    run = Run(resolved, rows, relay, learner, processes, steps, position, metrics, keeper, disk,
              time.monotonic() - position.seconds, forecast)
    _announce(run)
    processes.meet()  # one may still load, longer than the others wait for a sum
    return run


def _open_features(
    resolved: Resolved, devices: Devices, provenance: Provenance, first_row: TokenRows, *, leads: bool,
    spread: Callable[..., tuple[Stretch, ...]],
) -> tuple[list[FeatureSource], Ends]:
    """Where features come from, and the target's ends on the learning device. The process that `leads` checks and measures."""
    config = resolved.config
    if config.train.attention == "fused" and devices.learn.type == "cuda":
        open_kernel_cache(config.features.kernel_cache)
        wake_compilers()  # beside the loading of the target
    if config.features.server is not None:
        return _open_server(resolved, devices, provenance, first_row, checks=leads)
    answers = leads and config.data.heldout is not None
    return _open_sources(resolved, devices, provenance, first_row, answers=answers, spread=spread)


def _open_sources(
    resolved: Resolved, devices: Devices, provenance: Provenance, first_row: TokenRows, *, answers: bool,
    spread: Callable[..., tuple[Stretch, ...]],
) -> tuple[list[FeatureSource], Ends]:
    """A target on each capture device, or spread over several, and its ends on the learning one. The first target is whole when
    it `answers`, as the acceptance check wants."""
    config, layer_ids = resolved.config, resolved.shape.target_layer_ids
    path, dtype, colocated = config.target.path, config.target.dtype, not devices.capture
    sources = []
    for number, cards in enumerate(devices.targets):
        whole = answers and number == 0
        place = spread(resolved, cards, whole=whole) if len(cards) > 1 else str(cards[0])
        order = Order(path, dtype, place, layer_ids, None if whole else layer_ids[-1])
        sources.append(open_source(order, config.features, first_row, provenance))
        if not whole and not colocated:
            sources[-1].target.drop_head()
    ends = sources[0].target.ends if colocated else load_ends(path, dtype=dtype, device=str(devices.learn))
    return sources, ends


def _open_server(
    resolved: Resolved, devices: Devices, provenance: Provenance, first_row: TokenRows, *, checks: bool
) -> tuple[list[FeatureSource], Ends]:
    """Features from a server, and the target's ends on the learning device. One process `checks` them for all."""
    config = resolved.config
    if devices.capture:
        raise UserError(f"placement.capture_cards = {len(devices.capture)}: features.server captures elsewhere: set it to 0")
    if config.data.heldout is not None:
        raise UserError(f"data.heldout = '{config.data.heldout}': the real accepted length needs a target that is loaded here, "
                        "and features.server has it elsewhere: leave it out, and use outrider evaluate --engine on an export")
    order = Order(config.target.path, config.target.dtype, str(devices.learn), resolved.shape.target_layer_ids, None)
    source = open_served(order, config.features, first_row, provenance, timeout_s=config.placement.timeout_s, checks=checks)
    return [source], source.target.ends


def _begin(resolved: Resolved, initial: OpenInitial | None, target: str) -> Drafter | None:
    """The drafter of `train.init_from`, checked against the run; None where the run begins from scratch."""
    assert (initial is None) == (resolved.config.train.init_from is None)
    if initial is None:
        return None
    found = initial()
    check_initial(found, resolved, target)
    say(f"beginning from the drafter of {resolved.config.train.init_from}")
    return found.drafter.requires_grad_(True).train()


def _build_learner(
    drafter: Drafter, resolved: Resolved, ends: Ends, device: torch.device, processes: Processes
) -> Learner:
    drafter = drafter.to(device)
    road = open_road(drafter, resolved.config.train)
    masters = open_masters(drafter, processes, resolved.config.placement.sharding)  # may replace the drafter's parameters
    return Learner(road, masters, ends, build_optimizer(drafter, resolved.config.optimizer))


def _room_for_checkpoints(learner: Learner, config: RunConfig, processes: Processes) -> DiskWatch:
    """Refuse to start where the disk has no room for a checkpoint, or a machine's memory none for its processes' copies."""
    drafter, optimizer = learner.road.drafter, learner.optimizer
    written, copied = coming(drafter, optimizer), coming_here(drafter, optimizer, leads=processes.leads)
    disk = DiskWatch(config.train.folder / "checkpoints", checkpoint_bytes=sum(tensor.nbytes for tensor in written.values()),
                     min_free_gib=config.guards.min_free_gib)
    copied_bytes = processes.on_this_machine(sum(tensor.nbytes for tensor in copied.values()))
    if short := processes.first(disk.short() or short_of(copied_bytes)):
        raise UserError(short)
    return disk


def _write_resolved(resolved: Resolved) -> None:
    folder = resolved.config.train.folder
    with explain_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / RESOLVED_NAME, lambda path: path.write_text(to_toml(resolved.config), encoding="utf-8"))


def build_drafter(resolved: Resolved, ends: Ends) -> Drafter:
    """A drafter from scratch, at the scale of the target's head."""
    drafter = Drafter(resolved.shape, dense_attention)
    head_scale = float(ends.head.weight_VD.float().norm(dim=1).mean())
    initialise(drafter, seed=resolved.config.train.seed, head_scale=head_scale)
    return drafter


def _origin(resolved: Resolved, ends: Ends, inputs: dict[str, str]) -> Origin:
    config = resolved.config
    scale = embedding_scale(ends.embedding, where=config.target.path)
    return Origin(
        drafter_config=to_config(resolved.shape, embedding_scale=scale, softcap=ends.head.softcap,
                                 dtype=config.train.precision),
        target=config.target.path, inputs=inputs, config=config.model_dump(mode="json"), versions=versions(),
        git_commit=git_commit(config.train.folder),
    )


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
    stop_ids = read_stop_ids(resolved.config.target.path, tokenizer)
    special = {tokenizer.pad_token_id: "pad", tokenizer.bos_token_id: "bos", tokenizer.eos_token_id: "eos",
               **dict.fromkeys(stop_ids, "eos")}
    if mask in special or rows.contains_token(mask):
        what = f"is the target's {special[mask]} token" if mask in special else "occurs in the data"
        free = mask_token_ids(tokenizer, vocab_size=shape.vocab_size, stop_ids=stop_ids, occurs=rows.contains_token)
        such = f", such as {' or '.join(map(str, free))}" if free else ""
        raise UserError(f"drafter.mask_token_id = {mask}: {what}: choose an id that never occurs in text{such}")


def _check_share(config: RunConfig, processes: Processes, rows: int) -> None:
    per_step = config.train.rows_per_batch * config.train.accumulation
    if per_step > rows:
        raise UserError(f"train.rows_per_batch * train.accumulation = {per_step}: a step would take a row twice, data.rows has "
                        f"{rows}: lower them to at most {rows} a step, or prepare more rows")
    if config.train.accumulation < processes.count:
        raise UserError(f"train.accumulation = {config.train.accumulation}: the micro-batches of a step are shared out over the "
                        f"processes, and there are {processes.count} of those: set it to at least {processes.count}, or start "
                        "fewer")


def _announce(run: Run) -> None:
    for key, value in run.resolved.derived.items():
        say(f"derived: {key} = {value}")
    layout = run.resolved.config.layout
    per_step = run.resolved.config.train.rows_per_batch * run.resolved.config.train.accumulation
    say(f"drafter: {count_parameters(run.resolved.shape) / 1e6:.1f} M parameters; {len(run.rows)} rows of {run.rows.row_length} "
        f"tokens; {run.steps} steps of up to {per_step} x {layout.anchors} blocks; free disk "
        f"{run.disk.free_bytes / 2**30:.0f} GiB")
    placement = run.resolved.config.placement
    if run.position.step == run.steps:
        say(f"all {run.steps} steps are done already: nothing is left to do, and what is there stays as it is")
    if run.processes.count > 1 or placement.capture_cards:
        target = f"its target on {placement.capture_cards} more" if placement.capture_cards else "its target beside the drafter"
        target += f", {placement.cards_per_target} to a target" if placement.cards_per_target > 1 else ""
        say(f"placement: {run.processes.count} process(es) of one {run.device.type} device each, {target}; masters: "
            f"{placement.sharding if run.processes.count > 1 else 'whole'}")
