"""Rows of a matrix as the row kernels walk them: one warpgroup, whole vectors a thread, a few pieces a row."""

from pallas_kernels.common.sm90 import WARPGROUP


def pieces(width: int, piece: int) -> list[int]:
    """Starts of pieces that cover ``width`` elements; the last one reaches back into the one before when it must.

    What two pieces share is computed twice and written twice, with the same bits.
    """
    return [min(start, width - piece) for start in range(0, width, piece)]


def vector_length(width: int, itemsize: int) -> int:
    """Elements a thread loads at once: up to 16 bytes, fewer where a row has under 128 such vectors. 0 if none fits."""
    length = 16 // itemsize
    while length and (width < WARPGROUP * length or width % length):
        length //= 2
    return length
