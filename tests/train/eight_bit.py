"""8-bit moments in tests: torchao's operations one by one."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def uncompiled() -> Iterator[None]:
    """torchao compiles its update, one kernel a shape; its operations one by one give the same in a second."""
    torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        torch.compiler.set_stance("default")
