"""Which tile a persistent block works on next."""

from typing import Any

import jax.numpy as jnp
from jax import lax


def tiles_of_block(block: Any, total: Any, num_blocks: int) -> Any:
    """How many of ``total`` tiles fall to ``block`` when block b takes b, b + num_blocks, ..."""
    return lax.div(total - block + (num_blocks - 1), jnp.int32(num_blocks))


def tile_index(linear: Any, row_tiles: Any, column_tiles: int, raster_group_m: int) -> tuple[Any, Any]:
    """(row tile, column tile) of a linear index: bands of ``raster_group_m`` row tiles, inside a raster_group_m rows
    fastest.

    row_tiles is known on the device only; the last raster_group_m may be shorter. Blocks that run at the same time
    then work on
    one raster_group_m: its rows stay in L2 while the weights of its experts pass by once.
    """
    per_band = jnp.int32(raster_group_m * column_tiles)
    first = lax.div(linear, per_band) * raster_group_m
    inside = lax.rem(linear, per_band)
    rows = lax.min(jnp.int32(raster_group_m), row_tiles - first)
    column = lax.div(inside, rows)
    return first + (inside - column * rows), column
