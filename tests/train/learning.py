"""What the tests of the train room share: a learner and a supply from a toy target."""

from typing import Literal

import torch
from torch import Tensor
from toys import MASK, random_rows

from outrider.config import OptimizerConfig, PlacementConfig, Sharding
from outrider.features.capture import FeatureSource
from outrider.features.target import Target
from outrider.layout.anchors import draw_anchors
from outrider.layout.blocks import build_blocks
from outrider.layout.mask import dense_mask
from outrider.model.attention import dense_attention
from outrider.model.drafter import Drafter, initialise
from outrider.model.fused_drafter import fused_twin
from outrider.records import DraftBlocks, DrafterShape, TokenRows
from outrider.train.masters import Masters, open_masters
from outrider.train.optim import build_optimizer
from outrider.train.placement import Devices, Relay, open_relay
from outrider.train.processes import ALONE, Processes
from outrider.train.roads import DenseRoad, Embed
from outrider.train.step import Learner, MicroBatch

CPU = torch.device("cpu")
LOGITS_BYTES = 2**20


def make_drafter(shape: DrafterShape, *, seed: int = 0) -> Drafter:
    drafter = Drafter(shape, dense_attention)
    initialise(drafter, seed=seed, head_scale=1.0)
    return drafter


class PackedRoad:
    """The fused road's weights and gradients on a CPU: packed in `dtype`, lent by the masters, not compiled."""

    def __init__(self, drafter: Drafter, *, dtype: torch.dtype) -> None:
        self.drafter, self.dtype = drafter, dtype
        self.fused = fused_twin(drafter, dense_attention, dtype=dtype, compile_part=lambda part: part)

    def begin(self, masters: Masters) -> None:
        masters.lend(self.fused)

    def hidden(self, embed: Embed, features_BSF: Tensor, rows: TokenRows, blocks: DraftBlocks) -> Tensor:
        masks = {"full_attention": dense_mask(rows, blocks, window=None)}
        ends = embed(blocks.noise_ids_BAK[:, :, 0]), embed(blocks.noise_ids_BAK[0, 0, 1]), features_BSF
        return self.fused(*(values.to(self.dtype) for values in ends), self.fused.rotary(blocks.positions_BAK.flatten(1)),
                          self.fused.rotary(rows.positions_BS), masks)

    def collect(self, masters: Masters) -> None:
        masters.take_gradients(self.fused)


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
