"""Takes which slots were right, gives counts by slot and accepted runs; sums only, never means."""

import torch
from torch import Tensor


def slot_counts(correct_XK: Tensor, supervised_XK: Tensor) -> tuple[Tensor, Tensor]:
    """`[K]` float32 each: right predictions and supervised predictions, by slot, over all blocks."""
    return (correct_XK & supervised_XK).sum(0).float(), supervised_XK.sum(0).float()


def accepted_runs(correct_XK: Tensor, supervised_XK: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of accepted runs and number of blocks with a supervised slot (float32 scalars).

    A block's run is the number of right slots from slot 1 on before the first wrong or unsupervised one.
    """
    right_XK = (correct_XK & supervised_XK)[:, 1:]
    runs_X = right_XK.to(torch.int32).cumprod(dim=1).sum(dim=1)
    return runs_X.sum().float(), supervised_XK[:, 1:].any(dim=1).sum().float()
