"""Takes a drafter's shape and the size of a step, gives parameters, operations by part, dense attention's peak; loads no torch.

A product of [m, k] and [k, n] is 2 m k n operations. Only what the mathematics needs is counted: no recompute, no masked
pairs, no slot 0 in the head, no gradient of the frozen head or of the features.
"""

from dataclasses import asdict, dataclass

from outrider.records import DrafterShape

FORWARD_BACKWARD = 3  # a trained product is done once forward and twice backward
ATTENTION_FORWARD_BACKWARD = 7 / 2  # 2 products forward; 5 backward: the scores again, dP, dV, dQ, dK
# Peak bytes of the dense kernels over those of one fp32 score matrix, measured on an H200
PEAK_OVER_SCORES = {"flex_attention": 3.3, "flex_attention_backward": 6.5}


@dataclass(frozen=True)
class StepFlops:
    """Operations of one forward and backward."""

    noise_tokens: float
    context_keys_values: float
    feature_projection: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


def count_flops(shape: DrafterShape, *, queries: int, context: int, pairs: int) -> StepFlops:
    """`queries`: slots of all blocks, B * A * K. `context`: tokens of all rows, B * S. `pairs`: visible (query, key) pairs of
    one layer, summed over rows (the mean over layers where their windows differ)."""
    D, C, H, G, n = shape.hidden_size, shape.head_dim, shape.num_heads, shape.num_kv_heads, shape.num_layers
    layer_weights = 2 * D * C * (H + G) + 3 * D * shape.intermediate_size
    predicted = queries // shape.block_size * (shape.block_size - 1)
    return StepFlops(
        noise_tokens=FORWARD_BACKWARD * 2 * queries * layer_weights * n,
        context_keys_values=FORWARD_BACKWARD * 2 * context * (2 * D * G * C) * n,
        feature_projection=2 * 2 * context * len(shape.target_layer_ids) * D * D,
        attention=ATTENTION_FORWARD_BACKWARD * 4 * pairs * H * C * n,
        head=2 * 2 * predicted * D * shape.vocab_size,
    )


def count_parameters(shape: DrafterShape) -> int:
    """Trainable parameters of a drafter of this shape."""
    D, I, C = shape.hidden_size, shape.intermediate_size, shape.head_dim
    projections = D * C * (2 * shape.num_heads + 2 * shape.num_kv_heads) + 3 * D * I
    return D * D * len(shape.target_layer_ids) + 2 * D + shape.num_layers * (projections + 2 * D + 2 * C)
