"""Every way in which fused attention goes dense ends in one clear error, with the shapes and the bytes."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.flop_counter import FlopCounterMode

from outrider.model import tripwire

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCORES = 4 * 2 * 4 * 128 * 256  # bytes of the fp32 scores of the case below


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flex_attention(q, k, v, enable_gqa=True)  # type: ignore[return-value]


def run(call: Callable[..., torch.Tensor], queries: int = 128) -> torch.Tensor:
    q = torch.randn(2, 4, queries, 32, device=DEVICE)
    k, v = torch.randn(2, 2, 2, 256, 32, device=DEVICE)
    return call(q, k, v)


@pytest.fixture(autouse=True)
def armed() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings(), tripwire.installed():
        warnings.simplefilter("ignore")  # torch's own warning about the unfused call, once a process: not relied on
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["not compiled", "eager", "aot_eager"])
def test_uncompiled_backends(how: str) -> None:
    call = attend if how == "not compiled" else torch.compile(attend, backend=how, fullgraph=True)
    sentence = rf"queries \[2, 4, 128, 32\] and keys \[2, 2, 256, 32\].*{SCORES:,} bytes"
    with pytest.raises(tripwire.DenseAttentionError, match=sentence):
        run(call)


def test_compiler_disabled() -> None:
    with torch._dynamo.config.patch(disable=True), pytest.raises(tripwire.DenseAttentionError, match="TORCHDYNAMO_DISABLE"):
        run(torch.compile(attend, fullgraph=True))


def test_force_eager() -> None:
    with torch.compiler.set_stance("force_eager"), pytest.raises(tripwire.DenseAttentionError):
        run(torch.compile(attend, fullgraph=True))


def test_recompile_limit() -> None:
    """The silent road to running out of memory hours in: a new shape after the limit, without fullgraph."""
    compiled = torch.compile(attend, backend="eager", dynamic=False)
    with tripwire.installed(), torch._dynamo.config.patch(recompile_limit=1):
        tripwire.remove()
        run(compiled, 128)  # takes the one compilation there is (on whole scores: the eager backend needs no C compiler)
        tripwire.install()
        with pytest.raises(tripwire.DenseAttentionError, match=r"queries \[2, 4, 64, 32\]"):
            run(compiled, 64)


def test_recompile_limit_with_fullgraph() -> None:
    """There torch stops by itself, with an error that tells of its settings: it is given the same sentence."""
    compiled = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True, dynamic=False)
    sentence = rf"queries \[2, 4, 128, 32\].*{SCORES:,} bytes.*recompile limit"
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled(torch.zeros(2))
        with (pytest.raises(tripwire.DenseAttentionError, match=sentence),
              tripwire.within_recompile_limit((2, 4, 128, 32), (2, 2, 256, 32))):
            compiled(torch.zeros(3))


def test_dispatch_mode() -> None:
    with FlopCounterMode(display=False), pytest.raises(tripwire.DenseAttentionError, match="FlopCounterMode"):
        tripwire.check_no_modes((2, 4, 128, 32), (2, 2, 256, 32))
    tripwire.check_no_modes((2, 4, 128, 32), (2, 2, 256, 32))


def test_bytes_of_the_born_from_case() -> None:
    """8192 queries x 16384 keys x 32 heads in fp32 are the 16 GiB a layer of the job that this house was built for."""
    meta = torch.empty(1, 32, 8192, 128, device="meta")
    with pytest.raises(tripwire.DenseAttentionError, match=r"16\.00 GiB\) a layer and about 104\.0 GiB"):
        tripwire._refusal("flex_attention_backward")(meta, torch.empty(1, 8, 16384, 128, device="meta"))


def test_removed_after_use() -> None:
    tripwire.remove()
    assert run(attend).shape == (2, 4, 128, 32)
    tripwire.install()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: flex_attention has no backward on a CPU")
def test_fused_passes_and_backward_is_guarded() -> None:
    q = torch.randn(1, 4, 128, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(attend, fullgraph=True, dynamic=False)
    k, v = torch.randn(2, 1, 2, 256, 64, device=DEVICE, dtype=torch.bfloat16)
    compiled(q, k, v).sum().backward()
    assert q.grad is not None
    with pytest.raises((tripwire.DenseAttentionError, TypeError)), FlopCounterMode(display=False):
        compiled(q, k, v)
    torch._dynamo.reset()  # the mode poisons later calls until then
    tripwire.remove()
    out = attend(q, k, v)
    tripwire.install()
    with pytest.raises(tripwire.DenseAttentionError, match="flex_attention_backward"):
        out.sum().backward()
