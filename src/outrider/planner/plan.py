"""Takes a job and cards, gives the placements and settings that they allow, what each needs and how fast it is; runs nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.config import MOST_ROWS
from outrider.errors import UserError
from outrider.planner.gpus import Gpu
from outrider.planner.job import Job
from outrider.planner.ledger import DeviceLedger, capturers, colocated, learner
from outrider.planner.speed import parts, sum_ms
from outrider.planner.spread import MOST_CARDS, goes_onto, spread_over, time_shares

PLACEMENTS = ("colocated", "pairs", "fan-in", "spread")
FEWEST_CARDS = {"pairs": 2, "fan-in": 3, "spread": 3}
FEWEST_ANCHORS = 64
BUDGETS = (0.5,)  # of train.activation_budget, tried where everything kept does not fit
Change = tuple[dict[str, object], Job]  # `section.key` to its new value, and the job with it


@dataclass(frozen=True)
class DevicePlan:
    """`count` cards alike, and the ledger of each."""

    count: int
    gpu: Gpu
    ledger: DeviceLedger

    @property
    def headroom(self) -> int:
        """Bytes left on the card at its fullest moment, negative where it does not fit."""
        return self.gpu.usable_bytes - self.ledger.device_used_bytes


@dataclass(frozen=True)
class Plan:
    """One way to run the job. `changes`: `section.key` to the value that differs from the run file. Times are of one step.

    `supervised_tokens_per_s`: draft slots with a label, over all replicas: what the drafter learns from. `tokens_per_s`: of the
    rows.
    """

    placement: str
    job: Job
    changes: Mapping[str, object]
    devices: tuple[DevicePlan, ...]
    step_ms: float
    stages: Mapping[str, float]
    supervised_tokens_per_s: float
    tokens_per_s: float

    @property
    def fits(self) -> bool:
        return all(device.headroom >= 0 for device in self.devices)

    @property
    def headroom(self) -> int:
        return min(device.headroom for device in self.devices)

    @property
    def bottleneck(self) -> str:
        """The stage that the step waits for longest."""
        return max(self.stages, key=lambda name: self.stages[name])

    @property
    def gpus(self) -> int:
        return sum(device.count for device in self.devices)


def make_plans(job: Job, gpus: Sequence[Gpu], *, placements: Sequence[str], vary: bool) -> list[Plan]:
    """All placements of the job on the cards, best first: what fits by supervised tokens a second, then what misses least.

    `vary`: also with settings changed where the run file's own do not fit. Cards must be of one kind. Raises UserError.
    """
    if not gpus:
        raise UserError('--gpus: no CUDA device is here: name the cards, for example --gpus "4x rtx-pro-6000"')
    if len({gpu.name for gpu in gpus}) > 1:
        raise UserError(f"--gpus: {', '.join(sorted({gpu.name for gpu in gpus}))}: cards of several kinds: plan each kind by "
                        "itself")
    for name, least in FEWEST_CARDS.items():
        if tuple(placements) == (name,) and len(gpus) < least:
            raise UserError(f"--placement {name}: takes at least {least} cards, --gpus has {len(gpus)}: name more, or another "
                            "placement")
    plans = []
    for replicas, cards, sharded in _placements(len(gpus), ("colocated",) if job.served else placements):
        placement = placement_name(replicas, cards, sharded, served=job.served)
        needed, placed = shared_out(job, replicas, sharded=sharded)
        as_given = plan_of(placement, placed, gpus[0], cards, needed)
        plans.append(as_given)
        if vary and not as_given.fits:
            plans += _that_fit(placement, placed, gpus[0], cards, needed)
    if "spread" in placements and not job.served:
        plans += _spread(job, gpus, always=tuple(placements) == ("spread",))
    return sorted(plans, key=lambda plan: (not plan.fits, -plan.supervised_tokens_per_s if plan.fits else -plan.headroom))


def _placements(count: int, wanted: Sequence[str]) -> Iterator[tuple[int, int, bool]]:
    """Replicas, capture cards of each besides its own, whether masters are shared out."""
    for replicas in sorted({1, count}):
        if "colocated" in wanted:
            for sharded in (False, True)[: 1 if replicas == 1 else 2]:
                yield replicas, 0, sharded
    if "pairs" in wanted and count >= FEWEST_CARDS["pairs"]:
        for replicas in sorted({1, count // 2}):
            yield replicas, 1, False
    if "fan-in" in wanted and count >= FEWEST_CARDS["fan-in"]:
        yield 1, count - 1, False


def _spread(job: Job, gpus: Sequence[Gpu], *, always: bool) -> Iterator[Plan]:
    """One learner, and targets over as few cards each as hold one; where one card does, only if `always`."""
    job, usable = replace(job, prefetch=True), gpus[0].usable_bytes
    if not always and goes_onto(job, 1, usable):
        return
    tried = range(2, min(MOST_CARDS, job.loaded, len(gpus) - 1) + 1)
    each = next((cards for cards in tried if goes_onto(job, cards, usable)), tried[-1] if tried else None)
    if each is not None:
        targets = (len(gpus) - 1) // each
        name = placement_name(1, targets * each, False, each=each)
        yield plan_of(name, spread_over(job, each, usable), gpus[0], targets, {
            "placement.capture_cards": targets * each, "placement.cards_per_target": each})


def placement_name(replicas: int, cards: int, sharded: bool, *, served: bool = False, each: int = 1) -> str:
    """What a person calls `replicas` learners with `cards` for capture each, `each` of them to a target, or features from a
    server."""
    if each > 1:
        targets = cards // each
        feed = f"1 target over {each} cards feeds" if targets == 1 else f"{targets} targets over {each} cards each feed"
        name = f"{f'{replicas} x ' if replicas > 1 else ''}{feed} 1 drafter card"
    elif cards > 1:
        name = f"{f'{replicas} x ' if replicas > 1 else ''}{cards} target cards feed 1 drafter card"
    elif cards:
        name = f"{replicas} pair{'s' if replicas > 1 else ''}: target card, drafter card"
    elif served:
        name = f"{replicas} x drafter on one card, features from a server"
    else:
        name = f"{replicas} x target and drafter on one card"
    return f"{name}, {'fsdp2' if sharded else 'ddp'}" if replicas > 1 else name


def shared_out(job: Job, replicas: int, *, sharded: bool) -> Change:
    """The job over so many replicas, which needs at least one micro-batch a step for each of them."""
    needed: dict[str, object] = {"train.accumulation": replicas} if job.accumulation < replicas else {}
    return needed, replace(job, replicas=replicas, sharded=sharded, accumulation=max(job.accumulation, replicas))


def plan_of(placement: str, job: Job, gpu: Gpu, cards: int, changes: Mapping[str, object]) -> Plan:
    """One way to run the job: each replica on its own card, with `cards` more for its target (several each where the job has it
    spread), or on one with it (0). How fast a server gives features is not known: the step is that of one that keeps up."""
    job = replace(job, prefetch=cards > 0 or job.served)
    devices: tuple[DevicePlan, ...]
    if cards:
        devices = (*(DevicePlan(job.replicas * cards, gpu, ledger) for ledger in capturers(job)),
                   DevicePlan(job.replicas, gpu, learner(job)))
    else:
        devices = (DevicePlan(job.replicas, gpu, learner(job) if job.served else colocated(job)),)
    time, micro = parts(job, gpu), job.micro_batches
    if cards:
        waited = max(0.0, time.capture * max(time_shares(job)) / cards - time.learn)  # the slowest stretch sets a target's pace
        stages = {"drafter": micro * time.learn, "waiting for the target": micro * waited}
    else:
        stages = {"drafter": micro * time.learn}
        if not job.served:
            stages = {"target": micro * time.capture, **stages}
    stages |= {"sum of gradients": sum_ms(job, gpu), "optimizer": time.update}
    step_ms = sum(stages.values())
    per_s = job.accumulation * 1e3 / step_ms
    return Plan(placement, job, changes, devices, step_ms, stages, job.predicted * per_s, job.context * per_s)


def _that_fit(placement: str, job: Job, gpu: Gpu, cards: int, needed: Mapping[str, object]) -> Iterator[Plan]:
    """The nearest changes, besides those that are `needed`, with which the job fits on the cards."""
    for changes, changed in changes_of(job, fp8=gpu.fp8 is not None):
        plan = plan_of(placement, changed, gpu, cards, {**needed, **changes})
        if plan.fits:
            yield plan
            return


def changes_of(job: Job, *, fp8: bool) -> Iterator[Change]:
    """Ever stronger changes: what costs speed alone, what rounds more coarsely, together and with less kept, fewer blocks.

    `fp8`: the target's card has 8-bit products.
    """
    yield from slower(job)
    coarser = list(coarser_moments(job))
    coarser += [({**changes, **more}, both) for changes, changed in [({}, job), *coarser]
                for more, both in coarser_features(changed, fp8=fp8)]
    for changes, changed in coarser:
        yield changes, changed
        for budget in _budgets(job):
            yield {**changes, "train.activation_budget": budget}, replace(changed, activation_budget=budget)
    yield from fewer_blocks(job)


def slower(job: Job) -> Iterator[Change]:
    """The same learning in less memory and more time."""
    for budget in _budgets(job):
        yield {"train.activation_budget": budget}, replace(job, activation_budget=budget)
    accumulation = job.accumulation * job.rows
    if job.rows > 1 and accumulation <= MOST_ROWS:
        yield ({"train.rows_per_batch": 1, "train.accumulation": accumulation}, replace(job, rows=1, accumulation=accumulation))


def coarser_moments(job: Job) -> Iterator[Change]:
    if not job.eight_bit and not job.sharded:
        yield {"optimizer.state": "8bit"}, replace(job, eight_bit=True)


def coarser_features(job: Job, *, fp8: bool) -> Iterator[Change]:
    if fp8 and not job.fp8 and not job.served and job.target.quantised is None:  # else captured from as it is served, or came
        yield {"features.precision": "fp8"}, replace(job, fp8=True)


def fewer_blocks(job: Job) -> Iterator[Change]:
    """Down to FEWEST_ANCHORS, with all and with less kept for the backward."""
    anchors = job.anchors // 2
    while anchors >= FEWEST_ANCHORS:
        yield {"layout.anchors": anchors}, replace(job, anchors=anchors)
        for budget in _budgets(job):
            yield ({"layout.anchors": anchors, "train.activation_budget": budget},
                   replace(job, anchors=anchors, activation_budget=budget))
        anchors //= 2


def _budgets(job: Job) -> tuple[float, ...]:
    return BUDGETS if job.road == "fused" and job.activation_budget > min(BUDGETS) else ()


def nearest_that_fits(
    job: Job, usable_bytes: int, *, fp8: bool, ledger_of: Callable[[Job], DeviceLedger]
) -> tuple[Mapping[str, object], DeviceLedger] | None:
    """The least change with which a card of `usable_bytes` holds what `ledger_of` lays on it, and the ledger then; or None.

    `fp8`: the card has 8-bit products.
    """
    for changes, changed in ({}, job), *changes_of(job, fp8=fp8):
        ledger = ledger_of(changed)
        if ledger.device_used_bytes <= usable_bytes:
            return changes, ledger
    return None
