"""Norm and rotation of query and key heads, and the write to the cache.

A CTA is one warpgroup and takes every num_ctas-th item: four heads of a token, one a warp. A lane holds the same
columns of both halves of its head, so that a rotation needs no other lane, and a norm is one sum over a warp.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common import mosaic
from pallas_kernels.common.pages_sm90 import slot_of
from pallas_kernels.common.row_kernel_sm90 import for_items_of, in_place_row_kernel
from pallas_kernels.common.sm90 import LANES
from pallas_kernels.common.types import Ref, Scalar, Value
from pallas_kernels.rotate_and_store.config import HEADS, RotateConfig, RotateDesc


def rotate_and_store_sm90(
    desc: RotateDesc, config: RotateConfig
) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """The kernel: (two caches, projected, [three biases], cos, sin, [two norms], [scales (2,)], starts, lengths,
    first_slots, [pages (B, T)]) -> (queries, caches)."""
    tokens = desc.batch * desc.num_tokens
    out = jax.ShapeDtypeStruct((tokens, desc.num_heads, desc.width), desc.dtype)
    call = in_place_row_kernel(functools.partial(_kernel, desc), 2, [out], config.num_ctas, "rotate_and_store")

    def run(k, v, *rest):
        count = 1 if desc.is_packed else 3
        projected = [a.reshape(desc.num_parts, -1, a.shape[-1] // desc.width, desc.width) for a in rest[:count]]
        rest = rest[count:]
        biases = [a.reshape(-1, desc.width) for a in rest[: 3 * desc.has_bias]]
        rest = rest[3 * desc.has_bias :]
        angles = [a.reshape(tokens, -1) for a in rest[:2]]
        k, v, q = call(k, v, *projected, *biases, *angles, *rest[2:])
        return q.reshape(desc.batch, desc.num_tokens, desc.num_heads, desc.width), k, v

    return run


def _kernel(desc: RotateDesc, num_ctas: int, k_cache: Ref, v_cache: Ref, *rest: Ref) -> None:
    mosaic.begin()
    *operands, q_out = rest
    pages = operands.pop() if desc.num_pages else None
    projected, others = (operands[:1] * 3, operands[1:]) if desc.is_packed else (operands[:3], operands[3:])
    biases, others = (others[:3], others[3:]) if desc.has_bias else ((), others)
    (cos, sin, *norms), (starts, lengths, first_slots) = others[:-3], others[-3:]
    scales = norms.pop() if desc.is_e4m3 else None
    first_heads = (0, desc.num_heads, desc.num_heads + desc.num_kv_heads) if desc.is_packed else (0, 0, 0)
    half = desc.width // 2
    tile = (HEADS, half)
    layout = mosaic.row_a_warp(half // LANES)
    halves = (pl.ds(0, half), pl.ds(half, half))

    def vector(ref, *index):
        """A value for each column of a half, the same for all heads."""
        values = mosaic.load(ref.at[*index], layout=layout.reduce(0), optimized=False)
        return lax.broadcast_in_dim(values.astype(jnp.float32), tile, [1])

    def heads(which: int, token: Scalar, head: Scalar) -> list[Value]:
        """float32."""
        at = pl.ds(first_heads[which] + head, HEADS)

        def load(ref):
            return mosaic.load(ref, layout=layout, optimized=False).astype(jnp.float32)

        def total(columns):
            parts = [load(projected[which].at[index, token, at, columns]) for index in range(desc.num_parts)]
            parts += [load(biases[which].at[pl.ds(head, HEADS), columns])] if biases else []
            return functools.reduce(jnp.add, parts)

        return [*map(total, halves)]

    def rotated(which: int, token: Scalar, head: Scalar) -> list[Value]:
        x = heads(which, token, head)
        if desc.has_norm:
            total = jnp.sum(x[0] * x[0] + x[1] * x[1], axis=1)
            inverse = lax.broadcast_in_dim(lax.rsqrt(total * (1.0 / desc.width) + desc.eps), tile, [0])
            weights = [vector(norms[which], columns) for columns in halves]
            x = [part * inverse * weight for part, weight in zip(x, weights, strict=True)]
        (first, second), c, s = x, vector(cos, token), vector(sin, token)
        return [first * c - second * s, second * c + first * s]

    def code(which: int, value: Value) -> Value:
        """What the cache of keys (0) or values (1) holds of ``value``. The conversion saturates."""
        if scales is None:
            return value
        return (value.astype(jnp.float32) / scales[which]).astype(jnp.float8_e4m3fn)

    def store(which: int, token: Scalar, head: Scalar, values: Callable[[], list[Value]]) -> None:
        cache = (k_cache, v_cache)[which]
        row, slot, is_kept = slot_of(token, desc.num_tokens, desc.num_pages, starts, lengths, first_slots, pages)

        @pl.when(is_kept)
        def _():
            for columns, value in zip(halves, values(), strict=True):
                cache.at[row, pl.ds(head, HEADS), slot, columns][...] = code(which, value.astype(desc.dtype))

    def one_item(item):
        token, head = (
            lax.div(item, jnp.int32(desc.items_of_token)),
            lax.rem(item, jnp.int32(desc.items_of_token)) * HEADS,
        )
        of_keys, of_values = head - desc.num_heads, head - desc.num_heads - desc.num_kv_heads

        @pl.when(of_keys < 0)
        def _():
            for columns, value in zip(halves, rotated(0, token, head), strict=True):
                q_out.at[token, pl.ds(head, HEADS), columns][...] = value.astype(desc.dtype)

        @pl.when((of_keys >= 0) & (of_values < 0))
        def _():
            store(0, token, of_keys, lambda: rotated(1, token, of_keys))

        @pl.when(of_values >= 0)
        def _():
            store(1, token, of_values, lambda: heads(2, token, of_values))

    for_items_of(lax.axis_index("cta"), desc.num_items, num_ctas, one_item)
