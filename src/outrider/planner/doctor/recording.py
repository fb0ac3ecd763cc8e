"""Takes an exception, the job, its ledger and where the run was, leaves a JSON record of an out-of-memory (record.py)."""

import os
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.files import write_json
from outrider.planner.doctor.readings import (
    allocator_blocks,
    allocator_statistics,
    card_memory,
    card_processes,
    held_bytes,
    versions,
)
from outrider.planner.doctor.record import PHASES, SCHEMA, Moment, Record
from outrider.planner.job import Job
from outrider.planner.ledger import DeviceLedger

FRAMES_KEPT = 60


@dataclass(frozen=True)
class Planned:
    """What was known of the run before it ran. `settings`: `config.model_dump(mode="json")` of the resolved run."""

    settings: Mapping[str, Any]
    job: Job
    ledger: DeviceLedger


def write(
    path: Path, error: BaseException, *, moment: Moment, planned: Planned, held: Mapping[str, Iterable[Tensor]],
    device: torch.device,
) -> None:
    """Write the record of `error` to `path`, whole or not at all. To be called where the tensors still live, in the handler.

    `held`: the tensors behind the ledger's lines, by the line's name ("drafter: masters", "optimizer: both moments", "features",
    ...). Reads the allocator, allocates nothing on the device.
    """
    ledger, cuda = planned.ledger, device.type == "cuda"
    allowed_share = torch.cuda.get_per_process_memory_fraction(device) if cuda else 1.0
    assert moment.phase in PHASES, moment.phase
    free, total = card_memory(device)
    blocks, largest_free = allocator_blocks(device)
    frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    record = Record(
        schema=SCHEMA, written=datetime.now(UTC).isoformat(timespec="seconds"), pid=os.getpid(), error=_name(error),
        message=str(error), frames=tuple(frames[-FRAMES_KEPT:]), moment=moment, settings=planned.settings, job=planned.job,
        roles=ledger.roles, lines=ledger.lines, by_phase=ledger.by_phase,
        held={name: held_bytes(tensors) for name, tensors in held.items()},
        device=torch.cuda.get_device_name(device) if cuda else "cpu", free_bytes=free, total_bytes=total,
        allowed_bytes=int(allowed_share * total), statistics=allocator_statistics(device), blocks=blocks,
        largest_free_block=largest_free, processes=card_processes(device), versions=versions(),
    )
    write_json(path, asdict(record))


def _name(error: BaseException) -> str:
    kind = type(error)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
