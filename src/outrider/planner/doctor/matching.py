"""Takes a ledger and bytes that were asked for, gives the lines whose tensors have that size; knows nothing of causes."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from outrider.planner import lines as at
from outrider.planner.job import Job
from outrider.planner.ledger import DeviceLedger
from outrider.planner.lines import BYTES, Line
from outrider.records import DrafterShape

MIB, GIB = 2**20, 2**30
# torch's allocator asks the driver for 2 MiB on behalf of any tensor up to 1 MiB, for 20 MiB up to 10 MiB, and above that in
# steps of 2 MiB; its message states that, with two decimals
LARGE_SEGMENT, STEP = 20 * MIB, 2 * MIB
# Lines that stand for a tensor a parameter
OF_PARAMETERS = ("drafter: masters", "optimizer: both moments", "optimizer: moments, 8 bit", "gradients of the masters")
COPY = "drafter: compute copy"  # whole in each process, and joined as the fused road has it


@dataclass(frozen=True)
class Match:
    """A ledger's line one of whose tensors has the size asked for: `tensor` says which, with its shape; `bytes` of it."""

    line: Line
    tensor: str
    bytes: int


def is_size(tensor_bytes: int, stated: int) -> bool:
    """Could a message that states `stated` bytes (rounded to two decimals of its unit) have been for this tensor, of more than
    10 MiB?"""
    slack = 0.0051 * (GIB if stated >= GIB else MIB)
    return min(abs(tensor_bytes - stated), abs(-(-tensor_bytes // STEP) * STEP - stated)) <= slack


def find_lines(job: Job, ledger: DeviceLedger, stated: int, *, phases: Collection[str], names: tuple[str, ...]) -> list[Match]:
    """The lines that a request of `stated` bytes may be for, likeliest first, one of each name; none where it cannot be told.

    `phases`: where the run was, empty where that is not known: a line must live there, one born there comes first. `names`: how
    a line's name may begin, empty for any.
    """
    if stated <= LARGE_SEGMENT:  # a segment for any small tensor
        return []
    order = tuple(ledger.by_phase)
    place = {name: i for i, name in enumerate(order)}
    found: dict[str, tuple[tuple[bool, int], Match]] = {}
    for item in ledger.lines:
        alive = not phases or any(place[item.first] <= place[phase] <= place[item.last] for phase in phases)
        if not item.inside or not alive or (names and not item.name.startswith(names)):
            continue
        for tensor, size in tensors_of(job, item):
            rank = item.first not in phases, -item.bytes
            if is_size(size, stated) and (item.name not in found or rank < found[item.name][0]):
                found[item.name] = rank, Match(item, tensor, size)
    return [match for _, match in sorted(found.values(), key=lambda pair: pair[0])]


def tensors_of(job: Job, item: Line) -> Iterator[tuple[str, int]]:
    """The tensors of a line, each with its shape and bytes: a line of weights stands for one a parameter."""
    pieces = _pieces(job, item.name)
    if not pieces:
        yield item.tensor, item.tensor_bytes
    for name, shape in pieces.items():
        elements = prod(shape) if item.name == COPY else job.shard(prod(shape))
        size = elements * BYTES[item.dtype]
        yield f"{name}, {' x '.join(f'{n:,}' for n in shape)} x {BYTES[item.dtype]} B", -(-size // at.GRAIN) * at.GRAIN


def _pieces(job: Job, line: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters behind a line, by name, those of all layers as one; none for a line that is one tensor."""
    if line == "target: layers" and job.target.layers:
        return {"feed-forward projection": (max(x.wide for x in job.target.layers), job.target.hidden_size)}
    return _parameters(job.drafter, joined=line == COPY) if line in (*OF_PARAMETERS, COPY) else {}


@lru_cache(maxsize=8)
def _parameters(shape: DrafterShape, *, joined: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of a drafter's parameters by name, `joined`: as the fused one has them."""
    import torch  # seconds: only where a request is looked for in a run's own lines

    from outrider.model.attention import dense_attention
    from outrider.model.drafter import Drafter
    from outrider.model.fused_drafter import FusedDrafter

    with torch.device("meta"):
        module: torch.nn.Module = (FusedDrafter(shape, dense_attention, compile_part=lambda part: part) if joined
                                   else Drafter(shape, dense_attention))
    return {re.sub(r"\.\d+\.", ".*.", name): tuple(parameter.shape) for name, parameter in module.named_parameters()}
