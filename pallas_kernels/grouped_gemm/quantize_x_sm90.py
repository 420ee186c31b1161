"""Rows of x in 16 bits that the consumers of a grouped GEMM quantize themselves, into shared memory as wgmma reads it.

A launch between two products takes longer than this: the weights of the tile come into the ring meanwhile, and few rows
come from the L2 cache. Every consumer quantizes all rows of its tile for itself, so that none waits for another.

    for each 8 rows of the tile:
        scales by row: load the rows -> largest magnitudes; load them again where registers do not hold them
        for each part of K: values -> codes -> shared memory
        scales -> shared memory
    parts past K, which the last step multiplies: zeros
    fence, wait for the warpgroup

Codes and scales are those of quantize_and_permute, bit for bit.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.numerics import e4m3_row_scale, int8_token_factors, quantize_e4m3_static
from pallas_kernels.common.numerics_sm90 import cast_int8_in, e4m3_in_groups, e4m3_of_scales
from pallas_kernels.common.types import Layout, Scalar, TileRef, Value
from pallas_kernels.grouped_gemm.config import x_columns
from pallas_kernels.grouped_gemm.pipeline_sm90 import CtaContext
from pallas_kernels.grouped_gemm.problem import GemmDesc
from pallas_kernels.grouped_gemm.scheduler_sm90 import Tile

ROWS = 8  # at a time: those of a swizzle tile
_THREADS = 16  # of a row
_HELD = 64  # values a thread that stay in registers between the largest magnitude and the codes
_AT_ONCE = 32  # values a thread that are loaded at once where more are not held

_Load: TypeAlias = Callable[[Scalar], Value]  # part of K -> (8, columns) float32
_Store: TypeAlias = Callable[[Scalar, Value], None]  # of a part, its codes


def x_layout(columns: int) -> Layout:
    """Of an array (8, columns): two rows a warp, 16 threads a row."""
    tiling = plgpu.Tiling(((ROWS, columns), (2, columns), (columns // _THREADS,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def quantize_rows(cta: CtaContext, tile: Tile) -> None:
    """Write codes and scales of the tile's rows to this consumer's part of ``Scratch.x``, ``x_scale`` and ``rows``."""
    desc, config, scratch = cta.desc, cta.config, cta.scratch
    columns = x_columns(desc)
    parts, allocated, layout = desc.k // columns, scratch.x.shape[1], x_layout(columns)
    for row in range(0, config.block_m, ROWS):

        def load(part, row=row):
            own = pl.ds(tile.row * config.block_m + row, ROWS), pl.ds(part * columns, columns)
            return mosaic.load(cta.operands["x"].at[*own], layout=layout, optimized=False).astype(jnp.float32)

        def store(part, codes, row=row):
            scratch.x.at[cta.warpgroup, part, pl.ds(row, ROWS)][...] = codes

        if desc.lhs_scale == "tensor":
            _by_scale(desc, parts, load, store, cta.operands["x_scale"][0])
        elif desc.lhs_scale == "group":
            _by_group(desc, parts, load, store, scratch.x_scale.at[cta.warpgroup, :, pl.ds(row, ROWS)])
        else:
            scratch.rows.at[cta.warpgroup, pl.ds(row, ROWS)][...] = _by_row(desc, parts, load, store, layout)
        for part in range(parts, allocated):
            store(part, plgpu.layout_cast(jnp.zeros((ROWS, columns), desc.dtype), layout))
    plgpu.commit_smem()


def _by_scale(desc: GemmDesc, parts: int, load: _Load, store: _Store, scale: Value) -> None:
    """The given one of all rows."""

    def quantize(part, values, _):
        store(part, quantize_e4m3_static(values, scale))

    _fold(parts, x_columns(desc), load, quantize, None)


def _by_group(desc: GemmDesc, parts: int, load: _Load, store: _Store, scales: TileRef) -> None:
    """A part of K is a group."""
    is_power_of_two = desc.x_quantization.endswith("ue8m0")

    def quantize(part, values, _):
        codes, scale = e4m3_in_groups(values, jnp.max(jnp.abs(values), axis=1), is_power_of_two)
        store(part, codes)
        scales.at[part][...] = scale

    _fold(parts, x_columns(desc), load, quantize, None)


def _by_row(desc: GemmDesc, parts: int, load: _Load, store: _Store, layout: Layout) -> Value:
    """Stores the codes, returns the scales (8,)."""
    columns = x_columns(desc)
    if parts * columns // _THREADS <= _HELD:
        held = [load(part) for part in range(parts)]
        load = held.__getitem__
    largest = _fold(
        parts,
        columns,
        load,
        lambda part, values, most: jnp.maximum(most, jnp.abs(values)),
        plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), layout),
    )
    amax = jnp.max(largest, axis=1)
    if desc.x_quantization == "int8_row":
        inverse, scale = int8_token_factors(amax)

        def codes_of(values):
            return cast_int8_in(values * lax.broadcast_in_dim(inverse, values.shape, [0]), layout)

    else:
        scale = e4m3_row_scale(amax)

        def codes_of(values):
            return e4m3_of_scales(values, scale)

    _fold(parts, columns, load, lambda part, values, _: store(part, codes_of(values)), None)
    return scale


def _fold(parts: int, columns: int, load: _Load, body: Callable[..., Any], carry: Any) -> Any:
    """Fold ``body(part, values, carry)`` over the parts of K, several of which are loaded at once."""
    values_a_thread = columns // _THREADS
    at_once = _AT_ONCE // values_a_thread
    whole = 0 if parts * values_a_thread <= _HELD else parts // at_once

    def several(first, count, carry):
        loaded = [load(first + i) for i in range(count)]
        for i, values in enumerate(loaded):
            carry = body(first + i, values, carry)
        return carry

    if whole:
        carry = lax.fori_loop(0, whole, lambda i, carry: several(i * at_once, at_once, carry), carry)
    return several(whole * at_once, parts - whole * at_once, carry)
