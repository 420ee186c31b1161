"""The splits of a row's slots, and which each persistent CTA takes where it adds up runs of them (``Schedule``).

A CTA owns every num_ctas-th tile and takes as many of its first splits as a fair share of all splits allows: a run,
which leaves as one partial sum. Splits behind the runs fill up the CTAs that have less, one by one. So a batch that
fills the machine leaves one sum a tile, rows of any lengths keep all CTAs busy, and a single row is spread as without.

XLA computes it from the slots in use. Layers of one model ask for the same, so that a decode step computes it once.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.decode_attention.config import DecodeConfig, DecodeDesc


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


class Schedule(NamedTuple):
    """Arrays of int32, or references to them.

    Args:
        share: (1,), most that the runs of a CTA have, counted in config.split slots: a sixteenth more than the mean.
        first_rest: (num_ctas + 1,), where the splits of each CTA that belong to no run begin in ``rest``.
        rest: these splits, tile * num_splits + split each; any number behind the last one.
    """

    share: Any
    first_rest: Any
    rest: Any


def run_length(desc: DecodeDesc, config: DecodeConfig, share: Any, tile: Any, splits: Any, size: Any) -> Any:
    """Splits of a tile's run. splits: those that its row uses, of ``size`` slots each."""
    ctas = jnp.int32(config.num_ctas)
    tiles_of_cta = lax.div(config.all_tiles(desc) - 1 - lax.rem(tile, ctas), ctas) + 1
    return lax.min(splits, lax.div(share, tiles_of_cta * lax.div(size, jnp.int32(config.split))))


def make_schedule(
    desc: DecodeDesc, config: DecodeConfig, starts: jax.Array, lengths: jax.Array, first_slots: jax.Array
) -> Schedule:
    """The schedule of a call; rows as ``decode_attention`` takes them. Nothing is sorted, scanned or scattered."""
    num_ctas, tiles, unit = config.num_ctas, config.all_tiles(desc), jnp.int32(config.split)

    def of_row(*row: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        size, begin, stop = splits_of(desc, config, *seen(desc, *row))
        return size, begin, stop - begin

    of_rows = jax.vmap(of_row)(starts, lengths, first_slots)
    size, begin, splits = (jnp.repeat(a, tiles // desc.batch) for a in of_rows)
    units = lax.div(size, jnp.full_like(size, unit))
    total = (splits * units).sum(dtype=jnp.int32)
    share = lax.div(total + lax.div(total, jnp.int32(16)), jnp.int32(num_ctas))
    length = functools.partial(run_length, desc, config, share)
    run = jax.vmap(length)(jnp.arange(tiles, dtype=jnp.int32), splits, size)
    taken = jnp.pad(run * units, (0, -tiles % num_ctas)).reshape(-1, num_ctas).sum(axis=0, dtype=jnp.int32)

    # Splits outside of runs, tile by tile: each one's owner, and the units before it.
    left = splits - run
    index = jnp.arange(max(1, tiles * config.num_splits(desc)), dtype=jnp.int32)
    is_before = _sums_through(left) <= index[:, None]
    owner = lax.min(is_before.sum(axis=1, dtype=jnp.int32), jnp.full_like(index, tiles - 1))
    inside = index - jnp.where(is_before, left, 0).sum(axis=1, dtype=jnp.int32)
    units_before = jnp.where(is_before, left * units, 0).sum(axis=1, dtype=jnp.int32) + inside * units[owner]
    rest = owner * config.num_splits(desc) + (begin + run)[owner] + inside

    # They are shared in proportion to what the CTAs have less than the mean. Where nobody has less, nothing is left: no
    # number lies below 0 / 0.
    missing = _sums_through(jnp.maximum(total.astype(jnp.float32) / num_ctas - taken.astype(jnp.float32), 0.0))
    bound = missing[:-1] / missing[-1] * (left * units).sum().astype(jnp.float32)
    is_taken = (index < left.sum()) & (units_before.astype(jnp.float32) < bound[:, None])
    ends = [jnp.zeros(1, jnp.int32), is_taken.sum(axis=1, dtype=jnp.int32), left.sum(dtype=jnp.int32)[None]]
    return Schedule(share.reshape(1), jnp.concatenate(ends), rest)


def _sums_through(values: jax.Array) -> jax.Array:
    """(N,) -> (N,): the sum of the numbers up to each."""
    return jnp.where(jnp.tri(values.size, dtype=bool), values, 0).sum(axis=1, dtype=values.dtype)
