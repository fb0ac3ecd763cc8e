"""Attention and rotary embedding against plain loops in float64 and against transformers' own modules."""

import math

import pytest
import torch
from toys import noise, toy_model
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from outrider.model.attention import dense_attention, rotary_table, rotate


def loops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Softmax attention one query at a time, over the visible keys alone."""
    B, H, Q, C = q.shape
    G, N = k.shape[1:3]
    rows = []
    for b in range(B):
        for h in range(H):
            g = h * G // H
            for i in range(Q):
                seen = [n for n in range(N) if mask is None or bool(mask[b, 0, i, n])]
                scores = torch.stack([(q[b, h, i] * k[b, g, n]).sum() / math.sqrt(C) for n in seen])
                weights = (scores - scores.max()).exp()
                rows.append(sum(w * v[b, g, n] for w, n in zip(weights / weights.sum(), seen, strict=True)))
    return torch.stack(rows).view(B, H, Q, C)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("sharing", [1, 3, 4, 8])
def test_dense_attention_equals_loops_in_value_and_gradient(sharing: int, masked: bool) -> None:
    """float64 on both sides: the tolerance is that of a sum of a dozen products."""
    B, G, Q, N, C = 2, 8 // sharing or 1, 3, 7, 4
    H = G * sharing
    inputs = [noise(B, n, x, C, seed=i).double() for i, (n, x) in enumerate(((H, Q), (G, N), (G, N)))]
    mask = noise(B, 1, Q, N, seed=9) > 0
    mask[..., 0] = True
    upstream = noise(B, H, Q, C, seed=5).double()
    results = []
    for attend in (dense_attention, loops):
        qkv = [x.clone().requires_grad_() for x in inputs]
        out = attend(*qkv, mask if masked else None)
        out.backward(upstream)
        results.append([out.detach(), *(x.grad for x in qkv)])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


def test_a_hidden_key_cannot_move_one_bit() -> None:
    q, k, v = noise(1, 4, 3, 8, seed=0), noise(1, 2, 9, 8, seed=1), noise(1, 2, 9, 8, seed=2)
    mask = torch.ones(1, 1, 3, 9, dtype=torch.bool)
    mask[..., 4:7] = False
    before = dense_attention(q, k, v, mask)
    k[:, :, 4:7], v[:, :, 4:7] = 1e4, -1e4
    assert torch.equal(dense_attention(q, k, v, mask), before)


def test_rotary_equals_transformers() -> None:
    config = Qwen3Config(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=4096,
                         rope_parameters={"rope_type": "default", "rope_theta": 123456.0})
    positions = torch.tensor([[0, 1, 2, 7, 8, 4095], [5, 6, 0, 1, 2, 3]])
    q, k = noise(2, 4, 6, 16, seed=0), noise(2, 2, 6, 16, seed=1)
    cos, sin = Qwen3RotaryEmbedding(config)(q, positions)
    ours_cos, ours_sin = rotary_table(positions, 16, 123456.0)
    torch.testing.assert_close(ours_cos[:, 0], cos, rtol=0, atol=1e-7)
    torch.testing.assert_close(ours_sin[:, 0], sin, rtol=0, atol=1e-7)
    theirs = apply_rotary_pos_emb(q, k, cos, sin)
    for x, expected in zip((q, k), theirs, strict=True):
        torch.testing.assert_close(rotate(x, ours_cos, ours_sin), expected, rtol=0, atol=1e-6)


def test_rotated_scores_depend_on_distance_alone() -> None:
    q, k = noise(1, 1, 1, 16, seed=0), noise(1, 1, 1, 16, seed=1)

    def score(at: int, of: int) -> float:
        tables = [rotary_table(torch.tensor([[p]]), 16, 10000.0) for p in (at, of)]
        return float((rotate(q, *tables[0]) * rotate(k, *tables[1])).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-2


def test_the_toys_are_what_they_say() -> None:
    assert type(toy_model("qwen3", seed=0)).__name__ == "Qwen3ForCausalLM"
    with pytest.raises(ValueError, match="must be one of"):
        toy_model("gpt", seed=0)
