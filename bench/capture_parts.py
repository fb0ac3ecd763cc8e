"""What the parts of a captured layer could gain on one GPU: every algorithm that cuBLASLt offers, cuDNN, other tiles.

    python bench/capture_parts.py

The 27B-shaped target of capture.py, bf16, 8192 tokens. Each candidate runs in turn with the others, long enough that the power
limit sets in (0.1 s, the later half counts), two rounds. One JSON object a line: `ms` is the median. Needs a CUDA GPU.
"""

import ctypes
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from outrider.features import guards
from outrider.features.kernels import CHUNK, bounds_of, library_delta_rule, unit

X = 8192
PRODUCTS = {"gate and up": (34816, 5120), "down": (5120, 17408), "q, k, v and z": (16384, 5120), "out": (5120, 6144)}
HEADS, KEY_HEADS, SIZE = 24, 4, 256
WORKSPACE = 64 * 2**20
RESULT_BYTES, ALGORITHM_BYTES = 96, 64  # cublasLtMatmulHeuristicResult_t and what it begins with
SETTINGS = {"tile": 1, "custom": 5, "cluster": 8}  # cublasLtMatmulAlgoConfigAttributes_t


def sustained(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Milliseconds of each call, in turn."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(2):
        for name, call in calls.items():
            call()
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            torch.cuda.synchronize()
            n = max(2, int(seconds / (time.perf_counter() - began)))
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for i in range(n):
                if i == n // 2:
                    begin.record()
                call()
            end.record()
            torch.cuda.synchronize()
            found[name].append(begin.elapsed_time(end) / (n - n // 2))
    return {name: round(statistics.median(times), 4) for name, times in found.items()}


class CublasLt:
    """The library that torch has loaded, asked for its algorithms of `W [N, D]` times `x [X, D]` in bf16, row-major."""

    def __init__(self) -> None:
        lines = Path("/proc/self/maps").read_text().splitlines()
        self.library = ctypes.CDLL(next(line.split()[-1] for line in lines if "libcublasLt" in line))
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
        self.handle = self.made("cublasLtCreate")

    def __call__(self, function: str, *values: object) -> None:
        status = getattr(self.library, function)(*values)
        if status != 0:
            raise RuntimeError(f"{function}: status {status}")

    def made(self, function: str, *values: object) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self(function, ctypes.byref(handle), *values)
        return handle

    def layout(self, rows: int, columns: int) -> ctypes.c_void_p:
        return self.made("cublasLtMatrixLayoutCreate", 14, ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))

    def calls(self, w_ND: Tensor, x_XD: Tensor, out_XN: Tensor) -> dict[str, Callable[[], None]]:
        """One call an algorithm, by its number in the heuristic's order and its settings."""
        (N, D), tokens = w_ND.shape, len(x_XD)
        product = self.made("cublasLtMatmulDescCreate", 68, 0)  # float32 sums
        self("cublasLtMatmulDescSetAttribute", product, 3, ctypes.byref(ctypes.c_int32(1)), ctypes.c_size_t(4))  # W transposed
        w, x, out = self.layout(D, N), self.layout(D, tokens), self.layout(N, tokens)
        wish = self.made("cublasLtMatmulPreferenceCreate")
        self("cublasLtMatmulPreferenceSetAttribute", wish, 1, ctypes.byref(ctypes.c_uint64(WORKSPACE)), ctypes.c_size_t(8))
        results, count = (ctypes.c_uint8 * (RESULT_BYTES * 12))(), ctypes.c_int(0)
        self("cublasLtMatmulAlgoGetHeuristic", self.handle, product, w, x, out, out, wish, 12, results, ctypes.byref(count))
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

        def call(algorithm: Any) -> None:
            self("cublasLtMatmul", self.handle, product, ctypes.byref(one), at(w_ND), w, at(x_XD), x, ctypes.byref(zero),
                 at(out_XN), out, at(out_XN), out, algorithm, at(self.workspace), ctypes.c_size_t(WORKSPACE),
                 ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))

        found = {}
        for i in range(count.value):
            begin = RESULT_BYTES * i
            algorithm = ctypes.create_string_buffer(bytes(results[begin : begin + ALGORITHM_BYTES]), ALGORITHM_BYTES)
            found[f"{i}: {self.settings(algorithm)}"] = lambda algorithm=algorithm: call(algorithm)
        return found

    def settings(self, algorithm: Any) -> str:
        values = []
        for name, number in SETTINGS.items():
            value, written = ctypes.c_uint32(0), ctypes.c_size_t(0)
            size = 2 if name == "cluster" else 4
            self("cublasLtMatmulAlgoConfigGetAttribute", algorithm, number, ctypes.byref(value), ctypes.c_size_t(size),
                 ctypes.byref(written))
            values.append(f"{name} {value.value}")
        return ", ".join(values)


def at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def in_parts(x_XD: Tensor, w_ND: Tensor, out_XN: Tensor, x_parts: int, w_parts: int) -> None:
    """The product as several smaller ones, for which cuBLAS may choose another tile."""
    for x, rows in zip(x_XD.chunk(x_parts), out_XN.chunk(x_parts), strict=True):
        for w, out in zip(w_ND.chunk(w_parts), rows.chunk(w_parts, dim=1), strict=True):
            torch.mm(x, w.T, out=out)


def products(library: CublasLt) -> None:
    for name, (N, D) in PRODUCTS.items():
        w_ND = torch.randn(N, D, device="cuda", dtype=torch.bfloat16) * 0.02
        x_XD = torch.randn(X, D, device="cuda", dtype=torch.bfloat16)
        out_XN, truth_XN = torch.empty(X, N, device="cuda", dtype=torch.bfloat16), x_XD @ w_ND.T
        calls: dict[str, Callable[[], object]] = {
            f"torch, {x_parts} x {w_parts} parts": partial(in_parts, x_XD, w_ND, out_XN, x_parts, w_parts)
            for x_parts, w_parts in ((1, 1), (1, 2), (1, 4), (2, 1), (4, 1))
        }
        for how, call in library.calls(w_ND, x_XD, out_XN).items():
            call()
            torch.testing.assert_close(out_XN, truth_XN, rtol=0.02, atol=0.02)
            calls[how] = call
        if name in ("down", "out"):
            calls["torch, then the residual"] = lambda x=x_XD, w=w_ND, out=out_XN, r=truth_XN: torch.mm(x, w.T, out=out).add_(r)
            calls["the residual in the product"] = lambda x=x_XD, w=w_ND, out=out_XN: out.addmm_(x, w.T)
        for how, ms in sustained(calls, 0.1).items():
            print(json.dumps({"product": name, "N": N, "D": D, "how": how, "ms": ms, "tflops": round(2 * X * N * D / ms / 1e9)}),
                  flush=True)


def attention() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(X, heads, SIZE, generator=generator).to("cuda", torch.bfloat16)
               for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    for documents in (1, 4, 16):
        shares = torch.rand(documents, generator=generator) + 0.5
        lengths = (shares / shares.sum() * X).long()
        lengths[0] += X - lengths.sum()
        starts_N1, longest = F.pad(lengths.cumsum(0), (1, 0)), int(lengths.max())
        bounds = starts_N1.to("cuda", torch.int32)
        spans = list(zip(starts_N1[:-1].tolist(), starts_N1[1:].tolist(), strict=True))

        def flash(bounds: Tensor = bounds, longest: int = longest) -> Tensor:
            return torch.ops.aten._flash_attention_forward(q, k, v, bounds, bounds, longest, longest, 0.0, True, False,
                                                           scale=SIZE**-0.5)[0]

        def together(bounds: Tensor = bounds, longest: int = longest) -> Tensor:
            return torch.ops.aten._cudnn_attention_forward(q, k, v, None, bounds, bounds, longest, longest, False, 0.0, True,
                                                           False, scale=SIZE**-0.5)[0]

        def one_by_one(spans: list[tuple[int, int]] = spans) -> list[Tensor]:
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
                return [F.scaled_dot_product_attention(*(t[a:b].transpose(0, 1)[None] for t in (q, k, v)), is_causal=True,
                                                       enable_gqa=True) for a, b in spans]

        calls = {"flash, told the bounds": flash, "cuDNN, told the bounds": together, "cuDNN, one by one": one_by_one}
        began = time.perf_counter()
        one_by_one()
        torch.cuda.synchronize()
        print(json.dumps({"attention": documents, "how": "cuDNN, one by one, the first time", "s": time.perf_counter() - began}))
        for how, ms in sustained(calls, 0.05).items():
            print(json.dumps({"attention": documents, "how": how, "ms": ms}))


def delta_rule() -> None:
    """Our kernels at several tiles against flash-linear-attention's, 16 key heads and 48 value heads of 128."""
    from outrider.features import delta_cuda

    generator = torch.Generator().manual_seed(0)
    q, k = (unit(torch.randn(X, 16, 128, generator=generator)).to("cuda", torch.bfloat16) for _ in range(2))
    v = torch.randn(X, 48, 128, generator=generator).to("cuda", torch.bfloat16)
    decay, beta = ((torch.rand(X, 48, generator=generator) * scale).cuda() for scale in (-0.3, 1.0))
    chosen = delta_cuda.SOLVE_WARPS, delta_cuda.SCAN_E, delta_cuda.SCAN_WARPS, delta_cuda.SCAN_STAGES
    for documents in (1, 4, 16):
        lengths = torch.full((documents,), X // documents) + torch.arange(documents) * 7
        lengths[0] += X - lengths.sum()
        bounds = bounds_of(lengths, torch.device("cuda"))
        given = (q, k, v, decay, beta, bounds.starts_N1, bounds.chunks_P2)
        truth = library_delta_rule(*given).float()
        found = {"flash-linear-attention": sustained({"": lambda given=given: library_delta_rule(*given)}, 0.05)[""]}
        for tile in (chosen, (4, 64, 4, 1), (4, 64, 8, 2), (4, 64, 4, 3), (8, 64, 4, 2), (4, 32, 4, 2), (4, 128, 8, 2)):
            delta_cuda.SOLVE_WARPS, delta_cuda.SCAN_E, delta_cuda.SCAN_WARPS, delta_cuda.SCAN_STAGES = tile
            own = delta_cuda.gated_delta_rule_cuda(*given, CHUNK)
            assert (own - truth).norm() < 0.01 * truth.norm()
            name = "ours, {} warps to solve; {} channels, {} warps, {} stages to scan".format(*tile)
            found[name] = sustained({"": lambda given=given: delta_cuda.gated_delta_rule_cuda(*given, CHUNK)}, 0.05)[""]
        for how, ms in found.items():
            print(json.dumps({"delta rule": documents, "how": how, "ms": ms}), flush=True)
    delta_cuda.SOLVE_WARPS, delta_cuda.SCAN_E, delta_cuda.SCAN_WARPS, delta_cuda.SCAN_STAGES = chosen


def convolution() -> None:
    from outrider.features import passes_cuda

    qkv_z = torch.randn(X, 16384, device="cuda", dtype=torch.bfloat16)
    taps, since = torch.randn(10240, 4, device="cuda", dtype=torch.bfloat16), torch.arange(X, device="cuda") % 2000
    chosen = passes_cuda.BLOCK_X, passes_cuda.WARPS
    for tile in (chosen, (16, 4), (32, 4), (32, 8), (64, 4), (64, 8)):
        passes_cuda.BLOCK_X, passes_cuda.WARPS = tile
        call = partial(passes_cuda.convolve_cuda, qkv_z[:, :10240], taps, None, since, 16, 128, 48, 128)
        print(json.dumps({"convolution": "{} tokens, {} warps".format(*tile), "ms": sustained({"": call}, 0.02)[""]}), flush=True)
    passes_cuda.BLOCK_X, passes_cuda.WARPS = chosen


def main() -> None:
    if not torch.cuda.is_available():
        print(json.dumps({"bench": "capture_parts", "skipped": "needs a CUDA GPU"}))
        return
    torch.ones(16, 16, device="cuda", dtype=torch.bfloat16) @ torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    guards.lock_autotuner()
    products(CublasLt())
    attention()
    delta_rule()
    convolution()


if __name__ == "__main__":
    main()
