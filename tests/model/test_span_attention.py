"""Our own attention kernels give float64's output and gradients; their operators compile once and are refused outside."""

import importlib.util
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layouts import CASES, layout
from torch import Tensor

from outrider.layout.mask import dense_mask
from outrider.layout.span_mask import span_mask
from outrider.model import span_attention as span
from outrider.model.attention import dense_attention
from outrider.model.fused_attention import kernels_for
from outrider.model.span_tiles import SpanTiles, Tiles, heads_a_tile, span_tiles
from outrider.model.tripwire import DenseAttentionError
from outrider.records import DraftBlocks, TokenRows

CUDA = torch.cuda.is_available()
KEY_TILE = 128
SMALL = SpanTiles(Tiles(64, 64, 4, 2), Tiles(64, KEY_TILE, 4, 2))


def inputs(rows: TokenRows, blocks: DraftBlocks, heads: int, kv_heads: int, C: int) -> tuple[Tensor, ...]:
    """q, k, v and the output's gradient, float32, q and the gradient with their heads side by side as the drafter has them."""
    B, S = rows.document_ids_BS.shape
    Q = blocks.noise_ids_BAK[0].numel()
    q, gradient = (torch.randn(B, Q, heads, C).transpose(1, 2) for _ in range(2))
    k, v = (torch.randn(B, kv_heads, S + Q, C) for _ in range(2))
    return q, k, v, gradient


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, gradient: Tensor) -> list[Tensor]:
    """Output, dQ, dK, dV in float64 of the dense twin."""
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = dense_attention(*wide, mask)
    return [out.detach(), *torch.autograd.grad(out, wide, gradient.double())]


def errors(found: tuple[Tensor, ...], expected: list[Tensor]) -> list[float]:
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True)]


class DenseStandIn:
    """What span_attention_cuda gives, from dense tables, on any device: for the operators around the kernels."""

    def __init__(self) -> None:
        self.calls = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spans: Tensor, row_length: int, tiles: Any) -> tuple[Tensor, Tensor]:
        self.calls += 1
        n, group = torch.arange(k.shape[2]), q.shape[1] // k.shape[1]
        low, high, slots_low, slots_high = (x[:, None, :, None] for x in spans)
        mask = ((n >= low) & (n < high)) | ((n >= slots_low) & (n < slots_high))
        scores = (q @ k.repeat_interleave(group, 1).mT * q.shape[3] ** -0.5).masked_fill(~mask, float("-inf"))
        self.shares = scores.softmax(-1)  # of the last call: one layer at a time
        out = self.shares @ v.repeat_interleave(group, 1)
        sums = scores.logsumexp(-1).unflatten(1, (-1, heads_a_tile(group))).transpose(2, 3).contiguous()
        return out.transpose(1, 2).contiguous().transpose(1, 2), sums

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = q.shape[1] // k.shape[1]
        d_shares = gradient @ v.repeat_interleave(group, 1).mT
        d_scores = self.shares * (d_shares - (gradient * out).sum(-1, keepdim=True))
        dq = (d_scores @ k.repeat_interleave(group, 1)).unflatten(1, (-1, sums.shape[3])).transpose(2, 3).contiguous()
        dk, dv = d_scores.mT @ q * q.shape[3] ** -0.5, self.shares.mT @ gradient
        return dq, *(x.unflatten(1, (-1, group)).sum(2).transpose(1, 2).contiguous().transpose(1, 2) for x in (dk, dv))


def test_operators_compile_once_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """fullgraph, with a backward, fresh masks of one shape: one graph. Gradients reach q, k and v in their own shapes."""
    stand_in = DenseStandIn()
    monkeypatch.setitem(sys.modules, "outrider.model.span_attention_cuda", stand_in)
    monkeypatch.setattr(span, "_tiles", lambda x: SMALL)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # other tests' graphs are counted too
    compiled = torch.compile(span.span_attention, backend="aot_eager", fullgraph=True, dynamic=False)
    S, A, K, documents, dropped = CASES["packed"]
    for seed in range(20):
        rows, blocks = layout(S, A, K, documents, dropped, seed=seed)
        q, k, v, gradient = inputs(rows, blocks, 6, 1, 16)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = compiled(q, k, v, span_mask(blocks, row_length=S, window=None, key_tile=KEY_TILE))
        found = (out.detach(), *torch.autograd.grad(out, leaves, gradient))
        if seed < 3:
            expected = exact(q, k, v, dense_mask(rows, blocks, window=None), gradient)
            assert max(errors(found, expected)) < 1e-5, "fp32 against float64"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert stand_in.calls == 20, "the forward must not be done again in the backward"


def test_refused_outside_the_compiler() -> None:
    _, blocks = layout(256, 8, 16, [[256]], 0, seed=1)
    mask = span_mask(blocks, row_length=256, window=None, key_tile=KEY_TILE)
    q, k = torch.randn(1, 4, 128, 64), torch.randn(1, 2, 384, 64)
    with pytest.raises(DenseAttentionError, match=r"outside torch.compile on queries \[1, 4, 128, 64\] and keys"):
        span.span_attention(q, k, k, mask)


@pytest.mark.parametrize(("capability", "head_dim", "dtype", "name"), [
    ((9, 0), 128, torch.bfloat16, "span"), ((9, 0), 64, torch.bfloat16, "span"), ((9, 0), 256, torch.bfloat16, "flex"),
    ((9, 0), 128, torch.float32, "flex"), ((8, 6), 128, torch.bfloat16, "flex"), ((12, 0), 128, torch.bfloat16, "flex"),
])
def test_own_kernels_only_where_they_were_measured(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], head_dim: int, dtype: torch.dtype, name: str
) -> None:
    properties = SimpleNamespace(shared_memory_per_block_optin=99 * 2**10)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert kernels_for(torch.device("cuda"), head_dim=head_dim, dtype=dtype).name == name


KERNEL_CASES = [  # layout, window, query heads, key/value heads
    ("packed", None, 4, 1), ("padding and dropped blocks", 150, 3, 1), ("queries not a multiple of 128", None, 2, 2),
    ("blocks across tiles", None, 1, 1), ("127, 129", 7, 8, 1), ("1000", None, 6, 1),
]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter, where there is Triton but no GPU. It takes int() of arrays of one number, which numpy 2.4 refuses."""
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton, which torch brings only beside CUDA, and TRITON_INTERPRET=1 from the start")
    from triton.runtime import interpreter  # type: ignore[import-not-found, unused-ignore]

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.mark.parametrize(("name", "window", "heads", "kv_heads"), KERNEL_CASES)
@pytest.mark.filterwarnings("ignore")  # the interpreter's own, numpy overflows in numbers that are not used
def test_kernels_in_the_interpreter(interpreted: None, name: str, window: int | None, heads: int, kv_heads: int) -> None:
    """fp32 throughout: only the order of sums differs from float64."""
    from outrider.model import span_attention_cuda as kernels

    S, A, K, documents, dropped = CASES[name]
    rows, blocks = layout(S, A, K, documents, dropped, seed=len(name))
    q, k, v, gradient = inputs(rows, blocks, heads, kv_heads, 32)
    mask = span_mask(blocks, row_length=S, window=window, key_tile=KEY_TILE)
    out, sums = kernels.forward(q, k, v, mask.spans_4BQ, S, SMALL.forward)
    dq, dk, dv = kernels.backward(gradient, q, k, v, out, sums, mask.spans_4BQ, mask.seen_by_BT4, S, SMALL.backward)
    found = out, dq.transpose(2, 3).flatten(1, 2) * 32**-0.5, dk, dv
    assert max(errors(found, exact(q, k, v, dense_mask(rows, blocks, window=window), gradient))) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU of compute capability 9.0")
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # the float64 twin's first product is autograd's thread's own
@pytest.mark.parametrize("C", [64, 128])
@pytest.mark.parametrize(("name", "window", "heads", "kv_heads"), [*KERNEL_CASES, ("one document, whole tiles", None, 32, 8)])
def test_kernels_on_the_gpu(name: str, window: int | None, heads: int, kv_heads: int, C: int) -> None:
    """bf16 rounds the softmax's weights and dS to 2^-9 relative; up to 3e-3 in norm was seen, a wrong tile is 0.1 and more."""
    tiles = span_tiles(capability=torch.cuda.get_device_capability(), head_dim=C)
    if tiles is None:
        pytest.skip("needs a GPU of compute capability 9.0")
    S, A, K, documents, dropped = CASES[name]
    rows, blocks = layout(S, A, K, documents, dropped, seed=len(name))
    q, k, v, gradient = (x.bfloat16().cuda() for x in inputs(rows, blocks, heads, kv_heads, C))
    rows, blocks = rows.to(q.device), blocks.to(q.device)
    mask = span_mask(blocks, row_length=S, window=window, key_tile=tiles.backward.keys)
    kept = (mask.spans_4BQ, mask.seen_by_BT4, S)
    out, sums = span._attend(q, k, v, *kept)
    dq, dk, dv = span._attend_backward(gradient, q, k, v, out, sums, *kept)
    found = out, dq.transpose(2, 3).flatten(1, 2) * C**-0.5, dk, dv
    assert max(errors(found, exact(q, k, v, dense_mask(rows, blocks, window=window), gradient))) < 1e-2
