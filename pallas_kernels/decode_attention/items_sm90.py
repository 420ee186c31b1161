"""The work items of decode attention on the device: one split of the cache of one tile of queries."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.types import Ref, Scalar
from pallas_kernels.decode_attention.config import DecodeConfig, DecodeDesc


@dataclasses.dataclass(frozen=True)
class Item:
    """A split of one tile of columns; fields are int32 of the device.

    Args:
        row, head: of the batch, and the key head.
        column: of the key head's, the first one.
        index: of its partial sums.
        start, length, slot: of the row: slots in use, and the slot of the first query.
        first_step: the first block_kv slots with one in use.
        num_steps: how many are walked; 0 where no query sees the split.
    """

    row: Scalar
    head: Scalar
    column: Scalar
    index: Scalar
    start: Scalar
    length: Scalar
    slot: Scalar
    first_step: Scalar
    num_steps: Scalar


def seen(desc: DecodeDesc, start: Any, length: Any, slot: Any) -> tuple[Any, Any]:
    """[first, end) of the slots that any query of a row sees."""
    first = start if desc.window is None else lax.max(start, slot - (desc.window - 1))
    return first, lax.min(lax.min(length, slot + desc.num_queries), desc.num_slots)


def splits_of(desc: DecodeDesc, config: DecodeConfig, first: Any, end: Any) -> tuple[Any, Any, Any]:
    """(slots of a split, first split, end of the splits) of a row whose queries see the slots [first, end).

    Splits are counted from slot 0. Their size follows from the number of these slots alone, not from other rows.
    """
    most = desc.num_slots if desc.window is None else min(desc.num_slots, desc.window + desc.num_queries - 1)
    shift = jnp.int32(0)
    for bound in config.doubles_at:
        if most > bound:
            shift += jnp.where(end - first > bound, jnp.int32(1), jnp.int32(0))
    unit = jnp.int32(config.split)
    size = lax.shift_left(unit, shift)
    rest = lax.div(size, jnp.int32(2)) if config.joins_rest else size - 1
    begin, stop = (lax.shift_right_logical(lax.div(slots, unit), shift) for slots in (first, end + rest))
    if config.joins_rest:
        stop = lax.max(stop, jnp.int32(1))
        begin = lax.min(begin, stop - 1)
    return size, begin, jnp.where(first < end, stop, begin)


class Items:
    """Those of one persistent CTA: each num_ctas-th, tiles of one split beside each other.

    The last split comes first. It may have few slots, and what it takes besides loading them passes while the
    slots of whole splits arrive; behind these nothing would arrive any more.
    """

    def __init__(
        self, desc: DecodeDesc, config: DecodeConfig, cta: Scalar, starts: Ref, lengths: Ref, first_slots: Ref
    ):
        self._desc, self._config, self._cta = desc, config, cta
        self._starts, self._lengths, self._first_slots = starts, lengths, first_slots
        self._splits = _used_splits(desc, config, starts, lengths, first_slots)
        total = config.all_tiles(desc) * self._splits
        self._count = lax.div(total - cta + (config.num_ctas - 1), jnp.int32(config.num_ctas))

    def _item(self, t: Scalar) -> Item:
        desc, config = self._desc, self._config
        tiles, splits, block_kv = config.all_tiles(desc), config.num_splits(desc), config.block_kv
        index = self._cta + t * config.num_ctas
        tile = lax.rem(index, jnp.int32(tiles))
        split = self._splits - 1 - lax.div(index, jnp.int32(tiles))
        own = jnp.int32(config.num_tiles(desc))
        pair, column = lax.div(tile, own), pl.multiple_of(lax.rem(tile, own) * config.columns, config.columns)
        row, head = lax.div(pair, jnp.int32(desc.num_kv_heads)), lax.rem(pair, jnp.int32(desc.num_kv_heads))
        start, length, slot = self._starts[row], self._lengths[row], self._first_slots[row]
        first, end = seen(desc, start, length, slot)
        size, _, stop = splits_of(desc, config, first, end)
        own_end = jnp.where(split + 1 < stop, lax.min(end, (split + 1) * size), end)
        first, end = lax.max(first, split * size), jnp.where(split < stop, own_end, first)
        first_step = lax.div(first, jnp.int32(block_kv))
        steps = jnp.where(first < end, lax.div(end + (block_kv - 1), jnp.int32(block_kv)) - first_step, 0)
        return Item(row, head, column, tile * splits + split, start, length, slot, first_step, steps)

    def for_each(self, body: Callable[[Item, Scalar, Scalar], None]) -> tuple[Scalar, Scalar]:
        """body(item, items before it, steps before it) for those that a query sees; the sums of both in the end."""

        def one(t, carry):
            items, steps = carry
            item = self._item(t)
            is_used = item.num_steps > 0
            pl.when(is_used)(lambda: body(item, items, steps))
            return items + jnp.where(is_used, 1, 0), steps + item.num_steps

        return lax.fori_loop(0, self._count, one, (jnp.int32(0), jnp.int32(0)))


def _used_splits(desc: DecodeDesc, config: DecodeConfig, starts: Ref, lengths: Ref, first_slots: Ref) -> Scalar:
    """Splits up to the last one that any row uses, where walking the empty ones would take longer than finding it."""
    splits = config.num_splits(desc)
    if config.all_tiles(desc) * splits <= 2 * desc.batch * config.num_ctas:
        return splits

    def one(row, most):
        first, end = seen(desc, starts[row], lengths[row], first_slots[row])
        return lax.max(most, splits_of(desc, config, first, end)[2])

    return lax.fori_loop(0, desc.batch, one, jnp.int32(1))
