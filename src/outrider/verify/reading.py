"""Takes a target and tokens of several texts, gives hidden states and features, and forgets what is rejected; knows no drafts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import UserError
from outrider.features.capture import captured_layers
from outrider.features.target import Target
from outrider.records import FULL, SLIDING
from outrider.verify.execution import Execution
from outrider.verify.rollback import (
    AttentionSlots,
    Reading,
    RollbackCache,
    delta_rule_modules,
    layer_kinds,
    place_of,
    recorded_rules,
    whole_tiles,
)

MASKED = ("sdpa", "eager")  # attention implementations of transformers that take a mask, which they add to the scores
PROMPT_CHUNK = 1024  # prompt tokens a forward: a mask of 1024 x 32,768 is 32 MiB a row


class TargetReader:
    """Texts read by the target side by side, piece by piece, a text a row; features are those of `layer_ids`.

    `length_B` int64: the tokens of each row that are settled. `rows` texts of up to `capacity` tokens.
    Raises UserError for a target whose layers or attention cannot be handled.
    """

    def __init__(
        self, target: Target, layer_ids: Sequence[int], *, rows: int, capacity: int, execution: Execution
    ) -> None:
        config = target.model.config.get_text_config()
        self.target, self.layer_ids, self.kinds = target, layer_ids, layer_kinds(config)
        if config._attn_implementation not in MASKED:
            raise UserError(f"target: its attention implementation is '{config._attn_implementation}', decoding needs one of "
                            f"{', '.join(MASKED)}: load it with attn_implementation='sdpa'")
        self.window = config.sliding_window if SLIDING in self.kinds else None
        self.cache = RollbackCache(self.kinds, capacity=capacity)
        self.modules = delta_rule_modules(target.layers, self.kinds)
        self.compiled_layer, self.fixed_shapes = execution.compiled(read_layer), execution.fixed_shapes
        self.length_B = torch.zeros(rows, dtype=torch.int64, device=target.device)

    def reset(self) -> None:
        """Begin new texts."""
        self.length_B.zero_()
        self.cache.reset()

    @torch.no_grad()
    def read_settled(self, ids_BX: Tensor, count_B: Tensor) -> tuple[Tensor, Tensor | None]:
        """Read the first `count_B` of `ids_BX`, the rest is padding; they stay. Gives hidden states and features `[B, X, ..]`."""
        offset_X = torch.arange(ids_BX.shape[1], device=ids_BX.device)
        valid_BX = offset_X < count_B[:, None]
        out = self._read(ids_BX, self.length_B[:, None] + offset_X, valid_BX, None, settled=True)
        self.length_B += count_B
        return out

    @torch.no_grad()
    def read(self, ids_BX: Tensor) -> tuple[Tensor, Tensor | None]:
        """Read `ids_BX` after what is settled; `keep` says how many of them stay."""
        offset_X = torch.arange(ids_BX.shape[1], device=ids_BX.device)
        valid_BX = torch.ones_like(ids_BX, dtype=torch.bool)
        return self._read(ids_BX, self.length_B[:, None] + offset_X, valid_BX, None, settled=False)

    @torch.no_grad()
    def read_tree(self, ids_BX: Tensor, depth_BX: Tensor, seen_BXX: Tensor) -> tuple[Tensor, Tensor | None]:
        """Read the nodes of a tree: node i stands `depth_BX` after the settled text, and sees it and nodes `seen_BXX[:, i]`."""
        valid_BX = torch.ones_like(ids_BX, dtype=torch.bool)
        return self._read(ids_BX, self.length_B[:, None] + depth_BX, valid_BX, seen_BXX, settled=False)

    @torch.no_grad()
    def keep(self, kept_B: Tensor, X: int) -> None:
        """Of the X tokens read last, the first `kept_B` of each row stay."""
        self.cache.settle(torch.arange(X, device=kept_B.device) < kept_B[:, None])
        self.length_B += kept_B

    @torch.no_grad()
    def keep_path(self, path_BX: Tensor, kept_B: Tensor) -> None:
        """Of the tree read last, the first `kept_B` nodes of `path_BX` stay, in this order."""
        to_BX = self.length_B[:, None] + torch.arange(path_BX.shape[1], device=path_BX.device)
        self.cache.move(self.length_B[:, None] + path_BX, to_BX)
        self.length_B += kept_B

    def _read(
        self, ids_BX: Tensor, positions_BX: Tensor, valid_BX: Tensor, seen_BXX: Tensor | None, *, settled: bool
    ) -> tuple[Tensor, Tensor | None]:
        offset_X = torch.arange(ids_BX.shape[1], device=ids_BX.device)
        write_BX = torch.where(valid_BX, self.length_B[:, None] + offset_X, self.cache.capacity - 1)
        reach = self.cache.capacity
        if not self.fixed_shapes:  # attend to what is written, not to all that there is room for
            reach = min(reach, whole_tiles(int(self.length_B.max()) + ids_BX.shape[1]))
        self.cache.begin(Reading(place_of(write_BX), reach, valid_BX, settled=settled))
        masks = {kind: self._added(visible(
            positions_BX, write_BX, self.length_B, seen_BXX, keys=reach,
            window=self.window if kind == SLIDING else None)) for kind in (FULL, SLIDING) if kind in self.kinds}
        with ExitStack() as stack:
            stack.enter_context(recorded_rules(self.modules, self.cache))
            outputs = stack.enter_context(captured_layers(self.target, self.layer_ids, stop_after_last=False))
            if not settled or ids_BX.shape[1] == 1:  # prompts come in many widths: they are read as the code stands
                stack.enter_context(self._compiled_layers())
            hidden_BXD = self._forward(ids_BX, positions_BX, masks)
            return hidden_BXD, torch.cat(outputs, dim=-1) if outputs else None

    def _forward(self, ids_BX: Tensor, positions_BX: Tensor, masks: dict[str, Tensor]) -> Tensor:
        # a model with one kind of attention takes the mask itself, one with two a dictionary; linear layers need none here
        mask: Any = masks if len(masks) > 1 else next(iter(masks.values()))
        return self.target.model.get_decoder()(
            input_ids=ids_BX, attention_mask=mask, position_ids=positions_BX, past_key_values=self.cache, use_cache=True
        ).last_hidden_state

    @contextmanager
    def _compiled_layers(self) -> Iterator[None]:
        """While open, the attention layers run compiled: one compilation a shape serves them all, however many there are."""
        replaced, hooked = [], []
        if self.compiled_layer is not read_layer:
            for layer, slots in zip(self.target.layers, self.cache.layers, strict=True):
                if isinstance(slots, AttentionSlots) and slots.is_initialized:
                    layer.forward = partial(self._layer_forward, layer, slots)
                    replaced.append(layer)
                    # transformers' own collectors of attention weights cannot be traced, and collect nothing here
                    hooked += [(part, part._forward_hooks) for part in layer.modules() if part is not layer]
        for part, hooks in hooked:
            part._forward_hooks = type(hooks)()
        try:
            yield
        finally:
            for layer in replaced:
                del layer.forward
            for part, hooks in hooked:
                part._forward_hooks = hooks

    def _layer_forward(self, layer: nn.Module, slots: AttentionSlots, hidden_BXD: Tensor, **given: Any) -> Any:
        return self.compiled_layer(type(layer).forward, layer, hidden_BXD, {**given, "past_key_values": slots.view()})

    def _added(self, visible_B1XN: Tensor) -> Tensor:
        """What is added to the scores; a mask of truth values each layer would turn into this by itself."""
        hidden = torch.finfo(self.target.dtype).min
        return torch.zeros_like(visible_B1XN, dtype=self.target.dtype).masked_fill(~visible_B1XN, hidden)


def read_layer(forward: Callable[..., Any], layer: nn.Module, hidden_BXD: Tensor, given: dict[str, Any]) -> Any:
    """One layer of the target; `forward` is its class's own, whatever stands in its place on the instance."""
    return forward(layer, hidden_BXD, **given)


def visible(
    positions_BX: Tensor, write_BX: Tensor, length_B: Tensor, seen_BXX: Tensor | None, *, keys: int, window: int | None
) -> Tensor:
    """Who sees whom, `[B, 1, X, N]` bool over the first N = `keys` indices of the cache.

    Without `seen_BXX` a token sees all positions up to its own. With it, a tree: the settled text, and of the nodes read those
    that are marked. With a window also: query position - key position < window.
    """
    index_N = torch.arange(keys, device=positions_BX.device)
    if seen_BXX is None:
        key_positions_B1N = index_N[None, None]
        shown_BXN = index_N <= positions_BX[:, :, None]
    else:
        B, X = positions_BX.shape
        key_positions_B1N = index_N.repeat(B, 1).scatter(1, write_BX, positions_BX)[:, None]
        shown_BXN = (index_N < length_B[:, None, None]).expand(B, X, keys).scatter(2, write_BX[:, None].expand(B, X, X), seen_BXX)
    if window is not None:
        shown_BXN = shown_BXN & (positions_BX[:, :, None] - key_positions_B1N < window)
    return shown_BXN[:, None]


@torch.no_grad()
def read_prompts(
    reader: TargetReader, prompts: Sequence[Sequence[int]], absorb: Callable[[Tensor, Tensor], None] | None
) -> Tensor:
    """Read one prompt a row, none empty, and give the logits `[B, V]` of what follows each.

    `absorb` gets the features `[B, X, F]` of each chunk and how many of them are no padding, `[B]`.
    """
    device = reader.target.device
    longest = max(len(prompt) for prompt in prompts)
    ids_BX = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    length_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    reader.reset()
    last_BD: Tensor | None = None
    for start in range(0, longest, PROMPT_CHUNK):
        chunk_BX = ids_BX[:, start : start + PROMPT_CHUNK]
        count_B = (length_B - start).clamp(0, chunk_BX.shape[1])
        hidden_BXD, features_BXF = reader.read_settled(chunk_BX, count_B)
        if absorb is not None:
            assert features_BXF is not None
            absorb(features_BXF, count_B)
        end_BD = hidden_BXD[torch.arange(len(prompts)), (count_B - 1).clamp(min=0)]
        last_BD = end_BD if last_BD is None else torch.where((count_B > 0)[:, None], end_BD, last_BD)
    assert last_BD is not None
    return reader.target.head.logits(last_BD)
