"""Takes TokenRows and a target, gives Features, each document run on its own; knows nothing of anchors, drafters or losses."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from outrider.errors import UserError
from outrider.features.kernels import to_device
from outrider.features.target import Layers, Target
from outrider.records import PADDING_DOCUMENT, Features, TokenRows

MAX_PADDED_SHARE = 0.25  # of the tokens of one forward: below it a further document joins rather than starting a new one


class _LastCapturedLayer(Exception):  # noqa: N818 - a signal, not an error
    """Ends the forward pass once nothing above is needed."""


TakeOutput = Callable[[int, Tensor], None]  # j, output [B, X, D] of the j-th captured layer


@contextlib.contextmanager
def captured_layers(target: Layers, layer_ids: Sequence[int], *, stop_after_last: bool) -> Iterator[list[Tensor]]:
    """While open, each forward of the target fills the yielded list with the outputs `[B, X, D]` of `layer_ids`, in order."""
    outputs: list[Tensor] = []
    with handing_over(target, layer_ids, lambda j, output_BXD: outputs.append(output_BXD), stop_after_last=stop_after_last):
        yield outputs


@contextlib.contextmanager
def handing_over(target: Layers, layer_ids: Sequence[int], take: TakeOutput, *, stop_after_last: bool) -> Iterator[None]:
    """While open, each forward of the target hands the outputs of `layer_ids` to `take`, as they come about, on `target.device`.

    With `stop_after_last` the forward ends at the last of them, by an exception that the caller's forward must let pass
    through `run_to_last_layer`.
    """

    def keep(j: int) -> object:
        def hook(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            take(j, (output if isinstance(output, Tensor) else output[0]).to(target.device))
            if j == len(layer_ids) - 1 and stop_after_last:
                raise _LastCapturedLayer
        return hook

    handles = [target.layers[i].register_forward_hook(keep(j)) for j, i in enumerate(layer_ids)]  # type: ignore[arg-type]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Document:
    """One document's place in the rows: row b, positions start..start + length - 1."""

    b: int
    start: int
    length: int


def documents_of(document_ids_BS: Tensor) -> list[Document]:
    """The documents of rows, in reading order."""
    found = []
    for b, ids in enumerate(document_ids_BS.cpu()):
        values, counts = torch.unique_consecutive(ids, return_counts=True)
        start = 0
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            if value != PADDING_DOCUMENT:
                found.append(Document(b, start, count))
            start += count
    return found


def bucket_by_length(documents: Sequence[Document], max_tokens: int) -> list[list[Document]]:
    """Groups of documents of like length, longest first, each padded to its longest within MAX_PADDED_SHARE and `max_tokens`."""
    groups: list[list[Document]] = []
    tokens = 0
    for document in sorted(documents, key=lambda d: (-d.length, d.b, d.start)):
        if groups:
            padded = groups[-1][0].length * (len(groups[-1]) + 1)
            if padded <= max_tokens and (padded - tokens - document.length) <= MAX_PADDED_SHARE * padded:
                groups[-1].append(document)
                tokens += document.length
                continue
        groups.append([document])
        tokens = document.length
    return groups


def feature_buffer(target: Layers, rows: TokenRows, layer_ids: Sequence[int]) -> Tensor:
    """An uninitialised buffer `[B, S, L * D]` for the features of `rows`, in the target's dtype on its device."""
    B, S = rows.input_ids_BS.shape
    return torch.empty(B, S, len(layer_ids) * target.facts.hidden_size, dtype=target.dtype, device=target.device)


@torch.no_grad()
def capture(
    target: Layers, rows: TokenRows, layer_ids: Sequence[int], *, hidden_BSD: Tensor | None = None, out_BSF: Tensor | None = None
) -> Features:
    """The outputs of `layer_ids` for every token, concatenated: `[B, S, L * D]` in the target's dtype, 0 on padding.

    Each document is run on its own (documents of like length side by side, padded on the right, where a causal model does
    not look), so no document sees another, whatever the kind of its layers. No head, nothing after the last captured layer.
    The outputs are written into `out_BSF` (or a new buffer) as the layers give them. With `rows` on the CPU everything is
    launched on the current stream of the target's device and nothing waits for it. With `hidden_BSD`, on that device too, the
    layers begin from these hidden states instead of the tokens.
    """
    if out_BSF is None:
        out_BSF = feature_buffer(target, rows, layer_ids)
    out_BSLD = out_BSF.unflatten(-1, (len(layer_ids), -1))
    zero_padding(out_BSF, rows)
    for group in bucket_by_length(documents_of(rows.document_ids_BS), max_tokens=rows.input_ids_BS.numel()):
        of_rows = rows.input_ids_BS if hidden_BSD is None else hidden_BSD
        inputs_GX = of_rows.new_zeros(len(group), group[0].length, *of_rows.shape[2:])
        for g, document in enumerate(group):
            inputs_GX[g, : document.length] = of_rows[document.b, document.start : document.start + document.length]

        def take(j: int, output_GXD: Tensor, group: list[Document] = group) -> None:
            for g, document in enumerate(group):
                out_BSLD[document.b, document.start : document.start + document.length, j] = output_GXD[g, : document.length]

        with handing_over(target, layer_ids, take, stop_after_last=True):
            run_to_last_layer(target, inputs_GX)
    return Features(out_BSF)


def zero_padding(out_BSF: Tensor, rows: TokenRows) -> None:
    """0 in the padding, which stands at each row's end."""
    for b, length in enumerate((rows.document_ids_BS != PADDING_DOCUMENT).sum(dim=1).tolist()):
        out_BSF[b, length:] = 0


def run_to_last_layer(target: Layers, inputs_GX: Tensor, **given: Any) -> None:
    """Forward the decoder over token ids `[G, X]` (on any device) or hidden states `[G, X, D]`, without the head, until
    `handing_over` stops it."""
    name = "inputs_embeds" if inputs_GX.is_floating_point() else "input_ids"
    with contextlib.suppress(_LastCapturedLayer):
        target.decoder(**{name: to_device(inputs_GX, target.device)}, use_cache=False, **given)


CaptureRows = Callable[[TokenRows], Features]


class Kept(Protocol):
    """Features of rows by row number, each `[S, F]` on the CPU."""

    def put(self, row_id: int, values_SF: Tensor) -> None: ...

    def get(self, row_id: int, dtype: torch.dtype) -> Tensor | None:
        """None for a row that is not kept, or not any more as it was."""


class InMemory:
    """Features kept in host memory, S * F * dtype bytes a row."""

    def __init__(self) -> None:
        self._values: dict[int, Tensor] = {}

    def put(self, row_id: int, values_SF: Tensor) -> None:
        self._values[row_id] = values_SF.cpu()

    def get(self, row_id: int, dtype: torch.dtype) -> Tensor | None:
        return self._values[row_id].to(dtype) if row_id in self._values else None


class FeatureSource:
    """Captures the features of rows, or gives those kept from before.

    With `keep` each row's features stay (in host memory, or wherever a `Kept` puts them) after its first pass: the target runs
    once over the data instead of once an epoch. Rows never change, so what is kept in the target's dtype equals a fresh capture
    bit for bit. `run` captures in another way than `capture`; `elsewhere`: in another process, giving features on the CPU.
    """

    def __init__(
        self, target: Target, layer_ids: Sequence[int], *, keep: Literal["no", "memory"] | Kept, run: CaptureRows | None = None,
        elsewhere: bool = False,
    ) -> None:
        self.target, self.layer_ids = target, layer_ids
        self.elsewhere = elsewhere
        self.device = torch.device("cpu") if elsewhere else target.device
        self.run = run or (lambda rows: capture(target, rows, layer_ids))
        self._kept: Kept | None = None if keep == "no" else InMemory() if keep == "memory" else keep

    @property
    def keeps(self) -> bool:
        """Whether rows are captured once and then only read."""
        return self._kept is not None

    def features(self, rows: TokenRows, device: torch.device) -> Features:
        """Features of `rows`, `[B, S, F]` on `device`. Rows on the CPU cost no wait for the device (see `capture`)."""
        kept = self._kept
        if kept is None:
            return self.run(rows).to(device)
        parts = [self._row(kept, one_row(rows, b), row_id) for b, row_id in enumerate(rows.row_ids_B.tolist())]
        return Features(torch.stack(parts).to(device))

    def _row(self, kept: Kept, row: TokenRows, row_id: int) -> Tensor:
        """Features of one row, `[S, F]` on the CPU."""
        if (row.document_ids_BS == PADDING_DOCUMENT).all():  # in place of a row that could not be read: not to outlast that
            return self.run(row).values_BSF[0].cpu()
        values = kept.get(row_id, self.target.dtype)
        if values is None:
            kept.put(row_id, self.run(row).values_BSF[0])
            values = kept.get(row_id, self.target.dtype)
        if values is None:
            raise UserError(f"features.keep: row {row_id} cannot be read back as it was just written: look at the disk, or keep "
                            "none (\"no\")")
        return values


def one_row(rows: TokenRows, b: int) -> TokenRows:
    """Row b alone, B = 1."""
    return TokenRows(**{f.name: getattr(rows, f.name)[b : b + 1] for f in fields(rows)})
