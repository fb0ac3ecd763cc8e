"""Several processes learn what one does: uneven and empty rows, accumulation, whole and shared-out masters, both roads."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from learning import CPU, LOGITS_BYTES, colocated, fused_on_cpu, make_drafter, make_learner, random_micro_batch
from spawning import in_processes
from torch.distributed.tensor import DTensor
from toys import toy_shape

from outrider.config import Sharding
from outrider.features.target import Target, load_target
from outrider.model.drafter import Drafter
from outrider.records import LossTerms
from outrider.train.masters import whole_drafter
from outrider.train.meter import Stopwatch
from outrider.train.placement import Relay
from outrider.train.processes import ALONE, Processes
from outrider.train.roads import DenseRoad, Road
from outrider.train.step import Learner, MicroBatch, drafter_terms, run_step

STEPS = 20
LENGTHS = ([[30]], [[2, 3]], [[]], [[9, 9, 9]], [[1, 1]], [[31]], [[12, 12]], [[5]], [[29, 2]], [[3, 3, 3, 3]], [[20]], [[]])
# 20 steps of Adam at 1e-3 move each weight by up to 2e-2. Sums in another order differ by 1e-7 of their size, which Adam's
# division makes 1e-5 of a step where a gradient is itself near rounding; a mean of the processes' means differs by 1e-3.
TOLERANCE = 2e-5


@dataclass(frozen=True)
class Case:
    """`micro_batches` a step, over all processes. `looks`: forwards without an update come between the steps."""

    sharding: Sharding
    road: str
    micro_batches: int
    looks: bool = False


ROADS: dict[str, Callable[[Drafter], Road]] = {"dense": partial(DenseRoad, dtype=torch.float32),
                                               "fused": partial(fused_on_cpu, dtype=torch.float32)}


@cache
def micro_batch(step: int, m: int) -> MicroBatch:
    """Of very uneven weight; the third and the last of every twelve are empty."""
    made = random_micro_batch(LENGTHS[m], seed=100 * step + m)
    numbered = replace(made.rows, row_ids_B=torch.tensor([100 * step + m]))
    return replace(made, rows=numbered, host_rows=numbered)


def look(learner: Learner, batch: MicroBatch, supply: Relay) -> None:
    """Forwards and a backward that no update follows, as the search for a culprit and the leak test make them."""
    learner.road.begin(learner.masters)
    for last in (False, True):
        learner.masters.micro_batch(last=last)
        terms = drafter_terms(learner.road, learner.ends, batch.rows, supply.again(batch.host_rows), batch.blocks,
                              logits_bytes=LOGITS_BYTES)
        if not last:
            terms.loss_sum.backward()
            learner.road.collect(learner.masters)
    learner.masters.rest()


def learn(processes: Processes, target: Target, case: Case, supply: Relay) -> Any:
    """The whole parameters, the last step's sums, and how many elements of the masters stand here, after 20 steps."""
    drafter = make_drafter(toy_shape())
    road = ROADS[case.road](drafter)
    made = make_learner(drafter, target, processes=processes, sharding=case.sharding)
    learner = Learner(road, made.masters, made.ends, made.optimizer)
    for step in range(STEPS):
        mine = [micro_batch(step, m) for m in range(processes.rank, case.micro_batches, processes.count)]
        if case.looks:
            look(learner, mine[0], supply)
            assert_at_rest(drafter, case)
        sums = run_step(learner, supply, mine, [], clip_norm=1.0, logits_bytes=LOGITS_BYTES, watch=Stopwatch())
    here = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in drafter.parameters())
    copy = whole_drafter(drafter, CPU)
    return {name: p.detach() for name, p in copy.named_parameters()}, sums.terms, float(sums.norm), here


def assert_at_rest(drafter: Drafter, case: Case) -> None:
    """The masters are what the optimizer knows: pieces where they are shared out, and no gradient is left."""
    for name, parameter in drafter.named_parameters():
        assert isinstance(parameter, DTensor) == (case.sharding == "fsdp2"), name
        assert parameter.grad is None, name


def learn_all(processes: Processes, folder: str, cases: list[Case]) -> Any:
    target = load_target(folder, dtype="float32", device="cpu", last_layer=None, head=True)
    supply = colocated(target, toy_shape(), keep="memory")
    return [learn(processes, target, case, supply) for case in cases]


@pytest.mark.parametrize(("count", "kinds"), [
    (2, [("ddp", "dense"), ("fsdp2", "dense"), ("ddp", "fused"), ("fsdp2", "fused")]),
    (4, [("ddp", "dense"), ("fsdp2", "dense")]),
])
def test_processes_learn_what_one_learns(toy_folder: Callable[..., Path], count: int, kinds: list[tuple[Sharding, str]]) -> None:
    """Parameters after 20 steps of 1 and of 3 micro-batches a process, one of the processes with nothing but an empty row."""
    folder = str(toy_folder("llama"))
    cases = [Case(sharding, road, each * count) for sharding, road in kinds for each in (1, 3)]
    cases += [Case(sharding, road, count, looks=True) for sharding, road in kinds if count == 2]
    found = in_processes(count, learn_all, folder, cases)
    alone = dict(zip((1, 3), learn_all(ALONE, folder, [Case("ddp", "dense", each * count) for each in (1, 3)]), strict=True))
    for results in found:
        for case, (parameters, terms, norm, here) in zip(cases, results, strict=True):
            expected, its_terms, its_norm, everything = alone[case.micro_batches // count]
            for name, parameter in expected.items():
                assert (parameters[name] - parameter).norm() < TOLERANCE * parameter.norm(), (case, name)
            for f in fields(LossTerms):
                torch.testing.assert_close(getattr(terms, f.name), getattr(its_terms, f.name), rtol=1e-4, atol=1e-4, msg=f.name)
            assert norm == pytest.approx(its_norm, rel=1e-4)
            assert here == everything if case.sharding == "ddp" else here < 1.2 * everything / count
