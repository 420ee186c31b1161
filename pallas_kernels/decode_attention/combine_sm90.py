"""Partial sums of the splits of a row to its output, added in the order of the splits.

Each CTA is a warpgroup and makes elements of the output in the order in which the sums lie, so that a warp reads them
side by side: a thread one, or eight neighbouring values where the values of a query lie side by side. It walks the
splits once (``SplitSums``).
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.row_kernel_sm90 import row_kernel
from pallas_kernels.common.sm90 import WARPGROUP
from pallas_kernels.common.types import Kernel, Ref, Scalar, Value
from pallas_kernels.decode_attention.config import DecodeConfig, DecodeDesc
from pallas_kernels.decode_attention.outputs_sm90 import FLOOR, LOG2_E, Part, SplitSums, outputs_of
from pallas_kernels.decode_attention.schedule import run_length, seen, splits_of

UNROLL = 8  # splits whose sums are loaded at once
UNROLL_WIDE = 4  # where a thread has several values of each
UNROLL_RUNS = 2  # where most tiles have one run and nothing behind it


class Parts(NamedTuple):
    """The partial sums of a tile: of its run, in the place of the first split, and of each split behind it.

    Args:
        begin: the first split.
        run: splits of the run; 1 where there are no runs.
        count: partial sums.
    """

    begin: Scalar
    run: Scalar
    count: Scalar

    @classmethod
    def of(cls, desc: DecodeDesc, config: DecodeConfig, share: Ref | None, tile: Scalar, slots: Any) -> "Parts":
        """Of a tile whose queries see the ``slots`` [first, end)."""
        first, end = slots
        size, begin, stop = splits_of(desc, config, first, end)
        if share is None:
            return cls(begin, jnp.int32(1), stop - begin)
        run = lax.max(run_length(desc, config, share[0], tile, stop - begin, size), jnp.int32(1))
        return cls(begin, run, jnp.where(begin < stop, stop - begin - run + 1, 0))

    def at(self, index: Any) -> tuple[Scalar, Scalar]:
        """(its place, 1 if there is one, else 0)."""
        behind = jnp.where(index > 0, self.run - 1, 0)
        return self.begin + index + behind, jnp.where(index < self.count, 1, 0)


def combine_sm90(desc: DecodeDesc, config: DecodeConfig) -> Kernel:
    """The kernel: (sums, tops, totals, starts, lengths, first_slots, [share], [scales], [sinks]) -> (B, S, N, V) flat.

    sums, tops, totals: flat, as ``decode_sm90`` or ``latents_sm90`` gives them; share of a ``Schedule``; scales (2,)
    float32, of keys and of values in e4m3; sinks (N,).
    """
    (out,) = outputs_of(desc, None)
    body = functools.partial(_kernel, desc, config)
    return row_kernel(body, out, num_combining_ctas(desc, config), "add_splits")


def elements_a_thread(config: DecodeConfig) -> int:
    """Values of one query."""
    return 1 if config.swap_ab else 8


def num_combining_ctas(desc: DecodeDesc, config: DecodeConfig) -> int:
    """Each has elements of one tile: where a thread has one, a tile's columns are a multiple of 8 and its values of 64;
    else its columns are 64 and its values a multiple of 128."""
    return config.all_tiles(desc) * config.columns * desc.value_width // (WARPGROUP * elements_a_thread(config))


def _kernel(desc: DecodeDesc, config: DecodeConfig, *refs: Ref) -> None:
    mosaic.begin()
    sums, tops, totals, starts, lengths, first_slots, *rest, out = refs
    share = rest.pop(0) if config.runs else None
    scales = rest.pop(0) if desc.is_e4m3 else None
    sinks = rest
    cta = lax.axis_index("cta")
    splits, columns, width = config.num_splits(desc), config.columns, desc.value_width

    def split(x: Value, by: int) -> tuple[Value, Value]:
        """Quotient and remainder."""
        return lax.div(x, jnp.full_like(x, by)), lax.rem(x, jnp.full_like(x, by))

    nothing, count = simt.constant(0), elements_a_thread(config)
    thread = simt.thread_index() + cta * WARPGROUP
    if config.swap_ab:  # each value has its columns side by side
        rest, column = split(thread, columns)
        tile, value = split(rest, width)
    else:
        rest, part = split(thread, width // count)
        tile, column = split(rest, columns)
        value = part * count
    pair, own_tile = split(tile, config.num_tiles(desc))
    row, kv_head = split(pair, desc.num_kv_heads)
    query, member = split(own_tile * columns + column, desc.group)
    head = kv_head * desc.group + member
    is_used = query < desc.num_queries
    own_row = lax.div(cta, jnp.int32(num_combining_ctas(desc, config) // desc.batch))
    slots = seen(desc, starts[own_row], lengths[own_row], first_slots[own_row])
    cta_tile = lax.div(cta, jnp.int32(num_combining_ctas(desc, config) // config.all_tiles(desc)))
    parts = Parts.of(desc, config, share, cta_tile, slots)
    place = tile * splits * columns + column
    unroll = min(UNROLL_RUNS if config.runs else UNROLL if count == 1 else UNROLL_WIDE, splits)

    def indices(offset: Any) -> list[tuple[Value, Value]]:
        own = [parts.at(offset + j) for j in range(unroll)]
        return [(place + (nothing + split) * columns, is_used & (nothing + is_part != 0)) for split, is_part in own]

    def at(index: Value) -> Value:
        """Of ``sums``, from the index of its column in ``tops``."""
        if config.swap_ab:
            return (index - column) * width + value * columns + column
        return index * width + value

    def sums_of(index: Value, mask: Value) -> tuple[Value, ...]:
        """A thread's elements of one split, up to four in a load."""
        at_once = min(count, 4)
        loads = [simt.load_floats(sums, index + start, mask, at_once) for start in range(0, count, at_once)]
        return tuple(itertools.chain(*loads))

    def load(offset: Any) -> list[Part]:
        found = []
        for index, mask in indices(offset):
            own = (simt.load_float(a, index, mask, default) for a, default in ((tops, FLOOR), (totals, 0.0)))
            found.append((*own, sums_of(at(index), mask)))
        return found

    sink = simt.load_float(sinks[0], head, is_used, 0.0) * LOG2_E if sinks else None
    state = SplitSums.of_nothing(count).plus_all(load, parts.count, unroll, splits <= unroll).with_sink(sink)
    results = state.outputs(None if scales is None else scales[1])
    bits = [simt.float_bits(result, desc.dtype) for result in results]
    index = ((row * desc.num_queries + query) * desc.num_heads + head) * width + value
    if count == 1:
        simt.store_bits(out, index, bits[0], is_used, 2)
    else:
        words = [low | (high << 16) for low, high in zip(bits[::2], bits[1::2], strict=True)]
        simt.store_words(out, index, words, is_used)
