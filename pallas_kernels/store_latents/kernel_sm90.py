"""Norms of a token's latent and of what its queries are made of, the rotation of its key, and the write to the cache.

A CTA is one warpgroup and takes every num_ctas-th item: a token's latent with its key, or the row that its queries are
made of. A thread has every 128th column; of a row with a scale for each 128 columns a warp has such groups.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.pages import PAGE_SLOTS
from pallas_kernels.common.pages_sm90 import slot_of
from pallas_kernels.common.row_kernel_sm90 import for_items_of, in_place_row_kernel
from pallas_kernels.common.sm90 import LANES, WARPGROUP, WARPS
from pallas_kernels.common.types import Ref, Scalar, Value
from pallas_kernels.quantize_and_permute.by_thread_sm90 import coded, magnitude
from pallas_kernels.quantize_and_permute.config import GROUP
from pallas_kernels.store_latents.config import LatentsConfig, LatentsDesc


def store_latents_sm90(desc: LatentsDesc, config: LatentsConfig) -> Callable[..., tuple[Any, jax.Array]]:
    """The kernel: (cache, projected, [q_norm], kv_norm, cos, sin, starts, lengths, first_slots, [pages (B, T)]) ->
    (rows, or codes and scales, or None; the cache). config must pass ``config_error``."""
    rows, outputs = desc.rows, []
    if desc.has_queries:
        outputs = [jax.ShapeDtypeStruct((rows.num_tokens * rows.width,), jnp.dtype(rows.out_dtype))]
        if rows.scale_shape is not None:
            outputs += [jax.ShapeDtypeStruct((math.prod(rows.scale_shape),), jnp.float32)]
    body = functools.partial(_kernel, desc, len(outputs))
    call = in_place_row_kernel(body, 1, outputs, config.num_ctas, "store_latents")

    def run(cache, *operands):
        cache, *found = call(cache, *operands)
        found = [a.reshape(shape) for a, shape in zip(found, ((-1, desc.queries), rows.scale_shape), strict=False)]
        return tuple(found) if len(found) > 1 else found[0] if found else None, cache

    return run


def _kernel(desc: LatentsDesc, num_outputs: int, num_ctas: int, cache: Ref, *rest: Ref) -> None:
    mosaic.begin()
    operands, outputs = list(rest[: len(rest) - num_outputs]), rest[len(rest) - num_outputs :]
    projected = operands.pop(0)
    q_norm = operands.pop(0) if desc.has_queries else None
    kv_norm, cos, sin, *places = operands
    thread, nothing = simt.thread_index(), simt.constant(0)
    lane, warp = thread & (LANES - 1), lax.shift_right_logical(thread, jnp.full_like(thread, LANES.bit_length() - 1))
    width = desc.queries + desc.rank + desc.rope
    everywhere = thread >= 0

    def normed(token: Scalar, first: int, size: int, weight: Ref, columns: list[Value]) -> list[Value]:
        """The norm of columns [first, first + size) of a token, rounded, as float32. columns: of each thread."""
        inside = [everywhere if size % WARPGROUP == 0 else column < size for column in columns]
        places = [nothing + (token * width + first) + column for column in columns]
        values = [simt.load_float(projected, *at, 0.0) for at in zip(places, inside, strict=True)]
        weights = [simt.load_float(weight, *at, 0.0) for at in zip(columns, inside, strict=True)]
        total = jnp.sum(functools.reduce(jnp.add, [value * value for value in values]))
        inverse = lax.rsqrt(total * (1.0 / size) + desc.eps)
        both = zip(values, weights, strict=True)
        return [(value * inverse * own).astype(desc.dtype).astype(jnp.float32) for value, own in both]

    def make_queries(token: Scalar) -> None:
        assert q_norm is not None
        rows, count = desc.rows, desc.queries // WARPGROUP
        columns = [thread + i * WARPGROUP for i in range(count)]
        if rows.is_grouped:  # a warp has whole groups
            starts = [(i // WARPS * WARPS * GROUP, i % WARPS * LANES) for i in range(count)]
            columns = [warp * GROUP + lane + (start + part) for start, part in starts]
        values = normed(token, 0, desc.queries, q_norm, columns)
        places = [nothing + token * desc.queries + column for column in columns]
        if desc.quantization == "none":
            for place, value in zip(places, values, strict=True):
                simt.store_bits(outputs[0], place, simt.float_bits(value, desc.dtype), everywhere, 2)
            return
        room = rows.scale_rows or rows.num_rows
        step = WARPS if rows.is_grouped else count
        for i in range(0, count, step):
            own = values[i : i + step]
            largest = magnitude(own)
            largest = simt.warp_max(largest) if rows.is_grouped else nothing + jnp.max(largest)
            codes, scale = coded(rows, own, lax.bitcast_convert_type(largest, jnp.float32))
            for place, code in zip(places[i : i + step], codes, strict=True):
                simt.store_bits(outputs[0], place, code, everywhere, 1)
            place = (warp + i) * room + token if rows.is_grouped else nothing + token
            is_first = lane == 0 if rows.is_grouped else thread == 0
            simt.store(outputs[1], place, lax.bitcast_convert_type(scale, jnp.int32), is_first)

    def store_latent(token: Scalar) -> None:
        row, slot, is_kept = slot_of(token, desc.num_tokens, desc.num_pages, *places)

        @pl.when(is_kept)
        def _():
            slots = PAGE_SLOTS if desc.num_pages else desc.num_slots
            begin = nothing + (row * slots + slot) * (desc.rank + desc.rope)
            columns = [thread + start for start in range(0, desc.rank, WARPGROUP)]
            values = normed(token, desc.queries, desc.rank, kv_norm, columns)
            for column, value in zip(columns, values, strict=True):
                bits = simt.float_bits(value, desc.dtype)
                simt.store_bits(cache, begin + column, bits, column < desc.rank, 2)
            half = desc.rope // 2
            inside, of_key = thread < half, token * width + desc.queries + desc.rank
            first, second = (thread * 2, thread * 2 + 1) if desc.is_interleaved else (thread, thread + half)
            a, b = (simt.load_float(projected, nothing + of_key + at, inside, 0.0) for at in (first, second))
            c, s = (simt.load_float(angles, nothing + token * half + thread, inside, 0.0) for angles in (cos, sin))
            for at, value in ((thread, a * c - b * s), (thread + half, b * c + a * s)):
                simt.store_bits(cache, begin + desc.rank + at, simt.float_bits(value, desc.dtype), inside, 2)

    def one_item(item: Scalar) -> None:
        if not desc.has_queries:
            store_latent(item)
            return
        token, kind = lax.div(item, jnp.int32(2)), lax.rem(item, jnp.int32(2))
        pl.when(kind == 0)(lambda: make_queries(token))
        pl.when(kind == 1)(lambda: store_latent(token))

    total = desc.batch * desc.num_tokens * desc.items_of_token
    for_items_of(lax.axis_index("cta"), total, num_ctas, one_item)
