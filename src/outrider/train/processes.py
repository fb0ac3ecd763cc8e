"""Takes the launcher's environment, gives this process's place among those that train together, and sums over them.

One process holds one replica of the drafter and its devices. Knows nothing of models, rows or files.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from outrider import progress
from outrider.errors import RunFailure, UserError
from outrider.train.signals import heard

T = TypeVar("T")
PATIENCE = timedelta(hours=12)  # what the first process may take to measure or write while the others wait
PEER_LOST = 75  # exit code of a process that stopped because another one did
LOST = re.compile(r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe|timed out", re.IGNORECASE)


@dataclass(frozen=True)
class Place:
    """Where a launcher put this process: `rank` of `count`, `local_rank` on its machine."""

    rank: int
    count: int
    local_rank: int


@dataclass(frozen=True)
class Processes:
    """The processes that train one drafter. Collectives: every process must call them, in the same order."""

    place: Place
    patient: dist.ProcessGroup | None  # over gloo, for waits that may be long; None for a process on its own

    @property
    def count(self) -> int:
        return self.place.count

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def leads(self) -> bool:
        """The first process alone writes files and speaks."""
        return self.rank == 0

    def sum(self, values: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the processes; gives up after the timeout of `join`."""
        if self.count > 1:
            for work in [dist.all_reduce(value, async_op=True) for value in values]:
                work.wait()

    def any(self, flag: bool) -> bool:
        """Is it true in any process? Host memory only: no device waits."""
        if self.count == 1:
            return flag
        raised = torch.tensor(int(flag))
        dist.all_reduce(raised, op=dist.ReduceOp.MAX)
        return bool(raised)

    def meet(self) -> None:
        """Go on when every process is here, however long it takes; a process that died ends the wait with an error."""
        if self.patient is not None:
            dist.barrier(self.patient)

    def first(self, found: T | None) -> T | None:
        """What was found in any process, that of the lowest rank; None when nothing was."""
        if not self.any(found is not None):
            return None
        return next(value for value in self.gather(found) if value is not None)

    def apart(self) -> dist.ProcessGroup:
        """The same processes for the collectives of another thread, over gloo."""
        return dist.new_group(backend="gloo", timeout=PATIENCE)

    def gather(self, value: T) -> list[T]:
        """Every process's value, by rank."""
        if self.patient is None:
            return [value]
        box: list[T] = [value] * self.count
        dist.all_gather_object(box, value, group=self.patient)
        return box

    def on_this_machine(self, amount: int) -> int:
        """The sum of what the processes of this machine name."""
        here = socket.gethostname()
        return sum(named for machine, named in self.gather((here, amount)) if machine == here)

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` gives in the first process, which alone calls it; the others wait, however long it takes."""
        if self.patient is None:
            return make()
        box = [make() if self.leads else None]
        dist.broadcast_object_list(box, src=0, group=self.patient)
        return box[0]  # type: ignore[return-value]


ALONE = Processes(Place(rank=0, count=1, local_rank=0), patient=None)


def find_place(environment: Mapping[str, str]) -> Place | None:
    """The place that torchrun or SLURM's srun gave this process, None when no launcher started it. Raises UserError."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not all(name in environment for name in names):
        # srun alone sets the step's own count; inside sbatch or salloc the job's count is there too, without other processes
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        if not all(name in environment for name in names):
            return None
    try:
        rank, count, local_rank = (int(environment[name]) for name in names)
    except ValueError as error:
        raise UserError(f"environment {', '.join(names)}: must be whole numbers, as torchrun or srun sets them ({error}): start "
                        "with outrider train --processes, torchrun or srun") from error
    return Place(rank, count, local_rank)


def meeting_point(environment: Mapping[str, str]) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT for processes that srun started, which sets neither: the step's first node, a port by job."""
    if "MASTER_ADDR" in environment:
        return {}
    first = re.match(r"([^\[,]+)(?:\[(\d+))?", environment["SLURM_STEP_NODELIST"])
    assert first, "srun names its nodes"
    return {"MASTER_ADDR": first.group(1) + (first.group(2) or ""),
            "MASTER_PORT": str(20000 + int(environment["SLURM_JOB_ID"]) % 20000)}


@contextlib.contextmanager
def join(*, accelerator: bool, timeout_s: int) -> Iterator[Processes]:
    """Meet the other processes that the launcher started, if one did; all but the first fall silent.

    `accelerator`: sums of device tensors go through NCCL. A sum that a process waits for longer than `timeout_s` fails.
    """
    place = find_place(os.environ)
    if place is None or place.count == 1:
        yield ALONE
        return
    os.environ |= meeting_point(os.environ) | {"RANK": str(place.rank), "WORLD_SIZE": str(place.count)}
    backend = "cpu:gloo,cuda:nccl" if accelerator else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    patient = dist.new_group(backend="gloo", timeout=PATIENCE)
    progress.speaks(place.rank == 0)
    try:
        yield Processes(place, patient)
        dist.barrier(patient)  # nobody leaves while another still sums
    finally:
        progress.speaks(True)
        dist.destroy_process_group()


def run_processes(count: int, work: Callable[..., T], arguments: Sequence[Any]) -> T:
    """Run `work(*arguments)` in `count` processes of this machine through torchrun's agent; gives the first one's result.

    When one fails the others are stopped (after 30 s by force), and the first cause is raised here: UserError as it was, else
    a RunFailure with the failed process's own words. A stop signal is passed on to all of them and waited for. `work` must be
    importable, as new interpreters call it.
    """
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=count, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
                          run_id=f"outrider-{os.getpid()}", max_restarts=0, monitor_interval=0.1, start_method="spawn",
                          signals_to_handle="SIGQUIT")  # the agent's own way would stop a run unsaved
    try:
        with _passing_on_stops():
            results = elastic_launch(config, _guarded)(work, tuple(arguments))
    except ChildFailedError as failed:
        rank, failure = first_cause(failed.failures)
        message = _message_of(failure)
        if failure.exitcode == 2:
            raise UserError(message) from None
        if failure.exitcode < 0:
            message = f"it was ended by {signal.Signals(-failure.exitcode).name}"
        raise RunFailure(f"process {rank} of {count} failed, and the others were stopped: {message}") from None
    return results[0]


@contextlib.contextmanager
def _passing_on_stops() -> Iterator[None]:
    """While open, stop signals go to the processes that were started here, which save and end."""
    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in multiprocessing.active_children():
            if child.pid is not None:
                os.kill(child.pid, number)

    before = {number: signal.signal(number, pass_on) for number in heard()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def first_cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The failure that the others followed from: not one that only lost its peer or was told to stop; then the earliest."""
    followed = (PEER_LOST, -signal.SIGTERM)
    rank = min(failures, key=lambda rank: (failures[rank].exitcode in followed, failures[rank].timestamp, rank))
    return rank, failures[rank]


def _guarded(work: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    """In each process: a failure is recorded for the parent, which alone speaks of it, and ends the process."""
    try:
        return work(*arguments)
    except (Exception, KeyboardInterrupt) as error:
        get_error_handler().record_exception(error)
        sys.exit(exit_code_of(error))


def exit_code_of(error: BaseException) -> int:
    if isinstance(error, UserError):
        return 2
    lost = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and LOST.search(str(error)))
    return PEER_LOST if lost else 1


def _message_of(failure: ProcessFailure) -> str:
    """What the process recorded: one sentence for a user's mistake, else its traceback."""
    details = failure.error_file_data.get("message", failure.message) if failure.error_file_data else failure.message
    if not isinstance(details, dict):
        return str(details)
    if failure.exitcode == 2:
        return str(details["message"]).partition(": ")[2]  # without the exception's name
    return f"{details['message']}\n{details['extraInfo']['py_callstack']}"
