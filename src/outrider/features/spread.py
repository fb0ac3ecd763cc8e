"""Takes a target whose layers stand on several devices, gives its features by shares, one after another; knows no streams.

A share is a decoder of its own whose inputs are the hidden states that the one before it gave. Whoever runs the shares of several
rows side by side (train/relay.py) has every device at work; run one after another (`SpreadCapture`) they give the same bits.
"""

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from outrider.features.target import Stretch, Target
from outrider.records import Features, TokenRows

# Rows and the hidden states `[B, S, D]` that they begin from (None: from the tokens), on its device, to `Features`
RunShare = Callable[..., Features]
NOT_COPIED = ("layers", "embed_tokens", "norm")  # the large parts of a decoder, of which a share has its layers


class Share:
    """The layers of one stretch, as `Layers` of their own; `layer_ids` counts from its first one.

    It gives the layers of `layer_ids`, D channels each: the `captured` first of them are features, the last one is what the next
    share begins from (and a feature too where it is captured).
    """

    def __init__(self, target: Target, stretch: Stretch, layer_ids: Sequence[int]) -> None:
        """`layer_ids`: those to capture, of the whole target."""
        within = stretch.layers
        self.device, self.dtype = stretch.device, target.dtype
        kinds = target.facts.layer_kinds[within.start : within.stop]
        self.facts = replace(target.facts, num_layers=len(within), layer_kinds=kinds)
        self.decoder = _decoder_of(target.decoder, stretch)
        self.layers: nn.ModuleList = self.decoder.layers  # type: ignore[assignment]
        here = [i - within.start for i in layer_ids if i in within]
        self.captured = len(here)
        handed = [] if max(layer_ids) in within or here[-1:] == [len(within) - 1] else [len(within) - 1]
        self.layer_ids = (*here, *handed)

    @property
    def width(self) -> int:
        """Channels of its output that are features."""
        return self.captured * self.facts.hidden_size


def _decoder_of(decoder: nn.Module, stretch: Stretch) -> nn.Module:
    """The decoder with these layers alone. They are the same modules; what belongs to no layer (rotary tables) is copied."""
    config: Any = copy.copy(decoder.config)
    kinds, within = getattr(config, "layer_types", None), stretch.layers
    config.num_hidden_layers = len(within)
    if kinds is not None:
        config.layer_types = kinds[within.start : within.stop]
    layers = nn.ModuleList(list(cast(nn.ModuleList, decoder.layers))[within.start : within.stop])
    for module in layers.modules():  # each share names its own way of attention while it runs
        if getattr(module, "config", None) is decoder.config:
            module.config = config
    own = copy.copy(decoder)
    own._modules = {name: child if name in NOT_COPIED else copy.deepcopy(child).to(stretch.device)
                    for name, child in decoder.named_children()}
    own.layers, own.config = layers, config
    return own


def shares_of(target: Target, stretches: Sequence[Stretch], layer_ids: Sequence[int]) -> list[Share]:
    """The shares that capture needs, in order: none after the one with the last of `layer_ids`."""
    return [Share(target, stretch, layer_ids) for stretch in stretches if stretch.layers.start <= max(layer_ids)]


class SpreadCapture:
    """Captures through all shares one after another, each by its own `run`, on the current stream of its device."""

    def __init__(self, target: Target, shares: Sequence[Share], runs: Sequence[RunShare]) -> None:
        self.target, self.shares, self.runs = target, tuple(shares), tuple(runs)

    def __call__(self, rows: TokenRows) -> Features:
        """Features `[B, S, F]` on `target.device`, of rows on the CPU."""
        outs = [self.run(0, rows, None)]
        for number, share in enumerate(self.shares[1:], start=1):
            outs.append(self.run(number, rows, self.handed_on(outs[-1], share.device)))
        return Features(self.gathered(outs, self.target.device))

    def run(self, number: int, rows: TokenRows, hidden_BSD: Tensor | None) -> Tensor:
        """What share `number` gives: its layers' outputs `[B, S, layers * D]` on its device, launched on the current stream."""
        given = {} if hidden_BSD is None else {"hidden_BSD": hidden_BSD}
        with on(self.shares[number].device):
            return self.runs[number](rows, **given).values_BSF

    def handed_on(self, out_BSF: Tensor, device: torch.device) -> Tensor:
        """The hidden states `[B, S, D]` that the next share begins from, on its `device`."""
        hidden_BSD = out_BSF[..., -self.target.facts.hidden_size :]
        return hidden_BSD.to(device, non_blocking=device.type == "cuda").contiguous()

    def gathered(self, outs: Sequence[Tensor], device: torch.device) -> Tensor:
        """The features in the shares' outputs side by side, `[B, S, F]` on `device`."""
        widths = [share.width for share in self.shares]
        values_BSF = torch.empty(*outs[0].shape[:2], sum(widths), dtype=outs[0].dtype, device=device)
        for part_BSF, out_BSF, width in zip(values_BSF.split(widths, dim=-1), outs, widths, strict=True):
            part_BSF.copy_(out_BSF[..., :width], non_blocking=device.type == "cuda")
        return values_BSF


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes a CUDA device the current one, which Triton's kernels ask for."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
