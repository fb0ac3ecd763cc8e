"""Runs first in every process of vLLM's CPU build (on PYTHONPATH): what its hidden-states connector asks of a GPU, done on a CPU.

The connector of vLLM 0.32 copies into page-locked memory and asks an event whether the copy is done; a CPU build has neither.
"""

import importlib.abc
import sys
from typing import Any


class BeforeVllm(importlib.abc.MetaPathFinder):
    """Changes torch at the moment when vLLM is first imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "vllm":
            sys.meta_path.remove(self)
            plain_memory()


def plain_memory() -> None:
    import torch

    empty_like = torch.empty_like

    def unpinned(*given: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        if pin_memory and not hasattr(torch.cuda.Event, "query"):  # vLLM's stand-in for an event
            torch.cuda.Event.query = lambda self: True
        return empty_like(*given, **named)

    torch.empty_like = unpinned


sys.meta_path.insert(0, BeforeVllm())
