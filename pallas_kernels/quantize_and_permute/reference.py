"""quantize_and_permute in plain jnp."""

import jax
import jax.numpy as jnp

from pallas_kernels.common.microscaling import nvfp4_global_scale, round_groups
from pallas_kernels.common.numerics import (
    divide,
    magnitude,
    quantize_e4m3_group,
    quantize_e4m3_row,
    quantize_e4m3_static,
    quantize_e4m3_tensor,
    quantize_int8_token,
)
from pallas_kernels.quantize_and_permute.config import GROUP, PermuteDesc


def quantize_and_permute_ref(
    desc: PermuteDesc,
    x: jax.Array,
    row_of: jax.Array | None,
    scale: jax.Array | None = None,
    columns: jax.Array | None = None,
    tile_expert: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """What ``quantize_and_permute`` computes; rows that no token fills are zero, with scale 0."""
    codes, scales = quantize_rows(desc, x, scale)
    if columns is not None and tile_expert is not None and row_of is not None:
        row = row_of.reshape(-1)
        token = jnp.repeat(jnp.arange(desc.num_tokens), desc.top_k)
        order = columns[tile_expert[jnp.maximum(row, 0) // desc.block_m]]
        gathered = jnp.take_along_axis(codes[token], order, axis=-1)
        empty = jnp.zeros((desc.num_rows, desc.width), codes.dtype)
        return empty.at[jnp.where(row < 0, desc.num_rows, row)].set(gathered, mode="drop"), scales
    if row_of is None:
        if scales is not None and desc.scale_rows:
            scales = jnp.pad(scales, ((0, 0),) * (scales.ndim - 1) + ((0, desc.scale_rows - desc.num_rows),))
        return codes, scales
    target = jnp.where(row_of < 0, desc.num_rows, row_of).reshape(-1)
    token = jnp.repeat(jnp.arange(desc.num_tokens, dtype=jnp.int32), desc.top_k)
    # A row knows its token, so that rows are gathered: XLA scatters them many times slower.
    token_of = jnp.full(desc.num_rows, desc.num_tokens, jnp.int32).at[target].set(token, mode="drop")

    def rows_of(values: jax.Array, axis: int) -> jax.Array:
        return jnp.take(values, token_of, axis=axis, mode="fill", fill_value=0)

    return rows_of(codes, 0), None if scales is None else rows_of(scales, -1)


def quantize_rows(desc: PermuteDesc, x: jax.Array, scale: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """(T, H) -> codes (T, H) and scales (T,), (ceil(H / 128), T) or None."""
    if desc.quantization == "none":
        return x, None
    values = x.astype(jnp.float32)
    if desc.quantization == "e4m3_tensor" and scale is not None:
        return quantize_e4m3_static(values, scale), None
    if desc.is_grouped:
        padded = jnp.pad(values, ((0, 0), (0, -desc.width % GROUP))).reshape(desc.num_tokens, -1, GROUP)
        amax = jnp.max(magnitude(padded), axis=-1, keepdims=True)
        codes, scales = quantize_e4m3_group(padded, amax, desc.has_power_of_two_scales)
        return codes.reshape(desc.num_tokens, -1)[:, : desc.width], scales[..., 0].T
    if (kind := desc.microscaling_kind) is not None:
        group = desc.microscaling_group or desc.width
        groups = jnp.pad(values, ((0, 0), (0, -desc.width % group))).reshape(desc.num_tokens, -1, group)
        amax = jnp.max(magnitude(groups), axis=-1, keepdims=True, initial=0.0)
        row_scale = None
        if desc.quantization == "nvfp4_row":
            scale = nvfp4_global_scale(jnp.max(amax, axis=1, keepdims=True, initial=0.0))
            row_scale = divide(jnp.ones_like(scale), scale)[:, 0, 0]
        rounded = round_groups(groups, amax, kind, scale)
        return rounded.reshape(desc.num_tokens, -1)[:, : desc.width].astype(desc.out_dtype), row_scale
    rules = dict(e4m3_row=quantize_e4m3_row, e4m3_tensor_row=quantize_e4m3_tensor, int8_row=quantize_int8_token)
    rule = rules[desc.quantization]
    codes, scales = rule(values, jnp.max(magnitude(values), axis=-1, keepdims=True))
    return codes, scales[:, 0]
