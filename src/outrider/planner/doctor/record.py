"""Takes an exception, the job, its ledger and where the run was, gives a JSON record of an out-of-memory, and reads it back.

The record holds all that the diagnosis needs: it can be read on another machine, without the target, the run file or a GPU.
"""

import json
import os
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from outrider.errors import UserError
from outrider.files import read_json, write_json
from outrider.planner.doctor.readings import (
    Blocks,
    CardProcess,
    allocator_blocks,
    allocator_statistics,
    card_memory,
    card_processes,
    held_bytes,
    versions,
)
from outrider.planner.job import Job
from outrider.planner.ledger import DeviceLedger
from outrider.planner.lines import Line, Role

SCHEMA = 3
FRAMES_KEPT = 60
PHASES = ("load", "capture", "forward", "backward", "optimizer", "check")


@dataclass(frozen=True)
class Moment:
    """Where a run was when it ran out of memory.

    `phase`: of PHASES, as the step's stopwatch has them ("load" before the first step, "check" in the acceptance check). `step`:
    steps done before. `fused`: attention was proven to run fused (self-test passed, tripwire set). `allocated_by_step`: (step,
    allocated bytes at its end), some steps from the first of this start to the last, what a leak shows in.
    """

    phase: str
    step: int
    fused: bool
    allocated_by_step: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Record:
    """One out-of-memory, whole. `settings`: the resolved run file, section by section. `lines`: the ledger as planned before the
    run, `by_phase` its allocated bytes. `held`: bytes measured of the tensors that stand behind a ledger line, by its name.
    `blocks`: what the allocator held, in groups alike. `free_bytes` and `total_bytes` are the driver's, `allowed_bytes` what the
    allocator may take of them.
    """

    schema: int
    written: str
    pid: int
    error: str
    message: str
    frames: tuple[str, ...]
    moment: Moment
    settings: Mapping[str, Any]
    job: Job
    roles: tuple[Role, ...]
    lines: tuple[Line, ...]
    by_phase: Mapping[str, int]
    held: Mapping[str, int]
    device: str
    free_bytes: int
    total_bytes: int
    allowed_bytes: int
    statistics: Mapping[str, int]
    blocks: tuple[Blocks, ...]
    largest_free_block: int
    processes: tuple[CardProcess, ...]
    versions: Mapping[str, str | None]


def write(
    path: Path, error: BaseException, *, moment: Moment, settings: Mapping[str, Any], job: Job, ledger: DeviceLedger,
    held: Mapping[str, Iterable[Tensor]], device: torch.device, allowed_share: float,
) -> None:
    """Write the record of `error` to `path`, whole or not at all. To be called where the tensors still live, in the handler.

    `settings`: `config.model_dump(mode="json")` of the resolved run. `held`: the tensors behind the ledger's lines, by the
    line's name ("drafter: masters", "optimizer: both moments", "gradients of the masters", "features", ...). `allowed_share`: of
    the card's memory, as set by `set_per_process_memory_fraction`, else 1. Reads the allocator, allocates nothing on the device.
    """
    assert moment.phase in PHASES, moment.phase
    free, total = card_memory(device)
    blocks, largest_free = allocator_blocks(device)
    frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    record = Record(
        schema=SCHEMA, written=datetime.now(UTC).isoformat(timespec="seconds"), pid=os.getpid(), error=_name(error),
        message=str(error), frames=tuple(frames[-FRAMES_KEPT:]), moment=moment, settings=settings, job=job, roles=ledger.roles,
        lines=ledger.lines, by_phase=ledger.by_phase, held={name: held_bytes(tensors) for name, tensors in held.items()},
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", free_bytes=free, total_bytes=total,
        allowed_bytes=int(allowed_share * total), statistics=allocator_statistics(device), blocks=blocks,
        largest_free_block=largest_free, processes=card_processes(device), versions=versions(),
    )
    write_json(path, asdict(record))


def _name(error: BaseException) -> str:
    kind = type(error)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def read(path: Path) -> Record:
    """The record that `write` left at `path`. Raises UserError where it is missing, damaged, or of another version."""
    found = read_json(path, what="the out-of-memory record")
    if not isinstance(found, dict) or "schema" not in found:
        raise UserError(f"{path}: no out-of-memory record (it has no 'schema'): name the file that the run wrote when it "
                        "stopped, or give a plain log with --log")
    if found["schema"] != SCHEMA:
        writer = found.get("versions")
        by = f" by outrider {writer['outrider']}" if isinstance(writer, dict) and writer.get("outrider") else ""
        raise UserError(f"{path}: schema = {json.dumps(found['schema'])}, written{by}: this version reads {SCHEMA}: read it with "
                        "the version that wrote it, or give the run's log with --log")
    try:
        return _RECORD.validate_json(json.dumps(found), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: a damaged out-of-memory record, {place}: {first['msg']}: restore the file, or give the "
                        "run's log with --log") from error


_RECORD = TypeAdapter(Record)
