"""The portable grouped GEMMs in plain jnp, for machines without a GPU: the same operands, tiles, steps and roundings.

The interpreter of Pallas runs neither ``mma`` nor inline PTX. ``grouped_gemm_mma_twin`` takes the place of
``grouped_gemm_mma`` and reads the flat operands as its body does: rows clamped to the last, zeros past K, one partial
sum a step where sums are promoted, operands rounded where scales are folded into them. Tiles from num_tiles on, which
the kernel does not write, are NaN.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.experts.hopper import _kernel_backend, _plan
from moe_jax.experts.portable import _portable
from pallas_kernels.common.numerics import widen
from pallas_kernels.common.targets import Target
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N
from pallas_kernels.grouped_gemm.packed.layout import PackedWeights
from pallas_kernels.grouped_gemm.packed.problem import PackedDesc
from pallas_kernels.grouped_gemm.packed.reference import dequantized
from pallas_kernels.grouped_gemm.portable import api, kernel_mma
from pallas_kernels.grouped_gemm.portable.config import AnyDesc, MmaConfig, folds_scales, is_promoted, step_k
from pallas_kernels.grouped_gemm.problem import SCALE_GROUP, GemmDesc

Product = Callable[[jax.Array, jax.Array, jax.Array], list[jax.Array]]


@contextlib.contextmanager
def on_target(target: Target) -> Iterator[None]:
    """The portable backend as on a GPU that is not here, its kernels replaced by their twin."""
    where = [mock.patch.object(module, "portable_target", lambda: target) for module in (api, _plan, _portable)]
    with contextlib.ExitStack() as stack:
        for patch in (*where, mock.patch.object(kernel_mma, "grouped_gemm_mma", grouped_gemm_mma_twin)):
            stack.enter_context(patch)
        jax.clear_caches()
        _kernel_backend._refusal_of_shapes.cache_clear()
        yield
    jax.clear_caches()
    _kernel_backend._refusal_of_shapes.cache_clear()


def grouped_gemm_mma_twin(desc: AnyDesc, config: MmaConfig) -> Callable[[dict[str, jax.Array]], jax.Array]:
    """``grouped_gemm_mma`` in plain jnp."""

    def run(operands: dict[str, jax.Array]) -> jax.Array:
        assert set(operands) >= set(desc.operand_names)
        is_packed = isinstance(desc, PackedDesc)
        product = _packed(desc, config, operands) if is_packed else _plain(desc, config, operands)

        def one_tile(row):
            expert = jnp.maximum(operands["tile_expert"][row], 0)
            first = jnp.int32(0) if desc.unpermuted_rows else row * config.block_m
            x = lax.dynamic_slice_in_dim(operands["x"], first, config.block_m)
            values = product(x, first, expert)
            y = values[0] if desc.activation is None else desc.activation(*values)
            return jnp.where(row < operands["num_tiles"][0], y, jnp.nan).astype(desc.out_dtype)

        tiles = lax.map(one_tile, jnp.arange(desc.rows // config.block_m, dtype=jnp.int32))
        return tiles.reshape(desc.rows, -1)

    return run


def _steps(array: jax.Array, depth: int) -> jax.Array:
    """(..., K) -> (..., steps, depth), zeros past K."""
    widths = [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % depth)]
    padded = jnp.pad(array, widths)
    return padded.reshape(*array.shape[:-1], -1, depth)


def _row_scale(desc: AnyDesc, operands: dict[str, jax.Array], first: jax.Array, block_m: int) -> jax.Array | float:
    match desc.lhs_scale:
        case "tensor":
            return operands["x_scale"][0]
        case "row":
            return lax.dynamic_slice_in_dim(operands["x_scale"], first, block_m)[:, None]
    return 1.0


def _plain(desc: GemmDesc, config: MmaConfig, operands: dict[str, jax.Array]) -> Product:
    columns = -(-desc.n // config.block_n) * config.block_n
    depth, block_m = step_k(desc, config), config.block_m
    exact = jnp.int32 if desc.accumulator == "int32" else jnp.float32

    def product(x, first, expert):
        found = []
        for p in range(desc.projections):
            place = expert * desc.projections + p
            w = operands["w"][place][jnp.minimum(jnp.arange(columns), desc.n - 1)]
            parts = jnp.einsum(
                "msk,nsk->smn",
                _steps(widen(x, exact), depth),
                _steps(widen(w, exact), depth),
                precision=lax.Precision.HIGHEST,
                preferred_element_type=exact,
            )
            if is_promoted(desc):
                rows = lax.dynamic_slice_in_dim(operands["x_scale"], first, block_m, axis=1)
                own = operands["w_scale"][place][jnp.minimum(jnp.arange(columns) // SCALE_GROUP, -(-desc.n // 128) - 1)]
                parts = parts * (rows[:, :, None] * own.T[:, None, :])
            value = parts.sum(0).astype(jnp.float32)
            if not is_promoted(desc):
                value = value * _row_scale(desc, operands, first, block_m)
            if desc.rhs_scale in ("tensor", "channel"):
                value = value * operands["w_scale"][place]
            found.append(value if desc.bias_dtype is None else value + operands["bias"][place].astype(jnp.float32))
        return found

    return product


def _packed(desc: PackedDesc, config: MmaConfig, operands: dict[str, jax.Array]) -> Product:
    fmt, blocks = desc.fmt, desc.channel_blocks
    columns = -(-desc.n // config.block_n) * config.block_n
    channels = jnp.minimum(jnp.arange(columns // BLOCK_N), blocks - 1)

    def leaf(name):
        if name not in operands:
            return None
        array = operands[name]
        return array.reshape(-1, blocks, desc.projections, *array.shape[1:])

    scale = leaf("scale")
    if scale is not None:
        scale = scale[:, :, :, : -(-desc.k // (fmt.group_size or 1))]
    zero = leaf("zero")
    if zero is not None and fmt.group_size is not None:
        zero = zero[:, :, :, : -(-desc.k // fmt.group_size)]
    channel = leaf("channel_scale") if fmt.scale_words else None
    held = PackedWeights(leaf("w"), scale, zero, channel, fmt, blocks * BLOCK_N, desc.k)
    group = fmt.group_size or desc.k
    unscaled = dequantized(dataclasses.replace(held, scale=None)) if fmt.scale == "group" else dequantized(held)
    if fmt.scale == "group":
        own = scale.swapaxes(-1, -2).swapaxes(1, 2).reshape(*unscaled.shape[:3], -1).astype(jnp.float32)
        if folds_scales(desc):
            spread = jnp.repeat(own, group, axis=-1)[..., : desc.k]
            unscaled = lax.reduce_precision(unscaled * spread, 8, 7)

    def product(x, first, expert):
        found = []
        for p in range(desc.projections):
            w = unscaled[expert, p].reshape(blocks, BLOCK_N, desc.k)[channels].reshape(columns, desc.k)
            parts = jnp.einsum(
                "msk,nsk->smn", _steps(widen(x, jnp.float32), group), _steps(w, group), precision=lax.Precision.HIGHEST
            )
            if is_promoted(desc):
                parts = parts * own[expert, p].reshape(blocks, BLOCK_N, -1)[channels].reshape(columns, -1).T[:, None]
            value = parts.sum(0) * _row_scale(desc, operands, first, config.block_m)
            if desc.has_channel_scale and not fmt.scale_words:
                vector = operands["channel_scale"].reshape(-1, blocks, desc.projections, BLOCK_N)
                value = value * vector[expert][channels, p].reshape(-1)
            if desc.bias_dtype is not None:
                vector = operands["bias"].reshape(-1, desc.projections, blocks, BLOCK_N)
                value = value + vector[expert, p][channels].reshape(-1).astype(jnp.float32)
            found.append(value)
        return found

    return product
