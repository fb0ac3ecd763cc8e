"""Takes a run's numbers and its disk, says what is wrong with them; knows nothing of how steps are made."""

import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median

LOSSES_KEPT = 50  # logged losses that a spike is measured against
LOSSES_NEEDED = 10
DISK_LOOK_EVERY_S = 10.0


def spike(loss: float, before: Iterable[float], *, factor: float) -> float | None:
    """The median of the losses before, when `loss` is more than `factor` times that; None before there are enough of them."""
    known = list(before)
    usual = median(known) if len(known) >= LOSSES_NEEDED else float("inf")
    return usual if loss > factor * usual else None


def leak_test_due(slot_accuracy: list[float], *, too_good: float, step: int, tested_at: int | None) -> bool:
    """Is the mean accuracy over the slots suspicious, and this the first such step, or twice as far as the last one tested?"""
    suspicious = bool(slot_accuracy) and sum(slot_accuracy) / len(slot_accuracy) >= too_good
    return suspicious and (tested_at is None or step >= 2 * tested_at)


class DiskWatch:
    """Is there room in `folder` for one more checkpoint of `checkpoint_bytes`, with `min_free_gib` left beside it?"""

    def __init__(self, folder: Path, *, checkpoint_bytes: int, min_free_gib: float) -> None:
        self.folder, self.needed_bytes = folder, checkpoint_bytes + int(min_free_gib * 2**30)
        self._looked = float("-inf")

    @property
    def free_bytes(self) -> int:
        """On the disk of the folder, or of the nearest one above it that exists."""
        there = next(path for path in (self.folder, *self.folder.resolve().parents) if path.is_dir())
        return shutil.disk_usage(there).free

    def short(self) -> str | None:
        """What is missing, in words, or None. Looks every few seconds: a network disk may take milliseconds to answer."""
        now = time.monotonic()
        if now - self._looked < DISK_LOOK_EVERY_S:
            return None
        self._looked = now
        free = self.free_bytes
        if free >= self.needed_bytes:
            return None
        return (f"{self.folder}: {free / 2**30:.2f} GiB are free on its disk, one more checkpoint and guards.min_free_gib need "
                f"{self.needed_bytes / 2**30:.2f}: free some space, lower checkpoint.keep_last or choose another disk")
