"""Partial sums of the splits of a row to its output, added in the order of the splits.

Each CTA is a warpgroup and makes elements of the output in the order in which the sums lie, so that a warp reads them
side by side: a thread one, or eight neighbouring values where the values of a query lie side by side. A thread first
walks the largest scores of its row's splits, then adds their sums, UNROLL splits at a time so that as many loads are
under way, and UNROLL_MANY of rows in long caches. The sums of the first UNROLL are asked for before the largest score
is known.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.row_kernel_sm90 import row_kernel
from pallas_kernels.common.sm90 import WARPGROUP
from pallas_kernels.common.types import Kernel, Ref, Value
from pallas_kernels.decode_attention.config import DecodeConfig, DecodeDesc
from pallas_kernels.decode_attention.items_sm90 import seen, splits_of
from pallas_kernels.decode_attention.kernel_sm90 import FLOOR, LOG2_E

UNROLL = 8
UNROLL_MANY = 32


def combine_sm90(desc: DecodeDesc, config: DecodeConfig) -> Kernel:
    """The kernel: (sums, tops, totals, starts, lengths, first_slots, [scales], [sinks]) -> (B, S, N, V) flat.

    sums, tops, totals: flat, as ``decode_sm90`` or ``latents_sm90`` gives them; scales (2,) float32, of keys and of
    values in e4m3; sinks (N,).
    """
    out = jax.ShapeDtypeStruct(
        (desc.batch * desc.num_queries * desc.num_heads * desc.value_width,), jnp.dtype(desc.dtype)
    )
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
    first, end = seen(desc, starts[own_row], lengths[own_row], first_slots[own_row])
    _, begin, end = splits_of(desc, config, first, end)
    place = tile * splits * columns + column

    def indices(offset: Any, number: int) -> list[tuple[Value, Value]]:
        found = []
        for j in range(number):
            split_index = nothing + (begin + offset + j)
            found.append((place + split_index * columns, is_used & (split_index < end)))
        return found

    def at(index: Value) -> Value:
        """Of ``sums``, from the index of its column in ``tops``."""
        if config.swap_ab:
            return (index - column) * width + value * columns + column
        return index * width + value

    def scores(offset: Any, number: int) -> list[Value]:
        return [simt.load_float(tops, index, mask, FLOOR) for index, mask in indices(offset, number)]

    def sums_of(index: Value, mask: Value) -> tuple[Value, ...]:
        """A thread's elements of one split, up to four in a load."""
        at_once = min(count, 4)
        loads = [simt.load_floats(sums, index + start, mask, at_once) for start in range(0, count, at_once)]
        return tuple(itertools.chain(*loads))

    def parts(offset: Any, number: int) -> list[tuple[Value, tuple[Value, ...]]]:
        """Weights and sums."""
        found = indices(offset, number)
        weights = [simt.load_float(totals, index, mask, 0.0) for index, mask in found]
        values = [sums_of(at(index), mask) for index, mask in found]
        return list(zip(weights, values, strict=True))

    def over_the_others(body: Callable[[Any, Any, int], Any], carry: Any) -> Any:
        """body(carry, offset, number) for all splits behind the first ones, in their order."""
        if splits <= UNROLL:
            return carry
        offset = jnp.int32(UNROLL)
        left = lax.max(end - begin - UNROLL, 0)
        if splits > UNROLL_MANY and count == 1:  # more registers than there are else
            many = lax.div(left, jnp.int32(UNROLL_MANY))
            carry = lax.fori_loop(0, many, lambda i, c: body(c, UNROLL + i * UNROLL_MANY, UNROLL_MANY), carry)
            offset, left = offset + many * UNROLL_MANY, left - many * UNROLL_MANY
        rounds = lax.div(left + (UNROLL - 1), jnp.int32(UNROLL))
        return lax.fori_loop(0, rounds, lambda i, c: body(c, offset + i * UNROLL, UNROLL), carry)

    at_first = min(UNROLL, splits)
    first_scores, first_parts = scores(0, at_first), parts(0, at_first)
    top = lax.bitcast_convert_type(nothing, jnp.float32) + FLOOR
    sink = None
    if sinks:
        sink = simt.load_float(sinks[0], head, is_used, 0.0) * LOG2_E
        top = lax.max(top, sink)
    top = functools.reduce(lax.max, first_scores, top)
    top = over_the_others(lambda top, *where: functools.reduce(lax.max, scores(*where), top), top)

    def added(carry, scores, parts):
        numerators, denominator = carry
        for score, (weight, values) in zip(scores, parts, strict=True):
            shrink = jnp.exp2(score - top)
            numerators = tuple(own + value * shrink for own, value in zip(numerators, values, strict=True))
            denominator = denominator + weight * shrink
        return numerators, denominator

    zero = lax.bitcast_convert_type(nothing, jnp.float32)
    carry = added(((zero,) * count, zero if sink is None else jnp.exp2(sink - top)), first_scores, first_parts)
    numerators, denominator = over_the_others(lambda c, *where: added(c, scores(*where), parts(*where)), carry)
    results = [jnp.where(denominator == 0, 0.0, numerator / denominator) for numerator in numerators]
    results = results if scales is None else [result * scales[1] for result in results]
    bits = [simt.float_bits(result, desc.dtype) for result in results]
    index = ((row * desc.num_queries + query) * desc.num_heads + head) * width + value
    if count == 1:
        simt.store_bits(out, index, bits[0], is_used, 2)
    else:
        words = [low | (high << 16) for low, high in zip(bits[::2], bits[1::2], strict=True)]
        simt.store_words(out, index, words, is_used)
