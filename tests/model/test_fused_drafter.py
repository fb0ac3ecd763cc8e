"""The packed drafter is the drafter: same hidden states but for slot 0, same gradients, weights under standard names."""

import pytest
import torch

from outrider.model.attention import dense_attention
from outrider.model.drafter import Drafter
from outrider.model.fused_attention import tile_options
from outrider.model.fused_drafter import FusedDrafter, fused_twin
from outrider.records import FULL, SLIDING, DrafterShape

B, A, S, D = 2, 5, 23, 32


def make(layers: int, kv_heads: int, K: int) -> tuple[Drafter, FusedDrafter]:
    kinds = (FULL, SLIDING, FULL)[:layers]
    window = K + 2 if SLIDING in kinds else None
    shape = DrafterShape(D, 48, layers, 4, kv_heads, 8, 1e-6, 1e4, 100, 512, K, 99, (1, 2), 5, True, kinds, window)
    drafter = Drafter(shape, dense_attention).double()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
    fused = fused_twin(drafter, dense_attention, dtype=torch.float64, compile_part=lambda part: part)
    fused.borrow(drafter)
    return drafter, fused


def case(K: int) -> tuple[torch.Tensor, ...]:
    anchor, mask, features = torch.randn(B, A, D).double(), torch.randn(D).double(), torch.randn(B, S, 2 * D).double()
    noise = torch.cat((anchor[:, :, None], mask.expand(B, A, K - 1, D)), dim=2).flatten(1, 2)
    positions, context = torch.randint(0, 400, (B, A * K)), torch.arange(S).expand(B, S)
    masks = {kind: torch.rand(B, 1, A * K, S + A * K) < 0.5 for kind in (FULL, SLIDING)}
    return anchor, mask, features, noise, positions, context, masks  # type: ignore[return-value]


@pytest.mark.parametrize(("layers", "kv_heads", "K"), [(1, 4, 2), (2, 2, 3), (3, 1, 8)])
def test_equals_the_drafter(layers: int, kv_heads: int, K: int) -> None:
    """In float64, so the tolerance is that of sums in another order; the last layer without slot 0 and the first layer's
    shared mask rows must not show."""
    drafter, fused = make(layers, kv_heads, K)
    anchor, mask, features, noise, positions, context, masks = case(K)
    plain = drafter(noise, features, positions, context, masks).view(B, A, K, D)
    rotary = fused.rotary(positions), fused.rotary(context)
    fast = fused(anchor, mask, fused.project_context(features), *rotary, masks).view(B, A, K, D)
    torch.testing.assert_close(fast[:, :, 1:], plain[:, :, 1:], rtol=1e-6, atol=1e-6)  # the rotary tables are float32
    gradient = torch.randn(B, A, K - 1, D).double()
    plain[:, :, 1:].backward(gradient)
    expected = {name: p.grad for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    for _ in range(2):  # two micro-batches add up
        fused(anchor, mask, fused.project_context(features), *rotary, masks).view(B, A, K, D)[:, :, 1:].backward(gradient)
        fused.give_gradients(drafter)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * expected[name], rtol=1e-6, atol=1e-6, msg=name)
    assert all(parameter.grad is None for parameter in fused.parameters())


def test_new_weights_arrive() -> None:
    drafter, fused = make(2, 2, 3)
    anchor, mask, features, noise, positions, context, masks = case(3)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    fused.give_back()
    fused.borrow(drafter)
    plain = drafter(noise, features, positions, context, masks).view(B, A, 3, D)
    rotary = fused.rotary(positions), fused.rotary(context)
    fast = fused(anchor, mask, fused.project_context(features), *rotary, masks).view(B, A, 3, D)
    torch.testing.assert_close(fast[:, :, 1:], plain[:, :, 1:], rtol=1e-6, atol=1e-6)


def test_bf16_weights_live_in_the_masters_memory_and_leave_no_trace() -> None:
    drafter = make(2, 2, 3)[0].float()
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    fused = fused_twin(drafter, dense_attention, dtype=torch.bfloat16, compile_part=lambda part: part)
    for _ in range(2):
        fused.borrow(drafter)
        fused.borrow(drafter)  # once more changes nothing
        for share in fused.shares(drafter):
            name = next(name for name, parameter in drafter.named_parameters() if parameter is share.master)
            torch.testing.assert_close(share.of(share.packed), before[name].bfloat16(), rtol=2**-7, atol=0)  # a tie's one unit
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
                    for p in (*drafter.parameters(), *fused.parameters())}
        assert sum(storages.values()) == sum(4 * value.numel() for value in before.values())
        fused.give_back()
        fused.give_back()
        assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())


def test_tiles_shrink_where_shared_memory_is_small() -> None:
    assert tile_options(shared_memory=232448, head_dim=256) == {}  # sm_90
    assert tile_options(shared_memory=101376, head_dim=128) == {}  # sm_89
    assert tile_options(shared_memory=101376, head_dim=256)["bwd_BLOCK_M1"] == 32
