"""Takes the JSON record of an out-of-memory, gives it checked, as what it states; loads no torch.

The record (written by recording.py) holds all that the diagnosis needs: it can be read on another machine, without the target,
the run file or a GPU.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from outrider.errors import UserError
from outrider.files import read_json
from outrider.planner.job import Job
from outrider.planner.ledger import LEDGERS
from outrider.planner.lines import BYTES, Line, Role, phases

SCHEMA = 3
PHASES = ("load", "capture", "forward", "backward", "optimizer", "check")
# What a number of a record may be, by its field's name: sizes that a job cannot be without, up to what torch can lay out
MOST = 2**53  # for all others: bytes and counts, from 0; a float still holds each whole number
NUMBERS = {
    **dict.fromkeys(("rows", "row_length", "anchors", "accumulation", "logits_bytes", "replicas", "vocab_size"), (1, MOST)),
    **dict.fromkeys(("hidden_size", "intermediate_size"), (1, 2**20)),
    **dict.fromkeys(("num_layers", "num_heads", "num_kv_heads", "head_dim", "block_size"), (1, 2**16)),
    "wide": (0, 2**32), "activation_budget": (0, 1),
}
SHOWN = 60  # characters of a wrong value
# The allocator's counters under our names, and under torch's
STATISTICS = {
    "allocated_bytes": "allocated_bytes.all.current", "peak_allocated_bytes": "allocated_bytes.all.peak",
    "reserved_bytes": "reserved_bytes.all.current", "peak_reserved_bytes": "reserved_bytes.all.peak",
    "split_and_free_bytes": "inactive_split_bytes.all.current", "retries": "num_alloc_retries", "out_of_memories": "num_ooms",
}


@dataclass(frozen=True)
class CardProcess:
    """A process with memory on a card; `used_bytes` None where the driver does not say."""

    pid: int
    name: str
    used_bytes: int | None


@dataclass(frozen=True)
class Blocks:
    """`count` allocated blocks of `bytes` each (as asked for); `where`: the innermost frames that asked, if recorded."""

    bytes: int
    count: int
    where: tuple[str, ...]


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
    fault = next(_wrong_numbers(found, ()), None)
    if fault is None:
        try:
            record = _RECORD.validate_json(json.dumps(found), strict=True)
        except ValidationError as error:
            fault = _explain(error.errors()[0])
        else:
            fault = next(_contradictions(record), None)
            if fault is None:
                return record
    raise UserError(f"{path}: a damaged out-of-memory record, {fault}: restore the file, or give the run's log with --log")


_RECORD = TypeAdapter(Record)


def _wrong_numbers(value: Any, place: tuple[str, ...]) -> Iterator[str]:
    """Numbers out of their range, each as `field = value: rule`; the run file's own settings are not looked into."""
    if isinstance(value, dict | list) and place != ("settings",):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _wrong_numbers(item, (*place, str(key)))
    elif isinstance(value, int | float):
        name = next((part for part in reversed(place) if not part.isdecimal()), "")
        least, most = NUMBERS.get(name, (0, MOST))
        if not least <= value <= most:  # nor is a NaN
            yield f"{'.'.join(place)} = {_shown(value)}: must lie in {least}..{most}"


def _explain(detail: ErrorDetails) -> str:
    """What pydantic found, in the words of a run file's errors."""
    place, rule = ".".join(map(str, detail["loc"])), detail["msg"].replace("Input should be", "must be")
    if detail["type"] in ("missing", "value_error", "json_invalid"):  # whose value is all that stands around it
        return f"{place}: {rule.removeprefix('Value error, ')}"
    return f"{place} = {_shown(detail['input'])}: {rule}"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} .."


def _contradictions(record: Record) -> Iterator[str]:
    """Fields that do not go with each other, each as `field = value: rule`."""
    order, job = list(record.by_phase), record.job
    if record.moment.phase not in PHASES:
        yield f"moment.phase = {_shown(record.moment.phase)}: must be one of {', '.join(PHASES)}"
    if record.roles not in LEDGERS:
        yield f"roles = {_shown(record.roles)}: must be one of {', '.join(_shown(roles) for roles in LEDGERS)}"
    if len(job.target.layers) != job.drafter.num_target_layers:
        yield (f"job.target.layers: are {len(job.target.layers)}, must be job.drafter.num_target_layers = "
               f"{job.drafter.num_target_layers}")
    if record.statistics and not record.statistics.keys() >= STATISTICS.keys():
        yield f"statistics: must name all of {', '.join(STATISTICS)}, or nothing"
    if order != list(phases(job.drafter.num_layers)):
        yield f"by_phase: must name the phases of a step of {job.drafter.num_layers} layers, in their order"
    for i, line in enumerate(record.lines):
        for field, phase in (("first", line.first), ("last", line.last)):
            if phase not in record.by_phase:
                yield f"lines.{i}.{field} = {_shown(phase)}: must be a phase of by_phase"
        if order.index(line.first) > order.index(line.last):
            yield f"lines.{i}.first = {_shown(line.first)}: must not come after its last phase, {_shown(line.last)}"
        if line.dtype not in BYTES and (line.inside or line.dtype != "bytes"):
            yield f"lines.{i}.dtype = {_shown(line.dtype)}: must be one of {', '.join(BYTES)}"
