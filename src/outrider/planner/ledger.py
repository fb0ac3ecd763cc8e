"""Takes a job and a placement, gives each device's lines and its peak, phase by phase: the memory of a run that nobody started.

The device's own figure ("used") is the allocator's peak, what the allocator holds besides (gaps between blocks), and what never
passes through it: the CUDA context, NCCL.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from outrider.planner import lines as at
from outrider.planner.drafter_lines import drafter_lines
from outrider.planner.job import Job
from outrider.planner.lines import Line, Role, alive_in, lay, outside
from outrider.planner.target_lines import capture_lines, ends_and_features

MIB = 2**20
CUDA_CONTEXT = 752 * MIB  # per process and device, the kernels that it has loaded included
NCCL = 512 * MIB  # per communicator: channels' buffers
CUBLAS_WORKSPACE = 32 * MIB  # from the allocator, per thread that multiplies: the main one and autograd's
# Of the peak: reserved by the allocator and not in use then, because gradients of weights do not fit the holes that activations
# leave. Measured on 21 jobs (bench/results/ledger.md): 0.4 to 8.6 %, most of them 2 to 3 %.
GAPS = 0.035


@dataclass(frozen=True)
class DeviceLedger:
    """One device: who works there, its lines, the allocated bytes of each phase. `layers`: of a target that is spread, those it
    holds."""

    roles: tuple[Role, ...]
    lines: tuple[Line, ...]
    by_phase: dict[str, int]
    layers: range | None = None

    @property
    def role(self) -> str:
        """What the device does, in words."""
        words = " and ".join(self.roles)
        return words if self.layers is None else f"{words}, layers {self.layers[0]} to {self.layers[-1]}"

    @property
    def peak_phase(self) -> str:
        return max(self.by_phase, key=lambda phase: self.by_phase[phase])

    @property
    def peak_bytes(self) -> int:
        """Largest sum of allocated bytes, what torch.cuda.max_memory_allocated should say."""
        return self.by_phase[self.peak_phase]

    @property
    def device_used_bytes(self) -> int:
        """What the device shows as used by this process at its peak."""
        return self.peak_bytes + sum(item.bytes for item in self.lines if not item.inside)

    @property
    def standing_bytes(self) -> int:
        """Allocated for the whole run."""
        return sum(item.bytes for item in self.lines if item.inside and item.lifetime == "whole run")

    def at_peak(self) -> list[Line]:
        """The allocator's lines at the fullest moment, largest first."""
        return alive_in(self.lines, self.peak_phase, tuple(self.by_phase))


def colocated(job: Job) -> DeviceLedger:
    """One device that captures and learns."""
    target = capture_lines(job, range(job.loaded), colocated=True)
    return _device(job, [*target, *ends_and_features(job, colocated=True), *drafter_lines(job)], ("capture", "learn"))


def learner(job: Job) -> DeviceLedger:
    """A device that only learns: drafter, optimizer, and the target's embedding and head."""
    return _device(job, [*ends_and_features(job, colocated=False), *drafter_lines(job)], ("learn",))


def capturers(job: Job) -> tuple[DeviceLedger, ...]:
    """The devices of one target that only run it, up to the last captured layer: one, or as many as it is spread over."""
    found = [_device(job, capture_lines(job, layers, colocated=False), ("capture",)) for layers in job.capture_ranges]
    return tuple(replace(ledger, layers=layers if job.cuts else None)
                 for ledger, layers in zip(found, job.capture_ranges, strict=True))


def capturer(job: Job) -> DeviceLedger:
    """The fullest device of one target."""
    return max(capturers(job), key=lambda ledger: ledger.device_used_bytes)


def host(job: Job) -> tuple[Line, ...]:
    """What the first process holds of the machine's memory, not the card's, for the whole run: a checkpoint's copy of all weights
    and of its own moments."""
    copied = [item for item in drafter_lines(replace(job, sharded=False)) if item.name == "drafter: masters"]
    copied += [item for item in drafter_lines(job) if item.name.startswith("optimizer: ")]
    return tuple(replace(item, name=f"checkpoint: copy of '{item.name}', page-locked") for item in copied)


LEDGERS: dict[tuple[Role, ...], Callable[[Job], DeviceLedger]] = {
    ("capture", "learn"): colocated, ("learn",): learner, ("capture",): capturer,
}


def ledger_of(job: Job, roles: tuple[Role, ...]) -> DeviceLedger:
    """The ledger of the device that has these roles in a run."""
    return LEDGERS[roles](job)


def _device(job: Job, lines: list[Line], roles: tuple[Role, ...]) -> DeviceLedger:
    threads = 2 if "learn" in roles else 1
    lines = [*lines, at.line("cuBLAS workspaces", {"bytes": CUBLAS_WORKSPACE}, "uint8", at.LOAD, at.LAST, role=roles[0],
                             count=threads)]
    by_phase = lay(lines, at.phases(job.drafter.num_layers))
    lines += [
        outside("CUDA context", "a process on a device", CUDA_CONTEXT, role=roles[0]),
        outside("gaps in the allocator", f"{GAPS:.1%} of the peak", int(GAPS * max(by_phase.values())), role=roles[0]),
    ]
    if job.replicas > 1 and "learn" in roles:
        lines.append(outside("NCCL", "buffers of a communicator", NCCL))
    return DeviceLedger(roles, tuple(lines), by_phase)
