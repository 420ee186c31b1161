"""Partial sums of the splits of a row to its output, added in the order of the splits.

Each CTA is a warpgroup and makes 128 elements of the output, one a thread. A thread first walks the largest scores of
its row's splits, then adds their sums, UNROLL splits at a time so that as many loads are under way.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.row_kernel_sm90 import row_kernel
from pallas_kernels.common.sm90 import WARPGROUP
from pallas_kernels.common.types import Kernel, Ref, Value
from pallas_kernels.decode_attention.config import DecodeConfig, DecodeDesc
from pallas_kernels.decode_attention.items_sm90 import seen
from pallas_kernels.decode_attention.kernel_sm90 import FLOOR, LOG2_E

UNROLL = 8


def combine_sm90(desc: DecodeDesc, config: DecodeConfig) -> Kernel:
    """The kernel: (sums, tops, totals, starts, lengths, first_slots, [scales], [sinks]) -> (B, S, N, V) flat.

    sums, tops, totals: flat, as ``decode_sm90`` or ``latents_sm90`` gives them; scales (2,) float32, of keys and of
    values in e4m3; sinks (N,) float32.
    """
    elements = desc.batch * desc.num_queries * desc.num_heads * desc.value_width
    out = jax.ShapeDtypeStruct((elements,), jnp.dtype(desc.dtype))
    return row_kernel(functools.partial(_kernel, desc, config), out, -(-elements // WARPGROUP))


def _kernel(desc: DecodeDesc, config: DecodeConfig, *refs: Ref) -> None:
    mosaic.begin()
    sums, tops, totals, starts, lengths, first_slots, *rest, out = refs
    scales = rest.pop(0) if desc.is_e4m3 else None
    sinks = rest
    cta = lax.axis_index("cta")
    splits, columns, group = config.num_splits(desc), config.columns, desc.group

    def split(x: Value, by: int) -> tuple[Value, Value]:
        """Quotient and remainder."""
        return lax.div(x, jnp.full_like(x, by)), lax.rem(x, jnp.full_like(x, by))

    lanes = simt.thread_index()
    nothing = simt.constant(0)
    everywhere = lanes >= 0
    others, value = split(lanes + cta * WARPGROUP, desc.value_width)
    others, head = split(others, desc.num_heads)
    row, query = split(others, desc.num_queries)
    kv_head, member = split(head, group)
    tile, column = split(query * group + member, columns)
    # All elements of a CTA belong to one row: 128 divides V * N * S wherever N * V is a multiple of 128.
    own_row = lax.div(cta * WARPGROUP, jnp.int32(desc.num_queries * desc.num_heads * desc.value_width))
    first, end = seen(desc, starts[own_row], lengths[own_row], first_slots[own_row])
    begin = lax.div(first, jnp.int32(config.split))
    end = jnp.where(first < end, lax.div(end + (config.split - 1), jnp.int32(config.split)), begin)
    rounds = lax.div(end - begin + (UNROLL - 1), jnp.int32(UNROLL))
    tile = (row * desc.num_kv_heads + kv_head) * config.num_tiles(desc) + tile
    place = tile * splits * columns + column

    def indices(i: Any) -> list[tuple[Value, Value]]:
        found = []
        for j in range(UNROLL):
            split_index = nothing + (begin + i * UNROLL + j)
            found.append((place + split_index * columns, split_index < end))
        return found

    def at(index: Value) -> Value:
        """Of ``sums``, from the index of its column in ``tops``."""
        if config.swap_ab:
            return (index - column) * desc.value_width + value * columns + column
        return index * desc.value_width + value

    def highest(i, top):
        loaded = [simt.load_float(tops, index, mask, jnp.float32, FLOOR) for index, mask in indices(i)]
        for value in loaded:
            top = lax.max(top, value)
        return top

    top = lax.bitcast_convert_type(nothing, jnp.float32) + FLOOR
    sink = None
    if sinks:
        sink = simt.load_float(sinks[0], head, everywhere, jnp.float32, 0.0) * LOG2_E
        top = lax.max(top, sink)
    top = lax.fori_loop(0, rounds, highest, top)

    def add(i, carry):
        numerator, denominator = carry
        found = indices(i)
        scores = [simt.load_float(tops, index, mask, jnp.float32, FLOOR) for index, mask in found]
        weights = [simt.load_float(totals, index, mask, jnp.float32, 0.0) for index, mask in found]
        values = [simt.load_float(sums, at(index), mask, jnp.float32, 0.0) for index, mask in found]
        for score, weight, one in zip(scores, weights, values, strict=True):
            shrink = jnp.exp2(score - top)
            numerator, denominator = numerator + one * shrink, denominator + weight * shrink
        return numerator, denominator

    zero = lax.bitcast_convert_type(nothing, jnp.float32)
    denominator = zero if sink is None else jnp.exp2(sink - top)
    numerator, denominator = lax.fori_loop(0, rounds, add, (zero, denominator))
    result = jnp.where(denominator == 0, 0.0, numerator / denominator)
    if scales is not None:
        result = result * scales[1]
    out.at[pl.ds(cta * WARPGROUP, WARPGROUP)][...] = result.astype(desc.dtype)
