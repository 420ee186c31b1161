"""Grouped gradients of rows on Hopper, from quantized weights: products that contract over the channels of the weights.

One persistent CTA per SM; tile after tile of (rows of one expert, columns of the output).

    converter (1 warpgroup)    for each 64 channels: wait drained[place], full[slot] -> operands by bit moves, times
                               scales, rounded once -> matrix[place], as wgmma reads it -> ready[place]
                               TMA copies, num_stages - MATRICES steps ahead: the tile's rows x 64 of dy, the words of
                               64 x block_n weights and their scales -> full[slot]
    consumers (1 or 2)         64 rows of the tile each, or 64 of either of two neighbours
        main loop                  wait full[slot], ready[place] -> wgmma dy[slot] matrix[place] -> drained[place]
        epilogue                   staged TMA stores; with an activation its derivative comes first, see below

The copies of a step go to the slot of the step that was multiplied out of the matrix whose place is free again, so that
no barrier says that a slot is empty. A producer of its own would be a fourth warpgroup, and of 512 threads each has 128
registers: too few for accumulators of 64 x 256.

Plain weights are bytes as they are stored, a box of 64 channels by block_n columns for a step. From them the forward
product can be computed as well (``contracts_k``): a step is then a box of block_n channels by 64 columns, and wgmma
reads its tile with the contracted dimension contiguous.

A CTA's tile is one of the call, or two neighbours of one expert (``neighbours``): each converted number is then
multiplied with twice the rows, and a consumer has two accumulators of 64 x 128 in the registers of one of 64 x 256. A
pair without a second tile has rows of another expert, or zeros past the array, behind its own: they are copied, and
neither multiplied nor stored.

A register operand of wgmma has the contracted dimension along the words of a thread, and packed words lie along the
other one. So these weights pass through shared memory, where wgmma reads 16 bits transposed. One warpgroup converts
while the others multiply: 16,384 numbers for a step that takes the tensor cores about 1,000 clocks, of a pair 8,192.

The derivative of an activation: the sums are cotangents of hidden values. A piece of 64 columns at a time, what the
activation was given comes by TMA into before[consumer], and goes out as its own cotangent. Sums over the columns of a
tile of hidden value times cotangent go to an output of their own.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import accumulator_math_sm90, mosaic
from pallas_kernels.common.shapes import or_shapes
from pallas_kernels.common.sm90 import REDUCTION_BYTES
from pallas_kernels.common.types import Scalar, TileRef, Value
from pallas_kernels.grouped_gemm.dgrad.config import (
    MATRICES,
    UNIT,
    DgradConfig,
    DgradDesc,
    operand_names,
    shared_arrays,
    tile_groups,
)
from pallas_kernels.grouped_gemm.dgrad.plain_sm90 import dequantize
from pallas_kernels.grouped_gemm.dgrad.stmatrix_sm90 import store_matrices
from pallas_kernels.grouped_gemm.epilogue_pull_sm90 import pulled
from pallas_kernels.grouped_gemm.epilogue_sm90 import stores_under_way
from pallas_kernels.grouped_gemm.packed.dequantize_sm90 import load_block
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N
from pallas_kernels.grouped_gemm.scheduler_sm90 import Tile, tile_index, tiles_of_cta

# Pieces of a step that are converted before they are stored: no load moves in front of a store, and one piece hides
# what the other waits for. More would need registers.
_AT_ONCE = 2
_TILED = ("dy", "matrix", "staging", "before")  # as wgmma and TMA copies with a swizzle read them


def grouped_dgrad_sm90(desc: DgradDesc, config: DgradConfig) -> Callable[[Mapping[str, jax.Array]], Any]:
    """The kernel for ``desc``, a function of the operands by name (``operand_names``).

    config must pass ``config_error``. Returns (rows, width); with an activation (rows, G * K) and the sums over each
    tile's columns, (column tiles, rows) float32. Rows that are in no use are not written.
    """
    shapes, stages, consumers = shared_arrays(desc, config), config.num_stages, config.num_consumers
    scratch: dict[str, Any] = {
        name: plgpu.SMEM(shape, jnp.dtype(dtype), transforms=mosaic.tiled(dtype, 128) if name in _TILED else ())
        for name, (shape, dtype) in shapes.items()
    }
    if desc.is_plain:
        shape, dtype = shapes["w"]
        scratch["w"] = plgpu.SMEM(shape, jnp.dtype(dtype), transforms=mosaic.tiled(dtype, UNIT))
    copies = 2 + desc.has_groups + desc.fmt.has_zero_point + desc.has_channel_scale
    scratch["full"] = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
    scratch["ready"] = plgpu.Barrier(num_arrivals=1, num_barriers=MATRICES)
    scratch["drained"] = plgpu.Barrier(num_arrivals=consumers, num_barriers=MATRICES)
    out: Any = jax.ShapeDtypeStruct((desc.rows, desc.projections * desc.width), jnp.dtype(desc.dtype))
    if desc.activation is not None:
        scratch["before_full"] = plgpu.Barrier(num_arrivals=desc.projections, num_barriers=consumers)
        out = (out, jax.ShapeDtypeStruct((-(-desc.k // config.block_n), desc.rows), jnp.float32))
    call = plgpu.kernel(
        functools.partial(_kernel, desc, config),
        out_type=out,
        grid=(config.num_sms,),
        grid_names=("block",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        # Sums along rows stay inside warps: what Mosaic sets aside for others is a stage of the ring.
        compiler_params=mosaic.compiler_params(reduction_scratch_bytes=REDUCTION_BYTES),
        kernel_name="dgrad",
    )
    call = or_shapes(call, out)
    return lambda operands: call(*(operands[name] for name in operand_names(desc, config)))


@dataclasses.dataclass(frozen=True)
class _Tile(Tile):
    """A CTA's tile, whose ``row`` is the first of its neighbours. index: among the tiles of the kernel's table."""

    index: Scalar


@dataclasses.dataclass(frozen=True)
class _Cta:
    """What the roles of a CTA work with.

    operands, outputs: in global memory. scratch: shared memory and barriers. steps: ring slots that one tile takes.
    """

    desc: DgradDesc
    config: DgradConfig
    operands: Mapping[str, TileRef]
    outputs: tuple[TileRef, ...]
    scratch: Mapping[str, TileRef]
    warpgroup: Scalar
    steps: Scalar

    def slot(self, step: Scalar) -> Scalar:
        """Of the ring of copies; steps are counted over all tiles."""
        return lax.rem(step, jnp.int32(self.config.num_stages))

    def place(self, step: Scalar) -> Scalar:
        """Of the dequantized matrices."""
        return lax.rem(step, jnp.int32(MATRICES))


def _kernel(desc: DgradDesc, config: DgradConfig, /, *refs: TileRef, **scratch: TileRef) -> None:
    mosaic.begin()
    names, steps = operand_names(desc, config), desc.depth // BLOCK_N
    operands = dict(zip(names, refs, strict=False))
    row_tiles, column_tiles = operands["num_tiles"][0], -(-desc.width // config.block_n)
    # Read on the device: LLVM would unroll short loops.
    hidden = lax.min(jnp.int32(steps), row_tiles + steps)
    warpgroup, index, consumers = lax.axis_index("warpgroup"), lax.axis_index("block"), config.num_consumers
    cta = _Cta(desc, config, operands, refs[len(names) :], scratch, warpgroup, hidden)
    num_tiles = tiles_of_cta(index, row_tiles * column_tiles, config.num_sms)

    def tile(t: Scalar) -> _Tile:
        linear = index + t * config.num_sms
        m, n = tile_index(linear, row_tiles, column_tiles, config.raster_group_m)
        row = operands["first_tile"][m] if config.neighbours > 1 else m
        return _Tile(row, n, operands["tile_expert"][m], t * hidden, m)

    @pl.when(warpgroup == consumers)
    def _():
        if config.registers:
            plgpu.set_max_registers(config.registers[1], action="decrease")
        _convert(cta, num_tiles, tile)

    @pl.when(warpgroup < consumers)
    def _():
        if config.registers:
            plgpu.set_max_registers(config.registers[0], action="increase")

        def one_tile(t, _):
            _consume(cta, tile(t))
            return 0

        lax.fori_loop(0, num_tiles, one_tile, 0)
        plgpu.wait_smem_to_gmem(0)


# -- the converter ----------------------------------------------------------------------------------------------------


def _convert(cta: _Cta, num_tiles: Scalar, tile: Callable[[Scalar], _Tile]) -> None:
    scratch, ahead = cta.scratch, cta.config.num_stages - MATRICES

    @pl.when(num_tiles > 0)
    def _():
        for k in range(ahead):
            _load(cta, tile(0), jnp.int32(k), jnp.int32(k))

    def one_tile(t, _):
        this, following = tile(t), tile(lax.min(t + 1, num_tiles - 1))

        def one_step(k, step):
            slot, place = cta.slot(step), cta.place(step)

            @pl.when(step >= MATRICES)
            def _():
                plgpu.barrier_wait(scratch["drained"].at[place])

            is_inside = k + ahead < cta.steps

            @pl.when(is_inside | (t + 1 < num_tiles))
            def _():
                row, column, expert = (
                    jnp.where(is_inside, getattr(this, name), getattr(following, name))
                    for name in ("row", "column", "expert")
                )
                own = jnp.where(is_inside, k + ahead, k + ahead - cta.steps)
                _load(cta, Tile(row, column, expert, this.first_step), own, step + ahead)

            plgpu.barrier_wait(scratch["full"].at[slot])
            matrix = scratch["matrix"].at[place]
            convert = _widened if cta.desc.is_plain else _dequantized
            for first in range(0, cta.config.pieces, _AT_ONCE):
                pieces = range(first, min(first + _AT_ONCE, cta.config.pieces))
                for piece, value in [(piece, convert(cta, slot, piece)) for piece in pieces]:
                    if cta.desc.is_plain:
                        matrix.at[_part(cta.desc, piece)][...] = value
                    else:
                        store_matrices(matrix, piece, value)
            plgpu.commit_smem()  # the numbers for wgmma; and every warp has read the words
            plgpu.barrier_arrive(scratch["ready"].at[place])
            return step + 1

        lax.fori_loop(0, cta.steps, one_step, this.first_step)
        return 0

    lax.fori_loop(0, num_tiles, one_tile, 0)

    # Leave no completed phase unobserved.
    def drain(step, _):
        plgpu.barrier_wait(scratch["drained"].at[cta.place(step)])
        return 0

    end = num_tiles * cta.steps
    lax.fori_loop(lax.max(end - MATRICES, 0), end, drain, 0)


def _load(cta: _Cta, tile: Tile, k: Scalar, step: Scalar) -> None:
    """Issue the copies of K step k of ``tile``, which is ``step`` of all."""
    desc, config, operands, scratch, slot = cta.desc, cta.config, cta.operands, cta.scratch, cta.slot(step)
    full, first = scratch["full"].at[slot], tile.expert * (desc.n // BLOCK_N)
    rows = pl.ds(tile.row * config.block_m, config.rows)
    plgpu.copy_gmem_to_smem(operands["dy"].at[rows, pl.ds(k * BLOCK_N, BLOCK_N)], scratch["dy"].at[slot], full)
    if desc.contracts_k:
        # Channels past this expert's N are those of the next one: columns that are not stored.
        block = first + tile.column * config.pieces
        channels = pl.ds(block, config.pieces)
        groups = lax.div(k, jnp.int32((desc.fmt.group_size or UNIT) // UNIT))
        weights = (pl.ds(block * BLOCK_N, config.block_n), pl.ds(k * UNIT, UNIT))
    else:
        channels = block = first + k
        groups = pl.ds(_first_group(desc, config, tile.column), tile_groups(desc, config))
        weights = (block, pl.ds(tile.column * config.pieces, config.pieces))
        if desc.is_plain:
            weights = (pl.ds(block * BLOCK_N, BLOCK_N), pl.ds(tile.column * config.block_n, config.block_n))
    plgpu.copy_gmem_to_smem(operands["w"].at[weights], scratch["w"].at[slot], full)
    for name in ("scale", "zero"):
        if name in operands:
            plgpu.copy_gmem_to_smem(operands[name].at[channels, groups], scratch[name].at[slot], full)
    if desc.has_channel_scale:
        plgpu.copy_gmem_to_smem(operands["channel_scale"].at[channels], scratch["channel_scale"].at[slot], full)


def _first_group(desc: DgradDesc, config: DgradConfig, column: Scalar) -> Scalar:
    """First group of a column tile; 0 where a channel has one zero point for all of K."""
    group = desc.fmt.group_size
    if group is None or desc.groups == 1:
        return 0
    if config.block_n >= group:
        return column * (config.block_n // group)
    return lax.div(column, jnp.int32(group // config.block_n))


def _part(desc: DgradDesc, piece: int) -> tuple[Any, Any]:
    """(64, 64) of a step in shared memory."""
    part = pl.ds(piece * UNIT, UNIT)
    return (part, slice(None)) if desc.contracts_k else (slice(None), part)


def _widened(cta: _Cta, slot: Scalar, piece: int) -> Value:
    """(64, 64) of the matrix from plain weights."""
    desc, config, scratch = cta.desc, cta.config, cta.scratch
    codes = scratch["w"].at[(slot, *_part(desc, piece))]
    if desc.has_channel_scale:
        own = scratch["channel_scale"]
        return dequantize(codes, own.at[slot, piece] if desc.contracts_k else own.at[slot], desc.dtype)
    group = piece
    if not desc.contracts_k:
        group = min(piece * UNIT // (desc.fmt.group_size or config.block_n), tile_groups(desc, config) - 1)
    return dequantize(codes, scratch["scale"][slot, group, 0], desc.dtype)


def _dequantized(cta: _Cta, slot: Scalar, piece: int) -> Value:
    """(64, 64) of the matrix, a 1 of integers being ``desc.unit``."""
    desc, config, scratch = cta.desc, cta.config, cta.scratch
    fmt, groups = desc.fmt, tile_groups(desc, config)
    group = fmt.group_size or config.block_n

    def group_of(column: int) -> int:
        return min(column // group, groups - 1)

    first = piece * UNIT
    rows = tuple(group_of(first + UNIT // 4 * quarter) for quarter in range(4))
    zeros = scratch["zero"].at[slot] if fmt.has_zero_point else None
    folded = scratch["scale"].at[slot] if desc.folds_scales else None
    wide = None
    if desc.splits_scales:
        wide = scratch["channel_scale" if desc.has_channel_scale else "scale"].at[slot]
    (value,) = load_block(fmt, scratch["w"].at[slot, piece], UNIT, rows, zeros, folded, wide)
    if wide is None and folded is None:
        factors = [scratch["channel_scale"].at[slot]] if desc.has_channel_scale else []
        factors += [scratch["scale"].at[slot, group_of(first)]] if desc.has_groups else []
        for factor in factors:
            of_rows = mosaic.load(factor, layout=mosaic.ROWS, optimized=False).astype(jnp.float32)
            value = value.astype(jnp.float32) * lax.broadcast_in_dim(of_rows, value.shape, [0])
    return value.astype(desc.dtype)


# -- the consumers ----------------------------------------------------------------------------------------------------


def _consume(cta: _Cta, tile: _Tile) -> None:
    def compute(units: int) -> None:
        if cta.desc.activation is not None:
            _load_before(cta, tile, 0)
        with jax.named_scope("main_loop"):
            sums = _multiply(cta, tile, units)
        with jax.named_scope("epilogue"):
            (_store if cta.desc.activation is None else _store_pulled)(cta, tile, sums)

    neighbours, block_m = cta.config.neighbours, cta.config.block_m
    if "tile_rows" not in cta.operands or neighbours * cta.config.num_consumers == 1:
        compute(1)
        return
    # The second half of an expert's last tile is often empty: leave the tensor core to the first.
    in_use = cta.operands["tile_rows"][tile.index] - cta.warpgroup * UNIT
    pl.when(in_use <= 0)(lambda: _skip(cta, tile))
    for units in range(1, neighbours + 1):
        is_so_many = in_use > (units - 1) * block_m
        if units < neighbours:
            is_so_many &= in_use <= units * block_m
        pl.when(is_so_many)(functools.partial(compute, units))


def _multiply(cta: _Cta, tile: Tile, units: int) -> list[Value]:
    """(64, block_n) float32 over the contracted dimension, of this warpgroup's rows of so many neighbours."""
    scratch, config = cta.scratch, cta.config

    def matrix(place):
        ref = scratch["matrix"].at[place]
        return ref.transpose((1, 0)) if cta.desc.contracts_k else ref

    def scope(*accumulators):
        def one_step(k, step):
            slot, place = cta.slot(step), cta.place(step)
            plgpu.barrier_wait(scratch["full"].at[slot])
            plgpu.barrier_wait(scratch["ready"].at[place])
            for unit, accumulator in enumerate(accumulators):
                rows = pl.ds(unit * config.block_m + cta.warpgroup * UNIT, UNIT)
                plgpu.wgmma(accumulator, scratch["dy"].at[slot, rows], matrix(place))
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch["drained"].at[place])
            return step + 1

        lax.fori_loop(0, cta.steps, one_step, tile.first_step)
        return [accumulator[...] for accumulator in accumulators]

    return pl.run_scoped(scope, *[mosaic.Accumulator((UNIT, config.block_n), jnp.float32)] * units)


def _skip(cta: _Cta, tile: Tile) -> None:
    """Hand back what the other warpgroup multiplies, for a tile in which this one has no row."""
    scratch = cta.scratch

    def one_step(k, step):
        slot, place = cta.slot(step), cta.place(step)
        plgpu.barrier_wait(scratch["full"].at[slot])
        plgpu.barrier_wait(scratch["ready"].at[place])
        plgpu.barrier_arrive(scratch["drained"].at[place])
        return step + 1

    lax.fori_loop(0, cta.steps, one_step, tile.first_step)


def _rows(cta: _Cta, tile: Tile, unit: int) -> Any:
    """This warpgroup's 64 rows of one of the neighbours."""
    return pl.ds((tile.row + unit) * cta.config.block_m + cta.warpgroup * UNIT, UNIT)


def _store(cta: _Cta, tile: Tile, sums: list[Value]) -> None:
    """Write this warpgroup's (64, block_n) of the output. Columns past its width are not stored."""
    desc, config, staging = cta.desc, cta.config, cta.scratch["staging"].at[cta.warpgroup]
    count, slots = len(sums) * config.pieces, 2
    for index in range(count):
        unit, piece = divmod(index, config.pieces)
        # One neighbour or two leave the same slot behind as the last: of pairs the pieces are even in number.
        slot, column = index % slots, tile.column * config.block_n + piece * UNIT
        plgpu.wait_smem_to_gmem(stores_under_way(index, count, slots), wait_read_only=True)
        staging[slot] = _piece(cta, sums[unit], piece).astype(desc.dtype)
        plgpu.commit_smem()
        inside = mosaic.column_predicate(desc.width, config.block_n, column)
        target = cta.outputs[0].at[_rows(cta, tile, unit), pl.ds(column, UNIT)]
        plgpu.copy_smem_to_gmem(staging.at[slot], target, predicate=inside)


def _piece(cta: _Cta, sums: Value, piece: int) -> Value:
    own = sums if cta.config.pieces == 1 else sums[:, piece * UNIT : (piece + 1) * UNIT]
    return own if cta.desc.unit == 1 else own * (1 / cta.desc.unit)


def _load_before(cta: _Cta, tile: Tile, index: int) -> None:
    """Issue the copies of what the activation was given, for a piece of the columns; index: over all units' pieces."""
    unit, piece = divmod(index, cta.config.pieces)
    rows = _rows(cta, tile, unit)
    for projection in range(cta.desc.projections):
        plgpu.copy_gmem_to_smem(
            cta.operands["before"].at[rows, _columns(cta, tile, piece, projection)],
            cta.scratch["before"].at[cta.warpgroup, projection],
            cta.scratch["before_full"].at[cta.warpgroup],
        )


def _columns(cta: _Cta, tile: Tile, piece: int, projection: int) -> Any:
    """Of ``before`` and of its cotangent, whose projections take turns every 64 columns, or follow each other beside
    plain weights.
    """
    desc, block = cta.desc, tile.column * cta.config.pieces + piece
    block = block + projection * (desc.k // UNIT) if desc.is_plain else block * desc.projections + projection
    return pl.ds(block * UNIT, UNIT)


def _store_pulled(cta: _Cta, tile: Tile, sums: list[Value]) -> None:
    """Write the cotangent of what the activation was given, and the sum of hidden value times cotangent of each row."""
    desc, config, scratch, own = cta.desc, cta.config, cta.scratch, cta.warpgroup
    assert desc.activation is not None
    for unit, of_unit in enumerate(sums):
        rows, total = _rows(cta, tile, unit), None
        for piece in range(config.pieces):
            plgpu.barrier_wait(scratch["before_full"].at[own])
            given = [
                mosaic.load(scratch["before"].at[own, projection], layout=mosaic.WGMMA).astype(jnp.float32)
                for projection in range(desc.projections)
            ]
            plgpu.commit_smem()  # every warp has read
            following = unit * config.pieces + piece + 1
            if following < len(sums) * config.pieces:
                _load_before(cta, tile, following)
            product = _piece(cta, of_unit, piece)
            of_piece, _, bars = pulled(desc.activation, given, product, None, accumulator_math_sm90.sigmoid)
            total = of_piece if total is None else total + of_piece
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for projection, bar in enumerate(bars):
                scratch["staging"][own, projection] = bar.astype(desc.dtype)
            plgpu.commit_smem()
            inside = mosaic.column_predicate(desc.k, config.block_n, tile.column * config.block_n + piece * UNIT)
            for projection in range(desc.projections):
                target = cta.outputs[0].at[rows, _columns(cta, tile, piece, projection)]
                plgpu.copy_smem_to_gmem(scratch["staging"].at[own, projection], target, predicate=inside)
        cta.outputs[1].at[tile.column, rows][...] = total
