"""Takes a resolved run, its drafter's shape and its target's, gives the numbers that a ledger is made of; knows no devices."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from outrider.config import DType, RunConfig
from outrider.model.flops import count_parameters
from outrider.planner.target_shapes import TargetShape
from outrider.records import DrafterShape

Road = Literal["fused", "dense", "unfused"]
# What can go wrong in a trainer (not in this one), to see what it would cost
SUPPOSITIONS = ("unfused-attention", "plain-logits", "eager-mask")


@dataclass(frozen=True)
class Job:
    """One learner's share of a run: what decides how many bytes each tensor has.

    `rows` of `row_length` tokens a micro-batch with `anchors` blocks each, `accumulation` of them a step, shared out over
    `replicas` learners. `sharded`: each holds its part of masters, gradients and moments (FSDP2), else all of them (DDP).
    `packed`: capture takes whole rows, its layers compiled. `cuts`: of a target that is spread over several cards, the first
    layer of each but the first. `served`: features come from a server.
    """

    drafter: DrafterShape
    target: TargetShape
    rows: int
    row_length: int
    anchors: int
    accumulation: int
    road: Road
    compute: DType
    eight_bit: bool
    activation_budget: float
    logits_bytes: int
    plain_logits: bool
    eager_mask: bool
    target_dtype: DType
    fp8: bool
    packed: bool
    kept: bool
    prefetch: bool
    whole_target: bool
    replicas: int
    sharded: bool
    cuts: tuple[int, ...] = ()  # a record of before targets were spread has none
    served: bool = False

    @property
    def micro_batches(self) -> int:
        """Of a step in each replica."""
        return -(-self.accumulation // self.replicas)

    @property
    def queries(self) -> int:
        """Q over all rows."""
        return self.rows * self.anchors * self.drafter.block_size

    @property
    def predicted(self) -> int:
        """Y: slots with a label, all but the anchors' own."""
        return self.rows * self.anchors * (self.drafter.block_size - 1)

    @property
    def context(self) -> int:
        """S over all rows."""
        return self.rows * self.row_length

    @property
    def keys(self) -> int:
        """N over all rows."""
        return self.context + self.queries

    @property
    def parameters(self) -> int:
        return count_parameters(self.drafter)

    @property
    def loss_rows(self) -> int:
        """Rows of one chunk of logits, as objective.frozen_head.rows_per_chunk has them."""
        fit = max(1, self.logits_bytes // (self.drafter.vocab_size * (2 if self.target_dtype == "bfloat16" else 4)))
        chunks = -(-self.predicted // fit)
        return -(-self.predicted // chunks)

    @property
    def autocasts(self) -> bool:
        """The dense road rounds its fp32 weights as it goes."""
        return self.road == "dense" and self.compute != "float32"

    @property
    def keeps_attention(self) -> bool:
        """The compiler keeps turned queries, keys and values unless it was given a budget (seen at 0.5: it keeps none)."""
        return self.activation_budget == 1.0

    @property
    def keeps_feed_forward(self) -> bool:
        """The compiler keeps gate and up while they fit the budget of their part: they and the layer's inner stream."""
        wide = self.drafter.intermediate_size
        return self.activation_budget >= wide / (wide + self.drafter.hidden_size)

    @property
    def lends(self) -> bool:
        """Whole float32 masters hold the compute weights too, see model.halves."""
        return self.road != "dense" and self.compute != "float32" and not self.sharded

    @property
    def captured(self) -> int:
        """Target layers that capture runs: up to the last captured one."""
        return self.drafter.target_layer_ids[-1] + 1

    @property
    def loaded(self) -> int:
        """Target layers that stand on the capture cards."""
        return len(self.target.layers) if self.whole_target else self.captured

    @property
    def capture_ranges(self) -> tuple[range, ...]:
        """The layers on each card of a target."""
        return tuple(range(first, after) for first, after in pairwise((0, *self.cuts, self.loaded)))

    def shard(self, elements: int) -> int:
        return -(-elements // self.replicas) if self.sharded else elements

    @property
    def shard_name(self) -> str:
        return f"P / {self.replicas}" if self.sharded else "P"


def job_of(
    config: RunConfig, drafter: DrafterShape, target: TargetShape, *, row_length: int, replicas: int, sharded: bool,
    suppositions: Collection[str],
) -> Job:
    """The job of a run with nothing left to derive (its attention is named). `suppositions`: of SUPPOSITIONS, what if it went
    wrong."""
    attention = config.train.attention
    assert attention is not None
    return Job(
        drafter=drafter, target=target, rows=config.train.rows_per_batch, row_length=row_length, anchors=config.layout.anchors,
        accumulation=config.train.accumulation, road="unfused" if "unfused-attention" in suppositions else attention,
        compute=config.train.precision, eight_bit=config.optimizer.state == "8bit",
        activation_budget=config.train.activation_budget,
        logits_bytes=config.objective.logits_mib * 2**20, plain_logits="plain-logits" in suppositions,
        eager_mask="eager-mask" in suppositions, target_dtype=config.target.dtype, fp8=config.features.precision == "fp8",
        served=config.features.server is not None,
        packed=config.features.documents == "packed",
        kept=config.features.keep != "no", prefetch=False, whole_target=config.data.heldout is not None,
        replicas=replicas, sharded=sharded,
    )
