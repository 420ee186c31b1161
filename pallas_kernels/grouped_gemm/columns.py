"""How warps multiply a few rows with 16 channels each and share K: what the kernels of plain and of packed weights that
are not multiplied by wgmma have in common.
"""

import dataclasses

from pallas_kernels.common.sm90 import WARPS

CHANNELS = 16  # of a warp: the rows of one mma.sync
ROW_PIECES = 8  # of 16 bytes of a row of x, with which a block is multiplied
LEAST_SLOTS = 3  # of a ring
FEW_ROWS = 4  # of a tile
SPLITS = (4, 2, 1)  # of K among the warps of a CTA, preferred ones first


@dataclasses.dataclass(frozen=True)
class ColumnsConfig:
    """Each warp of a warpgroup multiplies 16 channels of every projection with its part of a tile's rows.

    k_split: how many warps share their channels, each with its part of K.
    """

    k_split: int

    @property
    def block_n(self) -> int:
        """Columns of a CTA."""
        return CHANNELS * WARPS // self.k_split


@dataclasses.dataclass(frozen=True)
class Ring:
    """What each warp keeps in shared memory, in pieces of 16 bytes, one after the other for each of ``slots`` blocks.

    steps: blocks of K of a warp, or one more than that. ahead: blocks under way before one is multiplied. words,
    scales, zeros: pieces of one projection, the latter two of what lies beside the blocks.
    """

    steps: int
    slots: int
    ahead: int
    words: int
    scales: int = 0
    zeros: int = 0


def ring(steps: int, room: int, words: int, scales: int = 0, zeros: int = 0) -> Ring:
    """As deep as there is ``room`` for, in slots; all else as ``Ring`` has it."""
    slots = min(steps, room)
    return Ring(steps, slots, slots if slots == steps else slots - 1, words, scales, zeros)
