"""Takes a job and a card, gives the milliseconds of each part of a step; measures nothing.

Times are operations over the rate that the card reaches, and bytes over its bandwidth. What a card reaches of its stated rate:
an H200 states 989 TFLOP/s and keeps up 643 to 649 in the drafter's largest products under its power limit; the fused drafter
step reached 610 (219.5 ms for 134 TFLOP), the target's forward with FLA's kernels 417 (926 ms for 386 TFLOP) document by
document, 596 packed, and 968 of 1,979 packed in 8 bits (672.7 and 413.9 ms for 401 TFLOP): bench/results.
Other cards are taken to reach the same shares, a guess: a plan's ranking is safer than its times. A card whose own rates were
measured (calibration.py) is taken to reach, of what it keeps up in large products, the share that an H200 does.
"""

from dataclasses import dataclass

from outrider.model.flops import PEAK_OVER_SCORES, count_flops
from outrider.planner.gpus import Gpu
from outrider.planner.job import Job

DRAFTER_SHARE, APART_SHARE, PACKED_SHARE = 610 / 989, 417 / 989, 596 / 989  # of a card's stated bf16 rate
PACKED_FP8_SHARE = 968 / 1979  # of its stated FP8 rate; apart was not measured, and is taken to reach bf16's
# Of the stated rates of an H200, as calibration.py measures it: 685 and 1,314 TFLOP/s, 4,373 GB/s (bench/results/plan.md)
KEPT_UP, KEPT_UP_FP8, KEPT_UP_BANDWIDTH = 685 / 989, 1314 / 1979, 4373 / 4800
BANDWIDTH_SHARE = 0.85
UPDATE_BYTES = 4 + 4 + 3 * 8  # a parameter: norm reads the gradient; the update gradient, master and moments
LENT_BYTES, COPIED_BYTES = 2 * 16, 4 + 2  # a parameter: its memory lent to the compute weights and back; rounded into a copy
LINK_SHARE = 0.7  # of a link, in copies to another card and sums over processes


@dataclass(frozen=True)
class Parts:
    """Milliseconds. `capture`: the target's forward of a micro-batch; `learn`: forward and backward of the drafter on it;
    `update`: clipping, AdamW and the weights to compute with, once a step."""

    capture: float
    learn: float
    update: float


def parts(job: Job, gpu: Gpu) -> Parts:
    """What one card needs for each part of the job."""
    target = job.target.forward_flops(layers=job.captured, tokens=job.context, mean_context=job.row_length / 2)
    rate = (gpu.fp8 or gpu.bf16) if job.fp8 else gpu.bf16
    shape = job.drafter
    seen = job.row_length / 2 + shape.block_size  # an anchor stands anywhere in its row
    flops = count_flops(shape, queries=job.queries, context=job.context, pairs=round(job.queries * seen))
    again = 0 if job.road != "fused" or job.keeps_feed_forward else 4 * job.queries * shape.hidden_size * shape.intermediate_size
    learn = (flops.total + again * shape.num_layers) / (gpu.bf16 * DRAFTER_SHARE)  # gate and up once more
    if job.road != "fused":  # every pair, visible or not, goes through memory some times
        scores = 4 * job.rows * shape.num_heads * (job.queries // job.rows) * (job.keys // job.rows) * shape.num_layers
        learn += 2 * sum(PEAK_OVER_SCORES.values()) * scores / (gpu.bandwidth * BANDWIDTH_SHARE)
    weights = 0 if job.road == "dense" else LENT_BYTES if job.lends else COPIED_BYTES
    update = (job.shard(job.parameters) * UPDATE_BYTES + job.parameters * weights) / (gpu.bandwidth * BANDWIDTH_SHARE)
    reached = APART_SHARE if not job.packed else PACKED_FP8_SHARE if job.fp8 and gpu.fp8 else PACKED_SHARE
    return Parts(1e3 * target / (rate * reached), 1e3 * learn, 1e3 * update)


def sum_ms(job: Job, gpu: Gpu) -> float:
    """Adding up the fp32 gradients of all replicas, a ring: each card sends and takes 2 (n - 1) / n of them."""
    n = job.replicas
    return 0.0 if n == 1 else 1e3 * 4 * job.parameters * 2 * (n - 1) / n / (gpu.link * LINK_SHARE)
