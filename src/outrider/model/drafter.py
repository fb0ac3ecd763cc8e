"""Takes block embeddings and the target's features, gives the block's hidden states; knows no device, loss or file.

n decoder layers of the Qwen3 kind (arXiv 2505.09388), whose keys and values are those of the context and of the block,
by the same projections (DFlash, arXiv 2602.06036). Parameter names are those of the published format.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.model.attention import Attention, rotary_table, rotate
from outrider.records import FULL, DrafterShape

Masks = dict[str, Tensor]
Rotary = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467) with the statistics in float32 and the result in the input's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * normed.to(x.dtype)


class BlockAttention(nn.Module):
    """Attention of the block's slots over the context and the block itself."""

    def __init__(self, shape: DrafterShape, attention: Attention) -> None:
        super().__init__()
        self.shape, self.attention = shape, attention
        D, C, H, G = shape.hidden_size, shape.head_dim, shape.num_heads, shape.num_kv_heads
        self.q_proj = nn.Linear(D, H * C, bias=False)
        self.k_proj = nn.Linear(D, G * C, bias=False)
        self.v_proj = nn.Linear(D, G * C, bias=False)
        self.o_proj = nn.Linear(H * C, D, bias=False)
        self.q_norm = RMSNorm(C, shape.rms_norm_eps)
        self.k_norm = RMSNorm(C, shape.rms_norm_eps)

    def keys_values(self, x_BXD: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Keys (normed, turned) and values `[B, G, X, C]` of context or of block tokens."""
        heads = (*x_BXD.shape[:2], self.shape.num_kv_heads, self.shape.head_dim)
        k_BGXC = self.k_norm(self.k_proj(x_BXD).view(heads)).transpose(1, 2)
        v_BGXC = self.v_proj(x_BXD).view(heads).transpose(1, 2)
        return rotate(k_BGXC, *rotary), v_BGXC

    def forward(self, x_BQD: Tensor, context_kv: tuple[Tensor, Tensor], rotary: Rotary, mask: Tensor | None) -> Tensor:
        B, Q, _ = x_BQD.shape
        q_BHQC = self.q_norm(self.q_proj(x_BQD).view(B, Q, self.shape.num_heads, self.shape.head_dim)).transpose(1, 2)
        k_BGQC, v_BGQC = self.keys_values(x_BQD, rotary)
        k_BGNC = torch.cat((context_kv[0], k_BGQC), dim=2)
        v_BGNC = torch.cat((context_kv[1], v_BGQC), dim=2)
        out_BHQC = self.attention(rotate(q_BHQC, *rotary), k_BGNC, v_BGNC, mask)
        return self.o_proj(out_BHQC.transpose(1, 2).reshape(B, Q, -1))


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x_BQD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BQD)) * self.up_proj(x_BQD))


class DrafterLayer(nn.Module):
    def __init__(self, shape: DrafterShape, attention: Attention) -> None:
        super().__init__()
        self.self_attn = BlockAttention(shape, attention)
        self.mlp = FeedForward(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x_BQD: Tensor, context_kv: tuple[Tensor, Tensor], rotary: Rotary, mask: Tensor | None) -> Tensor:
        x_BQD = x_BQD + self.self_attn(self.input_layernorm(x_BQD), context_kv, rotary, mask)
        return x_BQD + self.mlp(self.post_attention_layernorm(x_BQD))


@dataclass
class ContextCache:
    """Keys and values of the context seen so far, one pair `[B, G, J, C]` a layer, J = `length`. Slots never enter it."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.keys[0].shape[2] if self.keys else 0


class Drafter(nn.Module):
    """The drafter. It has no embedding and no head of its own: those of the target are used, frozen."""

    def __init__(self, shape: DrafterShape, attention: Attention) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.target_layer_ids) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(shape, attention) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def typed_layers(self) -> Iterator[tuple[DrafterLayer, str]]:
        """Each layer with its type (full or sliding attention)."""
        for layer, kind in zip(self.layers, self.shape.layer_types, strict=True):
            assert isinstance(layer, DrafterLayer)
            yield layer, kind

    def context(self, features_BSF: Tensor) -> Tensor:
        """`RMSNorm(W_c features)`, `[B, S, D]`."""
        return self.hidden_norm(self.fc(features_BSF))

    def rotary(self, positions_BX: Tensor) -> Rotary:
        return rotary_table(positions_BX, self.shape.head_dim, self.shape.rope_theta)

    def forward(
        self, noise_BQD: Tensor, features_BSF: Tensor, noise_positions_BQ: Tensor, context_positions_BS: Tensor, masks: Masks
    ) -> Tensor:
        """Final hidden states of all blocks of the rows, `[B, Q, D]`; `masks` maps a layer type to its mask, N = S + Q keys."""
        context_BSD = self.context(features_BSF)
        context_rotary, noise_rotary = self.rotary(context_positions_BS), self.rotary(noise_positions_BQ)
        x_BQD = noise_BQD
        for layer, kind in self.typed_layers():
            context_kv = layer.self_attn.keys_values(context_BSD, context_rotary)
            x_BQD = layer(x_BQD, context_kv, noise_rotary, masks[kind])
        return self.norm(x_BQD)

    def draft(self, noise_BKD: Tensor, new_features_BJF: Tensor, cache: ContextCache) -> Tensor:
        """Final hidden states `[B, K, D]` of one block a document, as at inference; appends the new context to `cache`.

        The block's anchor stands at the position after all context, cached and new. Takes and gives no slot state.
        """
        start = cache.length
        J, K = new_features_BJF.shape[1], noise_BKD.shape[1]
        context_BJD = self.context(new_features_BJF)
        positions_1X = torch.arange(start, start + J + K, device=noise_BKD.device)[None]
        context_rotary, noise_rotary = self.rotary(positions_1X[:, :J]), self.rotary(positions_1X[:, J:])
        x_BKD = noise_BKD
        for i, (layer, kind) in enumerate(self.typed_layers()):
            k, v = layer.self_attn.keys_values(context_BJD, context_rotary)
            if len(cache.keys) > i:
                k, v = torch.cat((cache.keys[i], k), dim=2), torch.cat((cache.values[i], v), dim=2)
                cache.keys[i], cache.values[i] = k, v
            else:
                cache.keys.append(k)
                cache.values.append(v)
            x_BKD = layer(x_BKD, (k, v), noise_rotary, self._draft_mask(kind, start + J, K, noise_BKD.device))
        return self.norm(x_BKD)

    def _draft_mask(self, kind: str, context_length: int, K: int, device: torch.device) -> Tensor | None:
        """`[1, 1, K, J + K]` bool for a sliding-window layer (the rule of layout.mask, in positions), None for a full one."""
        window = self.shape.sliding_window
        if kind == FULL or window is None:
            return None
        query = torch.arange(context_length, context_length + K, device=device)[:, None]
        key = torch.arange(context_length + K, device=device)[None]
        return ((key <= query) & ((query - key < window) | (key >= context_length)))[None, None]


@torch.no_grad()
def initialise(drafter: Drafter, *, seed: int, head_scale: float) -> None:
    """Start a drafter from scratch, on the CPU, the same for the same seed.

    Projections are normal with variance 1 / fan-in; those that write into the residual stream are divided by sqrt(2 n), as in
    GPT-2. The embeddings that they are added to are small beside that in most targets, and this is wanted: an embedding that
    passes through to a tied head makes the mask token the likeliest guess (first loss 37 instead of 15 on SmolLM2, and
    tau 1.51 instead of 1.61 after 300 steps: bench/results/recipe.md). `head_scale`: mean norm of a head row; the final norm
    starts at 1 / head_scale, so that what the layers write gives logits of standard deviation near 1.
    """
    generator = torch.Generator().manual_seed(seed)
    residual = (2 * drafter.shape.num_layers) ** -0.5
    for name, parameter in drafter.named_parameters():
        if parameter.dim() == 2:
            scale = residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            parameter.normal_(0.0, scale * parameter.shape[1] ** -0.5, generator=generator)
        else:
            parameter.fill_(1.0 / head_scale if name == "norm.weight" else 1.0)
