"""Pairs of neighbouring tiles of one expert, each of which one CTA multiplies with the numbers that it converts."""

import jax
import jax.numpy as jnp


def tile_pairs(
    tile_expert: jax.Array, num_tiles: jax.Array, tile_rows: jax.Array | None, block_m: int
) -> dict[str, jax.Array]:
    """The table of pairs, as the kernel's operands are named.

    The tiles of an expert are neighbours, as ``align`` makes them; from the first on, two and two are a pair. Where an
    expert has its tiles in several places, each place has pairs of its own.

    Args: as ``grouped_dgrad`` has them; tile_rows: None where all rows of the tiles are in use.

    Returns, with P the number of tiles, which pairs do not exceed:
        first_tile: (P,) int32. tile_expert: (P,) int32, the expert. tile_rows: (P,) int32, rows from the first tile's
        start on that hold those in use, 0 to 2 * block_m. num_tiles: (1,) int32, number of pairs. Entries from this
        number on are unspecified.
    """
    # Compared with one another, tiles need no scan and no sort: XLA makes one kernel of each of three reductions.
    tiles, count = tile_expert.shape[0], num_tiles.reshape(())
    index = jnp.arange(tiles, dtype=jnp.int32)
    is_first = (index == 0) | (tile_expert != jnp.roll(tile_expert, 1))  # of a run of tiles of one expert
    is_before = index[None, :] <= index[:, None]
    run = jnp.max(jnp.where(is_before & is_first[None, :], index[None, :], 0), axis=1)
    place = (index - run) & 1  # in the pair
    opens = (place == 0) & (index < count)
    pair = jnp.sum(is_before & opens[None, :], axis=1, dtype=jnp.int32) - 1
    is_own = (pair[None, :] == index[:, None]) & (index < count)[None, :]
    rows = jnp.full((tiles,), block_m, jnp.int32) if tile_rows is None else tile_rows
    ends = jnp.where(rows > 0, place * block_m + rows, 0)

    def of_pair(values: jax.Array) -> jax.Array:
        return jnp.max(jnp.where(is_own, values[None, :], 0), axis=1)

    return dict(
        first_tile=of_pair(index - place),
        tile_expert=of_pair(tile_expert),
        tile_rows=of_pair(ends),
        num_tiles=pair[-1:] + 1,
    )
