"""Takes a job and a number of cards for its target, gives the layers that each of them holds; knows no devices.

Ranges follow one another. They are as even in time as their cards' memory allows, else as even in bytes: the cards work on
several rows at once, so that the slowest sets the pace, and the fullest decides whether it fits.
"""

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from outrider.errors import UserError
from outrider.planner.job import Job
from outrider.planner.ledger import capturers
from outrider.planner.target_lines import weight_lines

MOST_CARDS = 8  # tried for one target: those of a machine


@lru_cache(maxsize=256)
def evenly(costs: tuple[float, ...], cards: int) -> tuple[int, ...]:
    """Where to cut layers of these costs into so many ranges, none empty, that the largest sum is least: the first layer of each
    range but the first. Raises UserError where there are fewer layers than cards."""
    if cards > len(costs):
        raise UserError(f"placement.cards_per_target = {cards}: the target has {len(costs)} layers to share out: use fewer cards")
    sums = [0.0, *accumulate(costs)]
    count = len(costs)
    best = [sums]  # [range number][end]: the largest sum up to here
    cuts: list[list[int]] = []
    for n in range(1, cards):
        choices = [min(((max(best[-1][cut], sums[end] - sums[cut]), cut) for cut in range(n, end)), default=(float("inf"), 0))
                   for end in range(count + 1)]
        best.append([largest for largest, _ in choices])
        cuts.append([cut for _, cut in choices])
    end, found = count, []
    for at in reversed(cuts):
        end = at[end]
        found.append(end)
    return tuple(reversed(found))


def spread_over(job: Job, cards: int, usable_bytes: int | None) -> Job:
    """The job with its target on so many cards of `usable_bytes` (None: whatever it takes). Raises UserError."""
    if cards == 1:
        return replace(job, cuts=())
    by_time = replace(job, cuts=evenly(_times(job), cards))
    if usable_bytes is None or all(ledger.device_used_bytes <= usable_bytes for ledger in capturers(by_time)):
        return by_time
    return replace(job, cuts=evenly(_bytes(job), cards))


def time_shares(job: Job) -> tuple[float, ...]:
    """The part of a capture's time that each card of the target has; they add up to 1."""
    times = _times(job)
    parts = [sum(times[layers.start : layers.stop]) for layers in job.capture_ranges]
    return tuple(part / sum(parts) for part in parts)


def goes_onto(job: Job, cards: int, usable_bytes: int) -> bool:
    """Whether one target fits, over so many cards of `usable_bytes`."""
    if cards > job.loaded:
        return False
    return all(ledger.device_used_bytes <= usable_bytes for ledger in capturers(spread_over(job, cards, usable_bytes)))


def cards_each(job: Job, cards: int, usable_bytes: int) -> int:
    """Over how many of `cards` each target is spread: the fewest that hold it, all of them where none do, and 1 of one."""
    even = [each for each in range(1, cards) if cards % each == 0]
    return next((each for each in even if goes_onto(job, each, usable_bytes)), min(max(cards, 1), job.loaded))


def _times(job: Job) -> tuple[float, ...]:
    """Operations of each layer that stands on a card; those after the last captured one do not run."""
    one = [replace(job.target, layers=(layer,)).forward_flops(layers=1, tokens=job.context, mean_context=job.row_length / 2)
           for layer in job.target.layers[: job.captured]]
    return (*one, *[0.0] * (job.loaded - job.captured))


def _bytes(job: Job) -> tuple[float, ...]:
    """Of each layer's weights, the embedding with the first."""
    return tuple(float(sum(line.bytes for line in weight_lines(job, range(i, i + 1)))) for i in range(job.loaded))
