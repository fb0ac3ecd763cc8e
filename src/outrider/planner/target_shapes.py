"""Takes a target's config, gives the size and the arithmetic of each of its layers; loads no weights, knows no devices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import UserError
from outrider.features.facts import read_text_config
from outrider.planner.quantised import Quantised, read_quantised

LINEAR = "linear_attention"
GATED_QUERIES = ("qwen3_5", "qwen3_next")  # their attention's query projection also makes the output's gate


@dataclass(frozen=True)
class TargetLayer:
    """One decoder layer. `matrices`: elements of its projections and experts, those that FP8 halves; `other`: norms, routers,
    convolutions. `active`: elements of `matrices` that one token meets (fewer than all of them with experts).

    `packed`: elements of `matrices` whose weights came quantised, and stay so.
    `mixer_width`: channels that attention or recurrence holds for a token at its fullest moment, `wide`: channels of one
    feed-forward projection. `score_channels`: H * C of an attention layer's scores (0 for a recurrent layer), `window` or None.
    """

    kind: str
    matrices: int
    other: int
    active: int
    mixer_width: int
    wide: int
    out_features: int
    score_channels: int
    window: int | None
    packed: int = 0


@dataclass(frozen=True)
class TargetShape:
    """A target from its text config alone: D width, V vocabulary, layers in order. `quantised`: the method its weights came
    quantised by, `bits` what one such weight takes, its share of scales included (None: not known here)."""

    model_type: str
    hidden_size: int
    vocab_size: int
    tied: bool
    layers: tuple[TargetLayer, ...]
    quantised: str | None = None
    bits: float | None = None

    @property
    def parameters(self) -> int:
        """Embedding, head (once when tied), layers and the final norm."""
        vocabulary = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return vocabulary + sum(layer.matrices + layer.other for layer in self.layers) + self.hidden_size

    def forward_flops(self, *, layers: int, tokens: int, mean_context: float) -> float:
        """Operations of the first `layers` layers over `tokens` tokens, each attending to `mean_context` on average."""
        total = 0.0
        for layer in self.layers[:layers]:
            seen = mean_context if layer.window is None else min(mean_context, layer.window)
            total += tokens * (2.0 * layer.active + 4.0 * layer.score_channels * seen)
        return total


def read_target_shape(path: str) -> TargetShape:
    """The shape of the target at `path` (a local folder or a hub id), from its config. Raises UserError for a kind of layer whose
    size is not known here."""
    return target_shape(read_text_config(path), where=f"target.path = {path!r}")


def target_shape(values: Mapping[str, Any], *, where: str) -> TargetShape:
    """As `read_target_shape`, from the text config's values."""
    if values.get("kv_lora_rank"):
        raise UserError(f"{where}: {values.get('model_type')} has latent attention, whose size the ledger does not know: "
                        "plan with a target of another kind")
    count = values["num_hidden_layers"]
    kinds = values.get("layer_types") or ["full_attention"] * count
    found, named = read_quantised(values), values.get("quantization_config")
    return TargetShape(
        model_type=str(values.get("model_type")),
        hidden_size=values["hidden_size"],
        vocab_size=values["vocab_size"],
        tied=bool(values.get("tie_word_embeddings")),
        layers=tuple(_layer(values, kinds[i], i, found) for i in range(count)),
        quantised=str(named.get("quant_method")) if isinstance(named, Mapping) else None, bits=found.bits if found else None,
    )


def _layer(values: Mapping[str, Any], kind: str, index: int, quantised: Quantised | None) -> TargetLayer:
    D = values["hidden_size"]
    feed, feed_other, feed_active, wide, feed_out = _feed_forward(values, index)
    mixer, mixer_other, mixer_width, mixer_out = (_recurrence if kind == LINEAR else _attention)(values)
    heads, C = values["num_attention_heads"], _head_dim(values)
    return TargetLayer(
        kind=kind, matrices=mixer + feed, other=mixer_other + feed_other + 2 * D, active=mixer + feed_active,
        mixer_width=mixer_width, wide=wide, out_features=mixer_out + feed_out,
        score_channels=0 if kind == LINEAR else heads * C,
        window=values.get("sliding_window") if kind == "sliding_attention" else None,
        packed=(mixer if quantised and quantised.attention else 0) + (feed if quantised and quantised.feed_forward else 0),
    )


def _head_dim(values: Mapping[str, Any]) -> int:
    return values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]


def _attention(values: Mapping[str, Any]) -> tuple[int, int, int, int]:
    D, H, C = values["hidden_size"], values["num_attention_heads"], _head_dim(values)
    G = values.get("num_key_value_heads") or H
    gated = str(values.get("model_type")).startswith(GATED_QUERIES)
    queries = H * C * (2 if gated else 1)
    out = queries + 2 * G * C
    # alive together: projections, turned queries and keys, the attended values
    return D * out + H * C * D, 2 * C, out + 2 * H * C + G * C, out + D


def _recurrence(values: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """A gated delta net (arXiv 2412.06464) as qwen3_5 and qwen3_next have it."""
    try:
        keys = values["linear_num_key_heads"] * values["linear_key_head_dim"]
        heads, C = values["linear_num_value_heads"], values["linear_value_head_dim"]
        kernel = values["linear_conv_kernel_dim"]
    except KeyError as error:
        raise UserError(f"target of type {values.get('model_type')}: its linear attention layers name no {error.args[0]}, so the "
                        "ledger cannot size them: plan with a target of another kind") from error
    D, channels, states = values["hidden_size"], 2 * keys + heads * C, heads * C
    out = channels + states + 2 * heads
    # alive together: projections before and after the convolution, keys and queries repeated for all heads, the kernel's three
    return D * out + states * D, channels * kernel + 2 * heads + C, 2 * channels + states + 2 * states + 3 * states, out + D


def _feed_forward(values: Mapping[str, Any], index: int) -> tuple[int, int, int, int, int]:
    """Matrices, other elements, active elements, the width of one projection, output features."""
    D = values["hidden_size"]
    experts = next((values[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if values.get(key)), 0)
    if not experts or _is_dense(values, index):
        wide = values.get("intermediate_size") or 4 * D
        return 3 * D * wide, 0, 3 * D * wide, wide, 2 * wide + D
    width = values.get("moe_intermediate_size") or values["intermediate_size"]
    shared = values.get("shared_expert_intermediate_size") or width * (values.get("n_shared_experts") or 0)
    chosen = values.get("num_experts_per_tok") or 1
    biases = experts * (2 * width + D + 1) if values.get("model_type") == "gpt_oss" else 0
    gate = D if values.get("shared_expert_intermediate_size") else 0
    return (3 * D * (width * experts + shared), D * experts + biases + gate, 3 * D * (width * chosen + shared),
            width * chosen + shared, experts * (2 * width + D) + 2 * shared + D)


def _is_dense(values: Mapping[str, Any], index: int) -> bool:
    """Is this layer of a target with experts one without?"""
    sparse_step = values.get("decoder_sparse_step") or 1
    return (index in (values.get("mlp_only_layers") or ()) or index < (values.get("first_k_dense_replace") or 0)
            or (index + 1) % sparse_step != 0)
