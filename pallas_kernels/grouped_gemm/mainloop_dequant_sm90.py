"""The dequant main loop: packed weights, unpacked in registers, are the left operand of wgmma; rows are its columns.

A tile has block_m rows and 64 * channel_groups channels of each projection. Where its rows in use are known, those
behind the least height that holds them (``heights``) are neither loaded nor multiplied nor stored.

    consumers (1 to 4)    64 channels of each projection
        main loop             16-byte loads of w[slot] -> operands by bit moves -> wgmma operands x[slot]^T
        exchange              sums of consumers that share channels, where k_split or splits_projections
        epilogue              scales, bias, activation -> transposed staging -> TMA store

Scales inside the blocks are multiplied into the operands, which stay exact; scales per channel follow the sum; scales
per group multiply the float32 partial sum of each group. No product is in flight when a step ends.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic, sm90
from pallas_kernels.common.accumulator_math_sm90 import sigmoid
from pallas_kernels.common.types import Scalar, Value
from pallas_kernels.grouped_gemm import pipeline_sm90 as pipeline
from pallas_kernels.grouped_gemm import side_by_side_sm90 as side_by_side
from pallas_kernels.grouped_gemm.epilogue_sm90 import finish, stage_transposed, store_staged
from pallas_kernels.grouped_gemm.packed.config import (
    PackedConfig,
    accumulators,
    are_groups_together,
    are_projections_together,
    fragment_k,
    heights,
    is_promoted,
    own_projections,
    products_in_flight,
    promoted_k,
    promoted_rows,
    registers,
    scale_rows,
    shared_arrays,
    unpacks_late,
)
from pallas_kernels.grouped_gemm.packed.dequantize_sm90 import load_block
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N
from pallas_kernels.grouped_gemm.packed.problem import PackedDesc
from pallas_kernels.grouped_gemm.pipeline_sm90 import CtaContext, LoadStep, MainLoop, Sums
from pallas_kernels.grouped_gemm.scheduler_sm90 import Tile


def main_loop(desc: PackedDesc, config: PackedConfig) -> MainLoop:
    """The dequant main loop for ``desc``; config must pass ``config_error``."""
    return MainLoop(
        scratch=scratch_types(desc, config), registers=registers(config), load_tile=_load_tile, consume=_consume
    )


def scratch_types(desc: PackedDesc, config: PackedConfig) -> dict[str, Any]:
    """Allocations by field of ``Scratch``."""
    itemsize, out_itemsize = (jnp.dtype(dtype).itemsize for dtype in (desc.fmt.operand, desc.out_dtype))
    shapes = shared_arrays(desc, config)
    operand = mosaic.tiled(desc.fmt.operand, sm90.swizzle_bytes(fragment_k(desc, config) * itemsize))
    stored = mosaic.tiled(desc.out_dtype, sm90.swizzle_bytes(desc.n * out_itemsize))
    types = pipeline.scratch_arrays(shapes, dict(x=operand, staging=stored))
    arrivals = 1 + config.k_split + ("scale" in shapes) + ("zero" in shapes)
    types["full"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=config.num_stages)
    types["empty"] = plgpu.Barrier(num_arrivals=config.num_consumers, num_barriers=config.num_stages)
    if config.sharers > 1:
        types["partial_full"] = plgpu.Barrier(num_arrivals=config.sharers - 1, num_barriers=config.channel_groups)
        types["partial_empty"] = plgpu.Barrier(num_arrivals=1, num_barriers=config.channel_groups)
    return types


def _load_tile(cta: CtaContext, tile: Tile) -> LoadStep:
    """The function that issues the copies of one K step. TMA fills with zeros what lies past K and past the rows."""
    desc, config, operands, scratch = cta.desc, cta.config, cta.operands, cta.scratch
    blocks, groups = config.channel_groups * desc.projections, scale_rows(desc, config)
    first_row, in_use = cta.first_row_of_x(tile), _rows_in_use(cta, tile)

    def channels(own_column):
        first = (tile.expert * desc.channel_blocks + own_column * config.channel_groups) * desc.projections
        return pl.ds(first, blocks)

    def load(k, slot):
        full, part = scratch.full.at[slot], config.part_blocks * desc.fmt.block_k

        def copy(along_k, target, array, own_column):
            plgpu.copy_gmem_to_smem(array.at[channels(own_column), along_k], target.at[slot], full)

        depth = pl.ds(k * config.step_blocks, config.step_blocks)
        side_by_side.at_own(cta, tile, "w", functools.partial(copy, depth, scratch.w))

        def copy_rows(rows):
            for index in range(config.k_split):
                columns = pl.ds(k * config.block_k(desc) + index * part, part)
                source = operands["x"].at[pl.ds(first_row, rows), columns]
                plgpu.copy_gmem_to_smem(source, scratch.x.at[slot, index, pl.ds(0, rows)], full)

        _at_height(cta, in_use, copy_rows)
        for name, target in (("scale", scratch.scale), ("zero", scratch.zero)):
            if target is not None:
                own = pl.ds(_group_of(desc, config, k), groups)
                side_by_side.at_own(cta, tile, name, functools.partial(copy, own, target))

    return lambda k: functools.partial(load, k)


def _group_of(desc: PackedDesc, config: PackedConfig, k: Scalar) -> Scalar:
    """First group of K step k; 0 where a channel has one zero point for all of K."""
    step, group = config.block_k(desc), desc.fmt.group_size
    if group is None:
        return 0
    return k * (step // group) if step >= group else lax.div(k, jnp.int32(group // step))


def _rows_in_use(cta: CtaContext, tile: Tile) -> Scalar:
    """Of a tile, where its height depends on them; else all."""
    return cta.operands["tile_rows"][tile.row] if len(heights(cta.desc, cta.config)) > 1 else cta.config.block_m


def _at_height(cta: CtaContext, in_use: Scalar, body: Callable[[int], None]) -> None:
    """``body`` with the least of the heights that holds ``_rows_in_use``."""

    def least_of(height: int, *higher: int) -> None:
        if not higher:
            body(height)
            return
        pl.when(in_use <= height)(functools.partial(body, height))
        pl.when(in_use > height)(functools.partial(least_of, *higher))

    least_of(*heights(cta.desc, cta.config))


def _consume(cta: CtaContext, tile: Tile) -> None:
    _at_height(cta, _rows_in_use(cta, tile), functools.partial(_compute, cta, tile))


def _compute(cta: CtaContext, tile: Tile, height: int) -> None:
    desc, config = cta.desc, cta.config
    group, *_ = place(config, cta.warpgroup)
    channel = tile.column * config.channel_groups + group
    vectors = _vectors(cta, tile, group)
    with jax.named_scope("main_loop"):
        sums = (multiply_promoted if is_promoted(desc, config) else multiply)(cta, tile, height)

    def store(sums: Sums) -> None:
        with jax.named_scope("epilogue"):
            _store(cta, tile, sums, vectors, channel, group)

    with jax.named_scope("exchange"):
        pipeline.gather_sums(cta, sums, store, splits_projections=config.splits_projections)


def multiply(cta: CtaContext, tile: Tile, height: int) -> Sums:
    """One accumulator per own projection over all of K; one piece each, (64, height)."""
    desc, config, scratch = cta.desc, cta.config, cta.scratch
    width, (_, _, part) = fragment_k(desc, config), place(config, cta.warpgroup)
    in_flight = products_in_flight(config)

    def one_slot(slot, accumulators):
        for batch in _batches(desc, config):
            for index, (projection, depth) in enumerate(batch):
                if index >= in_flight:
                    plgpu.wgmma_wait(in_flight - 1)
                ((column, weights),) = _fragments(cta, slot, projection, depth)
                x = scratch.x.at[slot, part, pl.ds(0, height), pl.ds(column, width)]
                plgpu.wgmma(accumulators[projection], weights, x.transpose((1, 0)))
            # Operands in registers must not be in flight when the loop comes round and rewrites them.
            plgpu.wgmma_wait(0)
        mosaic.release(scratch.empty.at[slot])

    shape = (BLOCK_N, height)
    found = pipeline.accumulate(cta, tile, shape, own_projections(desc, config), one_slot, dtype="float32")
    return [[value] for value in found]


def multiply_promoted(cta: CtaContext, tile: Tile, height: int) -> Sums:
    """The partial sum of every group scaled and added in float32, groups in their order; pieces of (64, promoted_rows),
    the last one of what is left of ``height``.
    """
    desc, config, scratch = cta.desc, cta.config, cta.scratch
    width, chunk, most = fragment_k(desc, config), promoted_k(desc, config), promoted_rows(config)
    pieces = [(start, min(most, height - start)) for start in range(0, height, most)]
    _, _, part = place(config, cta.warpgroup)
    part_k = config.part_blocks * desc.fmt.block_k
    first_group = lax.div(part * part_k, jnp.int32(desc.fmt.group_size)) if config.k_split > 1 else 0
    groups = list(enumerate(range(0, part_k, chunk)))
    is_late = unpacks_late(desc, config)

    def one_step(k, slot, sums):
        sums = [list(own) for own in sums]
        plgpu.barrier_wait(scratch.full.at[slot])
        for batch in _batches(desc, config):
            projections = sorted({projection for projection, _ in batch})
            operands: dict[tuple[int, int], Value] = {}

            def unpack(projection, depth, operands=operands):
                found = _fragments(cta, slot, projection, depth)
                operands.update({(projection, column): weights for column, weights in found})

            if not is_late:
                for projection, depth in batch:
                    unpack(projection, depth)
            for together in [groups] if are_groups_together(desc, config) else [[one] for one in groups]:
                parts = [(index, first, projection) for index, first in together for projection in projections]
                factors = []
                for index, _, projection in parts:
                    scale = scratch.scale.at[slot, _block(cta, projection), first_group + index]
                    scale = mosaic.load(scale, layout=mosaic.ROWS, optimized=False).astype(jnp.float32)
                    factors.append(scale)
                for piece, (start, rows) in enumerate(pieces):
                    own = pl.ds(start, rows)

                    def products(*fresh, parts=parts, own=own, operands=operands, unpack=unpack):
                        for (_, first, projection), accumulator in zip(parts, fresh, strict=True):
                            for column in range(first, first + chunk, width):
                                if is_late and column % desc.fmt.block_k == 0:
                                    unpack(projection, column // desc.fmt.block_k)
                                x = scratch.x.at[slot, part, own, pl.ds(column, width)]
                                plgpu.wgmma(accumulator, operands[projection, column], x.transpose((1, 0)))
                        return [accumulator[...] for accumulator in fresh]

                    shape = (BLOCK_N, rows)
                    kind = mosaic.Accumulator(shape, jnp.dtype(desc.accumulator))
                    found = pl.run_scoped(products, *[kind] * len(parts))
                    for (_, _, projection), scale, product in zip(parts, factors, found, strict=True):
                        factor = lax.broadcast_in_dim(scale, shape, [0])
                        sums[projection][piece] = sums[projection][piece] + _to_float32(desc, product) * factor
        mosaic.release(scratch.empty.at[slot])
        return tuple(tuple(own) for own in sums)

    own = tuple(pipeline.zeros((BLOCK_N, rows)) for _, rows in pieces)
    initial = (own,) * own_projections(desc, config)
    return [list(own) for own in pipeline.for_each_step(cta, tile, one_step, initial)]


def place(config: PackedConfig, warpgroup: Scalar) -> tuple[Scalar, Scalar, Scalar]:
    """(channel group, first projection, part of K) of a consumer."""
    if config.sharers == 1:
        return warpgroup, 0, 0
    group, sharer = (op(warpgroup, jnp.int32(config.sharers)) for op in (lax.div, lax.rem))
    return (group, sharer, 0) if config.splits_projections else (group, 0, sharer)


def _block(cta: CtaContext, projection: int) -> Scalar:
    """Index in a slot of the block of one of this consumer's projections."""
    channels, first_projection, _ = place(cta.config, cta.warpgroup)
    return channels * cta.desc.projections + first_projection + projection


def _fragments(cta: CtaContext, slot: Scalar, projection: int, depth: int) -> list[tuple[int, Value]]:
    """Register operands of one block: pairs (first column in the part, array (64, fragment_k))."""
    desc, config, scratch = cta.desc, cta.config, cta.scratch
    first, width = depth * desc.fmt.block_k, fragment_k(desc, config)
    block, (_, _, part) = _block(cta, projection), place(config, cta.warpgroup)
    group = desc.fmt.group_size or desc.k
    rows = tuple((first + desc.fmt.block_k // 4 * q) // group % scale_rows(desc, config) for q in range(4))
    parts = load_block(
        desc.fmt,
        scratch.w.at[slot, block, part * config.part_blocks + depth],
        width,
        rows,
        None if scratch.zero is None else scratch.zero.at[slot, block],
        scratch.scale.at[slot, block] if config.folds_scales else None,
    )
    return [(first + i * width, part) for i, part in enumerate(parts)]


def _batches(desc: PackedDesc, config: PackedConfig) -> list[list[tuple[int, int]]]:
    """(projection, block of K) of a step, in lists whose products are in flight together."""
    own = [[(p, depth) for depth in range(config.part_blocks)] for p in range(own_projections(desc, config))]
    return [sum(own, [])] if are_projections_together(desc, config) else own


def _to_float32(desc: PackedDesc, partial: Value) -> Value:
    """Partial sums as float32.

    A conversion of integers takes one instruction and a register of its own, which beside zero points spills. There
    integers below 2**22 in magnitude become the mantissa of 1.5 * 2**23: 128 products of int8 by 16 times int4 do not
    exceed 2**21.
    """
    if partial.dtype == jnp.float32 or not desc.fmt.has_zero_point:
        return partial.astype(jnp.float32)
    return lax.bitcast_convert_type(partial + jnp.int32(0x4B400000), jnp.float32) - jnp.float32(3 << 22)


def _vectors(cta: CtaContext, tile: Tile, group: Scalar) -> list[dict[str, Value]]:
    """(64,) channel scale and bias of each projection, loaded before the sums so that their latency hides."""
    desc, e = cta.desc, tile.expert

    def load(name: str, projection: int) -> Value:
        def one(vectors, own_column, width):
            # Past the last block nothing is stored, but the vectors must lie inside their arrays.
            blocks = -(-width // BLOCK_N)
            block = lax.min(own_column * cta.config.channel_groups + group, jnp.int32(blocks - 1))
            block = lax.max(block, jnp.int32(0)) if desc.widths else block
            by_block = (e * blocks + block) * desc.projections + projection
            by_projection = (e * desc.projections + projection) * blocks + block
            vector = vectors.at[by_block if name == "channel_scale" else by_projection]
            return mosaic.load(vector, layout=mosaic.ROWS, optimized=False).astype(jnp.float32)

        return side_by_side.of_own(cta, tile, name, one)

    names = [name for name in ("channel_scale", "bias") if name in cta.operands]
    return [{name: load(name, projection) for name in names} for projection in range(desc.projections)]


def _store(
    cta: CtaContext, tile: Tile, sums: Sums, vectors: Sequence[dict[str, Value]], channel: Scalar, group: Scalar
) -> None:
    """Write the rows of ``sums`` by 64 of the output, staged in pieces of rows and stored at once."""
    desc, config, scratch = cta.desc, cta.config, cta.scratch
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    first_row, start = cta.first_row_of_x(tile), 0
    for pieces in zip(*sums, strict=True):
        rows = pieces[0].shape[1]
        value = _scaled(cta, pieces, vectors, first_row + start)
        stage_transposed(value, scratch.staging.at[group, pl.ds(start, rows)], desc.out_dtype)
        start += rows
    plgpu.commit_smem()
    target = cta.outputs[0].at[pl.ds(tile.row * config.block_m, start), pl.ds(channel * BLOCK_N, BLOCK_N)]
    store_staged(cta, scratch.staging.at[group, pl.ds(0, start)], target, channel * BLOCK_N)


def _scaled(cta: CtaContext, sums: Sequence[Value], vectors: Sequence[dict[str, Value]], first_row: Scalar) -> Value:
    """Scales, bias and activation of the sums (64, rows) of each projection; float32, before any rounding.

    first_row: row of x that the first column belongs to.
    """
    desc, config, operands, shape = cta.desc, cta.config, cta.operands, sums[0].shape
    unit = desc.fmt.folded_unit if config.folds_scales else desc.fmt.unit
    of_rows = 1 / unit
    if desc.lhs_scale == "row":
        row_scales = operands["x_scale"].at[pl.ds(first_row, shape[1])]
        row_scales = mosaic.load(row_scales, layout=mosaic.COLUMNS, optimized=False)
        of_rows = lax.broadcast_in_dim(row_scales * of_rows, shape, [1])
    elif desc.lhs_scale == "tensor":
        of_rows = operands["x_scale"][0] * of_rows

    def of_channels(projection: int, name: str) -> Value:
        return lax.broadcast_in_dim(vectors[projection][name], shape, [0])

    def factors(projection: int) -> Iterator[Any]:
        if desc.lhs_scale != "none" or unit != 1:
            yield of_rows
        if desc.has_channel_scale:
            yield of_channels(projection, "channel_scale")

    # Beside so many accumulators ptxas spills three in the shorter one.
    is_full = is_promoted(desc, config) and accumulators(desc, config) >= 176
    return finish(
        cta,
        accumulator=lambda projection: sums[projection],
        factors=factors,
        bias=lambda projection: of_channels(projection, "bias"),
        sigmoid=lax.logistic if is_full else sigmoid,
    )
