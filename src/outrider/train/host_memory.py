"""Takes tensors to come, gives them room on the host that a GPU copies into at its full speed; knows nothing of their meaning."""

import contextlib
import mmap
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from outrider.errors import UserError
from outrider.progress import say

PAGE = mmap.PAGESIZE
GIB = 2**30


class HostMemory:
    """`tensors` by name, of the shapes and dtypes of `coming` (meta tensors), in one block, each from a page of its own.

    For a CUDA device their pages are locked in place, without which a copy goes through the driver's small buffer and the step
    waits for it. Making and locking takes seconds a gigabyte and no interpreter's lock: meant for a thread of its own. torch's
    own pinned memory rounds each tensor up to a power of two, 4 GiB more for a drafter of 1.7 B.
    """

    def __init__(self, coming: Mapping[str, Tensor], device: torch.device) -> None:
        """Raises UserError where the system refuses so much."""
        self.device, self._locked = device, list[int]()
        sizes = [PAGE * -(-tensor.nbytes // PAGE) for tensor in coming.values()]
        size = max(PAGE, sum(sizes))
        try:
            block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise UserError(f"a checkpoint is copied to {size / GIB:.1f} GiB of host memory, which the system refuses "
                            f"({error.strerror}): raise the limit (ulimit -v) or train a smaller drafter") from error
        with contextlib.suppress(OSError):  # large pages are found and locked several times faster, where the kernel has them
            block.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(block, dtype=torch.uint8)
        whole.zero_()  # now, not under the first copy, each page is really there
        parts = whole[: sum(sizes)].split(sizes)
        self.tensors = {name: part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                        for part, (name, tensor) in zip(parts, coming.items(), strict=True)}
        if device.type == "cuda":
            self._lock(parts)

    def _lock(self, parts: tuple[Tensor, ...]) -> None:
        for part in parts:
            refusal = lock_pages(part, self.device)
            if refusal:
                say(f"checkpoints: host memory cannot be page-locked ({refusal}): the step waits several times longer for a copy")
                return
            self._locked.append(part.data_ptr())

    def close(self) -> None:
        """Unlock. The tensors live on until nobody holds them."""
        while self._locked:
            unlock_pages(self._locked.pop(), self.device)


def lock_pages(part: Tensor, device: torch.device) -> str | None:
    """Page-lock the memory of a host tensor for the device; why the driver refused, or None."""
    with torch.cuda.device(device):  # a thread begins on the first card, where this would open a context
        driver = torch.cuda.cudart()
        status = driver.cudaHostRegister(part.data_ptr(), part.nbytes, 0)
        return None if status == driver.cudaError.success else str(driver.cudaGetErrorString(status))


def unlock_pages(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)


def short_of(size: int) -> str | None:
    """What copies of `size` bytes together lack on this machine, in words, or None."""
    free = available_bytes()
    if free >= size:
        return None
    return (f"a checkpoint is copied to {size / GIB:.2f} GiB of host memory, and {free / GIB:.2f} are available: free some, give "
            "the job more, or train a smaller drafter")


def available_bytes(root: Path = Path("/")) -> int:
    """Host memory that this process may still take: the machine's, or what its control group leaves of it. `root` of both."""
    machine = re.search(r"^MemAvailable: +(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE)
    assert machine, "Linux since 3.14 tells"
    available = 1024 * int(machine.group(1))
    with contextlib.suppress(OSError, ValueError):  # no such group, or no limit ("max")
        group = root / "sys/fs/cgroup"
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        cache = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
        available = min(available, limit - used + (int(cache.group(1)) if cache else 0))
    return available
