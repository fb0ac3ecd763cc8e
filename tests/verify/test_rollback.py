"""The cache of the target's layers: layers of one kind side by side, and a move that is one for all of them."""

import torch

from outrider.records import FULL, SLIDING
from outrider.verify.rollback import Reading, RollbackCache, place_of

KINDS = (FULL, SLIDING, FULL)


def test_a_move_is_one_for_all_layers_of_a_kind() -> None:
    cache, written = RollbackCache(KINDS, capacity=20), torch.arange(12).view(2, 6)
    valid = torch.ones_like(written, dtype=torch.bool)
    cache.begin(Reading(place_of(torch.arange(6).expand(2, 6)), cache.capacity, valid, settled=False))
    for layer, number in zip(cache.layers, (100, 200, 300), strict=True):
        keys = (number + written)[:, None, :, None].expand(2, 3, 6, 4).float()
        layer.update(keys, -keys)
    cache.move(torch.tensor([[0, 4, 5], [0, 2, 3]]), torch.tensor([[0, 1, 2], [0, 1, 2]]))
    for layer, number in zip(cache.layers, (100, 200, 300), strict=True):
        wanted = number + torch.tensor([[0, 4, 5, 3, 4, 5], [6, 8, 9, 9, 10, 11]])
        assert layer.keys[:, 1, :6, 2].tolist() == wanted.tolist()
        assert layer.values[:, 1, :6, 2].tolist() == (-wanted).tolist()
    assert sorted(len(stack) for stack in cache.stacks) == [1, 1, 2, 2]  # keys and values of one sliding and two full layers
