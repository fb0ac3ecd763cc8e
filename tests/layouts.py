"""Rows and blocks that the tests of masks and of attention share, by name."""

import torch

from outrider.records import DraftBlocks, TokenRows


def layout(S: int, A: int, K: int, documents: list[list[int]], dropped: int, seed: int) -> tuple[TokenRows, DraftBlocks]:
    """Rows of the given document lengths (the rest padding) with A sorted random anchors, the last `dropped` of them empty."""
    generator = torch.Generator().manual_seed(seed)
    ids, positions = torch.full((len(documents), S), -1), torch.zeros(len(documents), S, dtype=torch.int64)
    anchors = torch.zeros(len(documents), A, dtype=torch.int64)
    for b, lengths in enumerate(documents):
        start = 0
        for number, length in enumerate(lengths):
            ids[b, start : start + length] = number
            positions[b, start : start + length] = torch.arange(length)
            start += length
        anchors[b, : A - dropped] = torch.randint(start, (A - dropped,), generator=generator).sort().values
    keep = (torch.arange(A) < A - dropped).expand(len(documents), A)
    zeros = torch.zeros(len(documents), A, K, dtype=torch.int64)
    rows = TokenRows(ids.clamp(min=0), ids, positions, ids >= 0, torch.arange(len(documents)))
    places = positions.gather(1, anchors)[:, :, None] + torch.arange(K)
    return rows, DraftBlocks(anchors, keep, zeros, places, zeros, zeros.float())


CASES = {
    "one document, whole tiles": (512, 32, 16, [[512]], 0),
    "packed": (640, 24, 16, [[100, 29, 300, 211]], 0),
    "padding and dropped blocks": (512, 40, 16, [[130, 200], [512]], 7),
    "all blocks dropped": (256, 8, 16, [[256]], 8),
    "row not a multiple of 128": (333, 16, 16, [[100, 233], [5, 1, 300]], 1),
    "queries not a multiple of 128": (384, 13, 10, [[384], [200, 184]], 2),
    "blocks across tiles": (513, 43, 10, [[513]], 3),
    "one token": (1, 2, 4, [[1]], 0),
    "127, 129": (127, 43, 3, [[60, 67]], 0),
    "1000": (1000, 63, 8, [[999], [1, 500, 400]], 5),
}
