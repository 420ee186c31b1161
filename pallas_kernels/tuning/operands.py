"""Random operands of a layer's products, for whoever times them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_gemm import GemmDesc
from pallas_kernels.grouped_gemm.packed import PackedDesc, PackedFormat, PackedWeights, to_kernel_layout
from pallas_kernels.grouped_gemm.packed.format import rotated, scale_rotation, to_words, zero_term
from pallas_kernels.tuning.layer import AnyDesc, AnyKey


def random_routings(desc: AnyDesc, block_m: int, key: AnyKey, num_tokens: int, calls: int) -> list[dict[str, Any]]:
    """tile_expert, num_tiles and tile_rows of each call, for uniform routing of num_tokens.

    Each call draws its own: other experts, which are not in the L2 yet, and now and then one with more rows than a tile
    holds. A height is judged by all of them.
    """
    found, tiles = [], desc.rows // block_m
    for seed in range(calls):
        ids = np.argsort(np.random.default_rng(seed).random((num_tokens, key.num_experts)), axis=1)[:, : key.top_k]
        sizes = np.bincount(ids.reshape(-1), minlength=key.num_experts)
        tile_expert, tile_rows = np.full(tiles, -1, np.int32), np.zeros(tiles, np.int32)
        used = np.repeat(np.arange(key.num_experts), -(-sizes // block_m))
        tile_expert[: len(used)] = used
        tile_rows[: len(used)] = np.concatenate([np.minimum(s - np.arange(0, s, block_m), block_m) for s in sizes])
        own = dict(tile_expert=tile_expert, num_tiles=np.int32(len(used)), tile_rows=tile_rows)
        found.append({name: jnp.asarray(value) for name, value in own.items()})
    return found


def random_operands(desc: AnyDesc, block_m: int, key: AnyKey) -> tuple[Any, Any, dict[str, Any]]:
    """x, w and the scales by name, as ``grouped_gemm`` or ``grouped_gemm_packed`` takes them. Traceable."""
    x_dtype = desc.dtype if isinstance(desc, GemmDesc) else desc.fmt.operand
    x = _values(1, (desc.rows, desc.k), x_dtype)
    if isinstance(desc, PackedDesc):
        w = random_packed_weights(desc.fmt, (key.num_experts, desc.projections, desc.n, desc.k), desc.scale_dtype)
        scales = {"x_scale": jnp.full((desc.rows,), 0.01, jnp.float32)} if desc.lhs_scale == "row" else {}
        return x, w, scales

    matrices = (key.num_experts, desc.projections)
    # One expert's values for all: routing decides what is read, not the values.
    w = jnp.tile(_values(0, (1, desc.projections, desc.n, desc.k), desc.dtype), (key.num_experts, 1, 1, 1))
    k_groups, n_groups = -(-desc.k // 128), -(-desc.n // 128)
    x_scale = {"tensor": (), "row": (desc.rows,), "group": (k_groups, desc.rows)}.get(desc.lhs_scale)
    w_scale = {"tensor": matrices, "channel": (*matrices, desc.n), "block": (*matrices, n_groups, k_groups)}
    rest: dict[str, Any] = dict(
        x_scale=None if x_scale is None else jnp.full(x_scale, 0.01, jnp.float32),
        w_scale=None if desc.rhs_scale == "none" else jnp.full(w_scale[desc.rhs_scale], 0.01, jnp.float32),
        out_scale=jnp.float32(0.1) if desc.requantize == "tensor" else None,
    )
    if desc.activation is None:
        w = w[:, 0]
        rest["w_scale"] = None if rest["w_scale"] is None else rest["w_scale"][:, 0]
    return x, w, rest


def random_packed_weights(
    fmt: PackedFormat, shape: tuple[int, int, int, int], scale_dtype: str = "float32"
) -> PackedWeights:
    """Random codes for matrices (E, G, N, K), zero points around 0. Scales near 2**-7; those inside blocks are near
    1 or, powers of two, at most 2**-7.
    """
    experts, projections, n, k = shape
    channel_blocks = -(-n // 64)
    keys = jax.random.split(jax.random.key(0), 4)
    bits = jax.random.bits(keys[0], (experts, channel_blocks, projections, -(-k // fmt.block_k), *fmt.block_shape))
    if fmt.element == "e4m3":
        even = to_words(np.full((64, fmt.block_k), 0xFE, np.uint8), fmt)  # the same in every word; no NaN is even
        bits = bits & even.view(np.uint32).flat[0]
    if fmt.scale_words:
        near_one = {"e4m3": 0x48484848, "e8m0": 0xF0F0F0F0}[fmt.scale]
        inside = rotated(bits[..., -1:, :] & jnp.uint32(0x07070707) | jnp.uint32(near_one), scale_rotation(fmt))
        bits = jnp.concatenate([bits[..., :-1, :], inside], axis=-2)
    grouped = (experts, channel_blocks, projections, -(-k // (fmt.group_size or k)), 64)
    scale = zero = channel = None
    if fmt.has_zero_point:
        zero = zero_term(fmt, jax.random.randint(keys[3], grouped, -8, 8).astype(jnp.float32)).astype(fmt.operand)
    if fmt.scale == "group":
        scale = jax.random.uniform(keys[1], grouped, jnp.float32, 0.005, 0.015).astype(scale_dtype)
    else:
        channel = jax.random.uniform(keys[2], (*grouped[:3], 64), jnp.float32, 0.005, 0.015)
        if fmt.scale == "e8m0":
            channel = jnp.ones_like(channel)
        if fmt.scale_words:
            channel = channel * _left_by_scales_of_one(fmt)
    return PackedWeights(jax.lax.bitcast_convert_type(bits, jnp.int32), scale, zero, channel, fmt, n, k)


def _left_by_scales_of_one(fmt: PackedFormat) -> np.floating:
    """The factor of a channel that packing makes where all scales inside the blocks are 1."""
    one = {"e4m3": np.ones((), jnp.float8_e4m3fn), "e8m0": np.uint8(127)}[fmt.scale]
    codes = np.zeros((1, 1, 64, fmt.block_k), np.uint8)
    scales = np.full((1, 1, 64, fmt.block_k // (fmt.group_size or 1)), one)
    return np.asarray(to_kernel_layout(fmt, codes, scale=scales).channel_scale).flat[0]


def _values(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    random = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    return (random * 40).astype(jnp.int8) if dtype == "int8" else random.astype(dtype)
