"""Takes a record or a log of an out-of-memory, gives the diagnosis: cause, ledger line, plan against measurement, ways out."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from outrider.planner.doctor.causes import NO_MEMORY, NOT_STATED, STOPPED, Cause, Finding, asked, find_causes, gib, look
from outrider.planner.doctor.comparison import Compared, compare, ledger_phases, unplanned
from outrider.planner.doctor.log import Evidence, Frame, read_text
from outrider.planner.doctor.matching import Match, find_lines
from outrider.planner.doctor.record import Record
from outrider.planner.doctor.remedies import Remedy, find_remedies, room_of
from outrider.planner.job import Job
from outrider.planner.ledger import DeviceLedger, ledger_of
from outrider.planner.lines import Line, Role

# What a ledger must suppose to have the lines of a job in which this went wrong
FAULTS: dict[str, dict[str, Any]] = {"unfused attention": {"road": "unfused"}, "logits": {"plain_logits": True},
                                     "block mask": {"eager_mask": True}}
# How the lines may begin that a cause is about; others may be about any
LINES: dict[str, tuple[str, ...]] = {
    "unfused attention": ("attention:", "layer: attention shares"), "logits": ("logits",),
    "block mask": ("block mask", "dense mask"), "optimizer birth": ("optimizer",), "gradient birth": ("gradient",),
    "weights": ("target:", "drafter:"),
    "checkpoint load": ("target:", "drafter:", "optimizer"), "target's forward": ("target forward", "features"),
}
TABLES = ("attention:", "layer: attention shares", "layer: mask as numbers", "dense mask")  # of queries and keys
NO_SETTING = {  # causes that no line of the ledger mends, and what does
    "shared memory": "none of the ways to save device memory: another kernel, for example --set train.attention=dense, or a card "
                     "with more shared memory",
    "host memory": "the host's memory, not the card's: --set features.keep=no (or disk) where rows' features were kept in "
                   "memory, fewer processes on the machine, or a higher limit of its container",
    STOPPED: "the reason in the sentence is what to mend; --set train.attention=dense runs without the compiler, in more memory",
    NO_MEMORY: "",
}
ELSEWHERE = {  # what mends a cause without changing the job
    "fragmentation": ("PYTORCH_ALLOC_CONF=expandable_segments:True in front of the command", "as fast; the gaps close up"),
    "another process": ("end the other processes, or wait for them", "nothing"),
    "leak": ("what is kept from step to step must go; any setting only lasts longer", "nothing"),
    "private pools": ("fewer captured CUDA graphs (fewer shapes), or none", "the launches that they saved"),
}


@dataclass(frozen=True)
class Diagnosis:
    """`causes`: the first is the one to act on. `matches`: ledger lines that the request may be of, likeliest first. `findings`:
    each question that is always asked, with its answer. `compared`: largest surprise first, of a record alone."""

    summary: str
    causes: tuple[Cause, ...]
    requested: int | None
    matches: tuple[Match, ...]
    findings: tuple[Finding, ...]
    compared: tuple[Compared, ...]
    remedies: tuple[Remedy, ...]
    note: str


def diagnose_log(log: Evidence, job: Job | None, roles: tuple[Role, ...]) -> Diagnosis:
    """From what a log states. `job`: of the run file, as Outrider would run it, None without one; `roles`: of its device."""
    causes = find_causes(log)
    cause = causes[0]
    if job is None or cause.name in NO_SETTING:
        note = NO_SETTING.get(cause.name, "name the run file with --run for ledger lines and ways out with their peaks")
        return _diagnosis(log, causes, [], (), _elsewhere(cause), note)
    job = _as_it_went(job, cause)
    died = _roles(cause, roles)
    ledger = ledger_of(job, died)
    back = log.frame("backward", "_engine_run_backward") is not None
    phases = ledger_phases("backward", ledger.by_phase) if back and "learn" in died else ()
    matches = [] if log.requested is None else find_lines(job, ledger, log.requested, phases=phases,
                                                          names=LINES.get(cause.name, ()))
    usable = None if log.capacity is None else min(log.capacity, log.allowed or log.capacity) - _others(cause, log)
    room = room_of(name=None, capacity=log.capacity, usable_bytes=usable, missed=0)
    return _diagnosis(log, causes, matches, (), [*_elsewhere(cause), *find_remedies(job, died, room)], "")


def _as_it_went(job: Job, cause: Cause) -> Job:
    """The job as it ran when this went wrong."""
    fault = FAULTS.get(cause.name, {})
    return replace(job, **fault) if job.road == "fused" or "road" not in fault else job


def _roles(cause: Cause, roles: tuple[Role, ...]) -> tuple[Role, ...]:
    """Which of a pair's cards it was: the target's if its forward ran out."""
    return ("capture",) if roles == ("learn",) and cause.name == "target's forward" else roles


def diagnose_record(record: Record) -> Diagnosis:
    """From a record that Outrider's training wrote."""
    evidence, ledger = evidence_of(record), DeviceLedger(record.roles, record.lines, dict(record.by_phase))
    causes = find_causes(evidence)
    named, job = LINES.get(causes[0].name, ()), _as_it_went(record.job, causes[0])
    beside: dict[str, Line] = {}
    if job != record.job:  # the planned ledger has no line for what should not have been
        ledger, planned = ledger_of(job, record.roles), {line.name for line in record.lines}
        beside = {line.name: line for line in ledger.lines if line.name.startswith(named) and line.name not in planned}
    phases = () if causes[0].name == "optimizer birth" else ledger_phases(record.moment.phase, ledger.by_phase)
    matches = [] if evidence.requested is None else find_lines(job, ledger, evidence.requested, phases=phases, names=named)
    if record.job.road == "dense" and matches and matches[0].line.name.startswith(TABLES):
        causes.insert(0, Cause("unfused attention", "Attention ran dense, as train.attention = 'dense' asks, with whole tables "
                               f"of queries and keys, {asked(evidence)} failed", ()))
    compared, cause = tuple(compare(record, list(beside.values()))), causes[0]
    if cause.name in NO_SETTING:
        return _diagnosis(evidence, causes, matches, compared, [], NO_SETTING[cause.name])
    usable = record.allowed_bytes - _others(cause, evidence) if record.total_bytes else None
    missed = unplanned(replace(record, by_phase=ledger.by_phase))
    room = room_of(name=record.device, capacity=record.total_bytes, usable_bytes=usable, missed=missed)
    remedies = [*_elsewhere(cause), *find_remedies(job, record.roles, room)]
    fused = ("attention was proven to run fused (self-test passed, tripwire set)" if record.moment.fused else
             "train.attention was 'fused', and no tripwire was set" if record.job.road == "fused" else
             f"train.attention was '{record.job.road}'")
    note = f"after step {record.moment.step}, in '{record.moment.phase}'; {fused}"
    if room.missed:
        note += f"; the {gib(room.missed)} that the plan missed are added to what the ways out need"
    return _diagnosis(evidence, causes, matches, compared, remedies, note)


def evidence_of(record: Record) -> Evidence:
    """The record as a log would have stated it, exact where the message rounds."""
    stated = read_text(f"{record.error}: {record.message}")
    frames = []
    for text in record.frames:  # "file:line function"
        place, _, function = text.rpartition(" ")
        frames.append(Frame(0, function, place.rpartition(":")[0], ""))
    step, held = record.moment.step, record.moment.allocated_by_step
    counts, mine = record.statistics, None
    for process in record.processes:
        mine = process.used_bytes if process.pid == record.pid else mine
    others = tuple((p.pid, p.used_bytes) for p in record.processes if p.pid != record.pid and p.used_bytes)
    known: dict[str, Any] = {
        "capacity": record.total_bytes or stated.capacity, "free": record.free_bytes if record.total_bytes else stated.free,
        "allowed": record.allowed_bytes or stated.allowed, "mine": mine or stated.mine, "others": others or stated.others,
    }
    if counts:
        known |= {"allocated": counts["allocated_bytes"], "unallocated": counts["reserved_bytes"] - counts["allocated_bytes"]}
    return replace(stated, frames=tuple(frames), step=step, held=held, **known)


def _others(cause: Cause, log: Evidence) -> int:
    """Bytes that others hold and keep."""
    return sum(used for _, used in log.others) if cause.name == "another process" else 0


def _elsewhere(cause: Cause) -> list[Remedy]:
    return [Remedy(ELSEWHERE[cause.name][0], None, None, None, ELSEWHERE[cause.name][1])] if cause.name in ELSEWHERE else []


def _diagnosis(
    log: Evidence, causes: Sequence[Cause], matches: Sequence[Match], compared: tuple[Compared, ...],
    remedies: Sequence[Remedy], note: str,
) -> Diagnosis:
    return Diagnosis(_summary(causes[0], matches), tuple(causes), log.requested, tuple(matches), tuple(look(log, causes)),
                     compared, tuple(remedies), note)


def _summary(cause: Cause, matches: Sequence[Match]) -> str:
    """The cause, and of which line and shape the request was, in one sentence."""
    if not matches:
        return cause.sentence
    names = " or ".join(f"'{match.line.name}'" for match in matches[:3])
    return f"{cause.sentence.rstrip('.')}: that is the size of {names}, {matches[0].tensor} = {gib(matches[0].bytes)}."


def as_dict(found: Diagnosis, log: Evidence | None, source: Path) -> dict[str, Any]:
    """The keys of `outrider doctor --json` for a crash. `log`: whose lines are shown, None for a record."""
    cause = found.causes[0]
    surprise = found.compared[0] if found.compared and found.compared[0].surprise else None
    return {
        "ok": cause.name == NO_MEMORY, "source": str(source), "cause": cause.name, "summary": found.summary,
        "certain": cause.name != NOT_STATED, "line": found.matches[0].line.name if found.matches else None,
        "lines": [{"name": match.line.name, "tensor": match.tensor, "bytes": match.bytes, "line_bytes": match.line.bytes,
                   "lives": match.line.lifetime} for match in found.matches],
        "requested_bytes": found.requested, "note": found.note,
        "shown_by": [] if log is None else [{"line": n, "text": log.lines[n - 1].strip()} for n in cause.shown_by],
        "other_causes": [other.sentence for other in found.causes[1:]],
        "checks": [asdict(finding) for finding in found.findings],
        "planned_against_measured": [asdict(row) for row in found.compared],
        "largest_surprise": None if surprise is None else {**asdict(surprise), "bytes": surprise.surprise},
        "remedies": [asdict(remedy) for remedy in found.remedies],
    }
