"""Partial sums of the splits of a row to its output, added in the order of the splits.

Each CTA is a warpgroup and makes 128 elements of the output, one a thread, in the order in which the sums lie: so a
warp reads 128 bytes side by side. A thread first walks the largest scores of its row's splits, then adds their sums,
UNROLL splits at a time so that as many loads are under way, and UNROLL_MANY of rows in long caches. The sums of the
first UNROLL are asked for before the largest score is known.
"""

import functools
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


def num_combining_ctas(desc: DecodeDesc, config: DecodeConfig) -> int:
    """Each has 128 elements of one tile: a tile's columns are a multiple of 8, its values of 64."""
    return config.all_tiles(desc) * config.columns * desc.value_width // WARPGROUP


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

    nothing = simt.constant(0)
    elements = simt.thread_index() + cta * WARPGROUP
    if config.swap_ab:  # each value has its columns side by side
        rest, column = split(elements, columns)
        tile, value = split(rest, width)
    else:
        rest, value = split(elements, width)
        tile, column = split(rest, columns)
    pair, own_tile = split(tile, config.num_tiles(desc))
    row, kv_head = split(pair, desc.num_kv_heads)
    query, member = split(own_tile * columns + column, desc.group)
    head = kv_head * desc.group + member
    is_used = query < desc.num_queries
    own_row = lax.div(cta, jnp.int32(num_combining_ctas(desc, config) // desc.batch))
    first, end = seen(desc, starts[own_row], lengths[own_row], first_slots[own_row])
    _, begin, end = splits_of(desc, config, first, end)
    place = tile * splits * columns + column

    def indices(offset: Any, count: int) -> list[tuple[Value, Value]]:
        found = []
        for j in range(count):
            split_index = nothing + (begin + offset + j)
            found.append((place + split_index * columns, is_used & (split_index < end)))
        return found

    def at(index: Value) -> Value:
        """Of ``sums``, from the index of its column in ``tops``."""
        if config.swap_ab:
            return (index - column) * width + value * columns + column
        return index * width + value

    def scores(offset: Any, count: int) -> list[Value]:
        return [simt.load_float(tops, index, mask, FLOOR) for index, mask in indices(offset, count)]

    def parts(offset: Any, count: int) -> list[tuple[Value, Value]]:
        """Weights and sums."""
        found = indices(offset, count)
        weights = [simt.load_float(totals, index, mask, 0.0) for index, mask in found]
        values = [simt.load_float(sums, at(index), mask, 0.0) for index, mask in found]
        return list(zip(weights, values, strict=True))

    def over_the_others(body: Callable[[Any, Any, int], Any], carry: Any) -> Any:
        """body(carry, offset, count) for all splits behind the first UNROLL, in their order."""
        offset = jnp.int32(UNROLL)
        left = lax.max(end - begin - UNROLL, 0)
        if splits > UNROLL_MANY:
            many = lax.div(left, jnp.int32(UNROLL_MANY))
            carry = lax.fori_loop(0, many, lambda i, c: body(c, UNROLL + i * UNROLL_MANY, UNROLL_MANY), carry)
            offset, left = offset + many * UNROLL_MANY, left - many * UNROLL_MANY
        rounds = lax.div(left + (UNROLL - 1), jnp.int32(UNROLL))
        return lax.fori_loop(0, rounds, lambda i, c: body(c, offset + i * UNROLL, UNROLL), carry)

    first_scores, first_parts = scores(0, UNROLL), parts(0, UNROLL)
    top = lax.bitcast_convert_type(nothing, jnp.float32) + FLOOR
    sink = None
    if sinks:
        sink = simt.load_float(sinks[0], head, is_used, 0.0) * LOG2_E
        top = lax.max(top, sink)
    top = functools.reduce(lax.max, first_scores, top)
    top = over_the_others(lambda top, *where: functools.reduce(lax.max, scores(*where), top), top)

    def added(carry, scores, parts):
        numerator, denominator = carry
        for score, (weight, one) in zip(scores, parts, strict=True):
            shrink = jnp.exp2(score - top)
            numerator, denominator = numerator + one * shrink, denominator + weight * shrink
        return numerator, denominator

    zero = lax.bitcast_convert_type(nothing, jnp.float32)
    carry = added((zero, zero if sink is None else jnp.exp2(sink - top)), first_scores, first_parts)
    numerator, denominator = over_the_others(lambda c, *where: added(c, scores(*where), parts(*where)), carry)
    result = jnp.where(denominator == 0, 0.0, numerator / denominator)
    result = result if scales is None else result * scales[1]
    index = ((row * desc.num_queries + query) * desc.num_heads + head) * width + value
    simt.store_bits(out, index, simt.float_bits(result, desc.dtype), is_used, 2)
