"""Takes a drafter, gives the two roads through it: dense (reference, any device) and fused (compiled, CUDA); knows no losses."""

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from outrider.config import TrainConfig
from outrider.errors import UserError
from outrider.features.target import DTYPES
from outrider.layout.mask import dense_mask
from outrider.model import tripwire
from outrider.model.drafter import Drafter
from outrider.model.fused_attention import FusedKernels, kernels_for
from outrider.model.fused_drafter import fused_twin
from outrider.progress import say
from outrider.records import DraftBlocks, TokenRows
from outrider.train.masters import Masters
from outrider.train.selftest import check_fused_attention, windows_of

Embed = Callable[[Tensor], Tensor]  # token ids [...] to the target's embeddings [..., D]


class Road(Protocol):
    """How hidden states come about and how their gradients reach the parameters of `drafter`, the fp32 masters."""

    drafter: Drafter

    def begin(self, masters: Masters) -> None:
        """Before the first micro-batch of a step: see the masters' present values."""

    def hidden(self, embed: Embed, features_BSF: Tensor, rows: TokenRows, blocks: DraftBlocks) -> Tensor:
        """Final hidden states `[B, Q, D]`, with a graph; those of slot 0 may be anything, nothing learns from them."""

    def collect(self, masters: Masters) -> None:
        """After each micro-batch's backward: its gradient is handed to the masters."""


class DenseRoad:
    """The drafter itself over dense masks, in autocast when `dtype` is not the parameters' own."""

    def __init__(self, drafter: Drafter, *, dtype: torch.dtype) -> None:
        self.drafter, self.dtype = drafter, dtype

    def begin(self, masters: Masters) -> None:
        pass

    def hidden(self, embed: Embed, features_BSF: Tensor, rows: TokenRows, blocks: DraftBlocks) -> Tensor:
        masks = {kind: dense_mask(rows, blocks, window=window) for kind, window in windows_of(self.drafter.shape).items()}
        with torch.autocast(features_BSF.device.type, dtype=self.dtype, enabled=self.dtype != self.drafter.norm.weight.dtype):
            return self.drafter(
                embed(blocks.noise_ids_BAK.flatten(1)).to(self.dtype), features_BSF.to(self.dtype),
                blocks.positions_BAK.flatten(1), rows.positions_BS, masks,
            )

    def collect(self, masters: Masters) -> None:
        pass  # autograd's leaves are the masters themselves


class FusedRoad:
    """The weights in `dtype`, packed and compiled, lent by the fp32 masters, which the drafter keeps with their gradients.

    Shapes are fixed by the first call; another shape is a second compilation. Installs the tripwire for the whole process.
    `activation_budget`: share of the activations that may be kept for the backward, 1.0 for all that saves a product.
    """

    def __init__(
        self, drafter: Drafter, kernels: FusedKernels, *, dtype: torch.dtype, activation_budget: float
    ) -> None:
        tripwire.install()
        self.drafter, self.kernels, self.dtype = drafter, kernels, dtype
        self.fused = fused_twin(
            drafter, kernels.attention, dtype=dtype, compile_part=partial(torch.compile, fullgraph=True, dynamic=False)
        )
        # What an elementwise kernel of the backward can make again is never kept, even where a product then reads it from memory:
        # the normed inputs and silu(gate) * up, 430 of 1,390 MiB a layer in the born-from case
        self.partition = {"ban_recompute_materialized_backward": False, "activation_memory_budget": activation_budget}
        self._compiled_for: set[tuple[int, ...]] = set()
        self._forward_compiled: float | None = None

    def begin(self, masters: Masters) -> None:
        masters.lend(self.fused)

    def hidden(self, embed: Embed, features_BSF: Tensor, rows: TokenRows, blocks: DraftBlocks) -> Tensor:
        shape = self.drafter.shape
        B, A, K = blocks.noise_ids_BAK.shape
        S = features_BSF.shape[1]
        q_shape, k_shape = (B, shape.num_heads, A * K, shape.head_dim), (B, shape.num_kv_heads, S + A * K, shape.head_dim)
        tripwire.check_no_modes(q_shape, k_shape)
        if (B, A, S) in self._compiled_for:
            return self._forward(embed, features_BSF, rows, blocks)
        say(f"compiling the drafter for {B} x {A * K} queries over {S + A * K} keys, {shape.num_layers} layers (the backward "
            "compiles in the first step)")
        began = time.perf_counter()
        with torch._functorch.config.patch(self.partition), tripwire.within_recompile_limit(q_shape, k_shape):
            hidden_BQD = self._forward(embed, features_BSF, rows, blocks)
        self._compiled_for.add((B, A, S))
        self._forward_compiled = time.perf_counter()
        say(f"compiled the drafter's forward in {self._forward_compiled - began:.1f} s")
        return hidden_BQD

    def _forward(self, embed: Embed, features_BSF: Tensor, rows: TokenRows, blocks: DraftBlocks) -> Tensor:
        """The context's products, which need the features alone, go first: behind them the host has the time to launch the many
        small kernels of masks, embeddings and tables, for which a device that waits for each would stand still."""
        context_kv = self.fused.project_context(features_BSF.to(self.dtype))
        masks = {kind: self.kernels.mask(blocks, row_length=features_BSF.shape[1], window=window)
                 for kind, window in windows_of(self.drafter.shape).items()}
        hidden_BQD: Tensor = self.fused(
            embed(blocks.noise_ids_BAK[:, :, 0]).to(self.dtype), embed(blocks.noise_ids_BAK[0, 0, 1]).to(self.dtype), context_kv,
            self.fused.rotary(blocks.positions_BAK.flatten(1)), self.fused.rotary(rows.positions_BS), masks,
        )
        return hidden_BQD

    def collect(self, masters: Masters) -> None:
        if self._forward_compiled is not None:  # the backward compiles inside autograd, on the host, before this line
            say(f"compiled the drafter's backward in {time.perf_counter() - self._forward_compiled:.1f} s, loss included")
            self._forward_compiled = None
            masters.processes.meet()  # another process may still compile, longer than a sum may wait
        masters.take_gradients(self.fused)


def open_road(drafter: Drafter, settings: TrainConfig) -> Road:
    """The road that `train.attention` names. The fused one is checked against float64 first. Raises UserError."""
    dtype, device = DTYPES[settings.precision], drafter.norm.weight.device
    if settings.attention == "dense":
        return DenseRoad(drafter, dtype=dtype)
    if device.type != "cuda":
        raise UserError(f"train.attention = 'fused': needs a CUDA device, train.device is '{device}', whose kernels have no "
                        "backward: use train.attention = 'dense'")
    kernels = kernels_for(device, head_dim=drafter.shape.head_dim, dtype=dtype)
    check_fused_attention(drafter.shape, kernels, dtype=dtype, device=device)
    return FusedRoad(drafter, kernels, dtype=dtype, activation_budget=settings.activation_budget)
