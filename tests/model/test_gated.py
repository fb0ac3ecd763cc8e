"""The gated unit in one pass: silu(gate) * up and all its gradients, in plain torch, in Triton's interpreter and on a GPU."""

import importlib.util
import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.model.gated import gated, gated_backward, gated_down

B, Q, I, D = 2, 5, 24, 12


def plain(gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def test_value_and_gradients_are_those_of_autograd() -> None:
    gate_up = (3 * torch.randn(B, Q, 2 * I)).double().requires_grad_()
    down, gradient = torch.randn(D, I).double().requires_grad_(), torch.randn(B, Q, D).double()
    expected, found = plain(gate_up, down), gated_down(gate_up, down)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(*(torch.autograd.grad(x, (gate_up, down), gradient) for x in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_bf16_is_rounded_once() -> None:
    """Computed in float32: each value is the nearest bf16 to the exact one, which products of rounded factors are not."""
    gate_up, d_active = 3 * torch.randn(B, Q, 2 * I).bfloat16(), torch.randn(B, Q, I).bfloat16()
    d_both, active = gated_backward(d_active, gate_up)
    assert torch.equal(active, gated(gate_up))
    exact = gated_backward(d_active.double(), gate_up.double())
    for found, truth in zip((d_both, active), exact, strict=True):
        torch.testing.assert_close(found.double(), truth, rtol=2**-8 + 1e-5, atol=0)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # the compiler's own, as it traces an autograd.Function
def test_activation_is_not_kept() -> None:
    """The compiled backward asks for gate and up, not for their product: one graph, and no [B, Q, I] among what is saved."""
    saved: list[tuple[int, ...]] = []

    def keep(x: Tensor) -> Tensor:
        saved.append(tuple(x.shape))
        return x

    compiled = torch.compile(gated_down, backend="aot_eager", fullgraph=True, dynamic=False)
    gate_up, down = torch.randn(B, Q, 2 * I, requires_grad=True), torch.randn(D, I, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = compiled(gate_up, down)
    assert (B, Q, 2 * I) in saved
    assert (B, Q, I) not in saved
    expected = torch.autograd.grad(plain(gate_up, down).sum(), (gate_up, down))
    for ours, theirs in zip(torch.autograd.grad(out.sum(), (gate_up, down)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def check_kernels(width: int, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Both kernels against the plain code in float64, with gates so large that the exponential overflows."""
    from outrider.model import gated_cuda as kernels

    gate_up, d_active = 3 * torch.randn(B, Q, 2 * width), torch.randn(B, Q, width)
    gate_up[0, 0, :4] = torch.tensor([-200.0, 200.0, 0.0, -90.0])
    gate_up, d_active = gate_up.to(dtype).to(device), d_active.to(dtype).to(device)
    exact = (gated(gate_up.cpu().double()), *gated_backward(d_active.cpu().double(), gate_up.cpu().double()))
    for found, truth in zip((kernels.forward(gate_up), *kernels.backward(d_active, gate_up)), exact, strict=True):
        torch.testing.assert_close(found.cpu().double(), truth, rtol=tolerance, atol=1e-6)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
                    reason="needs Triton, which torch brings only beside CUDA, and TRITON_INTERPRET=1 from the start")
@pytest.mark.parametrize("width", [24, 1024, 1500])
@pytest.mark.filterwarnings("ignore")  # the interpreter's own
def test_kernels_in_the_interpreter(width: int) -> None:
    check_kernels(width, "cpu", torch.float32, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-8 + 1e-5), (torch.float32, 1e-5)])
@pytest.mark.parametrize("width", [24, 1024, 1500])
def test_kernels_on_the_gpu(width: int, dtype: torch.dtype, tolerance: float) -> None:
    check_kernels(width, "cuda", dtype, tolerance)
