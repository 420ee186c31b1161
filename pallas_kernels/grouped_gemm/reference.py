"""Grouped GEMM in plain jnp, tile by tile in float32: decides what is right, runs anywhere."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.activations import Activation
from pallas_kernels.common.numerics import magnitude, quantize_e4m3_group, quantize_e4m3_static, round_to_float, widen
from pallas_kernels.grouped_gemm.problem import SCALE_GROUP, GemmDesc, GroupedGemm


def grouped_gemm_ref(
    desc: GemmDesc,
    x: jax.Array,
    w: jax.Array,
    tile_expert: jax.Array,
    num_tiles: jax.Array,
    *,
    x_scale: jax.Array | None = None,
    w_scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    out_scale: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """What ``grouped_gemm`` computes, from the same stored values; arguments and shapes as there, w always (E, G, N,
    K).

    Every product is exact and summed in float32 (int8: in int32); rows of tiles from num_tiles on are zero.
    """
    exact = jnp.int32 if desc.accumulator == "int32" else jnp.float32

    def product(rows: jax.Array, first: jax.Array, expert: jax.Array) -> jax.Array:
        size, weights = rows.shape[0], w[expert]
        if desc.is_block_scaled:
            assert x_scale is not None and w_scale is not None
            groups = lax.dynamic_slice_in_dim(x_scale, first, size, axis=1)
            rows = widen(rows, jnp.float32) * _spread(groups.T, (desc.k,))
            weights = widen(weights, jnp.float32) * _spread(w_scale[expert], (desc.n, desc.k))
        h = jnp.einsum(
            "mk,gnk->mgn",
            widen(rows, exact),
            widen(weights, exact),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=exact,
        ).astype(jnp.float32)
        if desc.is_block_scaled:
            return h
        h = h * row_factor(x_scale, first, size)
        if w_scale is None:
            return h
        return h * (w_scale[expert] if desc.rhs_scale == "channel" else w_scale[expert][:, None])

    given = in_tiles(desc, x, tile_expert, num_tiles, bias, product)
    h = activated(desc, given)
    if desc.keeps_before:
        return h.astype(desc.out_dtype), given.reshape(desc.rows, -1).astype(desc.out_dtype)
    if desc.is_rounded_first:
        h = round_to_float(h, jnp.bfloat16)
    if out_scale is not None:
        return quantize_e4m3_static(h, out_scale)
    if desc.requantize == "group":
        return quantize_rows_by_group(h, desc.has_power_of_two_scales)
    return h.astype(desc.out_dtype)


def in_tiles(
    desc: GroupedGemm,
    x: jax.Array,
    tile_expert: jax.Array,
    num_tiles: jax.Array,
    bias: jax.Array | None,
    product: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """(rows, G, N) float32: each tile's products with bias, zeros in tiles from num_tiles on.

    product: (rows of x, index of the first, expert) -> (rows, G, N) float32, scaled.
    """
    tiles = tile_expert.shape[0]
    block_m = desc.rows // max(tiles, 1)

    def one_tile(index):
        expert = jnp.maximum(tile_expert[index], 0)
        first = index * block_m
        h = product(lax.dynamic_slice_in_dim(x, first, block_m), first, expert)
        if bias is not None:
            h = h + bias[expert].astype(jnp.float32)
        return jnp.where(index < num_tiles.reshape(()), h, 0.0)

    return lax.map(one_tile, jnp.arange(tiles, dtype=jnp.int32)).reshape(desc.rows, desc.projections, desc.n)


def activated(desc: GroupedGemm, given: jax.Array) -> jax.Array:
    """(rows, G, N) -> (rows, N): the activation of the projections, or the one where there is none."""
    parts: list[Any] = [given[:, projection] for projection in range(desc.projections)]
    return parts[0] if desc.activation is None else desc.activation(*parts)


def row_factor(x_scale: jax.Array | None, first: jax.Array, size: int) -> jax.Array | float:
    """Scales of ``size`` rows from ``first`` on, () or (size, 1, 1)."""
    if x_scale is None or x_scale.ndim == 0:
        return 1.0 if x_scale is None else x_scale
    return lax.dynamic_slice_in_dim(x_scale, first, size)[:, None, None]


def quantize_rows_by_group(h: jax.Array, is_power_of_two: bool = False) -> tuple[jax.Array, jax.Array]:
    """(rows, N) float32 -> e4m3 codes (rows, N) and scales (ceil(N / 128), rows), one per row and 128 columns."""
    rows, n = h.shape
    padded = jnp.pad(h, ((0, 0), (0, -n % SCALE_GROUP)))
    groups = padded.reshape(rows, -1, SCALE_GROUP)
    amax = jnp.max(magnitude(groups), axis=-1, keepdims=True)
    codes, scale = quantize_e4m3_group(groups, amax, is_power_of_two)
    return codes.reshape(rows, -1)[:, :n], scale[..., 0].T


def _spread(scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeat each scale over its 128 elements along the last len(shape) axes, cut to ``shape``."""
    for axis, size in zip(range(-len(shape), 0), shape, strict=True):
        scales = lax.slice_in_dim(jnp.repeat(scales, SCALE_GROUP, axis=axis), 0, size, axis=axis % scales.ndim)
    return scales


def pulled_ref(
    activation: Activation, given: Sequence[jax.Array], values_bar: jax.Array
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """(cotangents of what an activation was ``given``, its values), (rows, N) float32 each."""
    values, pull = jax.vjp(activation, *given)
    return pull(values_bar), values
