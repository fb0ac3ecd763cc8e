"""Takes queries, keys, values and a SpanMask's tensors on a GPU, gives attended values and gradients; knows nothing of autograd.

Two Triton kernels in the manner of FlashAttention (arXiv 2205.14135, 2307.08691), for the drafter's layout. A tile of queries
holds several heads of one key/value head's group, so it spans few anchors and little of what it reads is masked. The backward
is one pass: a program owns a tile of keys, makes the scores once from the saved log-sum-exp, keeps dK and dV in registers over
all queries and heads that see it, and adds its share of dQ to fp32 memory. (flex_attention's makes scores and dP twice.)
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from outrider.model.span_tiles import Tiles, heads_a_tile

LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-1.0e30)  # finite, so that a row that sees nothing of its first tile does not become NaN
# Triton compiles again for lengths that 16 divides. Here it gains nothing by it (the same registers), and so the kernels that the
# start-up self-test has proved on its odd little row are the very ones that a run takes, compiled once.
LENGTHS = ("S", "Q", "N")


@triton.jit
def _head_and_query(start, first_head, HEADS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Head and query of each row of a tile: queries from `start` on, HEADS heads of each side by side."""
    rows = tl.arange(0, ROWS)
    return first_head + rows % HEADS, start + rows // HEADS


@triton.jit
def _attend_tile(  # type: ignore[no-untyped-def]
    acc, total, top, q, k_base, v_base, k_stride, v_stride, start, N, low, high, scale,
    MASKED: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr,
):
    """One tile of keys into the running softmax of a tile of rows; `scale` includes log2 e."""
    keys = start + tl.arange(0, KEYS)
    channels = tl.arange(0, C)
    k_pointers = k_base + keys[:, None] * k_stride + channels[None, :]
    v_pointers = v_base + keys[:, None] * v_stride + channels[None, :]
    k = tl.load(k_pointers, mask=keys[:, None] < N, other=0.0) if MASKED else tl.load(k_pointers)
    scores = tl.dot(q, tl.trans(k))
    if MASKED:
        seen = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    shares = tl.exp2(scores * scale - new_top[:, None])
    fade = tl.exp2(top - new_top)
    total = total * fade + tl.sum(shares, 1)
    acc = acc * fade[:, None]
    v = tl.load(v_pointers, mask=keys[:, None] < N, other=0.0) if MASKED else tl.load(v_pointers)
    acc = tl.dot(shares.to(v.dtype), v, acc)
    return acc, total, new_top


@triton.jit(do_not_specialize=LENGTHS)
def _forward(  # type: ignore[no-untyped-def]
    q, k, v, out, log_sum, spans, S, Q, N, scale,
    q_b, q_h, q_q, k_b, k_g, k_n, v_b, v_g, v_n, o_b, o_h, o_q,
    B, G: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):
    parts: tl.constexpr = GROUP // HEADS
    each: tl.constexpr = ROWS // HEADS
    side = tl.program_id(0) % (G * parts * B)
    tile = tl.num_programs(0) // (G * parts * B) - 1 - tl.program_id(0) // (G * parts * B)  # late queries see most: first
    b = (side // (G * parts)).to(tl.int64)
    g = side % (G * parts) // parts
    head, query = _head_and_query(tile * each, g * GROUP + side % parts * HEADS, HEADS, ROWS)
    valid = query < Q
    channels = tl.arange(0, C)
    q_tile = tl.load(q + b * q_b + (head.to(tl.int64) * q_h)[:, None] + (query.to(tl.int64) * q_q)[:, None] + channels[None, :],
                     mask=valid[:, None], other=0.0)
    spans_at = spans + b * Q + query
    low = tl.load(spans_at, mask=valid, other=0)
    high = tl.load(spans_at + B * Q, mask=valid, other=0)
    slots_low = tl.load(spans_at + 2 * B * Q, mask=valid, other=0)
    slots_high = tl.load(spans_at + 3 * B * Q, mask=valid, other=0)

    some = valid & (low < high)
    from_tile = tl.min(tl.where(some, low, S)) // KEYS
    to_tile = tl.cdiv(tl.max(tl.where(some, high, 0)), KEYS)
    full_from = tl.cdiv(tl.max(tl.where(valid, low, 0)), KEYS)
    full_to = tl.min(tl.where(valid, high, S)) // KEYS
    if full_to <= full_from:
        full_from = to_tile
        full_to = to_tile
    own_from = tl.min(tl.where(valid, slots_low, N))
    own_tiles = tl.cdiv(tl.max(tl.where(valid, slots_high, 0)) - own_from, KEYS)

    k_base = k + b * k_b + g.to(tl.int64) * k_g
    v_base = v + b * v_b + g.to(tl.int64) * v_g
    acc = tl.zeros([ROWS, C], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], LOWEST, tl.float32)
    masked_tiles = own_tiles + tl.maximum(to_tile - from_tile - (full_to - full_from), 0)
    for i in range(masked_tiles):
        own = i < own_tiles
        at = from_tile + i - own_tiles
        at = tl.where(at >= full_from, at + full_to - full_from, at)
        start = tl.where(own, own_from + i * KEYS, at * KEYS)
        acc, total, top = _attend_tile(
            acc, total, top, q_tile, k_base, v_base, k_n, v_n, start, N, tl.where(own, slots_low, low),
            tl.where(own, slots_high, high), scale, True, KEYS, C,
        )
    for at in range(full_from, full_to):
        acc, total, top = _attend_tile(
            acc, total, top, q_tile, k_base, v_base, k_n, v_n, at * KEYS, N, low, high, scale, False, KEYS, C
        )
    out_at = out + b * o_b + (head.to(tl.int64) * o_h)[:, None] + (query.to(tl.int64) * o_q)[:, None] + channels[None, :]
    tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=valid[:, None])
    log_sum_at = log_sum + ((b * G * parts + side % (G * parts)) * Q + tile * each) * HEADS + tl.arange(0, ROWS)
    tl.store(log_sum_at, top + tl.log2(total), mask=valid)


@triton.jit(do_not_specialize=("Q",))
def _weigh(  # type: ignore[no-untyped-def]
    out, d_out, weighed, o_b, o_h, o_q, d_b, d_h, d_q, Q, SETS: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr,
    ROWS: tl.constexpr,
):
    """sum(out * d_out) over channels, the part of dP that the softmax's normalisation takes away."""
    b, heads = (tl.program_id(1) // SETS).to(tl.int64), tl.program_id(1) % SETS
    start = tl.program_id(0) * (ROWS // HEADS)
    head, query = _head_and_query(start, heads * HEADS, HEADS, ROWS)
    channels = tl.arange(0, C)
    valid = query < Q
    o_at = out + b * o_b + head[:, None] * o_h + query[:, None] * o_q + channels[None, :]
    d_at = d_out + b * d_b + head[:, None] * d_h + query[:, None] * d_q + channels[None, :]
    o = tl.load(o_at, mask=valid[:, None], other=0.0).to(tl.float32)
    d = tl.load(d_at, mask=valid[:, None], other=0.0).to(tl.float32)
    tl.store(weighed + ((b * SETS + heads) * Q + start) * HEADS + tl.arange(0, ROWS), tl.sum(o * d, 1), mask=valid)


@triton.jit
def _add(pointers, values, IN_PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add to fp32 memory. IN_PAIRS (sm_90): as a product leaves them in registers, where `tl.atomic_add` first carries every tile
    through shared memory to give each thread four numbers in a row."""
    if IN_PAIRS:
        tl.inline_asm_elementwise(
            "{ red.relaxed.gpu.global.add.v2.f32 [$2], {$4, $5}; mov.b32 $0, 0; mov.b32 $1, 0; }", "=r,=r,l,l,f,f",
            [pointers.to(tl.int64), values], dtype=tl.int32, is_pure=False, pack=2,
        )
    else:
        tl.atomic_add(pointers, values, sem="relaxed")


@triton.jit
def _backward_tile(  # type: ignore[no-untyped-def]
    dk, dv, k, v, q_base, d_base, dq_base, log_sum, weighed, spans_low, spans_high, keys, start, first_head, Q, scale,
    q_h, q_q, d_h, d_q, dq_row,
    MASKED: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, IN_PAIRS: tl.constexpr,
):
    """One tile of rows (HEADS heads from `first_head`, queries from `start`) into dK, dV of a tile of keys, and into dQ."""
    head, query = _head_and_query(start, first_head, HEADS, ROWS)
    channels = tl.arange(0, C)
    q_at = q_base + head[:, None] * q_h + query[:, None] * q_q + channels[None, :]
    d_at = d_base + head[:, None] * d_h + query[:, None] * d_q + channels[None, :]
    row = (first_head // HEADS * Q + start) * HEADS + tl.arange(0, ROWS)
    if MASKED:
        valid = query < Q
        q = tl.load(q_at, mask=valid[:, None], other=0.0)
        lse = tl.load(log_sum + row, mask=valid, other=float("inf"))
    else:
        q = tl.load(q_at)
        lse = tl.load(log_sum + row)
    scores = tl.dot(k, tl.trans(q))
    shares = tl.exp2(scores * scale - lse[None, :])
    if MASKED:
        low = tl.load(spans_low + query, mask=valid, other=0)
        high = tl.load(spans_high + query, mask=valid, other=0)
        shares = tl.where((keys[:, None] >= low[None, :]) & (keys[:, None] < high[None, :]), shares, 0.0)
        d = tl.load(d_at, mask=valid[:, None], other=0.0)
        delta = tl.load(weighed + row, mask=valid, other=0.0)
    else:
        d = tl.load(d_at)
        delta = tl.load(weighed + row)
    dv = tl.dot(shares.to(d.dtype), d, dv)
    d_shares = tl.dot(v, tl.trans(d))
    d_scores = (shares * (d_shares - delta[None, :])).to(q.dtype)
    dk = tl.dot(d_scores, q, dk)
    dq = tl.dot(tl.trans(d_scores), k)
    _add(dq_base + (dq_row + row).to(tl.int64)[:, None] * C + channels[None, :], dq, IN_PAIRS)
    return dk, dv


@triton.jit(do_not_specialize=LENGTHS)
def _backward(  # type: ignore[no-untyped-def]
    q, k, v, d_out, log_sum, weighed, dq, dk, dv, spans, seen_by, S, Q, N, scale, softmax_scale,
    q_b, q_h, q_q, k_b, k_g, k_n, v_b, v_g, v_n, d_b, d_h, d_q, B,
    G: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    IN_PAIRS: tl.constexpr,
):
    parts: tl.constexpr = GROUP // HEADS
    each: tl.constexpr = ROWS // HEADS
    H: tl.constexpr = G * GROUP
    side, tile = tl.program_id(0) % (G * B), tl.program_id(0) // (G * B)  # early keys are seen most: first
    tiles = tl.num_programs(0) // (G * B)
    b, g = (side // G).to(tl.int64), side % G
    context_tiles = tl.cdiv(S, KEYS)
    own = tile >= context_tiles
    start = tl.where(own, S + (tile - context_tiles) * KEYS, tile * KEYS)
    end = tl.where(own, N, S)
    keys = start + tl.arange(0, KEYS)
    channels = tl.arange(0, C)
    in_row = (keys < end)[:, None]
    k_at = k + b * k_b + g.to(tl.int64) * k_g + (keys.to(tl.int64) * k_n)[:, None] + channels[None, :]
    v_at = v + b * v_b + g.to(tl.int64) * v_g + (keys.to(tl.int64) * v_n)[:, None] + channels[None, :]
    k_tile = tl.load(k_at, mask=in_row, other=0.0)
    v_tile = tl.load(v_at, mask=in_row, other=0.0)

    seen_at = seen_by + (b * tiles + tile) * 4
    from_block = tl.load(seen_at) // each
    to_block = tl.cdiv(tl.load(seen_at + 1), each)
    full_from = tl.cdiv(tl.load(seen_at + 2), each)
    full_to = tl.load(seen_at + 3) // each
    if full_to <= full_from:
        full_from = to_block
        full_to = to_block
    spans_low = spans + b * Q + tl.where(own, 2, 0) * (B * Q)
    spans_high = spans_low + B * Q
    q_base, d_base = q + b * q_b, d_out + b * d_b
    dq_row = (b * (Q * H)).to(tl.int32)
    log_sum_base, weighed_base = log_sum + b * (H * Q), weighed + b * (H * Q)

    dk_acc = tl.zeros([KEYS, C], tl.float32)
    dv_acc = tl.zeros([KEYS, C], tl.float32)
    masked_blocks = tl.maximum(to_block - from_block - (full_to - full_from), 0)
    for i in range(masked_blocks * parts):
        block = from_block + i // parts
        block = tl.where(block >= full_from, block + full_to - full_from, block)
        dk_acc, dv_acc = _backward_tile(
            dk_acc, dv_acc, k_tile, v_tile, q_base, d_base, dq, log_sum_base, weighed_base, spans_low, spans_high, keys,
            block * each, g * GROUP + i % parts * HEADS, Q, scale, q_h, q_q, d_h, d_q, dq_row, True, HEADS, C, ROWS, IN_PAIRS,
        )
    for i in range((full_to - full_from) * parts):
        block = full_to - 1 - i // parts  # all programs go down from the last query: what one has read, others find in the cache
        dk_acc, dv_acc = _backward_tile(
            dk_acc, dv_acc, k_tile, v_tile, q_base, d_base, dq, log_sum_base, weighed_base, spans_low, spans_high, keys,
            block * each, g * GROUP + i % parts * HEADS, Q, scale, q_h, q_q, d_h, d_q, dq_row, False, HEADS, C, ROWS, IN_PAIRS,
        )
    at = ((b * N + keys) * G + g)[:, None] * C + channels[None, :]
    tl.store(dk + at, (dk_acc * softmax_scale).to(dk.dtype.element_ty), mask=in_row)
    tl.store(dv + at, dv_acc.to(dv.dtype.element_ty), mask=in_row)


def forward(
    q_BHQC: Tensor, k_BGNC: Tensor, v_BGNC: Tensor, spans_4BQ: Tensor, row_length: int, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """Attended values `[B, H, Q, C]` (`[B, Q, H, C]` in memory) and log2 of the softmax sums, float32.

    The sums lie as the tiles' rows do: `[B, X, Q, Y]` with head x * Y + y, Y from `heads_a_tile`.
    """
    B, H, Q, C = q_BHQC.shape
    G, N = k_BGNC.shape[1:3]
    out_BHQC = q_BHQC.new_empty(B, Q, H, C).transpose(1, 2)
    heads = heads_a_tile(H // G)
    log_sum_BXQY = torch.empty(B, H // heads, Q, heads, dtype=torch.float32, device=q_BHQC.device)
    grid = (triton.cdiv(Q, tiles.rows // heads) * B * H // heads,)
    _forward[grid](
        q_BHQC, k_BGNC, v_BGNC, out_BHQC, log_sum_BXQY, spans_4BQ, row_length, Q, N, C**-0.5 * LOG2_E,
        *_strides(q_BHQC), *_strides(k_BGNC), *_strides(v_BGNC), *_strides(out_BHQC), B, G=G, GROUP=H // G, HEADS=heads, C=C,
        ROWS=tiles.rows, KEYS=tiles.keys, num_warps=tiles.warps, num_stages=tiles.stages,
    )
    return out_BHQC, log_sum_BXQY


def backward(
    d_out_BHQC: Tensor, q_BHQC: Tensor, k_BGNC: Tensor, v_BGNC: Tensor, out_BHQC: Tensor, log_sum_BXQY: Tensor,
    spans_4BQ: Tensor, seen_by_BT4: Tensor, row_length: int, tiles: Tiles,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ float32 `[B, X, Q, Y, C]`, heads as in `forward`'s sums, still to be multiplied by C**-0.5; dK, dV `[B, G, N, C]`."""
    B, H, Q, C = q_BHQC.shape
    G, N = k_BGNC.shape[1:3]
    weighed_BXQY = torch.empty_like(log_sum_BXQY)
    rows, heads = 32, heads_a_tile(H // G)
    _weigh[(triton.cdiv(Q, rows // heads), B * H // heads)](
        out_BHQC, d_out_BHQC, weighed_BXQY, *_strides(out_BHQC), *_strides(d_out_BHQC), Q, SETS=H // heads, HEADS=heads, C=C,
        ROWS=rows, num_warps=4,
    )
    # a last tile adds zeros to the rows behind its queries
    dq_rows = torch.zeros(B * H * Q + tiles.rows, C, dtype=torch.float32, device=q_BHQC.device)
    dk_BNGC, dv_BNGC = (k_BGNC.new_empty(B, N, G, C) for _ in range(2))
    _backward[(seen_by_BT4.shape[1] * B * G,)](
        q_BHQC, k_BGNC, v_BGNC, d_out_BHQC, log_sum_BXQY, weighed_BXQY, dq_rows, dk_BNGC, dv_BNGC, spans_4BQ, seen_by_BT4,
        row_length, Q, N, C**-0.5 * LOG2_E, C**-0.5, *_strides(q_BHQC), *_strides(k_BGNC), *_strides(v_BGNC),
        *_strides(d_out_BHQC), B, G=G, GROUP=H // G, HEADS=heads, C=C, ROWS=tiles.rows, KEYS=tiles.keys,
        IN_PAIRS=not triton.knobs.runtime.interpret, num_warps=tiles.warps, num_stages=tiles.stages,
    )
    return dq_rows[: B * H * Q].view(B, H // heads, Q, heads, C), dk_BNGC.transpose(1, 2), dv_BNGC.transpose(1, 2)


def _strides(x_BHXC: Tensor) -> Any:
    assert x_BHXC.stride(3) == 1
    return x_BHXC.stride()[:3]
