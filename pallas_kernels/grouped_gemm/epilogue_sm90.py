"""From accumulators to the stored tile: scales, bias, activation, requantization, staged bulk stores."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.accumulator_math_sm90 import round_to_bfloat16, sigmoid
from pallas_kernels.common.numerics_sm90 import e4m3_in_groups
from pallas_kernels.grouped_gemm.config import GemmConfig, GemmDesc, store_columns


@dataclasses.dataclass(frozen=True)
class TileVectors:
    """What scales or shifts one tile, loaded where it is used; what a call has not is None.

    rows: (64,) factors of this warpgroup's rows, in layout ROWS. scalar: half -> () factor. columns, bias: refs
    (projections, block_n) in shared memory. requantize: () factor of a requantization whose scale is given.
    """

    rows: Any = None
    scalar: Callable[[int], Any] | None = None
    columns: Any = None
    bias: Any = None
    requantize: Any = None


def tile_values(
    desc: GemmDesc, config: GemmConfig, parts: Sequence[Any], vectors: TileVectors, start: int, width: int
) -> Any:
    """Columns [start, start + width) of the output tile, (64, width) float32, rounded if they are to be requantized.

    parts: accumulators of equal width side by side, together (64, projections * block_n); the columns asked for
    lie in one
    part per half.
    """

    def half(h: int) -> Any:
        index, offset = divmod(h * config.block_n + start, parts[0].shape[1])
        part = parts[index]
        value = (part if part.shape[1] == width else part[:, offset : offset + width]).astype(jnp.float32)
        factor = None if vectors.scalar is None else vectors.scalar(h)
        if vectors.rows is not None:
            rows = vectors.rows if factor is None else vectors.rows * factor
            value = value * lax.broadcast_in_dim(rows, value.shape, [0])
        elif factor is not None:
            value = value * factor
        if vectors.columns is not None:
            value = value * _across_rows(vectors.columns.at[h, pl.ds(start, width)], value.shape)
        if vectors.bias is not None:
            value = value + _across_rows(vectors.bias.at[h, pl.ds(start, width)], value.shape)
        return value

    values = [half(h) for h in range(desc.projections)]
    value = values[0] if desc.activation is None else desc.activation(*values, sigmoid=sigmoid)
    return round_to_bfloat16(value) if desc.is_rounded_first else value


def _across_rows(vector: Any, shape: tuple[int, int]) -> Any:
    loaded = mosaic.load(vector, layout=mosaic.COLUMNS, optimized=False).astype(jnp.float32)
    return lax.broadcast_in_dim(loaded, shape, [1])


def _store_scale(desc: GemmDesc, config: GemmConfig, out_scale: Any, column_tile: Any, rows: Any, scale: Any) -> None:
    def store():
        out_scale.at[column_tile, rows][...] = scale

    column_tiles = -(-desc.n // config.block_n)
    if column_tiles % config.cluster:
        pl.when(column_tile < column_tiles)(store)
    else:
        store()


def stores_under_way(index: int, num_pieces: int, num_slots: int) -> int:
    """How many stores of a warpgroup may still be reading when piece ``index`` of a tile is staged in slot
    ``index % num_slots``: as many as followed the last one out of that slot, in this tile or in the one before.
    """
    if index >= num_slots:
        return num_slots - 1
    last = max(j for j in range(num_pieces) if j % num_slots == index)
    return min(num_slots - 1, num_pieces - 1 - last + index)


def store_tile(
    desc: GemmDesc,
    config: GemmConfig,
    parts: Sequence[Any],
    vectors: TileVectors,
    *,
    staging: Any,
    out: Any,
    out_scale: Any,
    row: Any,
    column_tile: Any,
    in_use: Any = None,
) -> None:
    """Write one warpgroup's (64, block_n) of the output, staged through its slots of ``staging`` (slots, 64, columns).

    row: first row. in_use: how many of the 64 rows are wanted, for ``row_chunk``. Columns past N are not stored. A slot
    is written again once its store has read it.
    """
    rows = pl.ds(row, 64)
    columns = store_columns(desc, config)
    num_slots = staging.shape[0]

    whole = None
    if desc.requantize == "group":
        whole = tile_values(desc, config, parts, vectors, 0, config.block_n)
        whole, scale = e4m3_in_groups(whole, jnp.max(jnp.abs(whole), axis=1), desc.has_power_of_two_scales)
        _store_scale(desc, config, out_scale, column_tile, rows, scale)

    starts = range(0, config.block_n, columns)
    for index, start in enumerate(starts):
        if whole is None:
            value = tile_values(desc, config, parts, vectors, start, columns)
            if vectors.requantize is not None:
                value = value * vectors.requantize
        else:
            value = whole if columns == config.block_n else whole[:, start : start + columns]
        slot = index % num_slots
        plgpu.wait_smem_to_gmem(stores_under_way(index, len(starts), num_slots), wait_read_only=True)
        staging[slot] = value.astype(desc.stored_dtype)
        plgpu.commit_smem()
        first_column = column_tile * config.block_n + start
        target = out.at[rows, pl.ds(first_column, columns)]
        inside = mosaic.column_predicate(desc.n, config.cluster * config.block_n, first_column)
        if config.row_chunk is None:
            plgpu.copy_smem_to_gmem(staging.at[slot], target, predicate=inside)
            continue
        for first in range(0, 64, config.row_chunk):
            chunk, wanted = pl.ds(first, config.row_chunk), first < in_use
            wanted = wanted if inside is None else wanted & inside
            plgpu.copy_smem_to_gmem(staging.at[slot, chunk], target.at[chunk], predicate=wanted, commit_group=False)
        plgpu.commit_smem_to_gmem_group()
