"""Takes keys, values and recurrent states layer by layer, keeps them so that rejected tokens leave no trace; knows no model.

What transformers' models call a cache, with fixed shapes. Rows of a batch hold texts of unequal length: in an attention layer the
key of position p stands at index p, and whoever reads masks what is beyond the row's length, so rolling back is forgetting a
number. The state of a linear-attention layer has no positions: it changes only when a length is settled, by the update of the
accepted tokens alone.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from outrider.errors import UserError
from outrider.records import FULL, SLIDING

LINEAR = "linear_attention"
DELTA_RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")  # as transformers' modelling files name them
WHOLE_TILES = 64  # a mask whose rows are no multiple of 8 is copied by fused attention before it is used


Place = tuple[Tensor, Tensor]  # row_B1 and index_BX: where in a cache the X tokens of each row go


@dataclass
class Reading:
    """What the layers must know of the tokens that are being read.

    `place`: the index of each token, see `write`. `reach`: keys and values below it are attended to. `valid_BX` bool: not
    padding. `settled`: all valid tokens stay, nothing will be rolled back. `inputs`: the last call of a delta rule.
    """

    place: Place
    reach: int
    valid_BX: Tensor
    settled: bool
    inputs: "RuleInputs | None" = None


@dataclass(frozen=True)
class RuleInputs:
    """One call of a gated delta rule (arXiv 2412.06464): `key`, `value`, decay `g` and `beta` are `[B, X, heads, ..]`."""

    rule: Callable[..., Any]
    query: Tensor
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def state_after(self, kept_BX: Tensor, initial: Tensor | None) -> Tensor:
        """The state after the tokens that `kept_BX` marks: any other gets decay 1 (g = 0) and beta 0, which change nothing."""
        kept_BX1 = kept_BX[:, :, None]
        return self.rule(self.query, self.key, self.value, g=self.g * kept_BX1, beta=self.beta * kept_BX1,
                         **{**self.options, "initial_state": initial, "output_final_state": True})[1]


def place_of(index_BX: Tensor) -> Place:
    """For `write`: token x of row b goes to index `index_BX[b, x]`. Made once for all layers."""
    return torch.arange(len(index_BX), device=index_BX.device)[:, None], index_BX


def write(kept_BGNC: Tensor, new_BGXC: Tensor, place: Place) -> None:
    """Put each token in its place, in place also where this is compiled."""
    row_B1, index_BX = place
    kept_BGNC[row_B1, :, index_BX] = new_BGXC.transpose(1, 2)


class LayerView:
    """One layer's part of the cache, which needs no layer's number: a compiler that met one would compile each layer anew."""

    def __init__(self, keys: Tensor, values: Tensor, place: Place, reach: int) -> None:
        self.keys, self.values, self.place, self.reach = keys, values, place, reach

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        write(self.keys, key_states, self.place)
        write(self.values, value_states, self.place)
        return self.keys[:, :, : self.reach], self.values[:, :, : self.reach]


class AttentionSlots(CacheLayerMixin):
    """Keys and values `[B, G, N, C]`, position p at index p, and the last index for what is padding."""

    is_compileable = True
    is_sliding = False

    def __init__(self, rollback: "RollbackCache", kind: str) -> None:
        super().__init__()
        self.rollback, self.kind = rollback, kind

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self.rollback.room("keys", self.kind, key_states)
        self.values = self.rollback.room("values", self.kind, value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self.view().update(key_states, value_states)

    def view(self) -> LayerView:
        """What a layer needs of the cache for the tokens that are read now."""
        return LayerView(self.keys, self.values, self.rollback.reading.place, self.rollback.reading.reach)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.rollback.capacity, 0

    def get_seq_length(self) -> int:
        raise AssertionError("rows have lengths of their own: positions and masks are given, not asked for")

    def get_max_length(self) -> int:
        return self.rollback.capacity


class LinearSlots(LinearAttentionCacheLayerMixin):
    """The states of a linear-attention layer: inputs of the convolution's window `[B, E, W]` and the recurrent state.

    Both are those after the settled tokens. A forward over tokens that may be rejected leaves its inputs in `window` and
    `inputs`, and `settle` brings the states forward by the accepted ones.
    """

    def __init__(self, rollback: "RollbackCache") -> None:
        super().__init__()
        self.rollback = rollback
        self.record_past = True  # the layer then asks for its window here, also when it reads one token
        self.has_previous_state = {0: True}  # a state of zeros is what a text begins with
        self.window: Tensor | None = None
        self.inputs: RuleInputs | None = None

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("states are made by the first update")

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, *, conv_kernel_size: int, **kwargs: Any) -> Tensor:
        if self.conv_states[0] is None:
            self.conv_states[0] = conv_states.new_zeros(*conv_states.shape[:2], conv_kernel_size)
        self.window = torch.cat((self.conv_states[0], conv_states), dim=-1)
        if self.rollback.reading.settled:
            self._settle_window(self.rollback.reading.valid_BX)
        return self.window

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self.inputs = self.rollback.reading.inputs
        if self.recurrent_states[0] is None:
            self.recurrent_states[0] = torch.zeros_like(recurrent_states)
        if self.rollback.reading.settled:  # the forward itself left out what is padding: see `rule_that_records`
            self.recurrent_states[0].copy_(recurrent_states)
        return recurrent_states

    def settle(self, kept_BX: Tensor) -> None:
        """The tokens that `kept_BX` marks, a prefix of those read last in each row, are now part of the text."""
        assert self.inputs is not None
        assert self.recurrent_states[0] is not None
        self._settle_window(kept_BX)
        self.recurrent_states[0].copy_(self.inputs.state_after(kept_BX, self.recurrent_states[0]))

    def _settle_window(self, kept_BX: Tensor) -> None:
        assert self.window is not None
        assert self.conv_states[0] is not None
        B, E, W = self.conv_states[0].shape
        index_BW = kept_BX.sum(1)[:, None] + torch.arange(W, device=kept_BX.device)
        self.conv_states[0].copy_(self.window.gather(2, index_BW[:, None].expand(B, E, W)))

    def reset(self) -> None:
        for state in (self.conv_states[0], self.recurrent_states[0]):
            if state is not None:
                state.zero_()


class RollbackCache(Cache):
    """One text a row, read piece by piece by the layers of a model whose layer kinds are `kinds`.

    `capacity` is a multiple of WHOLE_TILES; its last index takes padding.
    """

    def __init__(self, kinds: Sequence[str], *, capacity: int) -> None:
        self.capacity = whole_tiles(capacity + 1)
        self.reading: Reading
        super().__init__(layers=[LinearSlots(self) if kind == LINEAR else AttentionSlots(self, kind) for kind in kinds])
        self.kinds = kinds
        self.linear = [layer for layer in self.layers if isinstance(layer, LinearSlots)]
        self.stacks: list[Tensor] = []  # [L, B, G, N, C]
        self._free: dict[tuple[Any, ...], list[Tensor]] = {}

    def begin(self, reading: Reading) -> None:
        """Say what is read next."""
        self.reading = reading

    def room(self, name: str, kind: str, states_BGXC: Tensor) -> Tensor:
        """Where a layer of this kind may keep its keys or its values, `[B, G, N, C]`, zeros.

        Layers of one kind lie side by side, keys and values apart: what is moved is moved in all layers by one kernel.
        """
        B, G, _, C = states_BGXC.shape
        free = self._free.setdefault((name, kind, B, G, C, states_BGXC.dtype, states_BGXC.device), [])
        if not free:
            self.stacks.append(states_BGXC.new_zeros(self.kinds.count(kind), B, G, self.capacity, C))
            free += self.stacks[-1].unbind()
        return free.pop()

    def move(self, from_BX: Tensor, to_BX: Tensor) -> None:
        """Copy keys and values from some indices to others."""
        for stack_LBGNC in self.stacks:
            L, B, G, _, C = stack_LBGNC.shape
            from_LBGXC, to_LBGXC = (at_BX[None, :, None, :, None].expand(L, B, G, -1, C) for at_BX in (from_BX, to_BX))
            stack_LBGNC.scatter_(3, to_LBGXC, stack_LBGNC.gather(3, from_LBGXC))

    def settle(self, kept_BX: Tensor) -> None:
        """Of the tokens read last, those that `kept_BX` marks stay."""
        for layer in self.linear:
            layer.settle(kept_BX)

    def reset(self) -> None:
        """Begin new texts. Keys of old ones need no clearing: no mask shows an index that was not written since."""
        for layer in self.linear:
            layer.reset()


def whole_tiles(count: int) -> int:
    """The next multiple of WHOLE_TILES."""
    return -(-count // WHOLE_TILES) * WHOLE_TILES


def layer_kinds(config: Any) -> tuple[str, ...]:
    """One kind a decoder layer, as transformers' own caches see them. Raises UserError for a kind that cannot be rolled back."""
    text = config.get_text_config()
    sliding = getattr(text, "sliding_window", None) is not None  # of a model that has one kind of layer only
    kinds = tuple(getattr(text, "layer_types", None) or [SLIDING if sliding else FULL] * text.num_hidden_layers)
    others = sorted(set(kinds) - {FULL, SLIDING, LINEAR})
    if others:
        raise UserError(f"target: has layers of kind {', '.join(repr(kind) for kind in others)}, whose state cannot be rolled "
                        f"back after a rejected draft: only '{FULL}', '{SLIDING}' and '{LINEAR}' layers can be decoded here")
    if getattr(text, "num_kv_shared_layers", None):
        raise UserError("target: has layers that share keys and values of others (num_kv_shared_layers): it cannot "
                        "be decoded here")
    return kinds


def delta_rule_modules(layers: nn.ModuleList, kinds: Sequence[str]) -> list[Any]:
    """The Python modules whose functions update the recurrent states of `layers`. Raises UserError where there is none."""
    found: dict[str, Any] = {}
    for layer, kind in zip(layers, kinds, strict=True):
        if kind != LINEAR:
            continue
        module = sys.modules[type(layer).__module__]
        if not all(hasattr(module, name) for name in DELTA_RULES):
            raise UserError(f"target: the linear-attention layers of {type(layer).__name__} are not of the gated delta kind, "
                            "whose update can be repeated for accepted tokens alone: this architecture cannot be decoded here")
        found[module.__name__] = module
    return list(found.values())


@contextlib.contextmanager
def recorded_rules(modules: Sequence[Any], cache: RollbackCache) -> Iterator[None]:
    """While open, delta rules leave their inputs in `cache.reading`, and pass over padding when what they read is settled."""
    originals = [(module, name, getattr(module, name)) for module in modules for name in DELTA_RULES]
    for module, name, rule in originals:
        setattr(module, name, rule_that_records(rule, cache))
    try:
        yield
    finally:
        for module, name, rule in originals:
            setattr(module, name, rule)


def rule_that_records(rule: Callable[..., Any], cache: RollbackCache) -> Callable[..., Any]:
    """`rule` with its inputs kept; see `recorded_rules`."""

    def recorded(query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **options: Any) -> Any:
        if cache.reading.settled:
            valid_BX1 = cache.reading.valid_BX[:, :, None]
            g, beta = g * valid_BX1, beta * valid_BX1
        cache.reading.inputs = RuleInputs(rule, query, key, value, g, beta, options)
        return rule(query, key, value, g=g, beta=beta, **options)

    return recorded
