"""What the tests of the train room share: a learner and a supply from a toy target."""

from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from toys import MASK, random_rows

from outrider.config import OptimizerConfig, PlacementConfig, Sharding
from outrider.features.capture import FeatureSource
from outrider.features.target import Target
from outrider.layout.anchors import draw_anchors
from outrider.layout.block_mask import block_mask
from outrider.layout.blocks import build_blocks
from outrider.model.attention import dense_attention
from outrider.model.drafter import Drafter, initialise
from outrider.model.fused_attention import FusedKernels
from outrider.records import DrafterShape, TokenRows
from outrider.train.masters import open_masters
from outrider.train.optim import build_optimizer
from outrider.train.placement import Devices, Relay, open_relay
from outrider.train.processes import ALONE, Processes
from outrider.train.roads import DenseRoad, FusedRoad
from outrider.train.step import Learner, MicroBatch

CPU = torch.device("cpu")
LOGITS_BYTES = 2**20


def make_drafter(shape: DrafterShape, *, seed: int = 0) -> Drafter:
    drafter = Drafter(shape, dense_attention)
    initialise(drafter, seed=seed, head_scale=1.0)
    return drafter


def masked_attention(q_BHQC: Tensor, k_BGNC: Tensor, v_BGNC: Tensor, mask: BlockMask) -> Tensor:
    """What the fused kernel computes, by the mask's own predicate."""
    B, Q, N = len(q_BHQC), q_BHQC.shape[2], k_BGNC.shape[2]
    seen_BQN = mask.mask_mod(torch.arange(B)[:, None, None], torch.tensor(0), torch.arange(Q)[:, None], torch.arange(N))
    return dense_attention(q_BHQC, k_BGNC, v_BGNC, seen_BQN[:, None])


def fused_on_cpu(drafter: Drafter, *, dtype: torch.dtype) -> FusedRoad:
    """The fused road itself, its packed weights, masks and gradients, without its compiler and its kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.model.tripwire.install", lambda: None)
        patch.setattr(torch, "compile", lambda part, **options: part)
        return FusedRoad(drafter, FusedKernels("flex", masked_attention, block_mask), dtype=dtype, activation_budget=1.0)


def make_learner(
    drafter: Drafter, target: Target, *, dtype: torch.dtype = torch.float32, learning_rate: float = 1e-3,
    processes: Processes = ALONE, sharding: Sharding = "ddp",
) -> Learner:
    road = DenseRoad(drafter, dtype=dtype)
    masters = open_masters(drafter, processes, sharding)
    return Learner(road, masters, target.ends, build_optimizer(drafter, OptimizerConfig(learning_rate=learning_rate)))


def colocated(target: Target, shape: DrafterShape, *, keep: Literal["no", "memory"] = "no") -> Relay:
    source = FeatureSource(target, shape.target_layer_ids, keep=keep)
    return open_relay([source], Devices(CPU, ()), PlacementConfig(), meeting="test", trace=None)


def micro_batch_of(rows: TokenRows, *, per_row: int) -> MicroBatch:
    """Rows with their blocks of 4, gamma 4, epoch 0."""
    anchors, keep, eligible = draw_anchors(rows, per_row=per_row, document_floor=2, seed=0, epochs_B=[0] * len(rows.row_ids_B))
    blocks = build_blocks(rows, anchors, keep, block_size=4, mask_token_id=MASK, gamma=4.0)
    return MicroBatch(rows, rows, blocks, eligible)


def random_micro_batch(lengths: list[list[int]], *, seed: int, per_row: int = 10, length: int = 32) -> MicroBatch:
    return micro_batch_of(random_rows(lengths, length=length, seed=seed), per_row=per_row)
