"""Takes a resolved run and the card it is to learn on, gives the memory foreseen, and refuses what cannot fit; runs nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from outrider.errors import UserError
from outrider.features.eight_bit import LEAST_CAPABILITY
from outrider.features.target import Stretch
from outrider.planner.job import Job
from outrider.planner.ledger import DeviceLedger, capturers, colocated, host, learner, ledger_of
from outrider.planner.plan import coarser_features, nearest_that_fits
from outrider.planner.run import grouped, job_from, telling_line
from outrider.planner.spread import MOST_CARDS, evenly, goes_onto, spread_over
from outrider.progress import say
from outrider.train.placement import Devices
from outrider.train.resolve import Resolved

GIB = 2**30
MEMORY_NAME = "memory.json"  # in the run's folder


@dataclass(frozen=True)
class Card:
    """`allowed_bytes`: what this process may take of the card, a cap of its own included; `free_bytes`: what nobody uses now.
    `fp8`: it has 8-bit products. `peak_bytes` tells the most that was allocated at a time so far."""

    name: str
    allowed_bytes: int
    free_bytes: int
    fp8: bool
    peak_bytes: Callable[[], int]


CardOf = Callable[[torch.device], Card | None]


def card_of(device: torch.device) -> Card | None:
    """The CUDA device's card as it is now; None for a CPU, whose memory is not planned."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    fp8 = torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
    return Card(torch.cuda.get_device_name(device), allowed, min(free, allowed), fp8,
                lambda: torch.cuda.max_memory_allocated(device))


@dataclass(frozen=True)
class Forecast:
    """What a run is expected to take of its card."""

    job: Job
    ledger: DeviceLedger
    card: Card

    def compared(self) -> str:
        """Predicted against measured, in words."""
        predicted, measured = self.ledger.peak_bytes, self.card.peak_bytes()
        return (f"memory: predicted {predicted / GIB:.2f} GiB at the peak, in '{self.ledger.peak_phase}', measured "
                f"{measured / GIB:.2f} GiB in a step of the worst rows ({predicted / measured - 1:+.1%})")


    def facts(self) -> dict[str, Any]:
        """Predicted against measured, and what the predicted peak is made of, bytes; as `outrider report` draws it."""
        return {
            "card": self.card.name, "allowed_bytes": self.card.allowed_bytes, "predicted_bytes": self.ledger.peak_bytes,
            "measured_bytes": self.card.peak_bytes(), "peak_phase": self.ledger.peak_phase, "by_phase": self.ledger.by_phase,
            "groups_at_peak": grouped(self.ledger.at_peak()),
        }


def foresee(resolved: Resolved, devices: Devices, card_of: CardOf, *, row_length: int, replicas: int) -> Forecast | None:
    """Plan the run for its cards. Raises UserError where it cannot fit, naming the nearest setting that does.

    None where there are no cards, and, with a word of it, for a target whose layers the ledger does not know.
    """
    card = card_of(devices.learn)
    if card is None:
        return None
    try:
        job = _placed(resolved, devices, row_length=row_length, replicas=replicas)
    except UserError as error:
        say(f"memory: not planned: {error}")
        return None
    for cards in devices.targets if devices.capture else ():
        known = [capture_card for device in cards if (capture_card := card_of(device))]
        if known:
            least = min(known, key=lambda card: card.allowed_bytes)
            spread = spread_over(job, len(cards), least.allowed_bytes)
            for ledger, capture_card in zip(capturers(spread), known, strict=len(known) == len(cards)):
                _check(spread, ledger, capture_card)
    ledger = learner(job) if job.prefetch else colocated(job)
    _check(job, ledger, card)
    say(f"memory: predicted {ledger.peak_bytes / GIB:.2f} GiB at the peak of {card.allowed_bytes / GIB:.1f} on {card.name}, "
        f"{sum(line.bytes for line in host(job)) / GIB:.2f} on the host for checkpoints")
    return Forecast(job, ledger, card)


def stretches_of(
    resolved: Resolved, devices: Sequence[torch.device], *, whole: bool, card_of: CardOf, row_length: int
) -> tuple[Stretch, ...]:
    """The layers that each of a target's `devices` is to hold, `whole` or up to the last captured one. Raises UserError.

    A target whose layers the ledger does not know is shared out by their number.
    """
    allowed = [card.allowed_bytes for device in devices if (card := card_of(device))]
    try:
        job = replace(job_from(resolved.config, resolved.shape, row_length=row_length, suppositions=()), prefetch=True)
    except UserError:
        count = resolved.shape.num_target_layers if whole else resolved.shape.target_layer_ids[-1] + 1
        ranges = tuple(range(a, b) for a, b in pairwise((0, *evenly((1.0,) * count, len(devices)), count)))
    else:
        ranges = spread_over(replace(job, whole_target=whole), len(devices), min(allowed, default=None)).capture_ranges
    told = ", ".join(f"{layers[0]} to {layers[-1]} on {device}" for device, layers in zip(devices, ranges, strict=True))
    say(f"target: its layers are spread over {len(devices)} devices: {told}")
    return tuple(Stretch(device, layers) for device, layers in zip(devices, ranges, strict=True))


def _placed(resolved: Resolved, devices: Devices, *, row_length: int, replicas: int) -> Job:
    """The job over `replicas` processes, its target and masters placed as the run file says."""
    placement, elsewhere = resolved.config.placement, resolved.config.features.server is not None
    job = job_from(resolved.config, resolved.shape, row_length=row_length, suppositions=())
    return replace(job, replicas=replicas, sharded=replicas > 1 and placement.sharding == "fsdp2",
                   prefetch=elsewhere or bool(devices.capture))


def _check(job: Job, ledger: DeviceLedger, card: Card) -> None:
    if ledger.peak_bytes > card.allowed_bytes:
        raise UserError(_refusal(job, ledger, card))
    if ledger.device_used_bytes > card.free_bytes:
        why = "others use it too" if ledger.device_used_bytes <= card.allowed_bytes else "it is a close fit"
        say(f"memory: warning: predicted {ledger.device_used_bytes / GIB:.1f} GiB used with the allocator's gaps and libraries, "
            f"{card.name} has {card.free_bytes / GIB:.1f} free of {card.allowed_bytes / GIB:.1f} ({why}): it may run out")


def _target_elsewhere(job: Job, ledger: DeviceLedger, card: Card) -> str:
    """What is left where no change on this card helps: the target on cards of its own, or in an engine that serves it."""
    if "learn" in ledger.roles and learner(job).device_used_bytes > card.allowed_bytes:
        return "see outrider plan"
    ways = (({}, job), *coarser_features(job, fp8=card.fp8))
    for cards in range(1, MOST_CARDS + 1):
        for changes, changed in ways:
            if not goes_onto(replace(changed, prefetch=True), cards, card.allowed_bytes):
                continue
            where = "on a card of its own" if cards == 1 else f"spread over {cards} cards of its own"
            spread = {"placement.cards_per_target": cards} if cards > 1 else {}
            settings = {"placement.capture_cards": cards, **spread, **changes}
            return (f"with the target {'in 8 bits ' if changes else ''}{where} it does: "
                    + " ".join(f"--set {key}={value}" for key, value in settings.items()))
    return (f"no target of its size goes onto {MOST_CARDS} cards such as this one: serve it with an engine that spreads it "
            "further, and set features.server (docs/placement.md)")


def _refusal(job: Job, ledger: DeviceLedger, card: Card) -> str:
    line = telling_line(ledger)

    def again(changed: Job) -> DeviceLedger:
        return ledger_of(spread_over(changed, len(changed.capture_ranges), card.allowed_bytes), ledger.roles)

    nearest = nearest_that_fits(job, card.allowed_bytes, fp8=card.fp8, ledger_of=again)
    if nearest is None:
        way_out = f"nothing near it fits: {_target_elsewhere(job, ledger, card)}"
    else:
        changes, found = nearest
        settings = " ".join(f"--set {key}={value}" for key, value in changes.items())
        way_out = f"the nearest that fits is {settings} ({found.device_used_bytes / GIB:.1f} GiB)"
    return (f"the run needs {ledger.peak_bytes / GIB:.1f} GiB in '{ledger.peak_phase}', {card.name} has "
            f"{card.allowed_bytes / GIB:.1f}: {ledger.standing_bytes / GIB:.1f} GiB stand for the whole run, and the largest of "
            f"the rest is '{line.name}', {line.bytes / GIB:.1f} GiB = {line.formula}: {way_out}")
