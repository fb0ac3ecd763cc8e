"""Which road is taken is explicit; what the device cannot do is refused; the self-test's own reference is right."""

from pathlib import Path

import pytest
import torch
from toys import toy_shape

from outrider.config import TrainConfig
from outrider.errors import UserError
from outrider.model.attention import dense_attention
from outrider.model.drafter import Drafter
from outrider.train.roads import DenseRoad, open_road
from outrider.train.selftest import exact_attention


def settings(**changes: object) -> TrainConfig:
    return TrainConfig(folder=Path("unused"), **changes)  # type: ignore[arg-type]


def test_dense_takes_the_precision() -> None:
    road = open_road(Drafter(toy_shape(), dense_attention), settings(attention="dense", precision="bfloat16"))
    assert isinstance(road, DenseRoad)
    assert road.dtype == torch.bfloat16


def test_fused_is_refused_on_a_cpu() -> None:
    with pytest.raises(UserError, match=r"train\.attention = 'fused': needs a CUDA device, train\.device is 'cpu'.*'dense'"):
        open_road(Drafter(toy_shape(), dense_attention), settings(attention="fused"))


def test_exact_attention_equals_the_dense_twin() -> None:
    """float64 on both sides: sums in another order."""
    q, k, v = torch.randn(1, 6, 5, 8).double(), *torch.randn(2, 1, 2, 9, 8).double()
    mask, gradient = torch.rand(1, 5, 9) < 0.5, torch.randn(1, 6, 5, 8).double()
    mask[..., 0] = True
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = dense_attention(q, k, v, mask[:, None])
    wanted = (out, *torch.autograd.grad(out, inputs, gradient))
    for found, expected in zip(exact_attention(q, k, v, mask, gradient), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
