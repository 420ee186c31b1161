"""From accumulators to stored tiles: scales, bias, activation, and TMA stores from staged shared memory."""

from collections.abc import Callable, Iterable, Sequence

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.types import Scalar, TileRef, Value
from pallas_kernels.grouped_gemm.pipeline_sm90 import CtaContext
from pallas_kernels.grouped_gemm.scheduler_sm90 import Tile

CHANNELS = 64  # Rows of one wgmma, which with weights as the left operand are output columns.


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
