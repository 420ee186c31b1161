"""The packed grouped GEMM in plain jnp: unpacks everything and multiplies in float32. Decides what is right."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.microscaling import decode_e2m1, decode_e8m0
from pallas_kernels.common.numerics import widen
from pallas_kernels.grouped_gemm.packed.format import FOLDED_RANGE
from pallas_kernels.grouped_gemm.packed.layout import PackedWeights, from_kernel_layout
from pallas_kernels.grouped_gemm.packed.problem import PackedDesc
from pallas_kernels.grouped_gemm.reference import activated, in_tiles, row_factor


def grouped_gemm_packed_ref(
    desc: PackedDesc,
    x: jax.Array,
    w: PackedWeights,
    tile_expert: jax.Array,
    num_tiles: jax.Array,
    *,
    x_scale: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """What ``grouped_gemm_packed`` computes; arguments as there, bias always (E, G, N). Rows of tiles from num_tiles on
    are zero.
    """
    matrices = dequantized(w)

    def product(rows: jax.Array, first: jax.Array, expert: jax.Array) -> jax.Array:
        wide = widen(rows, jnp.float32)[:, : w.k]
        h = jnp.einsum("mk,gnk->mgn", wide, matrices[expert], precision=lax.Precision.HIGHEST)
        return h * row_factor(x_scale, first, rows.shape[0])

    return activated(desc, in_tiles(desc, x, tile_expert, num_tiles, bias, product)).astype(desc.out_dtype)


def dequantized(w: PackedWeights) -> jax.Array:
    """(E, G, N, K) float32, every scale applied."""
    parts = from_kernel_layout(w)
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
