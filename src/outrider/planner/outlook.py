"""Takes a job, a kind of card and stage times, gives what each arrangement of so many cards brings, best first; runs nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.config import PlacementConfig
from outrider.errors import UserError
from outrider.planner.gpus import Gpu
from outrider.planner.job import Job
from outrider.planner.measured import Measured
from outrider.planner.plan import PLACEMENTS, placement_name, plan_of, shared_out
from outrider.planner.simulate import Arrangement, Simulated, StageTimes, arrangements_of, simulate
from outrider.planner.speed import LINK_SHARE, parts, sum_ms
from outrider.planner.spread import cards_each, spread_over, time_shares
from outrider.planner.timeline import within
from outrider.progress import ProgressBar

MOST_GPUS = 64
STEPS_DRAWN, PROCESSES_DRAWN = 2, 4


@dataclass(frozen=True)
class Case:
    """What is arranged: a job on cards of one kind, `per_machine` of them in a machine, with the run's settings. Times that were
    not `measured` are the plan's own. `placement`: these arrangements alone (None: all)."""

    job: Job
    gpu: Gpu
    per_machine: int
    measured: Measured | None
    settings: PlacementConfig
    placement: str | None


def look_ahead(case: Case, gpus: int) -> dict[str, Any]:
    """What `outrider plan --simulate` adds to a plan: every arrangement of `gpus` cards, the best one's time line, and the best
    for each smaller number of cards that is a power of two.

    A step has `train.accumulation` micro-batches, at least one a process: where the run file has fewer, `changes` says what it
    needs. Raises UserError.
    """
    if not 1 <= gpus <= MOST_GPUS:
        raise UserError(f"--simulate {gpus}: must be a number of GPUs from 1 to {MOST_GPUS}")
    counts = [2**i for i in range(gpus.bit_length()) if 2**i < gpus]
    asked = {count: _asked(case, count) for count in (gpus, *counts)}
    if not asked[gpus]:
        raise UserError(f"--placement {case.placement}: has no arrangement that takes all of --simulate {gpus}: name another "
                        "number, or another placement")
    with ProgressBar("simulate", total=sum(map(len, asked.values())), unit="arrangements") as bar:
        found = {count: _arranged(case, each, bar) for count, each in asked.items() if each}
    best, drawn = found[gpus][0]
    return {
        "gpus": gpus, "gpus_per_machine": case.per_machine, "turns": case.settings.turns,
        "times": case.measured.source if case.measured else "the plan's own predictions, none measured",
        "arrangements": [values for values, _ in found[gpus]],
        "by_gpus": [{key: one[key] for key in ("gpus", "placement", "step_ms", "supervised_tokens_per_s", "fits")}
                    for one in (*(found[count][0][0] for count in counts if count in found), best)],
        "spans": [{"lane": s.lane, "label": s.label, "begin_ms": s.begin, "end_ms": s.end} for s in _drawn(drawn)],
    }


def _asked(case: Case, gpus: int) -> list[tuple[int, int]]:
    """Processes and capture cards of each, for every arrangement of so many cards that is asked for."""
    return [(processes, cards) for processes, cards in arrangements_of(gpus)
            if case.placement in (None, PLACEMENTS[min(cards, 2)]) or (case.placement == "spread" and cards > 1)]


def _arranged(case: Case, asked: Sequence[tuple[int, int]], bar: ProgressBar) -> list[tuple[dict[str, Any], Simulated]]:
    """Each arrangement with its simulation: what fits first, then by supervised tokens a second."""
    job, settings, found = case.job, case.settings, []
    for processes, cards in asked:
        needed, placed = shared_out(job, processes, sharded=settings.sharding == "fsdp2" and processes > 1)
        placed, usable = replace(placed, prefetch=cards > 0), case.gpu.usable_bytes
        each = cards_each(placed, cards, usable)
        if each > 1:
            placed, needed = spread_over(placed, each, usable), {**needed, "placement.cards_per_target": each}
        name = placement_name(processes, cards, placed.sharded, each=each)
        plan = plan_of(name, placed, case.gpu, cards // each, needed)
        arrangement = Arrangement(processes, cards, placed.micro_batches, settings.turns == "one_at_a_time", case.per_machine,
                                  shares=time_shares(placed))
        times = stage_times(placed, case.gpu, case.measured, cards)
        simulated = simulate(times, arrangement)
        per_s = 1e3 * placed.accumulation / simulated.step_ms
        found.append(({
            "placement": plan.placement, "gpus": plan.gpus, "processes": processes, "capture_cards": cards, "fits": plan.fits,
            "headroom_bytes": plan.headroom, "step_ms": simulated.step_ms, "micro_batches": arrangement.micro_batches,
            "stages_ms": vars(times), "waits": simulated.waits,
            "supervised_tokens_per_s": job.predicted * per_s, "tokens_per_s": job.context * per_s,
            "changes": needed,
        }, simulated))
        bar.advance(1)
    return sorted(found, key=lambda one: (not one[0]["fits"], -one[0]["supervised_tokens_per_s"]))


def stage_times(job: Job, gpu: Gpu, measured: Measured | None, cards: int) -> StageTimes:
    """What was measured, and the plan's own times for the rest. One target and one drafter have nothing to sum or copy, and one
    on one card nothing to hand on."""
    planned = parts(job, gpu)
    hidden_bytes = 2 * job.context * job.drafter.hidden_size
    feature_bytes = len(job.drafter.target_layer_ids) * hidden_bytes
    times = {"capture": planned.capture, "learn": planned.learn, "update": planned.update, "sum": sum_ms(job, gpu),
             "cross": 1e3 * hidden_bytes / (gpu.link * LINK_SHARE),
             "copy": 1e3 * feature_bytes / (gpu.link * LINK_SHARE), **(measured.stages if measured else {})}
    return StageTimes(**{**times, "sum": times["sum"] if job.replicas > 1 else 0.0, "copy": times["copy"] if cards else 0.0,
                         "cross": times["cross"] if job.cuts else 0.0})


def _drawn(simulated: Simulated) -> Iterator[Any]:
    """The first steady steps of the first processes, as they are drawn."""
    began = simulated.steady[0]
    for span in within(simulated.spans, began, began + STEPS_DRAWN * simulated.step_ms):
        if int(span.lane.split()[0]) < PROCESSES_DRAWN:
            yield span
