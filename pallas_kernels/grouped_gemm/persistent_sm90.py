"""What every grouped GEMM on Hopper has around its arithmetic: persistent blocks of one producer and some consumers."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.grouped_gemm.schedule import tile_index, tiles_of_block

PAIR = "pair"  # axis over the blocks of a cluster


def launch(
    body: Callable[..., Any], config: Any, out_type: Any, scratch_types: Any, cluster: int = 1
) -> Callable[..., Any]:
    """The kernel that runs ``body``: config.num_sms blocks of config.num_consumers + 1 warpgroups, the last of which
    is the producer. cluster: of how many blocks a cluster consists, by ``PAIR``.
    """
    clusters: dict[str, Any] = dict(cluster=(cluster,), cluster_names=(PAIR,)) if cluster > 1 else {}

    def begin_and_run(*refs, **scratch):
        mosaic.begin()
        body(*refs, **scratch)

    return plgpu.kernel(
        begin_and_run,
        out_type=out_type,
        grid=(config.num_sms // cluster,),
        grid_names=("block",),
        **clusters,
        num_threads=config.num_consumers + 1,
        thread_name="warpgroup",
        scratch_types=scratch_types,
        compiler_params=mosaic.compiler_params(),
    )


def run_tiles(
    config: Any,
    operands: Mapping[str, Any],
    column_tiles: int,
    steps: Any,
    *,
    registers: tuple[int, int] | None,
    produce: Callable[[Any, Callable[[Any], tuple[Any, Any, Any]]], None],
    consume: Callable[[Any, Any, Any, Any], None],
    cluster: int = 1,
    pairs_rows: bool = False,
) -> None:
    """Walk this block's tiles in both roles; inside a ``launch``ed body.

    operands: with num_tiles (1,) and tile_expert (row tiles,). steps: ring slots that one tile takes. registers: a
    thread's (consumer, producer), None to leave them. produce: called as ``produce(num_tiles, tile)``, where
    ``tile(t)`` is (row tile, column tile, expert). consume: called for each tile as ``consume(m, n, e, count)``, count
    being the slots that earlier tiles took. cluster: as many neighbouring column tiles of one row tile go to the blocks
    of a cluster, or with pairs_rows row tiles of one column tile. Where they do not divide evenly, the last tile lies
    past the last column, or past the last row tile in use and is of that one's expert.
    """
    warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
    row_tiles = operands["num_tiles"][0]
    clusters, row_groups, column_groups, raster_group_m = (
        config.num_sms // cluster,
        row_tiles,
        column_tiles,
        config.raster_group_m,
    )
    if pairs_rows:
        row_groups, raster_group_m = (
            lax.div(row_tiles + (cluster - 1), jnp.int32(cluster)),
            max(raster_group_m // cluster, 1),
        )
    else:
        column_groups = -(-column_tiles // cluster)
    num_tiles = tiles_of_block(block, row_groups * column_groups, clusters)

    def tile(t):
        m, n = tile_index(block + t * clusters, row_groups, column_groups, raster_group_m)
        if pairs_rows:
            m = m * cluster + lax.axis_index(PAIR)
            return m, n, operands["tile_expert"][lax.min(m, row_tiles - 1)]
        n = n * cluster + lax.axis_index(PAIR) if cluster > 1 else n
        return m, n, operands["tile_expert"][m]

    @pl.when(warpgroup == config.num_consumers)
    def _():
        if registers:
            plgpu.set_max_registers(registers[1], action="decrease")
        produce(num_tiles, tile)

    @pl.when(warpgroup < config.num_consumers)
    def _():
        if registers:
            plgpu.set_max_registers(registers[0], action="increase")

        def one_tile(t, count):
            consume(*tile(t), count)
            return count + steps

        lax.fori_loop(0, num_tiles, one_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
