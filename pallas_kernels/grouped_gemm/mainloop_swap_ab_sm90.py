"""The swap_ab main loop: weights are the left operand of wgmma, activations the right one; both lie in shared memory.

A tile's product is computed transposed, W X^T: weights fill the 64 rows of a wgmma whatever the number of tokens, which
are its N. Small-M tiles serve few rows per expert; large-M tiles have heights between the multiples of 64.

    consumers (1 to 4)    64 channels of the tile each, or 128, or all the same 64 in turn (sharers)
        main loop             wgmma w[slot] x[slot]^T for each projection and K step
        exchange              sums of consumers that share channels
        epilogue              for each piece of rows: scales, bias, activation -> transposed staging -> TMA store;
                              or -> rows with the channels of all consumers -> requantization -> stores

Clusters of two CTAs share rows or weights as in mainloop_plain_sm90.py. With block scales the products of each 128
of K are scaled and added in float32, as there.

Value: a consumer accumulates G * 64 * block_m / 128 values a thread. What all enter with is enough for small-M
tiles (50 used at 2 x 64 channels by 16 rows); for large-M ones the producer gives up most of its own. Shared memory
goes to the ring: at 2 x 128 channels and 16 rows 6 stages of 34 KiB, at 144 rows 4 of 50 KiB beside 12 KiB of staging.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.numerics import quantize_e4m3_static
from pallas_kernels.common.numerics_sm90 import e4m3_in_groups
from pallas_kernels.common.sm90 import LANES
from pallas_kernels.common.types import Scalar, TileRef, Value
from pallas_kernels.grouped_gemm import pipeline_sm90 as pipeline
from pallas_kernels.grouped_gemm import smem_operands_sm90 as smem
from pallas_kernels.grouped_gemm.config import HANDED_OVER, GemmConfig, hands_over, store_rows
from pallas_kernels.grouped_gemm.epilogue_sm90 import (
    CHANNELS,
    finish,
    rows_in_use,
    stage_transposed,
    store_transposed,
    stores_under_way,
)
from pallas_kernels.grouped_gemm.pipeline_sm90 import CtaContext, MainLoop, Sums
from pallas_kernels.grouped_gemm.problem import SCALE_GROUP, GemmDesc
from pallas_kernels.grouped_gemm.scheduler_sm90 import Tile, tiles_of_cta


def main_loop(desc: GemmDesc, config: GemmConfig) -> MainLoop:
    """The swap_ab main loop for ``desc``; config must pass ``config_error``."""
    return smem.main_loop(desc, config, _consume)


def _consume(cta: CtaContext, tile: Tile) -> None:
    if not cta.config.shares_weights:
        _compute(cta, tile)
        return
    # The last row tile may have no partner: its cluster's other CTA keeps in step.
    is_tile = tile.row < cta.operands["num_tiles"][0]
    pl.when(is_tile)(lambda: _compute(cta, tile))
    pl.when(jnp.logical_not(is_tile))(lambda: smem.skip(cta, tile))


def _compute(cta: CtaContext, tile: Tile) -> None:
    in_use = rows_in_use(cta, tile)
    with jax.named_scope("main_loop"):
        accumulators = (_multiply_promoted if cta.desc.is_block_scaled else _multiply)(cta, tile)
    if hands_over(cta.desc, cta.config):
        _requantize(cta, tile, accumulators)
    else:
        pipeline.gather_sums(cta, [accumulators], functools.partial(_store, cta, tile, in_use))


def _store(cta: CtaContext, tile: Tile, in_use: Scalar | None, sums: Sums) -> None:
    desc, config, scratch, (accumulators,) = cta.desc, cta.config, cta.scratch, sums
    if scratch.vectors_full is not None:
        plgpu.barrier_wait(scratch.vectors_full)
    pieces, num_slots = _pieces(config), scratch.staging.shape[1]
    for index, (block, start, rows) in enumerate(pieces):
        channels = cta.channel_group * config.consumer_channels + block * CHANNELS
        with jax.named_scope("epilogue"):
            own = accumulators[block * desc.projections : (block + 1) * desc.projections]
            value = _scaled(cta, tile, own, channels, start, rows)
        if scratch.vectors_full is not None and index == len(pieces) - 1:
            mosaic.release(scratch.vectors_empty)
        with jax.named_scope("store"):
            staging = scratch.staging.at[cta.channel_group, index % num_slots, pl.ds(0, rows)]
            plgpu.wait_smem_to_gmem(stores_under_way(index, len(pieces), num_slots), wait_read_only=True)
            stage_transposed(value, staging, desc.stored_dtype)
            plgpu.commit_smem()
            first = tile.column * config.block_n + channels
            target = cta.outputs[0].at[pl.ds(tile.row * config.block_m, config.block_m), pl.ds(first, CHANNELS)]
            store_transposed(cta, in_use, staging, target.at[pl.ds(start, rows)], first)


def _requantize(cta: CtaContext, tile: Tile, accumulators: list[Value]) -> None:
    """Write codes of the rows in use, and the scales of their groups; a warp takes a row with all columns of the tile.

    The bits are those of ``quantize_and_permute``: rows are rounded to its operand on their way.
    """
    desc, config, operands, scratch = cta.desc, cta.config, cta.operands, cta.scratch
    if scratch.vectors_full is not None:
        plgpu.barrier_wait(scratch.vectors_full)
    channels = cta.channel_group * CHANNELS
    value = _scaled(cta, tile, accumulators, channels, 0, config.block_m)
    if scratch.vectors_full is not None:
        mosaic.release(scratch.vectors_empty)
    for piece in range(config.block_m // HANDED_OVER):
        rows = value[:, piece * HANDED_OVER : (piece + 1) * HANDED_OVER]
        stage_transposed(rows, scratch.handed_over.at[piece, :, pl.ds(channels, CHANNELS)], desc.out_dtype)
    plgpu.barrier_arrive(scratch.handed_over_by_all)
    plgpu.barrier_wait(scratch.handed_over_by_all)

    first_row, columns = tile.row * config.block_m, pl.ds(tile.column * config.block_n, config.block_n)
    in_use = operands["tile_rows"][tile.row] if desc.has_tile_rows else jnp.int32(config.block_m)

    def one_piece(i, _):
        piece = cta.channel_group + i * config.num_consumers
        rows = pl.ds(first_row + piece * HANDED_OVER, HANDED_OVER)
        layout = mosaic.row_a_warp(config.block_n // LANES)
        hidden = mosaic.load(scratch.handed_over.at[piece], layout=layout, optimized=False).astype(jnp.float32)
        if desc.requantize == "group":
            codes, scale = e4m3_in_groups(hidden, jnp.max(jnp.abs(hidden), axis=1), desc.has_power_of_two_scales)
            cta.outputs[1].at[tile.column, rows][...] = scale
        else:
            codes = quantize_e4m3_static(hidden, operands["out_scale"][0])
        cta.outputs[0].at[rows, columns][...] = codes
        return 0

    pieces = lax.div(in_use + (HANDED_OVER - 1), jnp.int32(HANDED_OVER))
    lax.fori_loop(0, tiles_of_cta(cta.channel_group, pieces, config.num_consumers), one_piece, 0)
    # The next tile's rows come where these were read.
    plgpu.barrier_arrive(scratch.handed_over_by_all)
    plgpu.barrier_wait(scratch.handed_over_by_all)


def _pieces(config: GemmConfig) -> list[tuple[int, int, int]]:
    """What a consumer stores at a time: (block of 64 channels, first row, rows)."""
    step = store_rows(config)
    starts = range(0, config.block_m, step)
    blocks = range(config.consumer_channels // CHANNELS)
    return [(block, start, min(step, config.block_m - start)) for block in blocks for start in starts]


def _multiply(cta: CtaContext, tile: Tile) -> list[Value]:
    """This warpgroup's channels of one tile: for each 64 of them, (64, block_m) of each projection."""
    desc, config, scratch = cta.desc, cta.config, cta.scratch
    number = config.consumer_channels // CHANNELS * desc.projections

    def products(slot):
        for block, projection in (divmod(index, desc.projections) for index in range(number)):
            first = projection * config.block_n + cta.channel_group * config.consumer_channels + block * CHANNELS
            yield scratch.w.at[slot, pl.ds(first, CHANNELS)], scratch.x.at[slot]

    return smem.multiply(cta, tile, (CHANNELS, config.block_m), number, products)


def _multiply_promoted(cta: CtaContext, tile: Tile) -> list[Value]:
    """As ``_multiply``; every 128 of K are added in float32. A consumer's 64 channels lie in one weight block."""
    desc, config, scratch = cta.desc, cta.config, cta.scratch
    channels = cta.channel_group * CHANNELS
    columns = [(projection, channels) for projection in range(desc.projections)]

    def products(slot, block):
        depth = pl.ds(block * SCALE_GROUP, SCALE_GROUP)
        for projection in range(desc.projections):
            first = projection * config.block_n + channels
            yield scratch.w.at[slot, pl.ds(first, CHANNELS), depth], scratch.x.at[slot, :, depth]

    def scales_of_rows(slot, block):
        own = scratch.x_scale.at[slot, block, pl.ds(0, config.block_m)]
        return mosaic.load(own, layout=mosaic.COLUMNS, optimized=False)

    shape, batches = (CHANNELS, config.block_m), lambda slot, block: [products(slot, block)]
    return smem.multiply_promoted(cta, tile, shape, desc.projections, batches, scales_of_rows, columns)


def _scaled(
    cta: CtaContext, tile: Tile, accumulators: list[Value], first_channel: Scalar, start: int, rows: int
) -> Value:
    """64 channels of the tile by ``rows`` rows from ``start`` on, float32. accumulators: of each projection."""
    desc, scratch, operands = cta.desc, cta.scratch, cta.operands
    shape, channels, piece = (CHANNELS, rows), pl.ds(first_channel, CHANNELS), pl.ds(start, rows)

    def accumulator(projection: int) -> Value:
        whole = accumulators[projection]
        return whole[:, start : start + rows] if rows < whole.shape[1] else whole

    def of_channels(ref: TileRef) -> Value:
        loaded = mosaic.load(ref, layout=mosaic.ROWS, optimized=False).astype(jnp.float32)
        return lax.broadcast_in_dim(loaded, shape, [0])

    def factors(projection: int) -> Iterator[Value]:
        if desc.lhs_scale == "row":
            of_rows = mosaic.load(scratch.rows.at[piece], layout=mosaic.COLUMNS, optimized=False)
            yield lax.broadcast_in_dim(of_rows, shape, [1])
        elif desc.lhs_scale == "tensor":
            yield operands["x_scale"][0]
        if desc.rhs_scale == "channel":
            yield of_channels(scratch.columns.at[projection, channels])
        elif desc.rhs_scale == "tensor":
            yield smem.matrix_scale(cta, tile, projection)

    def bias(projection: int) -> Value:
        return of_channels(scratch.bias.at[projection, channels])

    return finish(cta, accumulator, factors, bias, smem.sigmoid(cta.config))
