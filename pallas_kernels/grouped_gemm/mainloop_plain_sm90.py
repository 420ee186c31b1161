"""The plain main loop: activations are the left operand of wgmma, weights the right one; both lie in shared memory.

    consumers (1 or 2)    64 rows of the tile each
        main loop             wgmma x[slot] w[slot]^T for each K step
        epilogue              scales, bias, activation, requantization in registers -> staged TMA stores; or the
                              derivative of an activation, see epilogue_pull_sm90.py

With per-tensor, per-channel and per-row scales one accumulator runs over all of K and the scales follow in the
epilogue. With 128x128 weight blocks and 1x128 activation groups the product of each K step is scaled and added in
float32.

With cluster=2 the CTAs of a cluster work on neighbouring column tiles of one row tile. Each loads half of the rows
of a K step into the slots of both, so ``empty`` counts the consumers of both: neither runs more than a ring ahead of
the other, and neither ends while the other still writes or signals. With shares_weights they work on neighbouring row
tiles. Where both tiles have one expert, each CTA loads half of the weights for both; where not, each loads its own and
they stay in step.

Value a thread with two consumers: 168 at entry, then 240 (consumers) and 24 (producer); no spills at 128 x 256
tiles (jax 0.11.2, ptxas 13.0). Shared memory at that tile: 4 stages of 48 KiB and 32 KiB of staging.
"""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.accumulator_math_sm90 import round_to_bfloat16
from pallas_kernels.common.numerics_sm90 import e4m3_in_groups
from pallas_kernels.common.types import Scalar, TileRef, Value
from pallas_kernels.grouped_gemm import epilogue_pull_sm90 as pull
from pallas_kernels.grouped_gemm import smem_operands_sm90 as smem
from pallas_kernels.grouped_gemm.config import GemmConfig, num_pieces, piece_n, store_columns
from pallas_kernels.grouped_gemm.epilogue_sm90 import (
    activated,
    inside_output,
    projections,
    store_in_turn,
    store_staged,
    stores_under_way,
)
from pallas_kernels.grouped_gemm.pipeline_sm90 import CtaContext, MainLoop
from pallas_kernels.grouped_gemm.problem import GemmDesc
from pallas_kernels.grouped_gemm.scheduler_sm90 import Tile

_Values = Callable[[int, int], list[Value]]  # (first column, columns) -> (64, columns) of each projection, float32


def main_loop(desc: GemmDesc, config: GemmConfig) -> MainLoop:
    """The plain main loop for ``desc``; config must pass ``config_error``."""
    loop = smem.main_loop(desc, config, _consume)
    if desc.pulls is None:
        return loop
    return dataclasses.replace(loop, epilogue_steps=pull.ring_steps(desc, config), load_epilogue=pull.load_step)


def _consume(cta: CtaContext, tile: Tile) -> None:
    desc, config, scratch = cta.desc, cta.config, cta.scratch
    known = lax.min(tile.row, cta.operands["num_tiles"][0] - 1) if config.shares_weights else tile.row
    in_use = cta.operands["tile_rows"][known] - cta.warpgroup * 64 if desc.has_tile_rows else None
    if config.shares_weights:
        in_use = jnp.where(known == tile.row, 64 if in_use is None else in_use, 0)

    def compute():
        with jax.named_scope("main_loop"):
            accumulators = (_multiply_promoted if desc.is_block_scaled else _multiply)(cta, tile)
        if scratch.vectors_full is not None:
            plgpu.barrier_wait(scratch.vectors_full)
        with jax.named_scope("epilogue"):
            if desc.pulls is not None:
                pull.store(cta, tile, *accumulators)
            elif desc.keeps_before:
                _store_with_before(cta, tile, _scaled(cta, tile, accumulators))
            else:
                _store(cta, tile, _scaled(cta, tile, accumulators), in_use)
        if scratch.vectors_full is not None:
            mosaic.release(scratch.vectors_empty)

    if in_use is not None and (config.shares_weights or config.num_consumers > 1):
        # The second half of an expert's last tile is often empty: leave the tensor core to the first.
        pl.when(in_use > 0)(compute)
        pl.when(in_use <= 0)(lambda: smem.skip(cta, tile))
    else:
        compute()


def _multiply(cta: CtaContext, tile: Tile) -> list[Value]:
    """[(64, G * block_n)]: one accumulator over all of K."""
    rows, scratch = pl.ds(cta.warpgroup * 64, 64), cta.scratch
    shape = (64, cta.desc.projections * cta.config.block_n)
    return smem.multiply(cta, tile, shape, 1, lambda slot: [(scratch.x.at[slot, rows], scratch.w.at[slot])])


def _multiply_promoted(cta: CtaContext, tile: Tile) -> list[Value]:
    """Parts (64, <= 128) side by side, together (64, G * block_n): every K step of 128 is added in float32."""
    desc, config, scratch = cta.desc, cta.config, cta.scratch
    rows, piece = pl.ds(cta.warpgroup * 64, 64), piece_n(desc, config)
    starts = range(0, desc.projections * config.block_n, min(config.block_n, piece))
    columns = [divmod(start, config.block_n) for start in starts]

    def batches(slot, block):
        for index in range(num_pieces(desc, config)):
            yield [(scratch.x.at[slot, rows], scratch.w.at[slot, pl.ds(index * piece, piece)])]

    def scales_of_rows(slot, block):
        return mosaic.load(scratch.x_scale.at[slot, block, rows], layout=mosaic.ROWS, optimized=False)

    return smem.multiply_promoted(cta, tile, (64, piece), 1, batches, scales_of_rows, columns)


def _scaled(cta: CtaContext, tile: Tile, accumulators: list[Value]) -> _Values:
    """The tile of each projection. accumulators: of equal width, side by side (64, G * block_n)."""
    desc, config, scratch, operands = cta.desc, cta.config, cta.scratch, cta.operands
    row_scales = None
    if desc.lhs_scale == "row":
        rows = pl.ds(cta.warpgroup * 64, 64)
        row_scales = mosaic.load(scratch.rows.at[rows], layout=mosaic.ROWS, optimized=False)

    def values(start: int, width: int) -> list[Value]:
        shape, columns = (64, width), pl.ds(start, width)

        def accumulator(projection: int) -> Value:
            index, offset = divmod(projection * config.block_n + start, accumulators[0].shape[1])
            part = accumulators[index]
            return part if part.shape[1] == width else part[:, offset : offset + width]

        def factors(projection: int) -> Iterator[Value]:
            scalar = operands["x_scale"][0] if desc.lhs_scale == "tensor" else None
            if desc.rhs_scale == "tensor":
                own = smem.matrix_scale(cta, tile, projection)
                scalar = own if scalar is None else scalar * own
            if row_scales is not None:
                yield lax.broadcast_in_dim(row_scales if scalar is None else row_scales * scalar, shape, [0])
            elif scalar is not None:
                yield scalar
            if scratch.columns is not None:
                yield _across_rows(scratch.columns.at[projection, columns], shape)

        def bias(projection: int) -> Value:
            return _across_rows(scratch.bias.at[projection, columns], shape)

        return projections(cta, accumulator, factors, bias)

    return values


def _across_rows(vector: TileRef, shape: tuple[int, int]) -> Value:
    loaded = mosaic.load(vector, layout=mosaic.COLUMNS, optimized=False).astype(jnp.float32)
    return lax.broadcast_in_dim(loaded, shape, [1])


def _store(cta: CtaContext, tile: Tile, scaled: _Values, in_use: Value | None) -> None:
    """Requantize and write one warpgroup's (64, block_n) of the output, staged through its slots.

    in_use: how many of the 64 rows are wanted, for ``row_chunk``.
    """
    desc, config = cta.desc, cta.config
    inverse = 1.0 / cta.operands["out_scale"][0] if desc.requantize == "tensor" else None
    row = tile.row * config.block_m + cta.warpgroup * 64
    rows, columns, staging = pl.ds(row, 64), store_columns(desc, config), cta.scratch.staging.at[cta.warpgroup]
    num_slots = staging.shape[0]

    def rounded(start: int, width: int) -> Value:
        value = activated(cta, scaled(start, width), smem.sigmoid(config))
        if not desc.is_rounded_first:
            return value
        return round_to_bfloat16(value) if config.inline_ptx else lax.reduce_precision(value, 8, 7)

    whole = None
    if desc.requantize == "group":
        whole = rounded(0, config.block_n)
        whole, scale = e4m3_in_groups(whole, jnp.max(jnp.abs(whole), axis=1), desc.has_power_of_two_scales)
        _store_scale(cta, tile, row, scale)

    starts = range(0, config.block_n, columns)
    for index, start in enumerate(starts):
        if whole is not None:
            value = whole if columns == config.block_n else whole[:, start : start + columns]
        else:
            value = rounded(start, columns)
            value = value if inverse is None else value * inverse
        slot = index % num_slots
        plgpu.wait_smem_to_gmem(stores_under_way(index, len(starts), num_slots), wait_read_only=True)
        staging[slot] = value.astype(desc.stored_dtype)
        plgpu.commit_smem()
        first_column = tile.column * config.block_n + start
        target = cta.outputs[0].at[rows, pl.ds(first_column, columns)]
        if config.row_chunk is None:
            store_staged(cta, staging.at[slot], target, first_column)
            continue
        assert in_use is not None
        inside = inside_output(cta, first_column)
        for first in range(0, 64, config.row_chunk):
            chunk, wanted = pl.ds(first, config.row_chunk), first < in_use
            wanted = wanted if inside is None else wanted & inside
            plgpu.copy_smem_to_gmem(staging.at[slot, chunk], target.at[chunk], predicate=wanted, commit_group=False)
        plgpu.commit_smem_to_gmem_group()


def _store_with_before(cta: CtaContext, tile: Tile, scaled: _Values) -> None:
    """Write one warpgroup's (64, block_n) of the output, and what the activation was given."""
    desc, config = cta.desc, cta.config
    columns = store_columns(desc, config)
    pieces = config.block_n // columns
    for piece in range(pieces):
        given = scaled(piece * columns, columns)
        values = [(value, cta.outputs[1], projection * desc.n) for projection, value in enumerate(given)]
        values.append((activated(cta, given, smem.sigmoid(config)), cta.outputs[0], 0))
        store_in_turn(cta, tile, tile.column * config.block_n + piece * columns, values, piece, pieces)


def _store_scale(cta: CtaContext, tile: Tile, row: Scalar, scale: Value) -> None:
    def store():
        cta.outputs[1].at[tile.column, pl.ds(row, 64)][...] = scale

    column_tiles = -(-cta.desc.n // cta.config.block_n)
    if column_tiles % cta.config.cluster:
        pl.when(tile.column < column_tiles)(store)
    else:
        store()
