"""Takes this process and its machine, gives what can be read: versions, the allocator, who is on the card; judges nothing."""

import platform
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from outrider.planner.doctor.record import STATISTICS, Blocks, CardProcess

PACKAGES = ("outrider", "torch", "triton", "transformers", "flash-linear-attention", "numpy", "safetensors")
GROUPS_KEPT = 48  # of blocks alike, largest first: a step has a few hundred tensors of a few dozen sizes
FRAMES_KEPT = 3


def versions() -> dict[str, str | None]:
    """Of Python and of each package that decides what a run holds; None where it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind these tensors, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def allocator_statistics(device: torch.device) -> dict[str, int]:
    """The allocator's counters under our names, bytes and counts; empty where the device has no such allocator."""
    if device.type != "cuda":
        return {}
    raw = torch.cuda.memory_stats(device)
    return {name: int(raw.get(key, 0)) for name, key in STATISTICS.items()}


def allocator_blocks(device: torch.device) -> tuple[tuple[Blocks, ...], int]:
    """The allocated blocks in groups alike, largest groups first, and the largest free piece of the reserved memory, bytes."""
    return group_blocks(_segments(device)) if device.type == "cuda" else ((), 0)


def _segments(device: torch.device) -> list[dict[str, Any]]:
    index = torch.cuda.current_device() if device.index is None else device.index
    return [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == index]


def group_blocks(segments: Iterable[Mapping[str, Any]]) -> tuple[tuple[Blocks, ...], int]:
    """As `allocator_blocks`, of the segments of `torch.cuda.memory_snapshot()`."""
    counts: Counter[tuple[int, tuple[str, ...]]] = Counter()
    largest_free = 0
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                counts[block.get("requested_size", block["size"]), _frames(block)] += 1
            elif block["state"] == "inactive":
                largest_free = max(largest_free, block["size"])
    groups = [Blocks(size, count, where) for (size, where), count in counts.items()]
    groups.sort(key=lambda group: -group.bytes * group.count)
    return tuple(groups[:GROUPS_KEPT]), largest_free


def _frames(block: Mapping[str, Any]) -> tuple[str, ...]:
    frames = block.get("frames") or ()
    named = [f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in frames if str(frame["filename"]).endswith(".py")]
    return tuple(named[:FRAMES_KEPT])


def card_memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes as the driver has them; zeros where there is no card."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)


def card_processes(device: torch.device) -> tuple[CardProcess, ...]:
    """Who has memory on the card, this process too, as the driver tells (in a container it may tell nothing)."""
    if device.type != "cuda":
        return ()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    rows = ask_driver("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    return parse_processes(rows, uuid=uuid)


def parse_processes(rows: Iterable[str], *, uuid: str) -> tuple[CardProcess, ...]:
    """Rows `uuid, pid, name, MiB` of the driver's tool, those of one card."""
    found = []
    for row in rows:
        card, pid, *name, used = (part.strip() for part in row.split(","))
        if card.removeprefix("GPU-") == uuid.removeprefix("GPU-"):
            found.append(CardProcess(int(pid), ",".join(name), int(used) * 2**20 if used.isdecimal() else None))
    return tuple(found)


def ask_driver(query: str) -> list[str]:
    """Rows of `nvidia-smi <query>`, plain comma-separated values; none where there is no such tool or it does not answer."""
    try:
        asked = subprocess.run(["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True,
                               timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [row for row in asked.stdout.splitlines() if row.count(",") >= 1] if asked.returncode == 0 else []
