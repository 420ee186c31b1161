"""Persistent CTAs on Hopper: how they are launched, and which tile each takes next."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.shapes import or_shapes
from pallas_kernels.common.sm90 import REDUCTION_BYTES
from pallas_kernels.common.types import Scalar, TileRef
from pallas_kernels.grouped_gemm.config import GemmConfig
from pallas_kernels.grouped_gemm.packed.config import PackedConfig

PAIR = "pair"  # axis over the CTAs of a cluster


@dataclasses.dataclass(frozen=True)
class Tile:
    """One output tile; every field is an int32 of the device.

    Args:
        row: index of the tile among the tiles of rows.
        column: index among the tiles of columns.
        expert: whose weights it is multiplied with.
        first_step: ring slots that the earlier tiles of this CTA took.
    """

    row: Scalar
    column: Scalar
    expert: Scalar
    first_step: Scalar


def launch(
    body: Callable[..., None], config: GemmConfig | PackedConfig, out_type: Any, scratch_types: dict[str, Any]
) -> Callable[..., Any]:
    """The kernel that runs ``body`` in config.num_sms CTAs, or in clusters of them along ``PAIR``.

    Each has config.num_consumers + 1 warpgroups, the last of which is the producer.
    """
    clusters: dict[str, Any] = dict(cluster=(config.cluster,), cluster_names=(PAIR,)) if config.cluster > 1 else {}

    def begin_and_run(*refs, **scratch):
        mosaic.begin()
        body(*refs, **scratch)

    kernel = plgpu.kernel(
        begin_and_run,
        out_type=out_type,
        grid=(config.num_sms // config.cluster,),
        grid_names=("block",),
        **clusters,
        num_threads=config.num_consumers + 1,
        thread_name="warpgroup",
        scratch_types=scratch_types,
        compiler_params=mosaic.compiler_params(reduction_scratch_bytes=REDUCTION_BYTES),
        kernel_name="grouped_gemm",
    )
    return or_shapes(kernel, out_type)


def run_tiles(
    config: GemmConfig | PackedConfig,
    tile_expert: TileRef,
    num_row_tiles: TileRef,
    column_tiles: int,
    steps: Scalar,
    *,
    registers: tuple[int, int] | None,
    produce: Callable[[Scalar, Callable[[Scalar, Scalar], Tile]], None],
    consume: Callable[[Tile], None],
) -> None:
    """Walk this CTA's tiles in both roles; inside a ``launch``ed body.

    The CTAs of a cluster take neighbouring column tiles of one row tile, or with config.shares_weights neighbouring row
    tiles of one column tile. Where they do not divide evenly, the last tile lies past the last column, or past the last
    row tile in use; it then has that one's expert.

    Args:
        tile_expert: (row tiles,) int32.
        num_row_tiles: (1,) int32, row tiles in use.
        column_tiles: number of column tiles.
        steps: ring slots that one tile takes.
        registers: of a thread, (consumer, producer); None to leave them as launched.
        produce: called once as ``produce(num_tiles, tile)``; ``tile(t, first_step)`` is this CTA's tile t.
        consume: called for each tile.
    """
    warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("block")
    row_tiles = num_row_tiles[0]
    cluster, clusters = config.cluster, config.num_sms // config.cluster
    rows_of_cluster, column_groups, raster_group_m = _walk(config, column_tiles)
    row_groups = lax.div(row_tiles + (rows_of_cluster - 1), jnp.int32(rows_of_cluster))
    num_tiles = tiles_of_cta(cta, row_groups * column_groups, clusters)

    def tile(t, first_step):
        m, n = tile_index(cta + t * clusters, row_groups, column_groups, raster_group_m)
        if config.shares_weights:
            m = m * cluster + lax.axis_index(PAIR)
            return Tile(m, n, tile_expert[lax.min(m, row_tiles - 1)], first_step)
        n = n * cluster + lax.axis_index(PAIR) if cluster > 1 else n
        return Tile(m, n, tile_expert[m], first_step)

    @pl.when(warpgroup == config.num_consumers)
    def _():
        if registers:
            plgpu.set_max_registers(registers[1], action="decrease")
        produce(num_tiles, tile)

    @pl.when(warpgroup < config.num_consumers)
    def _():
        if registers:
            plgpu.set_max_registers(registers[0], action="increase")

        def one_tile(t, first_step):
            consume(tile(t, first_step))
            return first_step + steps

        lax.fori_loop(0, num_tiles, one_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def likely_row(config: GemmConfig | PackedConfig, row_tiles: int, column_tiles: int) -> Scalar:
    """Row tile that this CTA begins with, unless its raster group is one that the tiles in use do not fill. It is known
    before their number is. row_tiles: in use or not."""
    rows_of_cluster, column_groups, raster_group_m = _walk(config, column_tiles)
    cta, per_group = lax.axis_index("block"), jnp.int32(raster_group_m * column_groups)
    row = lax.div(cta, per_group) * raster_group_m + lax.rem(lax.rem(cta, per_group), jnp.int32(raster_group_m))
    row = row * rows_of_cluster + lax.axis_index(PAIR) if config.shares_weights else row
    return lax.min(row, jnp.int32(row_tiles - 1))


def _walk(config: GemmConfig | PackedConfig, column_tiles: int) -> tuple[int, int, int]:
    """(row tiles of a cluster, steps along the columns, steps along the rows of a raster group)."""
    if config.shares_weights:
        return config.cluster, column_tiles, max(config.raster_group_m // config.cluster, 1)
    return 1, -(-column_tiles // config.cluster), config.raster_group_m


def tiles_of_cta(cta: Scalar, total: Scalar, num_ctas: int) -> Scalar:
    """How many of ``total`` tiles fall to a CTA when CTA c takes c, c + num_ctas, ..."""
    return lax.div(total - cta + (num_ctas - 1), jnp.int32(num_ctas))


def tile_index(linear: Scalar, row_tiles: Scalar, column_tiles: int, raster_group_m: int) -> tuple[Scalar, Scalar]:
    """(row tile, column tile) of a linear index: raster groups of row tiles, inside a group rows fastest.

    CTAs that run at the same time then work on one group: its rows stay in L2 while the weights of its experts pass by
    once. ``row_tiles`` is known on the device only; the last group may have fewer than ``raster_group_m`` of them.
    """
    per_group = jnp.int32(raster_group_m * column_tiles)
    first = lax.div(linear, per_group) * raster_group_m
    inside = lax.rem(linear, per_group)
    rows = lax.min(jnp.int32(raster_group_m), row_tiles - first)
    column = lax.div(inside, rows)
    return first + (inside - column * rows), column
