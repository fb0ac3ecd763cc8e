"""Takes what the drafter takes, gives the same hidden states with fewer, larger products; knows no device, loss or file.

The fast twin of drafter.Drafter, for compilation: q/k/v in one product and gate/up in another, on packed weights in the
compute dtype. The drafter keeps the fp32 masters under their standard names; `borrow` brings their values here for the length
of a step, `give_gradients` takes the gradients back, so checkpoints, optimizer and exports never see the packing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.model.attention import Attention, rotary_table, rotate
from outrider.model.drafter import Drafter, RMSNorm, Rotary
from outrider.model.gated import gated_down
from outrider.model.halves import join_, split_, upper
from outrider.records import DrafterShape

CompilePart = Callable[[Callable[..., Any]], Callable[..., Any]]
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class Share:
    """Rows `first..first + rows` of a packed parameter hold one of the drafter's parameters."""

    master: nn.Parameter
    packed: nn.Parameter
    first: int
    rows: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor[self.first : self.first + self.rows]


class FusedBlockAttention(nn.Module):
    def __init__(self, shape: DrafterShape, attention: Attention) -> None:
        super().__init__()
        self.shape, self.attention = shape, attention
        D, C, H, G = shape.hidden_size, shape.head_dim, shape.num_heads, shape.num_kv_heads
        self.qkv_proj = nn.Linear(D, (H + 2 * G) * C, bias=False)
        self.o_proj = nn.Linear(H * C, D, bias=False)
        self.q_norm = RMSNorm(C, shape.rms_norm_eps)
        self.k_norm = RMSNorm(C, shape.rms_norm_eps)

    def kv_weight(self) -> Tensor:
        """The rows of `qkv_proj` that the context needs, `[2 G C, D]`."""
        return self.qkv_proj.weight[self.shape.num_heads * self.shape.head_dim :]

    def attend(self, qkv_BQX: Tensor, context_kv_BSX: Tensor, noise_rotary: Rotary, context_rotary: Rotary, mask: Any) -> Tensor:
        """From projections to attended values `[B, Q, H C]`, before `o_proj`."""
        B, Q, _ = qkv_BQX.shape
        C, H, G = self.shape.head_dim, self.shape.num_heads, self.shape.num_kv_heads
        q_BQX, k_BQX, v_BQX = qkv_BQX.split((H * C, G * C, G * C), dim=-1)
        context_k_BSX, context_v_BSX = context_kv_BSX.chunk(2, dim=-1)

        def heads(x_BXE: Tensor) -> Tensor:
            return x_BXE.unflatten(-1, (-1, C))

        q_BHQC = rotate(self.q_norm(heads(q_BQX)).transpose(1, 2), *noise_rotary)
        k_BGNC = torch.cat((
            rotate(self.k_norm(heads(context_k_BSX)).transpose(1, 2), *context_rotary),
            rotate(self.k_norm(heads(k_BQX)).transpose(1, 2), *noise_rotary),
        ), dim=2)
        v_BGNC = torch.cat((heads(context_v_BSX).transpose(1, 2), heads(v_BQX).transpose(1, 2)), dim=2)
        return self.attention(q_BHQC, k_BGNC, v_BGNC, mask).transpose(1, 2).reshape(B, Q, H * C)


class FusedFeedForward(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(shape.hidden_size, 2 * shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x_BQD: Tensor) -> Tensor:
        return gated_down(self.gate_up_proj(x_BQD), self.down_proj.weight)


class FusedLayer(nn.Module):
    def __init__(self, shape: DrafterShape, attention: Attention) -> None:
        super().__init__()
        self.self_attn = FusedBlockAttention(shape, attention)
        self.mlp = FusedFeedForward(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def project(self, x_BQD: Tensor) -> Tensor:
        return self.self_attn.qkv_proj(self.input_layernorm(x_BQD))

    def attend(self, qkv_BQX: Tensor, context_kv_BSX: Tensor, noise_rotary: Rotary, context_rotary: Rotary, mask: Any) -> Tensor:
        return self.self_attn.attend(qkv_BQX, context_kv_BSX, noise_rotary, context_rotary, mask)

    def finish(self, x_BQD: Tensor, attended_BQX: Tensor) -> Tensor:
        """The rest of the layer, slot by slot: output projection and feed-forward, each added to the stream."""
        x_BQD = x_BQD + self.self_attn.o_proj(attended_BQX)
        return x_BQD + self.mlp(self.post_attention_layernorm(x_BQD))


class FusedDrafter(nn.Module):
    """The drafter on packed compute weights, in four parts that `compile_part` turns into kernels (identity: as they stand).

    Parts, not the whole: layers share their code, so what is compiled does not grow with their number. Products meet at
    the same places in either, and the whole took 35 s to compile.
    """

    def __init__(self, shape: DrafterShape, attention: Attention, *, compile_part: CompilePart) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.target_layer_ids) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(FusedLayer(shape, attention) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self._context = compile_part(FusedDrafter.context_kv)
        self._project = compile_part(FusedLayer.project)
        self._attend = compile_part(FusedLayer.attend)
        self._finish = compile_part(FusedLayer.finish)
        self._end = compile_part(FusedDrafter.end)
        self._memory: list[Tensor] = []  # [N] of each parameter here, the masters' own; empty before they first lend it
        self._split = False

    def rotary(self, positions_BX: Tensor) -> Rotary:
        return rotary_table(positions_BX, self.shape.head_dim, self.shape.rope_theta)

    def context_kv(self, features_BSF: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of the context `[B, S, 2 G C]`, before norm and rotation, one a layer, from one product for all."""
        context_BSD = self.hidden_norm(self.fc(features_BSF))
        weights = torch.cat([cast(FusedLayer, layer).self_attn.kv_weight() for layer in self.layers])
        return F.linear(context_BSD, weights).chunk(self.shape.num_layers, dim=-1)

    def end(self, x_BQD: Tensor, attended_BQX: Tensor) -> Tensor:
        """The last layer after its attention and the final norm, without slot 0, which comes out as zeros."""
        K = self.shape.block_size
        last = cast(FusedLayer, self.layers[-1])
        x_BYD = last.finish(without_anchor_slot(x_BQD, K), without_anchor_slot(attended_BQX, K))
        return F.pad(self.norm(x_BYD).unflatten(1, (-1, K - 1)), (0, 0, 1, 0)).flatten(1, 2)

    def project_context(self, features_BSF: Tensor) -> tuple[Tensor, ...]:
        """`context_kv`, compiled. Apart from `forward` because it needs the features alone: masks can be built behind it."""
        context_kv: tuple[Tensor, ...] = self._context(self, features_BSF)
        return context_kv

    def forward(
        self, anchor_BAD: Tensor, mask_D: Tensor, context_kv: tuple[Tensor, ...], noise_rotary: Rotary, context_rotary: Rotary,
        masks: dict[str, Any],
    ) -> Tensor:
        """Final hidden states `[B, Q, D]` as Drafter.forward gives them, but for slot 0, which nothing learns from: zeros.

        `context_kv`: from `project_context`. `anchor_BAD`: embeddings of the anchors' tokens. `mask_D`: that of the mask token,
        which all other slots hold, so the first layer projects A + 1 rows instead of A * K (1.5 of 134 TFLOP in the born-from
        case). The last layer ends without slot 0 (0.9 TFLOP): its key and value were needed, its own output is not.
        """
        B, A, _ = anchor_BAD.shape
        K = self.shape.block_size
        layers = [cast(FusedLayer, layer) for layer in self.layers]
        x_BQD = as_blocks(anchor_BAD, mask_D, K)
        rows_YX = layers[0].project(torch.cat((anchor_BAD.flatten(0, 1), mask_D[None])))
        qkv_BQX = as_blocks(rows_YX[:-1].unflatten(0, (B, A)), rows_YX[-1], K)
        for i, (layer, kind) in enumerate(zip(layers, self.shape.layer_types, strict=True)):
            if i > 0:
                qkv_BQX = self._project(layer, x_BQD)
            attended_BQX = self._attend(layer, qkv_BQX, context_kv[i], noise_rotary, context_rotary, masks[kind])
            if i + 1 < len(layers):
                x_BQD = self._finish(layer, x_BQD, attended_BQX)
        return self._end(self, x_BQD, attended_BQX)

    def shares(self, drafter: Drafter) -> Iterator[Share]:
        """Where each parameter of `drafter` (same shape) lies here, in this module's order."""
        masters = dict(drafter.named_parameters())
        for name, packed in self.named_parameters():
            owner, _, leaf = name.removesuffix(".weight").rpartition(".")
            prefix = f"{owner}." if owner else ""
            first = 0
            for part in PACKED.get(leaf, (leaf,)):
                master = masters.pop(f"{prefix}{part}.weight")
                yield Share(master, packed, first, len(master))
                first += len(master)
            assert first == len(packed), name
        assert not masters, f"no place for {list(masters)}"

    @torch.no_grad()
    def borrow(self, drafter: Drafter) -> None:
        """Have the masters' present values here, until `give_back`, in the masters' own memory.

        In the masters' dtype the two are one. bf16 of float32 masters is their upper halves, see model.halves: until it is
        given back, what stands in `drafter` is no number. No bit of it is lost.
        """
        if not self._memory:
            self._move_in(drafter)
        if not self._split and self.norm.weight.dtype != drafter.norm.weight.dtype:
            for memory_N in self._memory:
                split_(memory_N)
            self._split = True

    @torch.no_grad()
    def give_back(self) -> None:
        """The masters are whole again, and nothing here may be computed with before it borrows again."""
        if self._split:
            for memory_N in self._memory:
                join_(memory_N)
            self._split = False

    def _move_in(self, drafter: Drafter) -> None:
        """Put masters that are packed here into one piece of memory, and this module's parameters on it."""
        shares, weights = list(self.shares(drafter)), {}
        for name, packed in self.named_parameters():
            mine = [share for share in shares if share.packed is packed]
            wide = torch.cat([share.master.detach() for share in mine])
            for share in mine:
                share.master.data = share.of(wide)
            memory_N = wide.flatten()
            self._memory.append(memory_N)
            weights[name] = (memory_N if packed.dtype == wide.dtype else upper(memory_N)).view_as(packed)
        self.load_state_dict(weights, assign=True)

    @torch.no_grad()
    def give_gradients(self, drafter: Drafter) -> None:
        """Add this module's gradients to the masters', in the masters' dtype, and drop them here."""
        for share in self.shares(drafter):
            assert share.packed.grad is not None
            gradient = share.of(share.packed.grad)
            if share.master.grad is None:
                share.master.grad = gradient.to(share.master.dtype, copy=True)
            else:
                share.master.grad.add_(gradient)
            if share.first + share.rows == len(share.packed):
                share.packed.grad = None


def as_blocks(anchor_BAX: Tensor, mask_X: Tensor, block_size: int) -> Tensor:
    """`[B, A * K, X]`: the anchor's vector in slot 0, the mask's in all others."""
    masks_BAkX = mask_X.expand(*anchor_BAX.shape[:2], block_size - 1, -1)
    return torch.cat((anchor_BAX[:, :, None], masks_BAkX), dim=2).flatten(1, 2)


def without_anchor_slot(x_BQX: Tensor, block_size: int) -> Tensor:
    """Slots 1..K-1 of each block, `[B, A * (K - 1), X]`."""
    return x_BQX.unflatten(1, (-1, block_size))[:, :, 1:].flatten(1, 2)


def fused_twin(drafter: Drafter, attention: Attention, *, dtype: torch.dtype, compile_part: CompilePart) -> FusedDrafter:
    """A FusedDrafter of `drafter`'s shape in `dtype`, without memory of its own: it has none before it borrows."""
    with torch.device("meta"):
        return FusedDrafter(drafter.shape, attention, compile_part=compile_part).to(dtype)
