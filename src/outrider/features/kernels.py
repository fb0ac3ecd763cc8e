"""Takes tokens of documents end to end, gives attention and the gated delta rule within each; knows nothing of models or rows.

Operators opaque to torch.compile: `outrider::attend`, `outrider::convolve` and `outrider::gated_delta_rule`. On a GPU they are
kernels that take the documents' boundaries; on a CPU they are plain code over the documents, the reference.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

CHUNK = 64  # tokens that flash-linear-attention's kernels take as one chunk


@dataclass(frozen=True)
class Bounds:
    """Where N documents, end to end in X tokens, begin and end, ready for the kernels.

    `starts_N1` int32 `[N + 1]` on the device: the first token of each, then X. `chunks_P2` int32 `[P, 2]` on the device: document
    and number within it of each chunk of CHUNK tokens. `longest`: tokens of the longest, an int64 scalar on the CPU.
    """

    starts_N1: Tensor
    chunks_P2: Tensor
    longest: Tensor


def bounds_of(lengths_N: Tensor, device: torch.device) -> Bounds:
    """The bounds of documents of these lengths (int64 on the CPU). Nothing waits for the device."""
    starts_N1 = F.pad(lengths_N.cumsum(0), (1, 0))
    counts_N = (lengths_N + CHUNK - 1) // CHUNK
    documents_P = torch.repeat_interleave(torch.arange(len(lengths_N)), counts_N)
    within_P = torch.arange(len(documents_P)) - (counts_N.cumsum(0) - counts_N)[documents_P]
    chunks_P2 = torch.stack([documents_P, within_P], dim=1)
    starts_N1, chunks_P2 = (to_device(t.to(torch.int32), device) for t in (starts_N1, chunks_P2))
    return Bounds(starts_N1, chunks_P2, longest=lengths_N.max())


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """The values on `device`; from page-locked memory where that is a GPU, so that the copy is queued and not waited for."""
    if values.device == device:
        return values
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


@torch.library.custom_op("outrider::attend", mutates_args=())
def attend(
    q_XHC: Tensor, k_XGC: Tensor, v_XGC: Tensor, starts_N1: Tensor, longest: Tensor, scale: float, window: int,
    sinks_H: Tensor | None,
) -> Tensor:
    """Causal attention within each document, `[X, H, C]`.

    `window`: a query sees keys less than this many positions back (0: all). `sinks_H`: a logit per head that joins the softmax
    and has no value.
    """
    out_XHC = torch.empty_like(q_XHC, memory_format=torch.contiguous_format)
    for start, end in _spans(starts_N1):
        q_HXC, k_GXC, v_GXC = (t[start:end].transpose(0, 1) for t in (q_XHC, k_XGC, v_XGC))
        k_HXC, v_HXC = (t.repeat_interleave(q_HXC.shape[0] // t.shape[0], dim=0) for t in (k_GXC, v_GXC))
        scores_HXX = (q_HXC @ k_HXC.mT) * scale
        back_XX = torch.arange(end - start)[:, None] - torch.arange(end - start)
        scores_HXX.masked_fill_((back_XX < 0) | ((back_XX >= window) if window else False), float("-inf"))
        if sinks_H is not None:
            sinks_HX1 = sinks_H.to(scores_HXX.dtype)[:, None, None].expand(-1, end - start, 1)
            scores_HXX = torch.cat([scores_HXX, sinks_HX1], dim=-1)
        weights_HXX = scores_HXX.softmax(dim=-1)[..., : end - start]
        out_XHC[start:end] = (weights_HXX @ v_HXC).transpose(0, 1)
    return out_XHC


@attend.register_kernel("cuda")
def _(
    q_XHC: Tensor, k_XGC: Tensor, v_XGC: Tensor, starts_N1: Tensor, longest: Tensor, scale: float, window: int,
    sinks_H: Tensor | None,
) -> Tensor:
    # one document: cuDNN's kernel, 1.26 ms for flash's 2.73 at 24 x 8192 x 256
    if len(starts_N1) == 2 and not window and sinks_H is None:
        q_1HXC, k_1GXC, v_1GXC = (t.transpose(0, 1)[None] for t in (q_XHC, k_XGC, v_XGC))
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            out_1HXC = F.scaled_dot_product_attention(q_1HXC, k_1GXC, v_1GXC, is_causal=True, scale=scale, enable_gqa=True)
        return out_1HXC[0].transpose(0, 1).contiguous()
    out_XHC, lse_HX, *_ = torch.ops.aten._flash_attention_forward(
        q_XHC, k_XGC, v_XGC, starts_N1, starts_N1, int(longest), int(longest), 0.0, True, False, scale=scale,
        window_size_left=window - 1 if window else -1, window_size_right=0,
    )
    if sinks_H is None:
        return out_XHC
    # exp(lse) is the softmax's denominator without the sink: with it, every weight shrinks by exp(lse) / (exp(lse) + exp(sink))
    share_XH = torch.sigmoid(lse_HX - sinks_H.float()[:, None]).T
    return (out_XHC * share_XH[..., None]).to(out_XHC.dtype)


@attend.register_fake
def _(
    q_XHC: Tensor, k_XGC: Tensor, v_XGC: Tensor, starts_N1: Tensor, longest: Tensor, scale: float, window: int,
    sinks_H: Tensor | None,
) -> Tensor:
    return torch.empty_like(q_XHC, memory_format=torch.contiguous_format)


@torch.library.custom_op("outrider::convolve", mutates_args=())
def convolve(
    x_XF: Tensor, taps_FW: Tensor, bias_F: Tensor | None, since_start_X: Tensor, key_heads: int, key_size: int, value_heads: int,
    value_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The causal convolution by channel, SiLU, and q and k at length 1: q `[X, G, C]`, k `[X, G, C]`, v `[X, H, E]` in x's dtype.

    `x_XF`: q, k and v side by side. `since_start_X`: position of each token within its document; the first ones see zeros before
    them. Sums in float32, where transformers rounds between the steps.
    """
    W, X = taps_FW.shape[1], len(x_XF)
    total_XF = torch.zeros(x_XF.shape, dtype=torch.float32, device=x_XF.device)
    padded = F.pad(x_XF.float(), (0, 0, W - 1, 0))
    for back in range(W):
        earlier_XF = padded[W - 1 - back : W - 1 - back + X]
        total_XF += torch.where(since_start_X[:, None] >= back, earlier_XF, 0.0) * taps_FW[:, W - 1 - back].float()
    mixed_XF = F.silu(total_XF if bias_F is None else total_XF + bias_F.float())
    keys = key_heads * key_size
    q, k, v = mixed_XF.split([keys, keys, value_heads * value_size], dim=-1)
    q, k = (unit(part.unflatten(-1, (key_heads, key_size))) for part in (q, k))
    return q.to(x_XF.dtype), k.to(x_XF.dtype), v.unflatten(-1, (value_heads, value_size)).to(x_XF.dtype, copy=True)


@convolve.register_kernel("cuda")
def _(
    x_XF: Tensor, taps_FW: Tensor, bias_F: Tensor | None, since_start_X: Tensor, key_heads: int, key_size: int, value_heads: int,
    value_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from outrider.features.passes_cuda import convolve_cuda

    return convolve_cuda(x_XF, taps_FW, bias_F, since_start_X, key_heads, key_size, value_heads, value_size)


@convolve.register_fake
def _(
    x_XF: Tensor, taps_FW: Tensor, bias_F: Tensor | None, since_start_X: Tensor, key_heads: int, key_size: int, value_heads: int,
    value_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    X, keys = len(x_XF), (key_heads, key_size)
    return x_XF.new_empty(X, *keys), x_XF.new_empty(X, *keys), x_XF.new_empty(X, value_heads, value_size)


def unit(x: Tensor) -> Tensor:
    """Vectors of the last axis at length 1 (1e-6 under the root, as flash-linear-attention has it)."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)


@torch.library.custom_op("outrider::gated_delta_rule", mutates_args=())
def gated_delta_rule(
    q_XGC: Tensor, k_XGC: Tensor, v_XHE: Tensor, decay_XH: Tensor, beta_XH: Tensor, starts_N1: Tensor, chunks_P2: Tensor
) -> Tensor:
    """The gated delta rule (arXiv 2412.06464) from an empty state in each document, `[X, H, E]` in v's dtype.

    Token by token `S = exp(decay) S; S = S + k (beta (v - S^T k))^T; out = S^T q / sqrt(C)`, q and k of length 1, each of the G
    query/key heads serving H / G value heads. `decay_XH` float32, log space.
    """
    out_XHE = torch.empty_like(v_XHE, memory_format=torch.contiguous_format)
    H, C = v_XHE.shape[1], q_XGC.shape[-1]
    q_XHC, k_XHC = (t.repeat_interleave(H // t.shape[1], dim=1).float() for t in (q_XGC, k_XGC))
    for start, end in _spans(starts_N1):
        state_HCE = torch.zeros(H, C, v_XHE.shape[-1])
        for x in range(start, end):
            state_HCE = state_HCE * decay_XH[x].float().exp()[:, None, None]
            wrong_HE = v_XHE[x].float() - torch.einsum("hce,hc->he", state_HCE, k_XHC[x])
            state_HCE = state_HCE + torch.einsum("hc,he->hce", k_XHC[x], beta_XH[x].float()[:, None] * wrong_HE)
            out_XHE[x] = torch.einsum("hce,hc->he", state_HCE, q_XHC[x]) * C**-0.5
    return out_XHE


@gated_delta_rule.register_kernel("cuda")
def _(
    q_XGC: Tensor, k_XGC: Tensor, v_XHE: Tensor, decay_XH: Tensor, beta_XH: Tensor, starts_N1: Tensor, chunks_P2: Tensor
) -> Tensor:
    if has_own_delta_rule(q_XGC.device, q_XGC.shape[-1], v_XHE.shape[-1]):
        from outrider.features.delta_cuda import gated_delta_rule_cuda

        return gated_delta_rule_cuda(q_XGC, k_XGC, v_XHE, decay_XH, beta_XH, starts_N1, chunks_P2, CHUNK)
    return library_delta_rule(q_XGC, k_XGC, v_XHE, decay_XH, beta_XH, starts_N1, chunks_P2)


@gated_delta_rule.register_fake
def _(
    q_XGC: Tensor, k_XGC: Tensor, v_XHE: Tensor, decay_XH: Tensor, beta_XH: Tensor, starts_N1: Tensor, chunks_P2: Tensor
) -> Tensor:
    return torch.empty_like(v_XHE, memory_format=torch.contiguous_format)


def library_delta_rule(
    q_XGC: Tensor, k_XGC: Tensor, v_XHE: Tensor, decay_XH: Tensor, beta_XH: Tensor, starts_N1: Tensor, chunks_P2: Tensor
) -> Tensor:
    """gated_delta_rule by flash-linear-attention's kernels, which transformers' own layers run too."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found, unused-ignore]

    out_1XHE, _ = chunk_gated_delta_rule(
        q_XGC[None], k_XGC[None], v_XHE[None], decay_XH[None], beta_XH[None], cu_seqlens=starts_N1, chunk_indices=chunks_P2,
        chunk_size=CHUNK,
    )
    return out_1XHE[0]


def has_own_delta_rule(device: torch.device, key_size: int, value_size: int) -> bool:
    """Whether gated_delta_rule runs on our kernels for heads of these sizes: on Hopper, where they were measured."""
    whole = all(size in (16, 32, 64, 128) for size in (key_size, value_size))
    return whole and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _spans(starts_N1: Tensor) -> list[tuple[int, int]]:
    starts = starts_N1.tolist()
    return list(itertools.pairwise(starts))
