"""Takes queries, keys, values and a SpanMask, gives attended values through our own kernels; knows nothing of layers or rows.

The operators that autograd and torch.compile see. A fast twin of attention.dense_attention beside fused_attention's: it never
holds scores, whatever compiles or does not compile it, and its backward makes them once where flex_attention's does it twice.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from outrider.layout.span_mask import SpanMask
from outrider.model import tripwire
from outrider.model.span_tiles import SpanTiles, heads_a_tile, span_tiles


def span_attention(q_BHQC: Tensor, k_BGNC: Tensor, v_BGNC: Tensor, mask: SpanMask) -> Tensor:
    """Softmax attention over a SpanMask whose `key_tile` is the backward's; `[B, H, Q, C]`, `[B, Q, H, C]` in memory.

    Query head h reads key/value head h * G // H. Only inside torch.compile, as all that stands around it needs to be: raises
    tripwire.DenseAttentionError outside.
    """
    if not torch.compiler.is_compiling():
        tripwire.refuse_uncompiled(tuple(q_BHQC.shape), tuple(k_BGNC.shape))
    out_BHQC: Tensor = _attend(q_BHQC, k_BGNC, v_BGNC, mask.spans_4BQ, mask.seen_by_BT4, mask.row_length)[0]
    return out_BHQC


def _tiles(x_BHXC: Tensor) -> SpanTiles:
    tiles = span_tiles(capability=torch.cuda.get_device_capability(x_BHXC.device), head_dim=x_BHXC.shape[3])
    assert tiles is not None
    return tiles


@torch.library.custom_op("outrider::span_attention", mutates_args=())
def _attend(
    q_BHQC: Tensor, k_BGNC: Tensor, v_BGNC: Tensor, spans_4BQ: Tensor, seen_by_BT4: Tensor, row_length: int
) -> tuple[Tensor, Tensor]:
    from outrider.model import span_attention_cuda  # Triton exists only beside CUDA builds of torch

    return span_attention_cuda.forward(q_BHQC, k_BGNC, v_BGNC, spans_4BQ, row_length, _tiles(q_BHQC).forward)


@_attend.register_fake
def _(
    q_BHQC: Tensor, k_BGNC: Tensor, v_BGNC: Tensor, spans_4BQ: Tensor, seen_by_BT4: Tensor, row_length: int
) -> tuple[Tensor, Tensor]:
    B, H, Q, C = q_BHQC.shape
    heads = heads_a_tile(H // k_BGNC.shape[1])
    return q_BHQC.new_empty(B, Q, H, C).transpose(1, 2), q_BHQC.new_empty(B, H // heads, Q, heads, dtype=torch.float32)


@torch.library.custom_op("outrider::span_attention_backward", mutates_args=())
def _attend_backward(
    d_out_BHQC: Tensor, q_BHQC: Tensor, k_BGNC: Tensor, v_BGNC: Tensor, out_BHQC: Tensor, log_sum_BXQY: Tensor,
    spans_4BQ: Tensor, seen_by_BT4: Tensor, row_length: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from outrider.model import span_attention_cuda

    d_out_BHQC = d_out_BHQC if d_out_BHQC.stride(3) == 1 else d_out_BHQC.contiguous()
    return span_attention_cuda.backward(
        d_out_BHQC, q_BHQC, k_BGNC, v_BGNC, out_BHQC, log_sum_BXQY, spans_4BQ, seen_by_BT4, row_length, _tiles(q_BHQC).backward
    )


@_attend_backward.register_fake
def _(
    d_out_BHQC: Tensor, q_BHQC: Tensor, k_BGNC: Tensor, v_BGNC: Tensor, out_BHQC: Tensor, log_sum_BXQY: Tensor,
    spans_4BQ: Tensor, seen_by_BT4: Tensor, row_length: int,
) -> tuple[Tensor, Tensor, Tensor]:
    B, G, N, C = k_BGNC.shape
    dk_BGNC, dv_BGNC = (k_BGNC.new_empty(B, N, G, C).transpose(1, 2) for _ in range(2))
    return q_BHQC.new_empty(*log_sum_BXQY.shape, C, dtype=torch.float32), dk_BGNC, dv_BGNC


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_BHQC, k_BGNC, v_BGNC, spans_4BQ, seen_by_BT4, ctx.row_length = inputs
    ctx.save_for_backward(q_BHQC, k_BGNC, v_BGNC, *output, spans_4BQ, seen_by_BT4)


def _gradients(ctx: Any, d_out_BHQC: Tensor, d_log_sum: Tensor) -> tuple[Tensor | None, ...]:
    q_BHQC, *_ = ctx.saved_tensors
    dq_BXQYC, dk_BGNC, dv_BGNC = _attend_backward(d_out_BHQC, *ctx.saved_tensors, ctx.row_length)
    dq_BHQC = dq_BXQYC.transpose(2, 3).flatten(1, 2) * q_BHQC.shape[3] ** -0.5
    return dq_BHQC.to(q_BHQC.dtype), dk_BGNC, dv_BGNC, None, None, None


_attend.register_autograd(_gradients, setup_context=_keep)


def _all_pairs(q_shape: tuple[int, ...], k_shape: tuple[int, ...], products: int) -> int:
    B, H, Q, C = q_shape
    return products * 2 * B * H * Q * k_shape[2] * C


@register_flop_formula(torch.ops.outrider.span_attention)
def _(q_shape: tuple[int, ...], k_shape: tuple[int, ...], *rest: Any, **more: Any) -> int:
    """As if nothing were masked: what tells the compiler's partitioner that this is dear to do again."""
    return _all_pairs(q_shape, k_shape, 2)


@register_flop_formula(torch.ops.outrider.span_attention_backward)
def _(d_shape: tuple[int, ...], q_shape: tuple[int, ...], k_shape: tuple[int, ...], *rest: Any, **more: Any) -> int:
    return _all_pairs(q_shape, k_shape, 5)
