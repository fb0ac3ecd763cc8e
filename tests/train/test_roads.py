"""The fused road gives the dense road's loss and gradients, on packed rows with dropped blocks, and compiles once."""

import contextlib
import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from outrider.errors import UserError
from outrider.layout.anchors import draw_anchors
from outrider.layout.blocks import build_blocks
from outrider.model import tripwire
from outrider.model.attention import dense_attention
from outrider.model.drafter import Drafter, initialise
from outrider.model.fused_attention import flex_kernels, kernels_for, span_kernels
from outrider.objective.frozen_head import frozen_head_loss
from outrider.objective.losses import plain_loss
from outrider.records import FULL, SLIDING, DraftBlocks, DrafterShape, FrozenHead, LossTerms, TokenRows
from outrider.train.masters import WholeMasters
from outrider.train.processes import ALONE
from outrider.train.roads import DenseRoad, FusedRoad, Road
from outrider.train.selftest import check_fused_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: flex_attention has no backward on a CPU"),
    pytest.mark.filterwarnings("ignore"),  # the compiler's own
]
D, V, LAYERS, ROWS = 256, 997, 2, 5


def make_shape(heads: int, kv_heads: int, K: int, kinds: tuple[str, ...]) -> DrafterShape:
    window = 50 if SLIDING in kinds else None
    return DrafterShape(D, 384, LAYERS, heads, kv_heads, 64, 1e-6, 1e4, V, 8192, K, 996, (1, 2), 5, True, kinds, window)


def random_case(shape: DrafterShape, S: int, A: int, seed: int) -> tuple[TokenRows, DraftBlocks, Tensor]:
    """A row of 1 to 6 documents and padding; the last document is short, so that some blocks end beyond it."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randperm(S - 9, generator=generator)[: 1 + seed].add(1).sort().values.tolist()
    ids, positions = torch.full((1, S), -1), torch.zeros(1, S, dtype=torch.int64)
    for number, (start, end) in enumerate(zip([0, *cuts], cuts, strict=False)):
        ids[0, start:end], positions[0, start:end] = number, torch.arange(end - start)
    supervised = (ids >= 0) & (torch.rand(1, S, generator=generator) < 0.95)
    rows = TokenRows(torch.randint(V - 1, (1, S), generator=generator), ids, positions, supervised, torch.tensor([seed]))
    anchors, keep, _ = draw_anchors(rows, per_row=A, document_floor=1, seed=0, epochs_B=[0])
    blocks = build_blocks(rows, anchors, keep, block_size=shape.block_size, mask_token_id=996, gamma=4.0)
    return rows.to(torch.device("cuda")), blocks.to(torch.device("cuda")), torch.randn(1, S, 2 * D, device="cuda")


def parts(shape: DrafterShape) -> tuple[Drafter, Tensor, FrozenHead]:
    drafter = Drafter(shape, dense_attention)
    initialise(drafter, seed=0, head_scale=1.0)
    return drafter.cuda(), torch.randn(V, D, device="cuda"), FrozenHead((torch.randn(V, D) / D**0.5).to("cuda"), None)


def run(road: Road, drafter: Drafter, table: Tensor, loss: LossTerms, blocks: DraftBlocks) -> tuple[float, dict[str, Tensor]]:
    (loss.loss_sum / blocks.weights_BAK.sum().clamp(min=1e-12)).backward()
    road.collect(WholeMasters(drafter, ALONE))
    gradients = {name: p.grad.double() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad(set_to_none=True)
    return float(loss.loss_sum), gradients


@pytest.mark.parametrize(("heads", "kv_heads", "K", "S", "A", "kinds", "budget", "attention"), [
    (8, 8, 16, 512, 24, (FULL, FULL), 1.0, "best"),
    (12, 4, 8, 333, 30, (FULL, SLIDING), 1.0, "best"),
    (12, 4, 8, 333, 30, (FULL, SLIDING), 1.0, "flex"),
    (8, 2, 4, 1000, 63, (FULL, FULL), 1.0, "best"),
    (8, 1, 16, 129, 13, (SLIDING, SLIDING), 1.0, "best"),
    (12, 4, 8, 333, 30, (FULL, SLIDING), 0.3, "best"),
], ids=["heads 8/8", "heads 12/4, window", "heads 12/4, window, flex", "heads 8/2", "heads 8/1, window", "recomputed"])
def test_loss_and_gradients(
    heads: int, kv_heads: int, K: int, S: int, A: int, kinds: tuple[str, ...], budget: float, attention: str
) -> None:
    """Judged against float64. Rounding to bf16 (2^-9 relative) at every product is what both bf16 roads do, at different
    places, so the fused road's error may be half as large again as autocast's, plus the 2^-9 of a gradient kept in bf16;
    a wrong mask or a lost gradient is an error of the order of 1."""
    torch._dynamo.reset()
    shape = make_shape(heads, kv_heads, K, kinds)
    drafter, table, head = parts(shape)
    wide = Drafter(shape, dense_attention).cuda().double()
    wide.load_state_dict(drafter.state_dict())
    exact, autocast = DenseRoad(wide, dtype=torch.float64), DenseRoad(drafter, dtype=torch.bfloat16)
    device = drafter.norm.weight.device
    kernels = kernels_for(device, head_dim=64, dtype=torch.bfloat16) if attention == "best" else flex_kernels(device, head_dim=64)
    fused = FusedRoad(drafter, kernels, dtype=torch.bfloat16, activation_budget=budget)
    counters = torch._dynamo.utils.counters["stats"]
    for seed in range(ROWS):
        rows, blocks, features = random_case(shape, S, A, seed)
        inputs = (table.__getitem__, features, rows, blocks)
        wide_head = FrozenHead(head.weight_VD.double(), None)
        true_loss, true = run(exact, wide, table, plain_loss(exact.hidden(*inputs), blocks, wide_head), blocks)
        _, plain = run(autocast, drafter, table, plain_loss(autocast.hidden(*inputs), blocks, head), blocks)
        fused.begin(WholeMasters(drafter, ALONE))
        fast_value, fast = run(
            fused, drafter, table, frozen_head_loss(fused.hidden(*inputs), blocks, head, budget_bytes=2**20), blocks
        )
        assert abs(fast_value - true_loss) <= 2e-3 * true_loss + 1e-6
        if seed == 0:
            graphs = counters["unique_graphs"]
        for name, expected in true.items():
            scale = expected.norm() + 1e-12
            error, allowed = (fast[name] - expected).norm() / scale, (plain[name] - expected).norm() / scale
            assert error <= 1.5 * allowed + 2**-8, f"row {seed}: {name}: {error:.2e}, autocast {allowed:.2e}"
    assert counters["unique_graphs"] == graphs, "fresh anchors and documents must not compile again"


def unfused(way: str, name: str) -> tuple[str, float]:
    """A step in one of the ways in which attention goes dense: what stopped it ("" if nothing), and the most bytes above the
    weights over those of one layer's fp32 scores."""
    torch._dynamo.reset()
    shape, device = make_shape(12, 4, 16, (FULL, FULL)), torch.device("cuda")
    kernels = flex_kernels(device, head_dim=64) if name == "flex" else span_kernels(device, head_dim=64, dtype=torch.bfloat16)
    if kernels is None:
        pytest.skip("our own kernels need compute capability 9.0")
    drafter, table, _ = parts(shape)
    compile_part = torch.compile
    if way == "aot_eager":
        torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    road, masters = FusedRoad(drafter, kernels, dtype=torch.bfloat16, activation_budget=1.0), WholeMasters(drafter, ALONE)
    torch.compile = compile_part
    road.begin(masters)
    with contextlib.ExitStack() as stack:
        if way == "compile off":
            stack.enter_context(torch._dynamo.config.patch(disable=True))
        if way == "FlopCounterMode":
            stack.enter_context(FlopCounterMode(display=False))
        if way == "recompile limit":
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=1))
            rows, blocks, features = random_case(shape, 500, 30, 0)
            road.hidden(partial(torch.embedding, table), features, rows, blocks)
        rows, blocks, features = random_case(shape, 3000, 200, 0)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            road.hidden(partial(torch.embedding, table), features, rows, blocks).sum().backward()
        except tripwire.DenseAttentionError as error:
            return str(error), 0.0
    return "", (torch.cuda.max_memory_allocated() - before) / (4 * 12 * 3200 * 6200)


@pytest.mark.parametrize("name", ["span", "flex"])
@pytest.mark.parametrize(("way", "reason"), [
    ("compile off", "torch.compile is disabled"), ("recompile limit", "the recompile limit was hit"),
    ("aot_eager", "not compiled by the inductor backend"), ("FlopCounterMode", "a dispatch mode"),
])
def test_unfused_steps_are_stopped(way: str, reason: str, name: str) -> None:
    """Our own kernels hold no scores whatever compiles what is around them, so under aot_eager they run, in a fraction of the
    memory that one layer's scores would take."""
    sentence, share = unfused(way, name)
    if (way, name) == ("aot_eager", "span"):
        assert not sentence
        assert share < 0.5
    else:
        assert reason in sentence
        assert "queries [1, 12, 3200, 64] and keys [1, 4, 6200, 64]" in sentence


@pytest.mark.parametrize("name", ["span", "flex"])
def test_self_test_passes_and_refuses(name: str) -> None:
    torch._dynamo.reset()
    shape, device = make_shape(8, 2, 16, (FULL, SLIDING)), torch.device("cuda")
    good = flex_kernels(device, head_dim=64) if name == "flex" else span_kernels(device, head_dim=64, dtype=torch.bfloat16)
    if good is None:
        pytest.skip("our own kernels need compute capability 9.0")
    check_fused_attention(shape, good, dtype=torch.bfloat16, device=device)

    def wrong(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return good.attention(q, k, v.detach() + 0.03 * (v - v.detach()), mask)

    with pytest.raises(UserError, match=f"dV of the {name} kernel is wrong"):
        check_fused_attention(shape, dataclasses.replace(good, attention=wrong), dtype=torch.bfloat16, device=device)
