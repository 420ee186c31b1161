"""Which tile a CTA takes when, which steps of keys it walks, and which of them need a mask.

Functions of int32 scalars: of the device inside the kernel, of any jax.Array in tests.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention.config import BLOCK_Q, ROWS, PrefillConfig, PrefillDesc
from pallas_kernels.common.types import Ref, Scalar


@dataclasses.dataclass(frozen=True)
class Tile:
    """128 queries of one head.

    Args:
        row, head, query: row of the batch, query head, first query.
        start, length: slots of the row in use.
        slot: of the first query.
        last_step: the step of keys that is walked first.
        num_steps: how many are walked, at least one.
        shared: slots that sequences share, the number of steps before the walk goes on with these, and the steps of
            keys between; None where there is no such thing.
    """

    row: Scalar
    head: Scalar
    query: Scalar
    start: Scalar
    length: Scalar
    slot: Scalar
    last_step: Scalar
    num_steps: Scalar
    shared: tuple[Scalar, Scalar, Scalar] | None = None

    def step(self, i: Scalar) -> jax.Array:
        """The step of keys that is walked as the i-th."""
        step = jnp.int32(self.last_step - i)
        if self.shared is None:
            return step
        _, begin, gap = self.shared
        return step - jnp.where(i >= begin, gap, 0)


def num_tiles_of(desc: PrefillDesc, config: PrefillConfig, cta: Scalar) -> Scalar:
    """How many tiles a CTA takes."""
    rounds, left = divmod(desc.num_tiles, config.num_sms)
    return rounds + jnp.where(_place(config, rounds, cta) < left, 1, 0)


def tile_of(desc: PrefillDesc, config: PrefillConfig, places: Mapping[str, Ref], cta: Scalar, t: Scalar) -> Tile:
    """Tile t of a CTA. places: starts, lengths and first_slots, (B,) each; with sequences also first_keys, (B, S) with
    S in whole tiles, and, but for windows, shared, (B,).

    Tiles go from the last queries, which see most, to the first. Every second round runs through the CTAs backwards:
    causal tiles of very different lengths then add up to nearly the same in every CTA.
    """
    index = t * config.num_sms + _place(config, t, cta)
    heads = jnp.int32(desc.batch * desc.num_heads)
    query_tile = desc.query_tiles - 1 - lax.div(index, heads)
    query = pl.multiple_of(query_tile * BLOCK_Q, BLOCK_Q)
    index = lax.rem(index, heads)
    row, head = lax.div(index, jnp.int32(desc.num_heads)), lax.rem(index, jnp.int32(desc.num_heads))
    start, length, first_slot = (places[name][row] for name in ("starts", "lengths", "first_slots"))
    slot = first_slot + query
    first, end = start, length
    if desc.is_causal:
        end = lax.min(end, slot + lax.min(jnp.int32(BLOCK_Q), desc.num_queries - query))
    if desc.window is not None:
        first = lax.max(first, slot - (desc.window - 1))
    if desc.has_sequences:
        first = lax.max(first, places["first_keys"][row, query])
    size, last = jnp.int32(config.block_kv), jnp.int32(-(-desc.num_slots // config.block_kv) - 1)
    first_step = lax.min(lax.div(first, size), last)
    end_step = lax.max(lax.div(end + (size - 1), size), first_step + 1)
    tile = Tile(row, head, query, start, length, slot, end_step - 1, end_step - first_step)
    if not desc.has_sequences or desc.window is not None:
        return tile
    shared = places["shared"][row]
    shared_end = lax.min(lax.div(lax.min(shared, end) + (size - 1), size), first_step)
    num_shared = lax.max(shared_end - lax.div(start, size), 0)
    where = (shared, tile.num_steps, first_step - shared_end)
    return dataclasses.replace(tile, num_steps=tile.num_steps + num_shared, shared=where)


def unmasked_steps(
    desc: PrefillDesc, config: PrefillConfig, places: Mapping[str, Ref], tile: Tile, consumer: Scalar
) -> tuple[Scalar, Scalar]:
    """(first, end) of a tile's steps, counted in the order of the walk, that need no mask. places: as of ``tile_of``.

    Every query of this consumer sees all of their slots. The step walked first is never among them, nor is one of slots
    that sequences share.
    """
    slot, size = tile.slot + consumer * ROWS, jnp.int32(config.block_kv)
    seen_by_all = lax.min(tile.length, slot + 1) if desc.is_causal else tile.length
    unseen_by_some = tile.start
    if desc.window is not None:
        unseen_by_some = lax.max(unseen_by_some, slot + (ROWS - desc.window))
    if desc.has_sequences:
        last = tile.query + consumer * ROWS + (ROWS - 1)
        unseen_by_some = lax.max(unseen_by_some, places["first_keys"][tile.row, last])
    first = tile.last_step + 1 - lax.div(seen_by_all, size)
    first = lax.min(lax.max(first, jnp.int32(1)), tile.num_steps)
    end = tile.last_step + 1 - lax.div(unseen_by_some + (size - 1), size)
    return first, lax.min(lax.max(end, first), tile.num_steps)


def _place(config: PrefillConfig, t: Scalar, cta: Scalar) -> Scalar:
    """Where in round t a CTA stands."""
    return jnp.where(lax.rem(jnp.int32(t), jnp.int32(2)) == 1, config.num_sms - 1 - cta, cta)
