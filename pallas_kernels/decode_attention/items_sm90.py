"""The work items of decode attention on the device: a split of the cache of one tile of queries, or a run of them."""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.types import Ref, Scalar
from pallas_kernels.decode_attention.config import DecodeConfig, DecodeDesc
from pallas_kernels.decode_attention.schedule import Schedule, run_length, seen, splits_of


@dataclasses.dataclass(frozen=True)
class Item:
    """Splits of one tile of columns that follow each other; fields are int32 of the device.

    Args:
        row, head: of the batch, and the key head.
        column: of the key head's, the first one.
        index: of its partial sums.
        start, length, slot: of the row: slots in use, and the slot of the first query.
        split, num_splits: the first of them, and how many.
        steps_of_split: block_kv slots of one.
        first_step: the first block_kv slots with one in use.
        num_steps: how many are walked; 0 where no query sees them.
    """

    row: Scalar
    head: Scalar
    column: Scalar
    index: Scalar
    start: Scalar
    length: Scalar
    slot: Scalar
    split: Scalar
    num_splits: Scalar
    steps_of_split: Scalar
    first_step: Scalar
    num_steps: Scalar


class Items:
    """Those of one persistent CTA: each num_ctas-th, tiles of one split beside each other; or as a ``Schedule`` has
    them, runs first; or whole tiles, also those that see no slot.

    Without a schedule the last split comes first. It may have few slots, and what it takes besides loading them passes
    while the slots of whole splits arrive; behind these nothing would arrive any more.
    """

    def __init__(
        self,
        desc: DecodeDesc,
        config: DecodeConfig,
        cta: Scalar,
        starts: Ref,
        lengths: Ref,
        first_slots: Ref,
        schedule: Sequence[Ref] = (),
    ):
        self._desc, self._config, self._cta = desc, config, cta
        self._starts, self._lengths, self._first_slots = starts, lengths, first_slots
        tiles = config.all_tiles(desc)

        def every(total: Scalar) -> Scalar:
            """Of ``total`` those that are this CTA's when it has each num_ctas-th."""
            return lax.div(total - cta + (config.num_ctas - 1), jnp.int32(config.num_ctas))

        self._schedule = Schedule(*schedule) if config.runs else None
        if self._schedule is not None:
            self._runs = every(tiles)
            self._first_rest = self._schedule.first_rest[cta]
            self._count = self._runs + (self._schedule.first_rest[cta + 1] - self._first_rest)
            return
        if config.whole_tiles:
            self._count = every(tiles)
            return
        self._splits = _used_splits(desc, config, starts, lengths, first_slots)
        self._count = every(tiles * self._splits)

    def _place(self, t: Scalar) -> tuple[Scalar, Scalar]:
        """(tile, split) of an item; -1 for the split of a run, or of a whole tile."""
        desc, config = self._desc, self._config
        if config.whole_tiles:
            return self._cta + t * config.num_ctas, jnp.int32(-1)
        if self._schedule is None:
            tiles = jnp.int32(config.all_tiles(desc))
            index = self._cta + t * config.num_ctas
            return lax.rem(index, tiles), self._splits - 1 - lax.div(index, tiles)
        rest, splits = self._schedule.rest, jnp.int32(config.num_splits(desc))

        def of_rest() -> tuple[Scalar, Scalar]:
            code = rest[self._first_rest + (t - self._runs)]
            return lax.div(code, splits), lax.rem(code, splits)

        # A branch, so that the first run does not wait for what it does not need.
        return lax.cond(t < self._runs, lambda: (self._cta + t * config.num_ctas, jnp.int32(-1)), of_rest)

    def _item(self, t: Scalar) -> Item:
        desc, config = self._desc, self._config
        splits, block_kv = config.num_splits(desc), config.block_kv
        tile, split = self._place(t)
        own = jnp.int32(config.num_tiles(desc))
        pair, column = lax.div(tile, own), pl.multiple_of(lax.rem(tile, own) * config.columns, config.columns)
        row, head = lax.div(pair, jnp.int32(desc.num_kv_heads)), lax.rem(pair, jnp.int32(desc.num_kv_heads))
        start, length, slot = self._starts[row], self._lengths[row], self._first_slots[row]
        first, end = seen(desc, start, length, slot)
        size, begin, stop = splits_of(desc, config, first, end)
        count = jnp.int32(1)
        if config.adds_up:
            run = stop - begin
            if self._schedule is not None:
                run = run_length(desc, config, self._schedule.share[0], tile, run, size)
            split, count = jnp.where(split < 0, begin, split), jnp.where(split < 0, run, 1)
        own_end = jnp.where(split + count < stop, lax.min(end, (split + count) * size), end)
        first, end = lax.max(first, split * size), jnp.where(split < stop, own_end, first)
        first_step = lax.div(first, jnp.int32(block_kv))
        steps = jnp.where(first < end, lax.div(end + (block_kv - 1), jnp.int32(block_kv)) - first_step, 0)
        return Item(
            row=row,
            head=head,
            column=column,
            index=tile * splits + split,
            start=start,
            length=length,
            slot=slot,
            split=split,
            num_splits=count,
            steps_of_split=lax.div(size, jnp.int32(block_kv)),
            first_step=first_step,
            num_steps=steps,
        )

    def for_each(self, body: Callable[[Item, Scalar, Scalar], None]) -> tuple[Scalar, Scalar]:
        """body(item, items before it, steps before it) for those that a query sees, and for all whole tiles; the sums
        of both in the end."""

        def one(t, carry):
            items, steps = carry
            item = self._item(t)
            is_used = item.num_steps >= (0 if self._config.whole_tiles else 1)
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
