"""The one-pass Triton kernels against their plain twins: on a GPU, or (TRITON_INTERPRET=1) by Triton's interpreter on a CPU."""

import importlib.util
import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from toys import noise

from outrider.features.fp8 import LARGEST, gated_norm_in_8_bits, swiglu_in_8_bits
from outrider.features.kernels import CHUNK, bounds_of, convolve, gated_delta_rule, unit

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED),
                                reason="needs a CUDA GPU, or Triton and TRITON_INTERPRET=1 for its interpreter")
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
LENGTHS = [70, 3, 128, 1, 55]
X = sum(LENGTHS)
SINCE = torch.cat([torch.arange(n) for n in LENGTHS])


def values(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return noise(*shape, seed=seed).to(dtype)


def loops_over_values() -> bool:
    """Whether this NumPy takes an array of one value for a whole number, as the interpreter's `range` needs it (before 1.25)."""
    try:
        return bool(int(np.ones(1)))
    except (TypeError, DeprecationWarning):
        return False


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.float().cpu() - truth.float()).norm() / truth.float().norm())


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2 if INTERPRETED else 1e-3)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(4, 128, 12, 128), (2, 16, 4, 24)])
def test_convolution(sizes: tuple[int, int, int, int], bias: bool, dtype: torch.dtype, most: float) -> None:
    """The same float32 sums, rounded once; Triton's interpreter cuts off to bfloat16 where the GPU rounds (0.004 of the norm)."""
    from outrider.features.passes_cuda import convolve_cuda

    G, C, H, E = sizes
    width = 2 * G * C + H * E
    joint, taps = values(X, width + 64, seed=0, dtype=dtype), values(width, 4, seed=1, dtype=dtype)
    bias_F = values(width, seed=2, dtype=dtype) if bias else None
    truth = convolve(joint[:, :width], taps, bias_F, SINCE, *sizes)
    found = convolve_cuda(joint.to(DEVICE)[:, :width], taps.to(DEVICE), None if bias_F is None else bias_F.to(DEVICE),
                          SINCE.to(DEVICE), *sizes)
    for part, right in zip(found, truth, strict=True):
        assert relative(part, right) < most


@pytest.mark.skipif(INTERPRETED and not loops_over_values(), reason="Triton's interpreter needs an older NumPy")
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("size", [16, 128])
def test_gated_delta_rule(size: int, alike: bool) -> None:
    """Keys all alike and nothing forgotten: there the triangular system is as far from its diagonal as it can be.

    float32 by the interpreter (which multiplies no bfloat16), bfloat16 on a GPU: half a step of 2^-8 at random is 0.0017 of the
    norm, of factors that are rounded as well: 0.004. Where 64 keys are one, what each token rounds adds up until the next chunk
    sees it: the same sums by hand in float32, rounded where these kernels round, are 0.019 off, and rounded where
    flash-linear-attention rounds 0.016.
    """
    from outrider.features.delta_cuda import gated_delta_rule_cuda

    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    q, k, v = (noise(X, heads, size, seed=seed) for seed, heads in enumerate((2, 2, 4)))
    q, k, v = unit(q).to(dtype), unit(k[:1].expand_as(k) if alike else k).to(dtype).contiguous(), v.to(dtype)
    decay, beta = -noise(X, 4, seed=3).abs() * (1e-3 if alike else 1), noise(X, 4, seed=4).sigmoid() ** (0.1 if alike else 1)
    plain, there = bounds_of(torch.tensor(LENGTHS), torch.device("cpu")), bounds_of(torch.tensor(LENGTHS), DEVICE)
    truth = gated_delta_rule(q, k, v, decay, beta, plain.starts_N1, plain.chunks_P2)

    def found(v_XHE: torch.Tensor) -> torch.Tensor:
        given = (t.to(DEVICE) for t in (q, k, v_XHE, decay, beta))
        return gated_delta_rule_cuda(*given, there.starts_N1, there.chunks_P2, CHUNK).cpu()

    assert relative(found(v), truth) < (1e-5 if INTERPRETED else 0.025 if alike else 0.006)
    other = v.clone()
    other[: LENGTHS[0]] += 100
    other[sum(LENGTHS[:3]) :] += 100
    middle = slice(LENGTHS[0], sum(LENGTHS[:3]))
    assert torch.equal(found(other)[middle], found(v)[middle]), "documents before and after do not matter"


def assert_same_8_bits(found: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """Equal scales, and equal values but for the few that stand on a step's edge.

    The interpreter rounds up to a power of two without the carry, in one value of 60: there only the others are held to a step
    (e4m3 has 3 bits after the first, and steps of 2^-9 below 2^-6).
    """
    torch.testing.assert_close(found[1].cpu(), truth[1], rtol=1e-5, atol=0)
    a, b = (eight.float().cpu() for eight in (found[0], truth[0]))
    wrong = (a - b).abs() > b.abs().clamp(min=2.0**-6) / 8 if INTERPRETED else a != b
    assert float(wrong.float().mean()) < (0.03 if INTERPRETED else 0.001)


@pytest.mark.parametrize("width", [48, 17408])
def test_feed_forward_in_8_bits(width: int) -> None:
    from outrider.features.passes_cuda import swiglu_cuda

    gate_up = values(33, 2 * width, seed=0)
    assert_same_8_bits(swiglu_cuda(gate_up.to(DEVICE), LARGEST), swiglu_in_8_bits(gate_up))


@pytest.mark.parametrize(("heads", "size"), [(48, 128), (3, 20)])
def test_gated_norm_in_8_bits(heads: int, size: int) -> None:
    from outrider.features.passes_cuda import gated_norm_cuda

    x, joint, weight = values(33, heads, size, seed=0), values(33, heads * size + 32, seed=1), noise(size, seed=2)
    gate = joint[:, : heads * size]
    found = gated_norm_cuda(x.to(DEVICE), joint.to(DEVICE)[:, : heads * size], weight.to(DEVICE), 1e-6, LARGEST)
    assert_same_8_bits(found, gated_norm_in_8_bits(x, gate, weight, 1e-6))
