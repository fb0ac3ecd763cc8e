"""Takes a job that ran out of memory and its card, gives the ways out, best first, each with its peak and its cost; runs nothing.

A way out is a change of the run file that the ledger says takes less of the card; its speed is the plan's. What the ledger missed
of the run that died (`missed`) is taken to be missed again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.planner.gpus import CATALOGUE, DRIVER_NAMES, Gpu
from outrider.planner.job import Job
from outrider.planner.lines import Role
from outrider.planner.plan import (
    Change,
    DevicePlan,
    Plan,
    coarser_features,
    coarser_moments,
    fewer_blocks,
    plan_of,
    slower,
)

FEWER_LOGITS_MIB = 256
LEAST_SAVING = 32 * 2**20  # bytes, below which a change is no way out
MOST_TOGETHER = 4  # changes at a time, where no single one is enough
SAME_CARD = 0.004  # of a card's bytes: neighbours in the catalogue are further apart, or as fast
REFERENCE = "h200"  # whose rates stand in for a card's that nobody knows: speeds are compared, not stated


@dataclass(frozen=True)
class Room:
    """The card as the run had it. `usable_bytes` of this process (None: not known), others' and what it may not take left out;
    `missed`: bytes that the run held above its plan."""

    gpu: Gpu
    known: bool
    usable_bytes: int | None
    missed: int


@dataclass(frozen=True)
class Remedy:
    """`set`: what to add to the command, exactly. `peak_bytes`: allocated, `used_bytes`: of the card, as predicted (None where it
    is no matter of the ledger). `fits`: None where the card's size is not known. `cost`: in speed or signal."""

    set: str
    peak_bytes: int | None
    used_bytes: int | None
    fits: bool | None
    cost: str


def room_of(*, name: str | None, capacity: int | None, usable_bytes: int | None, missed: int) -> Room:
    """The card by the driver's name or, from a log, by its size alone."""
    gpu = next((CATALOGUE[ours] for part, ours in DRIVER_NAMES if name and part.lower() in name.lower()), None)
    if gpu is None and capacity:
        nearest = min(CATALOGUE.values(), key=lambda card: abs(card.usable_bytes - capacity))
        gpu = nearest if abs(nearest.usable_bytes - capacity) <= SAME_CARD * capacity else None
    return Room(gpu or CATALOGUE[REFERENCE], gpu is not None, usable_bytes or None, missed)


def find_remedies(job: Job, roles: tuple[Role, ...], room: Room) -> list[Remedy]:
    """What helps the card with these roles, best first: what fits by speed, then what misses least. `job`: as it ran, faults
    included."""
    cards = 0 if "capture" in roles and "learn" in roles else 1
    before = plan_of("as it ran", job, room.gpu, cards, {})
    used = _used(before, roles)
    plans = [plan for plan in _plans(job, room.gpu, cards) if _used(plan, roles) <= used - LEAST_SAVING]
    if room.usable_bytes is not None and not any(_fits(plan, roles, room) for plan in plans):
        for more in {len(plan.devices) - 1 for plan in plans}:
            begun = min((plan for plan in plans if len(plan.devices) - 1 == more), key=lambda plan: _used(plan, roles))
            plans += _together(begun, roles, room, more)
    plans.sort(key=lambda plan: _rank(plan, roles, room))
    return [_remedy(plan, before, roles, room) for i, plan in enumerate(plans) if not _needless(i, plans, roles, room)]


def _needless(i: int, plans: Sequence[Plan], roles: tuple[Role, ...], room: Room) -> bool:
    """Does another change less, or a better one the same settings, and is it enough or saves as much?"""
    plan, keys = plans[i], plans[i].changes.keys()
    less = [other for j, other in enumerate(plans) if other.changes.keys() < keys or (other.changes.keys() == keys and j < i)]
    return any((room.usable_bytes is not None and _fits(other, roles, room)) or _used(other, roles) <= _used(plan, roles)
               for other in less)


def _plans(job: Job, gpu: Gpu, cards: int) -> Iterator[Plan]:
    """Each way out by itself."""
    for changes, changed in _ways(job, gpu):
        yield plan_of("changed", changed, gpu, cards, changes)
    if not cards:
        yield plan_of("changed", _mended(job), gpu, 1, {**_mending(job), "placement.capture_cards": 1})


def _ways(job: Job, gpu: Gpu) -> Iterator[Change]:
    """Changes of the run on the cards it has. Where something had gone wrong, all of them come with what mends it, and without
    it the one that keeps the fault and makes it small enough."""
    mended, mending = _mended(job), _mending(job)
    if mending:
        yield mending, mended
        yield from fewer_blocks(job)
    for changes, changed in _single(mended, gpu):
        yield {**mending, **changes}, changed


def _mending(job: Job) -> dict[str, object]:
    """The settings under which nothing of the job goes wrong; empty for a job as Outrider runs it on a GPU."""
    mending: dict[str, object] = {}
    if job.road != "fused" or job.eager_mask:
        mending["train.attention"] = "fused"
    if job.plain_logits:
        mending["objective.logits_mib"] = job.logits_bytes // 2**20
    return mending


def _mended(job: Job) -> Job:
    return replace(job, road="fused", eager_mask=False, plain_logits=False)


def _single(job: Job, gpu: Gpu) -> Iterator[Change]:
    yield from coarser_features(job, fp8=gpu.fp8 is not None)
    yield from coarser_moments(job)
    if job.logits_bytes > FEWER_LOGITS_MIB * 2**20:
        yield {"objective.logits_mib": FEWER_LOGITS_MIB}, replace(job, logits_bytes=FEWER_LOGITS_MIB * 2**20)
    if job.replicas > 1 and not job.sharded and not job.eight_bit:
        yield {"placement.sharding": "fsdp2"}, replace(job, sharded=True)
    yield from slower(job)
    yield from fewer_blocks(job)


def _together(begun: Plan, roles: tuple[Role, ...], room: Room, cards: int) -> Iterator[Plan]:
    """One change and others added to it, each time the one that saves most, until they fit."""
    while len(begun.changes) < MOST_TOGETHER:
        more = [plan_of("changed", changed, room.gpu, cards, {**begun.changes, **changes})
                for changes, changed in _single(begun.job, room.gpu) if not changes.keys() & begun.changes.keys()]
        best = min(more, key=lambda plan: _used(plan, roles), default=None)
        if best is None or _used(best, roles) > _used(begun, roles) - LEAST_SAVING:
            return
        yield best
        if _fits(best, roles, room):
            return
        begun = best


def _device(plan: Plan, roles: tuple[Role, ...]) -> DevicePlan:
    """The card that the plan gives to what died; where it is shared out over two, the fuller one."""
    own = [device for device in plan.devices if device.ledger.roles == roles]
    return max(own or plan.devices, key=lambda device: device.ledger.device_used_bytes)


def _used(plan: Plan, roles: tuple[Role, ...]) -> int:
    return _device(plan, roles).ledger.device_used_bytes


def _fits(plan: Plan, roles: tuple[Role, ...], room: Room) -> bool:
    assert room.usable_bytes is not None
    return _used(plan, roles) + room.missed <= room.usable_bytes


def _rank(plan: Plan, roles: tuple[Role, ...], room: Room) -> tuple[bool, float]:
    if room.usable_bytes is None:
        return False, float(_used(plan, roles))
    fits = _fits(plan, roles, room)
    return not fits, -plan.supervised_tokens_per_s / plan.gpus if fits else float(_used(plan, roles))


def _remedy(plan: Plan, before: Plan, roles: tuple[Role, ...], room: Room) -> Remedy:
    device = _device(plan, roles)
    settings = " ".join(f"--set {key}={value}" for key, value in plan.changes.items())
    return Remedy(settings, device.ledger.peak_bytes, device.ledger.device_used_bytes + room.missed,
                  None if room.usable_bytes is None else _fits(plan, roles, room), _cost(plan, before, room))


def _cost(plan: Plan, before: Plan, room: Room) -> str:
    """In speed, as the plan has it, and in what the drafter learns."""
    change = plan.supervised_tokens_per_s / before.supervised_tokens_per_s - 1
    speed = "as fast" if abs(change) < 0.005 else f"{change:+.0%} supervised tokens/s"
    if not room.known:
        speed += f" at an {REFERENCE}'s rates"
    signals = [signal for key in plan.changes if (signal := _signal(key, plan.changes, before.job))]
    return "; ".join([speed, *signals])


def _signal(key: str, changes: Mapping[str, object], job: Job) -> str:
    match key:
        case "layout.anchors":
            return f"{changes[key]} blocks a row instead of {job.anchors}"
        case "features.precision":
            return "features from a target in 8 bits"
        case "optimizer.state":
            return "moments in 8 bits (needs torchao)"
        case "placement.capture_cards":
            return "one more card for each drafter"
        case _:
            return ""
