"""Takes the record of an out-of-memory, gives what was planned against what was measured, line by line; judges no cause."""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from outrider.planner import lines as at
from outrider.planner.doctor.matching import tensors_of
from outrider.planner.doctor.record import Record
from outrider.planner.lines import Line, alive_in

REST = "everything else"


@dataclass(frozen=True)
class Compared:
    """A line's name, its bytes as planned for the fullest moment of the phase, and as measured when memory ran out."""

    name: str
    planned: int
    measured: int

    @property
    def surprise(self) -> int:
        return self.measured - self.planned


def ledger_phases(part: str, order: Collection[str]) -> tuple[str, ...]:
    """The ledger's phases that a part of the run (of record.PHASES) goes through."""
    names = list(order)

    def between(first: str, last: str) -> tuple[str, ...]:
        return tuple(names[names.index(first): names.index(last) + 1])

    return {"load": (at.LOAD,), "capture": (at.CAPTURE,), "forward": between(at.LAYOUT, at.LOSS),
            "backward": between(at.BACK_LOSS, at.COLLECT), "optimizer": (at.UPDATE,), "check": (at.CHECK,)}[part]


def fullest(record: Record) -> str:
    """The fullest ledger phase of the part that the run was in."""
    return max(ledger_phases(record.moment.phase, record.by_phase), key=lambda phase: record.by_phase[phase])


def compare(record: Record, beside: Sequence[Line] = ()) -> list[Compared]:
    """Lines whose tensors were found, by what held them or by their sizes among the allocator's blocks, largest surprise first;
    all that is left on both sides stands as one. Empty where nothing was measured. `beside`: lines that nobody planned."""
    phase = fullest(record)
    planned: Counter[str] = Counter()
    for line in alive_in(record.lines, phase, tuple(record.by_phase)):
        planned[line.name] += line.bytes
    lines = [*beside, *alive_in(record.lines, phase, tuple(record.by_phase))]
    measured = dict(record.held) | _by_size(record, lines)
    if "gradients of the masters" not in planned:  # on the dense road they are born matrix by matrix, each a line
        planned["gradients of the masters"] = sum(size for name, size in planned.items() if name.startswith("gradients: "))
    rows = [Compared(name, planned[name], size) for name, size in measured.items()]
    allocated = record.statistics.get("allocated_bytes")
    if allocated is not None:
        rows.append(Compared(REST, record.by_phase[phase] - sum(row.planned for row in rows),
                             allocated - sum(row.measured for row in rows)))
    return sorted(rows, key=lambda row: -abs(row.surprise))


def unplanned(record: Record) -> int:
    """Bytes allocated above what was planned for the fullest moment of the phase, 0 where there were fewer or none is known."""
    return max(0, record.statistics.get("allocated_bytes", 0) - record.by_phase[fullest(record)])


def _by_size(record: Record, lines: Sequence[Line]) -> dict[str, int]:
    """Bytes of the blocks that have the size of a line's tensor, by the line's name, no more of them than the line has tensors.

    Lines that were measured whole are left out, those of many tensors of unlike sizes, and sizes under a MiB, which could be
    anything's.
    """
    wanted: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        tensors = list(tensors_of(record.job, line))
        if line.name not in record.held and len(tensors) == 1 and tensors[0][1] == line.tensor_bytes >= 2**20:
            wanted[tensors[0][1]].append(line)
    found: Counter[str] = Counter()
    for block in record.blocks:
        left = block.count
        for line in wanted.get(-(-block.bytes // at.GRAIN) * at.GRAIN, ()):
            taken = min(left, max(1, round(line.count)))
            found[line.name] += taken * block.bytes
            left -= taken
    return {name: size for name, size in found.items() if size}
