"""Takes nothing, gives the certainty that attention meant to be fused never runs dense; knows nothing of drafters.

flex_attention falls back to whole score matrices when it is not compiled, under the backends "eager" and "aot_eager", after
the recompile limit, and while any dispatch mode (FlopCounterMode) is on the stack: with one warning or none. All of these
end in the same two Python kernels of the higher-order operators, so those two are replaced by an error.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from outrider.model.flops import PEAK_OVER_SCORES

OPERATORS = ("flex_attention", "flex_attention_backward")
_originals: dict[str, Callable[..., Any]] = {}


class DenseAttentionError(RuntimeError):
    """Attention that must be fused was about to run on whole score matrices."""


def install() -> None:
    """From now on, in this process, running flex_attention unfused raises DenseAttentionError. Idempotent."""
    for name in OPERATORS:
        operator = _operator(name)
        if name not in _originals:
            _originals[name] = operator.py_kernels[DispatchKey.CompositeExplicitAutograd]
            operator.py_kernels[DispatchKey.CompositeExplicitAutograd] = _refusal(name)
            operator._dispatch_cache.clear()


def remove() -> None:
    """Undo `install`."""
    for name in list(_originals):
        operator = _operator(name)
        operator.py_kernels[DispatchKey.CompositeExplicitAutograd] = _originals.pop(name)
        operator._dispatch_cache.clear()


def is_installed() -> bool:
    """Whether unfused flex_attention is an error in this process now."""
    return bool(_originals)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """`install` for the length of a block."""
    install()
    try:
        yield
    finally:
        remove()


def _operator(name: str) -> Any:
    # by its name: torch._higher_order_ops exports an operator under the module's own; and late, for it takes half a second
    return getattr(importlib.import_module("torch._higher_order_ops.flex_attention"), name)


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
        raise DenseAttentionError(_sentence(name, tuple(query.shape), tuple(key.shape)))

    return refuse


def check_no_modes(query_shape: tuple[int, ...], key_shape: tuple[int, ...]) -> None:
    """Raises DenseAttentionError while a dispatch mode is active. To be called before the step: torch 2.13 stops there too, but
    does not say why."""
    if torch._C._len_torch_dispatch_stack():
        raise DenseAttentionError(_sentence("flex_attention", query_shape, key_shape))


@contextlib.contextmanager
def within_recompile_limit(query_shape: tuple[int, ...], key_shape: tuple[int, ...]) -> Iterator[None]:
    """Raises DenseAttentionError where torch.compile refuses one more shape, in place of its own error that tells of settings."""
    try:
        yield
    except torch._dynamo.exc.FailOnRecompileLimitHit as hit:
        raise DenseAttentionError(_sentence("flex_attention", query_shape, key_shape)) from hit


def refuse_uncompiled(query_shape: tuple[int, ...], key_shape: tuple[int, ...]) -> None:
    """Raises DenseAttentionError: our own kernels, which hold no scores anywhere, were called outside torch.compile."""
    raise DenseAttentionError(
        f"attention was about to run outside torch.compile on queries {list(query_shape)} and keys {list(key_shape)}: its "
        f"kernels would hold no scores, but every step around them would keep its own copies; {_reason()}"
    )


def _sentence(name: str, query_shape: tuple[int, ...], key_shape: tuple[int, ...]) -> str:
    B, H, Q, _ = query_shape
    N = key_shape[2]
    scores = 4 * B * H * Q * N
    return (
        f"{name} was about to run unfused on queries {list(query_shape)} and keys {list(key_shape)}: the fp32 scores take "
        f"{scores:,} bytes ({scores / 2**30:.2f} GiB) a layer and about {PEAK_OVER_SCORES[name] * scores / 2**30:.1f} GiB at "
        f"the peak; {_reason()}"
    )


def _reason() -> str:
    """What turned the compiler off, as far as it can be seen from here, and the way out."""
    if torch._C._len_torch_dispatch_stack():
        return "a dispatch mode (FlopCounterMode, a memory tracker) is active: leave it before the step"
    if torch._dynamo.config.disable:
        return "torch.compile is disabled (TORCHDYNAMO_DISABLE): unset it"
    return ("the step was not compiled by the inductor backend, or the recompile limit was hit: keep shapes fixed, compile with "
            "fullgraph=True, or set train.attention = \"dense\"")
