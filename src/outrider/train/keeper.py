"""Takes a run's state now and then, gives checkpoints written in the background and kept by policy; knows nothing of steps.

Saving costs the loop one look for a NaN and one copy to the host; disk, checksums and the copy's memory, which is made beside the
first steps and held, are another thread's.
Of several processes the first one writes. Where masters are shared out each also writes its own part of the moments, two thirds
of everything; the weights come together in the first one's host memory, a tensor at a time, as engines load them.
"""

import contextlib
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from outrider.config import CheckpointConfig
from outrider.errors import RunFailure, UserError
from outrider.files import explain_os_errors
from outrider.model.drafter import Drafter
from outrider.progress import say
from outrider.train.checkpoint import (
    Origin,
    Position,
    Snapshot,
    Tensors,
    coming_here,
    list_checkpoints,
    moments,
    read_position,
    write_checkpoint,
)
from outrider.train.host_memory import HostMemory
from outrider.train.masters import is_shared_out, mine, on_host, whole
from outrider.train.processes import Processes
from outrider.train.rng import rng_state
from outrider.train.shards import write_shards

QUIET_S = 5.0  # a longer wait for the disk is said


class Keeper:
    """Writes checkpoints of one run, one at a time. Use as a context manager: the last one is waited for at the end."""

    def __init__(
        self, run_folder: Path, policy: CheckpointConfig, origin: Origin, last: Position, processes: Processes
    ) -> None:
        self.run_folder, self.policy, self.origin, self.processes = run_folder, policy, origin, processes
        self.last = last  # the newest position that is saved, or where the run began
        self.copy_seconds = self.write_seconds = 0.0  # of the newest one
        self._saved_at = time.monotonic()
        self._room: Future[HostMemory] | None = None
        self._together: Together | None = None  # where masters are shared out
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.wait()
            else:
                self.settle()
        finally:
            self._thread.shutdown()
            if self._room and not self._room.exception():
                self._room.result().close()

    def make_room(self, drafter: Drafter, optimizer: torch.optim.Optimizer) -> None:
        """Begin to make the host memory of a copy, which takes seconds for gigabytes. Every process must call it."""
        if self._room is not None:
            return
        if is_shared_out(drafter):
            self._together = Together(self.processes)
        wanted = coming_here(drafter, optimizer, leads=self.processes.leads)
        self._room = self._thread.submit(HostMemory, wanted, drafter.norm.weight.device)

    def settle(self) -> None:
        """As `wait`, where something else has failed already: what the writer met is only said."""
        try:
            self.wait()
        except Exception as failure:
            say(f"the checkpoint that was being written failed too: {failure}")

    def due(self, position: Position, *, total: int) -> bool:
        """Is a checkpoint due at this position, of `total` steps? Not when it is saved already, measurement included."""
        if (position.step, position.tau_step) == (self.last.step, self.last.tau_step):
            return False
        minutes = self.policy.every_minutes
        best = self.policy.keep_best and position.tau_step == position.step and position.tau == position.best_tau
        return (position.step % self.policy.every == 0 or position.step == total or best
                or (minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes))

    def save(self, drafter: Drafter, optimizer: torch.optim.Optimizer, position: Position) -> None:
        """Copy the state to the host and have it written. Waits for the one before, and raises what that one met.

        Every process must call it. Raises RunFailure, with nothing written, when a number of it is not finite.
        """
        self.wait()
        self.make_room(drafter, optimizer)
        self.processes.meet()  # the first one may have waited for its disk, longer than others wait for a sum
        started = time.monotonic()
        found: Tensors = {}
        weights = self._to_host(drafter.state_dict(), whole, found, here=self.processes.leads)
        state = moments(drafter, optimizer)
        parts = self._to_host(state, mine, found, here=self.processes.leads or self._together is not None)
        device = drafter.norm.weight.device
        finite = torch.stack([extremes.to(device, torch.float32) for extremes in found.values()]).isfinite().all(dim=1)
        bad = [name for name, fine in zip(found, finite.tolist(), strict=True) if not fine]  # waits for the copies too
        self.copy_seconds = time.monotonic() - started
        if first_bad := self.processes.first(bad[0] if bad else None):
            raise RunFailure(f"{first_bad} is not finite: no checkpoint was written, earlier ones are intact")
        self.last, self._saved_at = position, time.monotonic()
        if self._together is not None:
            parts = {name: on_host(part, state[name], self._together.mesh) for name, part in parts.items()}
        if self.processes.leads or self._together is not None:
            self._writing = self._thread.submit(self._write, Snapshot(position, weights, parts, rng_state()))

    def check(self) -> None:
        """Raise what the writer met, if it has; called once a step."""
        if self._room is not None and self._room.done():
            self._room.result()
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written. Raises what the writer met."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        futures.wait([writing], timeout=QUIET_S)
        if not writing.done():
            before = f", the one before took {self.write_seconds:.0f} s" if self.write_seconds else ""
            say(f"waiting for the checkpoint of step {self.last.step} to be written{before}")
        writing.result()

    def _to_host(
        self, tensors: Mapping[str, Tensor], take: Callable[[Tensor], Tensor], found: Tensors, *, here: bool
    ) -> Tensors:
        """A copy of what `take` gives of each tensor, in host memory that is used again for the next one; none unless `here`.
        `found` takes the least and the largest number of each, made where it is: one reading by a GPU in place of a core's, and a
        NaN is both."""
        room, copies = self._room.result().tensors if self._room else {}, {}
        for name, tensor in tensors.items():
            taken = take(tensor.detach())
            if taken.numel():  # of a tensor with fewer rows than processes the last ones have nothing
                found[name] = torch.stack(torch.aminmax(taken))
            if here:  # an optimizer's counters, a few bytes each, have no room of their own
                place = room[name] if name in room else torch.empty_like(taken, device="cpu")
                copies[name] = place.copy_(taken, non_blocking=True)
        return copies

    def _write(self, snapshot: Snapshot) -> None:
        started = time.monotonic()
        shards = None
        if self._together is not None and snapshot.optimizer:  # there is none before the first step
            shards = self.run_folder / "checkpoints" / f".step-{snapshot.position.step:08d}.{self._together.token}.partial"
            write_shards(shards, snapshot.optimizer, self._together.group)
        if self.processes.leads:
            write_checkpoint(self.run_folder, snapshot, self.origin, shards)
            sweep(self.run_folder, self.policy)
        self.write_seconds = time.monotonic() - started


class Together:
    """What processes need that write shards: a group for their threads, a mesh of their CPUs, a name that no earlier start used.

    Every process must make one, at the same time.
    """

    def __init__(self, processes: Processes) -> None:
        self.group = processes.apart()
        self.mesh = init_device_mesh("cpu", (processes.count,))
        self.token = processes.from_first(lambda: uuid.uuid4().hex[:8])


def kept(positions: Mapping[Path, Position], policy: CheckpointConfig) -> set[Path]:
    """Which of a run's checkpoints stay: the last n, the one of the best accepted length, and the first of every m hours."""
    in_order = sorted(positions, key=lambda path: positions[path].step)
    stay = set(in_order[-policy.keep_last:])
    measured = [path for path in in_order if positions[path].tau_step == positions[path].step]
    if policy.keep_best and measured:
        stay.add(max(measured, key=lambda path: (positions[path].tau or 0.0, positions[path].step)))
    if policy.keep_every_hours is not None:
        first_of: dict[int, Path] = {}
        for path in in_order:
            first_of.setdefault(int(positions[path].seconds // (3600 * policy.keep_every_hours)), path)
        stay.update(path for number, path in first_of.items() if number > 0)
    return stay


def sweep(run_folder: Path, policy: CheckpointConfig) -> None:
    """Remove what the policy does not keep, each renamed first so that no checkpoint is ever half there, and killed writes.

    One that says no position is left where it is: it is not known what it is worth, and no reason to end the run.
    """
    checkpoints = run_folder / "checkpoints"
    with explain_os_errors(checkpoints):
        positions = {}
        for path in list_checkpoints(run_folder):
            with contextlib.suppress(UserError):
                positions[path] = read_position(path)
        for old in positions.keys() - kept(positions, policy):
            old.rename(old.with_name(f".{old.name}.partial"))
        for leftover in (*checkpoints.glob(".step-*.partial"), *checkpoints.glob(".step-*.retired")):
            leftover.unlink() if leftover.is_symlink() else shutil.rmtree(leftover)  # one that was moved, and linked back
