"""Operands that lie in shared memory as wgmma reads them: the copies and products that the plain and the swap_ab main
loop have in common.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import accumulator_math_sm90, mosaic, sm90
from pallas_kernels.common.types import Scalar, TileRef, Value
from pallas_kernels.grouped_gemm import pipeline_sm90 as pipeline
from pallas_kernels.grouped_gemm import side_by_side_sm90 as side_by_side
from pallas_kernels.grouped_gemm.config import (
    GemmConfig,
    copies_per_piece,
    num_pieces,
    piece_n,
    registers,
    shared_arrays,
    store_swizzle,
)
from pallas_kernels.grouped_gemm.pipeline_sm90 import CtaContext, LoadStep, MainLoop
from pallas_kernels.grouped_gemm.problem import SCALE_GROUP, GemmDesc
from pallas_kernels.grouped_gemm.scheduler_sm90 import PAIR, Tile

Product = tuple[TileRef, TileRef]  # operands of one wgmma: (64, K) and (N, K), of transposed weights (K, N)


def main_loop(desc: GemmDesc, config: GemmConfig, consume: Callable[[CtaContext, Tile], None]) -> MainLoop:
    """The main loop that multiplies and stores by ``consume``."""
    return MainLoop(scratch_types(desc, config), registers(desc, config), load_tile, consume, load_vectors)


def scratch_types(desc: GemmDesc, config: GemmConfig) -> dict[str, Any]:
    """Allocations by field of ``Scratch``."""
    stages, copies = config.num_stages, copies_per_piece(desc, config)
    consumers = config.num_consumers // config.sharers  # that read a slot, and a tile's vectors
    pieces, shapes = num_pieces(desc, config), shared_arrays(desc, config)
    operand = mosaic.tiled(desc.dtype, sm90.swizzle_bytes(desc.k * desc.itemsize))
    stored = mosaic.tiled(desc.stored_dtype, store_swizzle(desc, config))
    # Of transposed weights the widest swizzle divides rows of N, as it does those of K.
    handed_over = mosaic.tiled(desc.out_dtype, sm90.swizzle_bytes(128))
    types = pipeline.scratch_arrays(shapes, dict(x=operand, w=operand, staging=stored, handed_over=handed_over))
    arrivals = config.block_m // config.rows_moved + desc.is_block_scaled * config.step_blocks + copies
    types["full"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
    if config.cluster == 1:
        types["empty"] = plgpu.Barrier(num_arrivals=consumers, num_barriers=stages)
    else:
        # Slots are handed back to the producers of both CTAs. One thread arrives for its warpgroup, whose warps have
        # come together in a wgmma, or by ``commit_smem`` where they waited or read by themselves.
        types["empty"] = plgpu.ClusterBarrier(collective_axes=(PAIR,), num_arrivals=consumers, num_barriers=stages)
    if pieces > 1:
        types["full_pieces"] = plgpu.Barrier(num_arrivals=copies, num_barriers=stages * (pieces - 1))
    vectors = ("rows" in shapes) + desc.projections * (("columns" in shapes) + ("bias" in shapes))
    if vectors:
        types["vectors_full"] = plgpu.Barrier(num_arrivals=vectors)
        types["vectors_empty"] = plgpu.Barrier(num_arrivals=consumers)
    if "handed_over" in shapes:
        types["handed_over_by_all"] = plgpu.Barrier(num_arrivals=consumers)
    if config.sharers > 1:
        types["partial_full"] = plgpu.Barrier(num_arrivals=config.sharers - 1, num_barriers=1)
        types["partial_empty"] = plgpu.Barrier(num_barriers=1)
    return types


def load_tile(cta: CtaContext, tile: Tile) -> LoadStep:
    """The function that issues the copies of one K step of ``tile``."""
    desc, config, operands, scratch = cta.desc, cta.config, cta.operands, cta.scratch
    piece, pieces = piece_n(desc, config), num_pieces(desc, config)
    copied = min(piece, config.block_n)  # a copy stays inside one projection
    # Each CTA of a cluster then copies its part, to all.
    to_all: dict[str, Any] = dict(collective_axes=PAIR)
    of_rows = to_all if config.cluster > 1 and not config.shares_weights else {}
    rows = pl.ds(cta.first_row_of_x(tile), config.block_m)
    in_use = operands["tile_rows"][tile.row] if config.row_chunk is not None else config.block_m
    is_shared: Any = None
    if config.shares_weights:
        other = lax.min(lax.bitwise_xor(tile.row, jnp.int32(1)), operands["num_tiles"][0] - 1)
        is_shared = operands["tile_expert"][other] == tile.expert

    def load_rows(depth, slot):
        for start in range(0, config.block_m, config.rows_moved):
            chunk = pl.ds(start, config.rows_moved)
            copy_chunk = functools.partial(
                plgpu.copy_gmem_to_smem,
                operands["x"].at[rows, depth].at[chunk],
                scratch.x.at[slot, chunk],
                scratch.full.at[slot],
            )
            if config.row_chunk is None or start == 0:
                copy_chunk(**of_rows)
                continue
            # What lies in the slot from before is multiplied instead, into rows that nobody reads.
            pl.when(start < in_use)(copy_chunk)
            pl.when(start >= in_use)(functools.partial(plgpu.barrier_arrive, scratch.full.at[slot]))

    def load_weights(depth, slot):
        for start in range(0, desc.projections * config.block_n, copied):
            projection, column = divmod(start, config.block_n)
            index = start // piece

            def copy(w, own_column, start=start, projection=projection, column=column, index=index):
                matrix = tile.expert * desc.projections + projection
                columns = pl.ds(own_column * config.block_n + column, copied)
                part = (depth, columns) if desc.transposes_w else (columns, depth)
                copy_weights = functools.partial(
                    plgpu.copy_gmem_to_smem,
                    w.at[matrix, *part],
                    scratch.w.at[slot] if desc.transposes_w else scratch.w.at[slot, pl.ds(start, copied)],
                    full_barrier(cta, slot, index, pieces),
                )
                if config.shares_weights:
                    pl.when(is_shared)(functools.partial(copy_weights, **to_all))
                    pl.when(jnp.logical_not(is_shared))(copy_weights)
                else:
                    copy_weights()

            side_by_side.at_own(cta, tile, "w", copy)

    def load(k, depth, slot):
        load_rows(depth, slot)
        if desc.is_block_scaled:
            for block in range(config.step_blocks):
                own = scratch.x_scale.at[slot, block, pl.ds(0, config.block_m)]
                scales = operands["x_scale"].at[k * config.step_blocks + block, rows]
                plgpu.copy_gmem_to_smem(scales, own, scratch.full.at[slot])
        load_weights(depth, slot)

    first = first_step_of_k(cta, tile)

    def load_step(k):
        step = config.block_k(desc)
        return functools.partial(load, first + k, pl.ds((first + k) * step, step))

    return load_step


def first_step_of_k(cta: CtaContext, tile: Tile) -> Scalar:
    """K step, counted over all of K, that the tile starts with."""
    return tile.row * cta.steps if cta.desc.k_parts > 1 else 0


def load_vectors(cta: CtaContext, tile: Tile) -> None:
    """Issue the copies of the tile's row scales, column scales and bias."""
    desc, config, operands, scratch = cta.desc, cta.config, cta.operands, cta.scratch
    if scratch.rows is not None:
        rows = pl.ds(cta.first_row_of_x(tile), config.block_m)
        plgpu.copy_gmem_to_smem(operands["x_scale"].at[rows], scratch.rows, scratch.vectors_full)
    for name, target in (("w_scale", scratch.columns), ("bias", scratch.bias)):
        if target is None:
            continue
        for projection in range(desc.projections):

            def copy(vectors, own_column, target=target, projection=projection):
                columns = pl.ds(own_column * config.block_n, config.block_n)
                source = vectors.at[tile.expert * desc.projections + projection, columns]
                own = target.at[projection, pl.ds(0, config.block_n)]
                plgpu.copy_gmem_to_smem(source, own, scratch.vectors_full)

            side_by_side.at_own(cta, tile, name, copy)


def full_barrier(cta: CtaContext, slot: Scalar, piece: int, pieces: int) -> TileRef:
    """The barrier that says that a weight piece of a slot, and with the first one the rest of the slot, is there."""
    scratch = cta.scratch
    return scratch.full_pieces.at[slot * (pieces - 1) + piece - 1] if piece else scratch.full.at[slot]


def multiply(
    cta: CtaContext, tile: Tile, shape: tuple[int, int], number: int, products: Callable[[Scalar], Iterable[Product]]
) -> list[Value]:
    """``number`` accumulators of ``shape`` over all of K, one for each of the ``products(slot)``."""

    def one_slot(slot, accumulators):
        for accumulator, (left, right) in zip(accumulators, products(slot), strict=True):
            plgpu.wgmma(accumulator, left, right if cta.desc.transposes_w else right.transpose((1, 0)))
        # The other warpgroups keep the tensor core busy; leaving one product in flight here measured the same.
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(cta.scratch.empty.at[slot])

    return pipeline.accumulate(cta, tile, shape, number, one_slot)


def multiply_promoted(
    cta: CtaContext,
    tile: Tile,
    shape: tuple[int, int],
    number: int,
    batches: Callable[[Scalar, int], Iterable[Iterable[Product]]],
    scales_of_rows: Callable[[Scalar, int], Value],
    columns: Sequence[tuple[int, Scalar]],
) -> list[Value]:
    """float32 sums over all of K of products that are scaled after every 128 of it, a block of a K step.

    The products of a batch are in flight together. Waiting for each batch on a barrier of its own also keeps ptxas from
    issuing the next one before this one is added, which needs more registers than there are.

    Args:
        shape: of one product; it consists of equal parts side by side, which have one weight scale each.
        number: products of a batch.
        batches: (slot, block) -> batches of operands; one batch where a K step has several blocks.
        scales_of_rows: (slot, block) -> the activation scales, in layout ROWS or COLUMNS as rows lie in the products.
        columns: (projection, first column of the tile) of each part, in the order of the products.

    Returns the sums of each part.
    """
    desc, config, scratch = cta.desc, cta.config, cta.scratch
    width = shape[1] if config.swap_ab else min(shape[1], config.block_n)
    axis = 1 if config.swap_ab else 0

    def one_block(slot, block, factors, sums):
        row_scales = scales_of_rows(slot, block)
        first, last = 0, num_pieces(desc, config) - 1
        for index, products in enumerate(batches(slot, block)):
            if index:
                plgpu.barrier_wait(full_barrier(cta, slot, index, last + 1))

            def issue(*fresh, products=products):
                for accumulator, (left, right) in zip(fresh, products, strict=True):
                    plgpu.wgmma(accumulator, left, right.transpose((1, 0)))
                return [accumulator[...] for accumulator in fresh]

            values = pl.run_scoped(issue, *[mosaic.Accumulator(shape, jnp.float32)] * number)
            is_over = index == last and block == config.step_blocks - 1
            if is_over and config.cluster > 1:
                plgpu.commit_smem()
                plgpu.barrier_arrive(scratch.empty.at[slot])
            elif is_over:
                mosaic.release(scratch.empty.at[slot])
            if width < shape[1]:
                values = [value[:, start : start + width] for value in values for start in range(0, shape[1], width)]
            own = factors[first : first + len(values)]
            scales = [lax.broadcast_in_dim(row_scales * factor, values[0].shape, [axis]) for factor in own]
            for value, scale in zip(values, scales, strict=True):
                sums[first] = sums[first] + value * scale
                first += 1

    first_step = first_step_of_k(cta, tile)

    def one_step(k, slot, sums):
        of_blocks = [(first_step + k) * config.step_blocks + block for block in range(config.step_blocks)]
        factors = [[_block_scale(cta, tile, *column, index) for column in columns] for index in of_blocks]
        sums = list(sums)
        plgpu.barrier_wait(scratch.full.at[slot])
        for block, own in enumerate(factors):
            one_block(slot, block, own, sums)
        return tuple(sums)

    initial = (pipeline.zeros((shape[0], width)),) * len(columns)
    return list(pipeline.for_each_step(cta, tile, one_step, initial))


def _block_scale(cta: CtaContext, tile: Tile, projection: int, column: Scalar, k: Scalar) -> Value:
    """The weight scale () of the k-th 128 of K at a column of the tile. Columns past N have the scale of the last."""

    def load(scales, own_column, width):
        block = lax.div(own_column * cta.config.block_n + column, jnp.int32(SCALE_GROUP))
        block = lax.min(block, jnp.int32(-(-width // SCALE_GROUP) - 1))
        block = lax.max(block, jnp.int32(0)) if cta.desc.widths else block
        return scales[tile.expert * cta.desc.projections + projection, block, k]

    return side_by_side.of_own(cta, tile, "w_scale", load)


def matrix_scale(cta: CtaContext, tile: Tile, projection: int) -> Value:
    """The one scale () of a projection's weights."""
    place = tile.expert * cta.desc.projections + projection
    return side_by_side.of_own(cta, tile, "w_scale", lambda scales, own_column, width: scales[place])


def skip(cta: CtaContext, tile: Tile) -> None:
    """Hand back what the other warpgroup multiplies, for a tile in which this one has no row."""
    scratch, pieces = cta.scratch, num_pieces(cta.desc, cta.config)

    def one_step(k, slot, _):
        for piece in range(pieces):
            plgpu.barrier_wait(full_barrier(cta, slot, piece, pieces))
        if cta.config.cluster > 1:
            plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.empty.at[slot])
        return ()

    pipeline.for_each_step(cta, tile, one_step, (), cta.all_steps)
    if scratch.vectors_full is not None:
        plgpu.barrier_wait(scratch.vectors_full)
        plgpu.barrier_arrive(scratch.vectors_empty)


def sigmoid(config: GemmConfig) -> Callable[[Value], Value]:
    """How activations compute it."""
    return accumulator_math_sm90.sigmoid if config.inline_ptx else lax.logistic
