"""Takes a seed or a state, sets every random generator of this process, and gives their state as tensors; knows no files.

Rows and anchors come from counter-based generators keyed by (seed, epoch, row) and need none of this. It is kept so that
whatever else draws a random number goes on after a resume as if there had been no interruption.
"""

import random

import numpy as np
import torch
from torch import Tensor


def rng_state() -> dict[str, Tensor]:
    """The generators of torch (CPU, each CUDA device), numpy and Python. Tensors by name, all on the CPU."""
    words, gauss = random.getstate()[1:]
    legacy = np.random.get_state(legacy=False)
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
        "numpy_place": torch.tensor([legacy["state"]["pos"], legacy["has_gauss"]], dtype=torch.int64),
        "numpy_gauss": torch.tensor([legacy["gauss"]], dtype=torch.float64),
    }
    return state | {f"cuda/{device}": torch.cuda.get_rng_state(device) for device in range(torch.cuda.device_count())}


def seed_rng(seed: int) -> None:
    """Begin all generators anew from one seed."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def restore_rng(state: dict[str, Tensor]) -> None:
    """Set what `rng_state` gave. CUDA devices that this machine lacks are left out."""
    torch.set_rng_state(state["torch"])
    random.setstate((3, tuple(state["python"].tolist()), state["python_gauss"][0].item() if len(state["python_gauss"]) else None))
    place, has_gauss = state["numpy_place"].tolist()
    np.random.set_state({
        "bit_generator": "MT19937", "has_gauss": has_gauss, "gauss": state["numpy_gauss"].item(),
        "state": {"key": state["numpy"].numpy().astype(np.uint32), "pos": place},
    })
    for device in range(torch.cuda.device_count()):
        if f"cuda/{device}" in state:
            torch.cuda.set_rng_state(state[f"cuda/{device}"], device)
