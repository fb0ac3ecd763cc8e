"""Takes TokenRows and a target, gives Features; knows nothing of anchors, drafters or losses."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from outrider.features.target import Target
from outrider.records import PADDING_DOCUMENT, Features, TokenRows

MAX_PADDED_SHARE = 0.25  # of the tokens of one forward: below it a further document joins rather than starting a new one


class _LastCapturedLayer(Exception):  # noqa: N818 - a signal, not an error
    """Ends the forward pass once nothing above is needed."""


@contextlib.contextmanager
def captured_layers(target: Target, layer_ids: Sequence[int], *, stop_after_last: bool) -> Iterator[list[Tensor]]:
    """While open, each forward of the target fills the yielded list with the outputs `[B, X, D]` of `layer_ids`, in order.

    With `stop_after_last` the forward ends at the last of them, by an exception that the caller's forward must let pass
    through `run_to_last_layer`.
    """
    outputs: list[Tensor] = []

    def keep(is_last: bool) -> object:
        def hook(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            outputs.append(output if isinstance(output, Tensor) else output[0])
            if is_last and stop_after_last:
                raise _LastCapturedLayer
        return hook

    handles = [target.layers[i].register_forward_hook(keep(i == layer_ids[-1])) for i in layer_ids]  # type: ignore[arg-type]
    try:
        yield outputs
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


@torch.no_grad()
def capture(target: Target, rows: TokenRows, layer_ids: Sequence[int]) -> Features:
    """The outputs of `layer_ids` for every token, concatenated: `[B, S, L * D]` in the target's dtype, 0 on padding.

    Each document is run on its own (documents of like length side by side, padded on the right, where a causal model does
    not look), so no document sees another, whatever the kind of its layers. No head, nothing after the last captured layer.
    """
    B, S = rows.input_ids_BS.shape
    D = target.facts.hidden_size
    values_BSF = torch.zeros(B, S, len(layer_ids) * D, dtype=target.dtype, device=target.device)
    for group in bucket_by_length(documents_of(rows.document_ids_BS), max_tokens=B * S):
        ids_GX = torch.zeros(len(group), group[0].length, dtype=torch.int64)
        for g, document in enumerate(group):
            ids_GX[g, : document.length] = rows.input_ids_BS[document.b, document.start : document.start + document.length]
        with captured_layers(target, layer_ids, stop_after_last=True) as outputs:
            run_to_last_layer(target, ids_GX.to(target.device))
        features_GXF = torch.cat(outputs, dim=-1)
        for g, document in enumerate(group):
            values_BSF[document.b, document.start : document.start + document.length] = features_GXF[g, : document.length]
    return Features(values_BSF)


def run_to_last_layer(target: Target, ids_GX: Tensor) -> None:
    """Forward the decoder, without the head, until `captured_layers` stops it."""
    with contextlib.suppress(_LastCapturedLayer):
        target.model.get_decoder()(input_ids=ids_GX, use_cache=False)


class FeatureSource:
    """Captures the features of rows, or gives those kept from before.

    With `keep`, each row's features stay in host memory after its first pass (S * F * dtype bytes a row): the target runs once
    over the data instead of once an epoch. Rows never change, so what is kept equals a fresh capture bit for bit.
    """

    def __init__(self, target: Target, layer_ids: Sequence[int], *, keep: bool) -> None:
        self.target, self.layer_ids, self.keep = target, layer_ids, keep
        self._kept: dict[int, Tensor] = {}

    def features(self, rows: TokenRows, device: torch.device) -> Features:
        """Features of `rows`, `[B, S, F]` on `device`."""
        if not self.keep:
            return capture(self.target, rows, self.layer_ids).to(device)
        row_ids = rows.row_ids_B.tolist()
        for b, row_id in enumerate(row_ids):
            if row_id not in self._kept:
                self._kept[row_id] = capture(self.target, one_row(rows, b), self.layer_ids).values_BSF[0].cpu()
        return Features(torch.stack([self._kept[row_id] for row_id in row_ids]).to(device))


def one_row(rows: TokenRows, b: int) -> TokenRows:
    """Row b alone, B = 1."""
    return TokenRows(**{f.name: getattr(rows, f.name)[b : b + 1] for f in fields(rows)})
