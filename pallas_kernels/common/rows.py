"""How kernels cut rows into pieces, and rows that are the same in every tile."""

import jax
import jax.numpy as jnp

from pallas_kernels.common.sm90 import WARPGROUP


def pieces(width: int, piece: int) -> list[int]:
    """Starts of pieces that cover ``width`` elements; the last one may reach back into the one before.

    What two pieces share is computed twice and written twice, with the same bits.
    """
    return [min(start, width - piece) for start in range(0, width, piece)]


def in_every_tile(x: jax.Array, tiles: int, block_m: int) -> jax.Array:
    """(T, K), T <= block_m -> (tiles * block_m, K): tiles that all have the same rows, zeros below them."""
    return jnp.tile(jnp.pad(x, ((0, block_m - x.shape[0]), (0, 0))), (tiles, 1))


def scales_in_every_tile(x_scale: jax.Array | None, tiles: int) -> jax.Array | None:
    """Scales (block_m,) or (groups, block_m) of a tile's rows -> of the rows of all tiles; None and () as they are."""
    if x_scale is None or not x_scale.ndim:
        return x_scale
    return jnp.tile(x_scale, tiles)


def check_unpermuted_rows(num_rows: int, block_m: int) -> None:
    """Raise ValueError where x (num_rows, K) cannot be the first rows of every tile of block_m rows."""
    if not 1 <= num_rows <= block_m:
        raise ValueError(f"x has {num_rows} rows, expected 1 to block_m={block_m}, the first of every tile")


def unpermuted_rows_error(unpermuted_rows: int, block_m: int) -> str | None:
    """Why TMA copies cannot bring the same rows into every tile of block_m, or None.

    A TMA box is 8 rows high. Mosaic cuts an array into whole boxes, or takes a part of one. unpermuted_rows: 0 for
    tiles with rows of their own.
    """
    if unpermuted_rows > block_m:
        return f"the same {unpermuted_rows} rows in every tile: a tile has {block_m}"
    if unpermuted_rows > 8 and unpermuted_rows % 8:
        return f"the same {unpermuted_rows} rows in every tile: up to 8, or a multiple of 8"
    return None


def vector_length(width: int, itemsize: int) -> int:
    """Elements a thread loads at once: up to 16 bytes, fewer where a row has under 128 such vectors. 0 if none fits."""
    length = 16 // itemsize
    while length and (width < WARPGROUP * length or width % length):
        length //= 2
    return length
