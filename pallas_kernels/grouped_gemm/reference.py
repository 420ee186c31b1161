"""Grouped GEMM in plain jnp, tile by tile in float32: decides what is right, runs anywhere."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.numerics import quantize_e4m3_group, quantize_e4m3_static, round_to_float, widen
from pallas_kernels.grouped_gemm.config import SCALE_GROUP, GemmDesc


def grouped_gemm_ref(
    desc: GemmDesc,
    x: Any,
    w: Any,
    tile_expert: Any,
    num_tiles: Any,
    *,
    x_scale: Any = None,
    w_scale: Any = None,
    bias: Any = None,
    out_scale: Any = None,
) -> Any:
    """What ``grouped_gemm`` computes, from the same stored values; arguments and shapes as there, w always (E, G, N,
    K).

    Every product is exact and summed in float32 (int8: in int32); rows of tiles from num_tiles on are zero.
    """
    tiles = tile_expert.shape[0]
    block_m = desc.rows // max(tiles, 1)
    accumulator = jnp.dtype(desc.accumulator)

    def one_tile(index):
        expert = jnp.maximum(tile_expert[index], 0)
        first = index * block_m
        rows = lax.dynamic_slice_in_dim(x, first, block_m)
        weights = w[expert]
        row_factor, block_factor = 1.0, 1.0
        if desc.lhs_scale == "group":
            groups = lax.dynamic_slice_in_dim(x_scale, first, block_m, axis=1)
            rows = widen(rows, jnp.float32) * _spread(groups.T, (desc.k,))
            weights = widen(weights, jnp.float32) * _spread(w_scale[expert], (desc.n, desc.k))
        elif desc.lhs_scale == "row":
            row_factor = lax.dynamic_slice_in_dim(x_scale, first, block_m)[:, None, None]
        elif desc.lhs_scale == "tensor":
            row_factor = x_scale
        if desc.rhs_scale == "channel":
            block_factor = w_scale[expert]
        elif desc.rhs_scale == "tensor":
            block_factor = w_scale[expert][:, None]
        exact = accumulator if accumulator == jnp.int32 else jnp.float32
        sums = jnp.einsum(
            "mk,gnk->mgn",
            widen(rows, exact),
            widen(weights, exact),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=exact,
        )
        h = sums.astype(jnp.float32) * row_factor * block_factor
        if bias is not None:
            h = h + bias[expert].astype(jnp.float32)
        h = h[:, 0] if desc.activation is None else desc.activation(*(h[:, g] for g in range(desc.projections)))
        return jnp.where(index < num_tiles.reshape(()), h, 0.0)

    h = lax.map(one_tile, jnp.arange(tiles, dtype=jnp.int32)).reshape(desc.rows, desc.n)
    if desc.is_rounded_first:
        h = round_to_float(h, jnp.bfloat16)
    if desc.requantize == "tensor":
        return quantize_e4m3_static(h, out_scale)
    if desc.requantize == "group":
        return quantize_rows_by_group(h, desc.has_power_of_two_scales)
    return h.astype(desc.out_dtype)


def quantize_rows_by_group(h: Any, is_power_of_two: bool = False) -> tuple[Any, Any]:
    """(rows, N) float32 -> e4m3 codes (rows, N) and scales (ceil(N / 128), rows), one per row and 128 columns."""
    rows, n = h.shape
    padded = jnp.pad(h, ((0, 0), (0, -n % SCALE_GROUP)))
    groups = padded.reshape(rows, -1, SCALE_GROUP)
    amax = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
    codes, scale = quantize_e4m3_group(groups, amax, is_power_of_two)
    return codes.reshape(rows, -1)[:, :n], scale[..., 0].T


def _spread(scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeat each scale over its 128 elements along the last len(shape) axes, cut to ``shape``."""
    for axis, size in zip(range(-len(shape), 0), shape, strict=True):
        scales = lax.slice_in_dim(jnp.repeat(scales, SCALE_GROUP, axis=axis), 0, size, axis=axis % scales.ndim)
    return scales
