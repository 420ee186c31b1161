"""The packed grouped GEMM in plain jnp: unpacks everything and multiplies in float32. Decides what is right."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.microscaling import decode_e2m1, decode_e8m0
from pallas_kernels.common.numerics import widen
from pallas_kernels.grouped_gemm.packed.config import PackedDesc
from pallas_kernels.grouped_gemm.packed.format import FOLDED_RANGE
from pallas_kernels.grouped_gemm.packed.layout import PackedWeights, unpack


def grouped_gemm_packed_ref(
    desc: PackedDesc,
    x: Any,
    w: PackedWeights,
    tile_expert: Any,
    num_tiles: Any,
    *,
    x_scale: Any = None,
    bias: Any = None,
) -> Any:
    """What ``grouped_gemm_packed`` computes; arguments as there, bias always (E, G, N). Rows of tiles from num_tiles on
    are zero.
    """
    tiles = tile_expert.shape[0]
    block_m = desc.rows // max(tiles, 1)
    matrices = dequantized(w)

    def one_tile(index):
        expert = jnp.maximum(tile_expert[index], 0)
        rows = widen(lax.dynamic_slice_in_dim(x, index * block_m, block_m), jnp.float32)
        h = jnp.einsum("mk,gnk->mgn", rows[:, : w.k], matrices[expert], precision=lax.Precision.HIGHEST)
        if desc.lhs_scale == "row":
            h = h * lax.dynamic_slice_in_dim(x_scale, index * block_m, block_m)[:, None, None]
        elif desc.lhs_scale == "tensor":
            h = h * x_scale
        if bias is not None:
            h = h + bias[expert].astype(jnp.float32)
        h = h[:, 0] if desc.activation is None else desc.activation(*(h[:, g] for g in range(desc.projections)))
        return jnp.where(index < num_tiles.reshape(()), h, 0.0)

    h = lax.map(one_tile, jnp.arange(tiles, dtype=jnp.int32)).reshape(desc.rows, desc.n)
    return h.astype(desc.out_dtype)


def dequantized(w: PackedWeights) -> Any:
    """(E, G, N, K) float32, every scale applied."""
    parts = unpack(w)
    codes = jnp.asarray(parts["codes"])
    if w.fmt.bits == 4:
        values = decode_e2m1(codes) if w.fmt.element == "e2m1" else codes.astype(jnp.float32) - 8.0
    elif w.fmt.element == "int8":
        values = codes.astype(jnp.float32) - 128.0
    else:
        values = widen(lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), jnp.float32)

    def spread(array):
        size = w.fmt.group_size or w.k
        return jnp.repeat(jnp.asarray(array), size, axis=-1)[..., : w.k].astype(jnp.float32)

    if "zero_point" in parts:
        values = values - spread(parts["zero_point"])
    if "scale" in parts:
        scale = parts["scale"]
        if w.fmt.scale == "e8m0" and w.fmt.is_8bit:
            top = jnp.asarray(scale).max(-1, keepdims=True).astype(jnp.float32)
            values = jnp.where(spread(scale) < top - FOLDED_RANGE, 0.0, values)
        values = values * spread(decode_e8m0(jnp.asarray(scale)) if w.fmt.scale == "e8m0" else scale)
    if "channel_scale" in parts:
        values = values * jnp.asarray(parts["channel_scale"])[..., None]
    return values
