"""Takes a GPU's compute capability and a head's width, gives the tile sizes of our own attention kernels; knows no tensors."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """Sizes of a kernel's tiles: rows (queries times heads), keys, and the warps and pipeline stages that suit them."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class SpanTiles:
    forward: Tiles
    backward: Tiles


HOPPER = (9, 0)
# Registers decide. Backward: 64 x 128 over 8 warps leaves dK, dV, scores and dP their 255 a thread. Forward: two programs a
# multiprocessor, so that one's exponentials meet the other's products. Tried and slower: bench/results/drafter_step.md
TILES = {
    64: SpanTiles(Tiles(128, 64, 4, 3), Tiles(64, 128, 8, 3)),
    128: SpanTiles(Tiles(64, 64, 4, 3), Tiles(64, 128, 8, 3)),
}


def span_tiles(*, capability: tuple[int, int], head_dim: int) -> SpanTiles | None:
    """Tiles for a CUDA device of this compute capability; None where the kernels were not seen to beat flex_attention."""
    return TILES.get(head_dim) if capability == HOPPER else None


def heads_a_tile(group: int) -> int:
    """How many of a group's heads stand side by side in a tile: the largest power of two that divides the group, at most 8."""
    return next(heads for heads in (8, 4, 2, 1) if group % heads == 0)
