"""Takes queries, keys, values and gates of documents on a GPU, gives the gated delta rule's outputs; knows no models.

The Triton kernels of `kernels.gated_delta_rule`. Within a chunk of tokens the rule is a triangular system (arXiv 2406.06484): of
all chunks side by side, `_solve` inverts it; then `_scan` takes the state through each document, chunk by chunk, and holds it in
registers: neither states nor what they predict touch the memory.
"""

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-not-found, unused-ignore]

LOG2_E = tl.constexpr(1.4426950408889634)
SOLVE_WARPS = 4
SCAN_WARPS, SCAN_STAGES, SCAN_E = 4, 2, 64  # SCAN_E: value channels of a head that one program takes


@triton.jit
def _solve(  # type: ignore[no-untyped-def]
    q, k, decay, beta, starts, chunks, solved, seen, sums, X, scale, G: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
    T: tl.constexpr
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    document, number = tl.load(chunks + chunk * 2), tl.load(chunks + chunk * 2 + 1)
    first, end = tl.load(starts + document) + number * T, tl.load(starts + document + 1)
    at = tl.arange(0, T)
    inside = first + at < end
    token = (first + at).to(tl.int64)
    of_head = (token * G + head // (H // G))[:, None] * C + tl.arange(0, C)[None, :]
    k_TC = tl.load(k + of_head, mask=inside[:, None], other=0.0)
    q_TC = tl.load(q + of_head, mask=inside[:, None], other=0.0)
    beta_T = tl.load(beta + token * H + head, mask=inside, other=0.0).to(tl.float32)
    sum_T = tl.cumsum(tl.load(decay + token * H + head, mask=inside, other=0.0).to(tl.float32) * LOG2_E)
    back = at[:, None] - at[None, :]
    kept_TT = tl.exp2(tl.where(back >= 0, sum_T[:, None] - sum_T[None, :], float("-inf")))
    tl.store(sums + head * X + first + at, sum_T, mask=inside)
    square = (token * H + head)[:, None] * T + at[None, :]
    seen_TT = tl.dot(q_TC, tl.trans(k_TC)) * kept_TT * scale
    tl.store(seen + square, seen_TT.to(seen.dtype.element_ty), mask=inside[:, None])
    system_TT = tl.where(back > 0, tl.dot(k_TC, tl.trans(k_TC)) * kept_TT * beta_T[:, None], 0.0)
    # The inverse of I + system: of blocks of twice the size from those of each size, [[A, 0], [C, B]] gives -B^-1 C A^-1
    together = at[:, None] // 2 == at[None, :] // 2
    inverse_TT = tl.where(back == 0, 1.0, 0.0) - tl.where(together, system_TT, 0.0)
    for level in tl.static_range(1, 31):
        if (2 << level) <= T:
            pair = (at[:, None] // (2 << level) == at[None, :] // (2 << level)) & (
                at[:, None] // (1 << level) != at[None, :] // (1 << level)
            )
            below_TT = tl.dot(tl.where(pair, system_TT, 0.0), inverse_TT, input_precision="tf32")
            inverse_TT -= tl.dot(inverse_TT, below_TT, input_precision="tf32")
    tl.store(solved + square, (inverse_TT * beta_T[None, :]).to(solved.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _scan(  # type: ignore[no-untyped-def]
    q, k, v, solved, seen, sums, starts, out, X, scale, E: tl.constexpr, G: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
    T: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr
):
    # What a document's last chunk reads beyond its end needs no mask: in `solved` and `seen` the columns there are 0, the state
    # after it is nobody's, and its output is not stored
    block, head, document = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(starts + document), tl.load(starts + document + 1)
    at = tl.arange(0, T)
    channels = head * E + block * BLOCK_E + tl.arange(0, BLOCK_E)
    dtype: tl.constexpr = out.dtype.element_ty
    state_CE = tl.zeros([C, BLOCK_E], tl.float32)
    for token in tl.range(begin, end, T, num_stages=STAGES):
        k_TC = k.load([token, head // (H // G) * C])
        q_TC = q.load([token, head // (H // G) * C])
        v_TE = v.load([token, head * E + block * BLOCK_E])
        solved_TT, seen_TT = solved.load([token, head * T]), seen.load([token, head * T])
        sum_T = tl.load(sums + head * X + token + at, mask=token + at < end, other=0.0)
        whole = tl.load(sums + head * X + tl.minimum(token + T, end) - 1)
        kept_T = tl.exp2(sum_T)
        before_CE = state_CE.to(dtype)
        wrong_TE = v_TE.to(tl.float32) - kept_T[:, None] * tl.dot(k_TC, before_CE)
        new_TE = tl.dot(solved_TT, wrong_TE.to(dtype))
        out_TE = tl.dot(q_TC, before_CE) * (kept_T * scale)[:, None]
        out_TE = tl.dot(seen_TT, new_TE.to(dtype), out_TE)
        to = (token + at).to(tl.int64)[:, None] * (H * E) + channels[None, :]
        tl.store(out + to, out_TE.to(dtype), mask=(token + at < end)[:, None])
        fresh_TE = (new_TE * tl.exp2(whole - sum_T)[:, None]).to(dtype)
        state_CE = tl.dot(tl.trans(k_TC), fresh_TE, state_CE * tl.exp2(whole))


def gated_delta_rule_cuda(
    q_XGC: Tensor, k_XGC: Tensor, v_XHE: Tensor, decay_XH: Tensor, beta_XH: Tensor, starts_N1: Tensor, chunks_P2: Tensor,
    chunk: int,
) -> Tensor:
    """kernels.gated_delta_rule over chunks of `chunk` tokens, which `chunks_P2` lists."""
    (X, H, E), (G, C) = v_XHE.shape, q_XGC.shape[1:]
    assert all(t.is_contiguous() for t in (q_XGC, k_XGC, v_XHE, decay_XH, beta_XH))
    solved, seen = (torch.empty(X, H * chunk, dtype=v_XHE.dtype, device=v_XHE.device) for _ in range(2))
    sums = torch.empty(H, X, dtype=torch.float32, device=v_XHE.device)
    _solve[(len(chunks_P2), H)](
        q_XGC, k_XGC, decay_XH, beta_XH, starts_N1, chunks_P2, solved, seen, sums, X, C**-0.5, G=G, C=C, H=H, T=chunk,
        num_warps=SOLVE_WARPS,
    )
    out_XHE, block_E = torch.empty_like(v_XHE), min(SCAN_E, E)
    tiles = ((q_XGC, C), (k_XGC, C), (v_XHE, block_E), (solved, chunk), (seen, chunk))
    _scan[(E // block_E, H, len(starts_N1) - 1)](
        *(TensorDescriptor.from_tensor(t.flatten(1), [chunk, width]) for t, width in tiles), sums, starts_N1, out_XHE, X, C**-0.5,
        E=E, G=G, C=C, H=H, T=chunk, BLOCK_E=block_E, STAGES=SCAN_STAGES, num_warps=SCAN_WARPS,
    )
    return out_XHE
