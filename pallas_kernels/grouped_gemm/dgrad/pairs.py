"""Pairs of neighbouring tiles of one expert, each of which one CTA multiplies with the numbers that it converts."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def tile_pairs(
    tile_expert: jax.Array, num_tiles: jax.Array, tile_rows: jax.Array | None, block_m: int
) -> dict[str, jax.Array]:
    """The table of pairs, as the kernel's operands are named.

    The tiles of an expert are neighbours, as ``align`` makes them; from the first on, two and two are a pair. Where an
    expert has its tiles in several places, each place has pairs of its own. Pairs of two tiles come first, then those
    of one, which take less time: CTAs take pairs by turns, and in this order each gets as many of either kind.

    Args: as ``grouped_dgrad`` has them; tile_rows: None where all rows of the tiles are in use.

    Returns (P,) int32 each, with P the number of tiles, which pairs do not exceed:
        first_tile. tile_expert: the expert. tile_rows: rows from the first tile's start on that hold those in use, 0 to
        2 * block_m. num_tiles: at 0 the number of pairs. Other entries from this number on are unspecified.
    """
    # Compared with one another, tiles need no scan and no sort: three reductions.
    tiles, count = tile_expert.shape[0], num_tiles.reshape(())
    index = jnp.arange(tiles, dtype=jnp.int32)
    is_first = (index == 0) | (tile_expert != jnp.roll(tile_expert, 1))  # of a run of tiles of one expert
    is_last = jnp.roll(is_first, -1) | (index + 1 >= count)
    begins = (index[None, :] <= index[:, None]) & is_first[None, :]
    run = jnp.max(jnp.where(begins, index[None, :], 0), axis=1)
    place = (index - run) & 1  # in the pair
    opens = (place == 0) & (index < count)
    order = jnp.where((place == 0) & is_last, index + tiles, index)
    comes_first = (order[None, :] <= order[:, None]) & opens[None, :]
    pair = jnp.where(index < count, jnp.sum(comes_first, axis=1, dtype=jnp.int32) - 1, -1)
    rows = jnp.full((tiles,), block_m, jnp.int32) if tile_rows is None else tile_rows
    ends = jnp.where(rows > 0, place * block_m + rows, 0)
    is_own = pair[None, :] == index[:, None]
    columns = [jnp.where(is_own, values[None, :], 0) for values in (index - place, tile_expert, ends)]
    columns.append(jnp.broadcast_to(pair + 1, is_own.shape))

    def largest(ones: Any, others: Any) -> Any:
        return [lax.max(one, other) for one, other in zip(ones, others, strict=True)]

    found = lax.reduce(columns, [jnp.int32(0)] * len(columns), largest, [1])  # at once: one kernel, not three
    return dict(zip(("first_tile", "tile_expert", "tile_rows", "num_tiles"), found, strict=True))
