"""From accumulators to stored tiles: scales, bias, activation, and TMA stores from staged shared memory."""

from collections.abc import Callable, Iterable, Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.sm90 import LANES, WARPGROUP, WARPS
from pallas_kernels.common.types import Scalar, TileRef, Value
from pallas_kernels.grouped_gemm.pipeline_sm90 import CtaContext
from pallas_kernels.grouped_gemm.scheduler_sm90 import Tile

CHANNELS = 64  # Rows of one wgmma, which with weights as the left operand are output columns.
ROWS_BY_ONE = 16  # of the highest tile whose rows in use are stored one by one, each by a warp
BY_ROWS = mosaic.row_a_warp(CHANNELS // LANES)


def finish(
    cta: CtaContext,
    accumulator: Callable[[int], Value],
    factors: Callable[[int], Iterable[Value]],
    bias: Callable[[int], Value],
    sigmoid: Callable[[Value], Value],
) -> Value:
    """A piece of the output before any rounding, float32 in layout WGMMA: the activation of ``projections``.

    sigmoid: how activations compute it.
    """
    return activated(cta, projections(cta, accumulator, factors, bias), sigmoid)


def activated(cta: CtaContext, values: Sequence[Value], sigmoid: Callable[[Value], Value]) -> Value:
    """The activation of ``values``, one for each projection, or the one where there is no activation."""
    return values[0] if cta.desc.activation is None else cta.desc.activation(*values, sigmoid=sigmoid)


def projections(
    cta: CtaContext,
    accumulator: Callable[[int], Value],
    factors: Callable[[int], Iterable[Value]],
    bias: Callable[[int], Value],
) -> list[Value]:
    """A piece of each projection, float32 in layout WGMMA: products with scales and bias.

    The arguments are functions of the projection:

    Args:
        accumulator: the products of the piece.
        factors: what they are multiplied with, one after the other: scalars, or of the piece's shape.
        bias: what is added then, of the piece's shape; not called where the call has none.
    """
    desc = cta.desc
    values = []
    for projection in range(desc.projections):
        value = accumulator(projection).astype(jnp.float32)
        for factor in factors(projection):
            value = value * factor
        values.append(value if desc.bias_dtype is None else value + bias(projection))
    return values


def stores_under_way(index: int, num_pieces: int, num_slots: int) -> int:
    """How many stores of a warpgroup may still be reading when piece ``index`` of a tile is staged in slot
    ``index % num_slots``: as many as followed the last one out of that slot, in this tile or in the one before.
    """
    if index >= num_slots:
        return num_slots - 1
    last = max(j for j in range(num_pieces) if j % num_slots == index)
    return min(num_slots - 1, num_pieces - 1 - last + index)


def rows_in_use(cta: CtaContext, tile: Tile) -> Scalar | None:
    """A bit for each row of a low tile that is in use; None where tiles are written whole. Read it before the products:
    behind them nothing hides the time that it takes to come."""
    desc, operands = cta.desc, cta.operands
    if not desc.has_tile_rows or cta.config.block_m > ROWS_BY_ONE:
        return None
    if desc.has_tile_bits:
        return operands["tile_bits"][tile.row]
    return lax.shift_left(jnp.int32(1), operands["tile_rows"][tile.row]) - 1


def store_transposed(
    cta: CtaContext, in_use: Scalar | None, staging: TileRef, target: TileRef, first_column: Scalar
) -> None:
    """Write the rows in use of a low tile that this warpgroup has staged and committed; of others all, or a piece.

    Lines of 128 bytes that lie apart cost memory far more time than as many bytes that are read: layers with 16 tokens
    took 0.96 to 1.00 of their time without any stores (H200).

    in_use: ``rows_in_use``. staging, target: (rows, 64).
    """
    if in_use is None:
        store_staged(cta, staging, target, first_column)
        return
    value = mosaic.load(staging, layout=BY_ROWS, optimized=False)
    plgpu.commit_smem()  # The next piece may be staged where this one was read.
    store_by_row(value, target, in_use, cta.desc.n - first_column)


def store_by_row(value: Value, target: TileRef, bits: Scalar, columns: Scalar) -> None:
    """Write the rows of ``value`` whose bits are set, up to so many columns. The interpreter cannot run this: tests
    replace it.

    value: (rows, 64) of 16 bits in ``BY_ROWS``. target: as many rows and columns of the output.
    """
    thread = simt.thread_index() & (WARPGROUP - 1)
    warp, column = simt.warp_of(thread), (thread & (LANES - 1)) * 2
    rows = [warp + first for first in range(0, value.shape[0], WARPS)]
    is_set = [lax.bitwise_and(lax.shift_right_logical(simt.constant(0) + bits, row), 1) == 1 for row in rows]
    wanted = [jnp.where(one & (column < columns), 1, 0) for one in is_set]

    @simt.inline(plgpu.RefType(), BY_ROWS, *[simt.LANES] * (1 + 2 * len(rows)))
    def write(ctx, target, value, column, *places):
        del ctx
        pitch = ir.MemRefType(target.type).get_strides_and_offset()[0][0]
        registers = list(value.registers.flat)
        for register, row, is_wanted in zip(registers, places[: len(rows)], places[len(rows) :], strict=True):
            row, own = (arith.extsi(simt.integer(64), simt.value_of(place)) for place in (row, column))
            offset = arith.addi(arith.muli(row, simt.integer_constant(pitch)), own)
            address = arith.addi(simt.address_of(target), arith.muli(offset, simt.integer_constant(2)))
            bits = mgpu.utils.bitcast(register, simt.integer(32))
            text = "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.global.b32 [$0], $1; }"
            simt.asm([address, bits, simt.value_of(is_wanted)], text, "l,r,r,~{memory}")

    write(target, value, column, *rows, *wanted)


def stage_transposed(value: Value, staging: TileRef, dtype: str) -> None:
    """Write a piece (channels, rows) to ``staging`` (rows, channels)."""
    staging.transpose((1, 0))[...] = plgpu.layout_cast(value.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)


def inside_output(cta: CtaContext, first_column: Scalar) -> Value | None:
    """Whether the output has columns from ``first_column`` on; None where every tile lies inside."""
    return mosaic.column_predicate(cta.desc.n, cta.config.cluster * cta.config.block_n, first_column)


def store_staged(cta: CtaContext, staging: TileRef, target: TileRef, first_column: Scalar) -> None:
    """Issue the TMA store of what this warpgroup wrote to ``staging`` and committed. Columns past N are not stored."""
    plgpu.copy_smem_to_gmem(staging, target, predicate=inside_output(cta, first_column))


def store_in_turn(
    cta: CtaContext,
    tile: Tile,
    first_column: Scalar,
    values: Sequence[tuple[Value, TileRef, Scalar]],
    piece: int,
    num_pieces: int,
) -> None:
    """Write what a warpgroup has for one piece of a tile's columns, each through the next slot of its staging.

    first_column: of the piece. values: (64, columns), the output that they are for, and the column there of column 0.
    """
    staging = cta.scratch.staging.at[cta.warpgroup]
    rows, num_slots = pl.ds(tile.row * cta.config.block_m + cta.warpgroup * 64, 64), staging.shape[0]
    for index, (value, output, offset) in enumerate(values, start=piece * len(values)):
        slot = index % num_slots
        plgpu.wait_smem_to_gmem(stores_under_way(index, num_pieces * len(values), num_slots), wait_read_only=True)
        staging[slot] = value.astype(cta.desc.stored_dtype)
        plgpu.commit_smem()
        target = output.at[rows, pl.ds(offset + first_column, value.shape[1])]
        store_staged(cta, staging.at[slot], target, first_column)
