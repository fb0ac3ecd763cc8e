"""Takes TokenRows and a target, gives Features, whole rows in one forward; knows nothing of anchors, drafters or losses.

The fast twin of capture.py. The target's own decoder runs over all tokens of the rows end to end. For the time of the call its
attention is `kernels.attend`, which gets the documents' boundaries and needs no mask, its gated-delta-net layers are
`PackedDeltaNet`, its SwiGLU layers take gate and up in one product, and its layers' forwards are compiled, once for each kind.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.activations import SiLUActivation

from outrider.errors import UserError
from outrider.features.capture import feature_buffer, handing_over, run_to_last_layer, zero_padding
from outrider.features.fp8 import Fp8Linear, gated_norm_in_8_bits, swiglu_in_8_bits
from outrider.features.kernels import Bounds, attend, bounds_of, convolve, gated_delta_rule, to_device
from outrider.features.projections import Projections, side_by_side
from outrider.features.summed import SummedLayer, can_sum
from outrider.features.target import Layers
from outrider.records import Features, TokenRows

ATTENTION = "outrider_packed"
DELTA_NET_PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "A_log", "dt_bias", "norm", "out_proj")
SWIGLU_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")
KINDS = ("full_attention", "sliding_attention", "linear_attention")  # a mask of another kind would be lost without a word


def _attention(
    module: nn.Module, q_1HXC: Tensor, k_1GXC: Tensor, v_1GXC: Tensor, attention_mask: None, *, scaling: float, starts_N1: Tensor,
    longest: Tensor, sliding_window: int | None = None, s_aux: Tensor | None = None, **unused: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' layers call it; `attention_mask` is None, as no mask function is registered for ATTENTION."""
    q_XHC, k_XGC, v_XGC = (t[0].transpose(0, 1).contiguous() for t in (q_1HXC, k_1GXC, v_1GXC))
    return attend(q_XHC, k_XGC, v_XGC, starts_N1, longest, scaling, sliding_window or 0, s_aux)[None], None


AttentionInterface.register(ATTENTION, _attention)


class PackedSwiglu(nn.Module):
    """A feed-forward layer `down(act(gate x) * up x)` over the weights of `layer`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.gate_up = side_by_side(layer.gate_proj, layer.up_proj)  # type: ignore[arg-type]
        self.down_proj, self.act_fn = layer.down_proj, layer.act_fn
        silu = isinstance(layer.act_fn, nn.SiLU | SiLUActivation)
        self.in_8_bits = silu and isinstance(layer.down_proj, Fp8Linear) and isinstance(self.gate_up, Projections)

    def forward(self, x: Tensor) -> Tensor:
        if self.in_8_bits:
            eight = swiglu_in_8_bits(self.gate_up.joint(x).flatten(0, -2))  # type: ignore[operator]
            return self.down_proj.product(*eight, x.dtype).unflatten(0, x.shape[:-1])  # type: ignore[operator, union-attr]
        gate, up = self.gate_up(x)
        return self.down_proj(self.act_fn(gate) * up)  # type: ignore[operator]


class PackedDeltaNet(nn.Module):
    """A gated-delta-net layer (transformers' Qwen3_5GatedDeltaNet) over the weights of `layer`, with documents kept apart."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.qkv_z = side_by_side(layer.in_proj_qkv, layer.in_proj_z)  # type: ignore[arg-type]
        self.beta_decay = side_by_side(layer.in_proj_b, layer.in_proj_a)  # type: ignore[arg-type]
        self.taps, self.bias = layer.conv1d.weight, layer.conv1d.bias  # type: ignore[union-attr]
        self.A_log, self.dt_bias, self.norm, self.out_proj = layer.A_log, layer.dt_bias, layer.norm, layer.out_proj
        key_size, value_size = cast(int, layer.head_k_dim), cast(int, layer.head_v_dim)
        self.heads = (cast(int, layer.key_dim) // key_size, key_size, cast(int, layer.value_dim) // value_size, value_size)
        self.in_8_bits = isinstance(layer.out_proj, Fp8Linear) and hasattr(layer.norm, "variance_epsilon")

    def forward(
        self, hidden_states: Tensor, starts_N1: Tensor, chunks_P2: Tensor, since_start_X: Tensor, **unused: Any
    ) -> Tensor:
        """`[1, X, D]` to `[1, X, D]`; `since_start_X`: position of each token within its document."""
        x_XD = hidden_states[0]
        qkv_XF, z_XF = self.qkv_z(x_XD)
        beta_XH, decay_XH = self.beta_decay(x_XD)
        q_XGC, k_XGC, v_XHE = convolve(qkv_XF, self.taps[:, 0], self.bias, since_start_X, *self.heads)  # type: ignore[index]
        decay_XH = -self.A_log.float().exp() * F.softplus(decay_XH.float() + self.dt_bias.float())  # type: ignore[operator]
        out_XHE = gated_delta_rule(q_XGC, k_XGC, v_XHE, decay_XH, beta_XH.float().sigmoid(), starts_N1, chunks_P2)
        if self.in_8_bits:
            norm = cast(Any, self.norm)
            eight = gated_norm_in_8_bits(out_XHE, z_XF, norm.weight, norm.variance_epsilon)
            return self.out_proj.product(*eight, x_XD.dtype)[None]  # type: ignore[operator, union-attr]
        z_RE = z_XF.unflatten(-1, out_XHE.shape[1:]).flatten(0, 1)
        out_RE = self.norm(out_XHE.flatten(0, 1), z_RE)  # type: ignore[operator]
        return self.out_proj(out_RE.view_as(out_XHE).flatten(1))[None]  # type: ignore[operator]


class PackedCapture:
    """Captures the features of rows of one shape in one forward each. Raises UserError for a target it cannot pack.

    `compiled`: the layers' forwards are compiled at the first call, for the shape of its rows. For the time of a call the target
    is not what it was: nobody else may use it then.
    """

    def __init__(
        self, target: Layers, layer_ids: Sequence[int], *, compiled: bool, backend: str | Callable[..., Any] = "inductor"
    ) -> None:
        self.target, self.layer_ids = target, layer_ids
        self._parts: list[tuple[nn.Module, str, nn.Module]] = []  # layer, name of its part, what stands in for it
        self._forwards: list[tuple[nn.Module, Any]] = []
        for layer, kind in zip(target.layers[: max(layer_ids) + 1], target.facts.layer_kinds, strict=False):
            check_can_pack(layer, kind, target)
            forward = self._replace_parts(layer)
            if compiled:
                forward = torch.compile(forward, fullgraph=True, backend=backend)
            self._forwards.append((layer, forward))
        if target.device.type == "cuda":  # weights put side by side leave their old places behind, which fit nothing else
            torch.cuda.empty_cache()

    def _replace_parts(self, layer: Any) -> Callable[..., Tensor]:
        """Note what stands in for parts of the layer during a call; gives its forward over them."""
        mixer, mixer_end = getattr(layer, "self_attn", None), "o_proj"
        if hasattr(layer, "linear_attn"):
            mixer, mixer_end = PackedDeltaNet(layer.linear_attn), "out_proj"
            self._parts.append((layer, "linear_attn", mixer))
        if not all(hasattr(layer.mlp, part) for part in SWIGLU_PARTS):
            return layer.forward
        feed = PackedSwiglu(layer.mlp)
        self._parts.append((layer, "mlp", feed))
        ends = getattr(mixer, mixer_end, None), feed.down_proj
        if not can_sum(layer, *ends):  # type: ignore[arg-type]
            return layer.forward
        self._parts += [(mixer, mixer_end, nn.Identity()), (feed, "down_proj", nn.Identity())]  # type: ignore[list-item]
        return SummedLayer(layer, mixer, ends[0], feed, ends[1]).forward  # type: ignore[arg-type]

    @torch.no_grad()
    def __call__(self, rows: TokenRows, *, hidden_BSD: Tensor | None = None, out_BSF: Tensor | None = None) -> Features:
        """As `capture.capture`, of rows on the CPU: launched on the current stream, and nothing waits for it."""
        target = self.target
        if out_BSF is None:
            out_BSF = feature_buffer(target, rows, self.layer_ids)
        out_XLD = out_BSF.flatten(0, 1).unflatten(-1, (len(self.layer_ids), -1))
        lengths_N, since_start_X = documents_end_to_end(rows.document_ids_BS.cpu())
        bounds = bounds_of(lengths_N, target.device)
        since_start_X = to_device(since_start_X, target.device)

        def take(j: int, output_1XD: Tensor) -> None:
            out_XLD[:, j] = output_1XD[0]

        # a copy of hidden states, which may be another's features: the layers add in their memory (summed.py)
        inputs_BS = rows.input_ids_BS if hidden_BSD is None else hidden_BSD.clone()
        with self._packed(), handing_over(target, self.layer_ids, take, stop_after_last=True):
            run_to_last_layer(target, inputs_BS.flatten(0, 1)[None], position_ids=since_start_X[None],
                              since_start_X=since_start_X, **_marked(bounds))
        zero_padding(out_BSF, rows)
        return Features(out_BSF)

    @contextlib.contextmanager
    def _packed(self) -> Iterator[None]:
        """While open, the target's layers work on packed documents; after, they are what they were."""
        config: Any = self.target.decoder.config
        # transformers' own recording of outputs, which torch.compile cannot trace, and which nobody asks for here
        recording = [(part, part._forward_hooks) for layer, _ in self._forwards for part in layer.modules()
                     if part is not layer and part._forward_hooks]
        attention = config._attn_implementation
        originals = [(layer, name, getattr(layer, name)) for layer, name, _ in self._parts]
        try:
            config._attn_implementation = ATTENTION
            for layer, name, part in self._parts:
                setattr(layer, name, part)
            for layer, forward in self._forwards:
                layer.forward = forward
            for part, _ in recording:
                part._forward_hooks = OrderedDict()
            yield
        finally:
            config._attn_implementation = attention
            for layer, name, part in originals:
                setattr(layer, name, part)
            for layer, _ in self._forwards:
                layer.__dict__.pop("forward", None)
            for part, hooks in recording:
                part._forward_hooks = hooks


def _marked(bounds: Bounds) -> dict[str, Tensor]:
    """The bounds as the layers get them, their lengths marked as varying: another number of documents compiles nothing anew."""
    for tensor in (bounds.starts_N1, bounds.chunks_P2):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return {"starts_N1": bounds.starts_N1, "chunks_P2": bounds.chunks_P2, "longest": bounds.longest}


def documents_end_to_end(document_ids_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Of all rows end to end, the padding at each row's end taken as a document: lengths `[N]`, positions within each `[X]`."""
    B, S = document_ids_BS.shape
    keys_X = (document_ids_BS + 1 + (torch.arange(B) * (S + 1))[:, None]).flatten()
    lengths_N = torch.unique_consecutive(keys_X, return_counts=True)[1]
    starts_N = lengths_N.cumsum(0) - lengths_N
    return lengths_N, torch.arange(B * S) - starts_N.repeat_interleave(lengths_N)


def check_can_pack(layer: nn.Module, kind: str, target: Layers) -> None:
    """Raises UserError when documents side by side would not stay apart, or not be fast, in this layer of this `kind`."""
    name = type(layer).__name__
    if kind not in KINDS:
        why = f"its kind is {kind}, and the packed kernels know {', '.join(KINDS)}"
    elif hasattr(layer, "linear_attn"):
        absent = [part for part in DELTA_NET_PARTS if not hasattr(layer.linear_attn, part)]
        why = f"its linear attention has no {', '.join(absent)}" if absent else ""
    elif not hasattr(layer, "self_attn"):
        why = "it has neither self_attn nor linear_attn"
    elif getattr(layer.self_attn, "attn_logit_softcapping", None) is not None:
        why = "its attention caps the scores, which the packed kernel does not"
    elif kind == "sliding_attention" and getattr(layer.self_attn, "sliding_window", None) is None:
        why = "its attention sees a window, and does not say how wide"
    else:
        why = ""
    if not why and target.device.type == "cuda" and target.dtype == torch.float32:
        why = "the packed kernels on a GPU take bfloat16, the target is loaded in float32"
    if why:
        raise UserError(f"features.documents = \"packed\": {name}: {why}: use features.documents = \"apart\"")
