"""Takes a run and the error with which its memory ended, leaves a record of plan and allocator; diagnoses nothing."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from outrider.errors import RunFailure
from outrider.model import tripwire
from outrider.planner.doctor import recording
from outrider.planner.doctor.record import PHASES, Moment
from outrider.train.checkpoint import list_checkpoints
from outrider.train.meter import Stopwatch
from outrider.train.optim import MOMENTS, plain_state
from outrider.train.roads import FusedRoad
from outrider.train.start import Run

STEPS_KEPT = 16  # of allocated bytes, from the first step to the last: what a leak shows in


@contextlib.contextmanager
def recorded(run: Run, watch: Stopwatch, *, phase: str | None = None) -> Iterator[None]:
    """Around work on the device: an out-of-memory in it leaves a record in the run's folder and ends the run. Raises RunFailure.

    `phase`: of record.PHASES; by default the stopwatch's part at that moment.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        when = phase or (watch.part if watch.part in PHASES else "load")
        where = f"out of memory after step {run.position.step}, in '{when}': {str(error).strip().splitlines()[0]}"
        run.keeper.settle()
        saved = list_checkpoints(run.folder)
        rest = f"; {saved[-1].name} is whole, the same command goes on from it" if saved else ""
        if run.forecast is None:
            raise RunFailure(f"{where}: this run was not planned, so no record of its memory is left{rest}") from error
        path = run.folder / ("out_of_memory.json" if run.processes.leads else f"out_of_memory-{run.processes.rank}.json")
        fused = isinstance(run.road, FusedRoad) and tripwire.is_installed()
        moment = Moment(when, run.position.step, fused, _by_step(run))
        planned = recording.Planned(run.resolved.config.model_dump(mode="json"), run.forecast.job, run.forecast.ledger)
        recording.write(path, error, moment=moment, planned=planned, held=_held(run), device=run.device)
        raise RunFailure(f"{where}: `outrider doctor --record {path}` says why, and which settings fit{rest}") from error
    if run.device.type == "cuda" and phase is None:
        run.allocated.append(torch.cuda.memory_allocated(run.device))


def is_out_of_memory(error: Exception) -> bool:
    """Of a device, or of a multiprocessor's shared memory: Triton's OutOfResources, alone or told on by the compiler."""
    return isinstance(error, torch.OutOfMemoryError) or "OutOfResources" in f"{type(error).__name__} {error}" or (
        "out of resource: " in str(error))


def _by_step(run: Run) -> tuple[tuple[int, int], ...]:
    """(step, allocated bytes at its end) of at most STEPS_KEPT steps of this start, evenly spread, the last one included."""
    latest = list(enumerate(run.allocated, start=run.position.step - len(run.allocated) + 1))
    every = -(-len(latest) // STEPS_KEPT) or 1
    return tuple(latest[::-every][::-1])


def _held(run: Run) -> Mapping[str, Iterable[Tensor]]:
    """The tensors that stand behind the ledger's lines, by the line's name."""
    masters: list[Tensor] = list(run.drafter.parameters())
    states = [plain_state(state) for state in run.learner.optimizer.state.values()]

    def moments(part: str) -> list[Tensor]:
        return [state[name + part] for state in states for name in MOMENTS if name + part in state]

    held: dict[str, list[Tensor]] = {
        "drafter: masters": masters,
        "optimizer: both moments": moments(""), "optimizer: moments, 8 bit": moments(".codes"),
        "optimizer: scales of the moments": moments(".scale"),
        "gradients of the masters": [parameter.grad for parameter in masters if parameter.grad is not None],
    }
    if isinstance(run.road, FusedRoad) and run.forecast is not None and run.forecast.job.sharded:  # else the masters' own memory
        held["drafter: compute copy"] = list(run.road.fused.parameters())
    return {name: tensors for name, tensors in held.items() if tensors}
