"""Grouped gradients of weights on Hopper: products that contract over the rows of each expert.

One persistent CTA per SM; tile after tile of (expert, rows of the output, columns of the output).

    producer (1 warpgroup)     for each 64 rows of the expert: wait empty[slot] -> TMA copies of 64 x block_n of dy and
                               64 x block_k of x -> full[slot]
    consumers (1 or 2)         64 rows of the output tile each
        main loop                  wait full[slot] -> wgmma dy[slot]^T x[slot] -> empty[slot]
        epilogue                   staged TMA stores, two under way

Rows are the contracted dimension of both operands, which wgmma reads transposed from shared memory as they lie in
global memory. An expert without rows has no steps: its sums are the zeros that accumulators start with. Steps of an
expert's last rows contain zeros in one operand, so nothing is masked.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.types import Kernel, Scalar, TileRef
from pallas_kernels.grouped_gemm.epilogue_sm90 import stores_under_way
from pallas_kernels.grouped_gemm.scheduler_sm90 import tile_index, tiles_of_cta
from pallas_kernels.grouped_gemm.wgrad.config import STEP, UNIT, WgradConfig, WgradDesc, shared_arrays, store_columns


def grouped_wgrad_sm90(desc: WgradDesc, config: WgradConfig) -> Kernel:
    """The kernel: (dy, x, first_row, num_rows) -> (E, N, K). config must pass ``config_error``."""
    shapes = shared_arrays(desc, config)
    scratch: dict[str, Any] = {
        name: plgpu.SMEM(shape, jnp.dtype(dtype), transforms=mosaic.tiled(dtype, 128))
        for name, (shape, dtype) in shapes.items()
    }
    stages, consumers = config.num_stages, config.num_consumers
    scratch["full"] = plgpu.Barrier(num_arrivals=consumers + 1, num_barriers=stages)
    scratch["empty"] = plgpu.Barrier(num_arrivals=consumers, num_barriers=stages)
    return plgpu.kernel(
        functools.partial(_kernel, desc, config),
        out_type=jax.ShapeDtypeStruct((desc.num_experts, desc.n, desc.k), jnp.dtype(desc.out_dtype)),
        grid=(config.num_sms,),
        grid_names=("block",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=mosaic.compiler_params(),
    )


def _kernel(
    desc: WgradDesc,
    config: WgradConfig,
    dy: TileRef,
    x: TileRef,
    first_row: TileRef,
    num_rows: TileRef,
    out: TileRef,
    /,
    **scratch: TileRef,
) -> None:
    mosaic.begin()
    cta, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    tiles_n, tiles_k = -(-desc.n // config.block_n), -(-desc.k // config.block_k)
    num_tiles = tiles_of_cta(cta, desc.num_experts * tiles_n * tiles_k, config.num_sms)
    stages = config.num_stages

    def tile(t: Scalar) -> tuple[Scalar, Scalar, Scalar, Scalar]:
        """(expert, row tile, column tile, steps) of this CTA's tile t: the tiles of an expert follow each other."""
        linear = cta + t * config.num_sms
        expert = lax.div(linear, jnp.int32(tiles_n * tiles_k))
        inside = lax.rem(linear, jnp.int32(tiles_n * tiles_k))
        steps = lax.div(num_rows[expert] + (STEP - 1), jnp.int32(STEP))
        n, k = tile_index(inside, tiles_n, tiles_k, config.raster_group_n)
        return expert, n, k, steps

    def slot_of(step: Scalar) -> Scalar:
        return lax.rem(step, jnp.int32(stages))

    @pl.when(warpgroup == config.num_consumers)
    def _():
        if config.registers:
            plgpu.set_max_registers(config.registers[1], action="decrease")
        _produce(config, dy, x, first_row, scratch, num_tiles, tile, slot_of)

    @pl.when(warpgroup < config.num_consumers)
    def _():
        if config.registers:
            plgpu.set_max_registers(config.registers[0], action="increase")

        def one_tile(t, first_step):
            expert, n, k, steps = tile(t)
            with jax.named_scope("main_loop"):
                sums = _multiply(config, scratch, warpgroup, first_step, steps, slot_of)
            with jax.named_scope("epilogue"):
                own = out.at[expert, pl.ds(n * config.block_n + warpgroup * UNIT, UNIT)]
                _store(desc, config, sums, own, k * config.block_k, scratch["staging"].at[warpgroup])
            return first_step + steps

        lax.fori_loop(0, num_tiles, one_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def _produce(
    config: WgradConfig,
    dy: TileRef,
    x: TileRef,
    first_row: TileRef,
    scratch: dict[str, TileRef],
    num_tiles: Scalar,
    tile: Callable[[Scalar], tuple[Scalar, Scalar, Scalar, Scalar]],
    slot_of: Callable[[Scalar], Scalar],
) -> None:
    full, empty, stages = scratch["full"], scratch["empty"], config.num_stages

    def one_tile(t, first_step):
        expert, n, k, steps = tile(t)
        first = first_row[expert]

        def one_step(index, step):
            slot = slot_of(step)

            @pl.when(step >= stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            rows = pl.ds(pl.multiple_of(first + index * STEP, STEP), STEP)
            for consumer in range(config.num_consumers):
                columns = pl.ds(n * config.block_n + consumer * UNIT, UNIT)
                plgpu.copy_gmem_to_smem(dy.at[rows, columns], scratch["dy"].at[slot, consumer], full.at[slot])
            columns = pl.ds(k * config.block_k, config.block_k)
            plgpu.copy_gmem_to_smem(x.at[rows, columns], scratch["x"].at[slot], full.at[slot])
            return step + 1

        return lax.fori_loop(0, steps, one_step, first_step)

    end = lax.fori_loop(0, num_tiles, one_tile, jnp.int32(0))

    # Leave no completed phase unobserved.
    def drain(step, _):
        plgpu.barrier_wait(empty.at[slot_of(step)])
        return 0

    lax.fori_loop(lax.max(end - stages, 0), end, drain, 0)


def _multiply(
    config: WgradConfig,
    scratch: dict[str, TileRef],
    warpgroup: Scalar,
    first_step: Scalar,
    steps: Scalar,
    slot_of: Callable[[Scalar], Scalar],
) -> Any:
    """(64, block_k) float32: this warpgroup's rows of the output tile."""

    def scope(accumulator):
        def one_step(index, _):
            slot = slot_of(first_step + index)
            plgpu.barrier_wait(scratch["full"].at[slot])
            plgpu.wgmma(accumulator, scratch["dy"].at[slot, warpgroup].transpose((1, 0)), scratch["x"].at[slot])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch["empty"].at[slot])
            return ()

        lax.fori_loop(0, steps, one_step, ())
        return accumulator[...]

    return pl.run_scoped(scope, mosaic.Accumulator((UNIT, config.block_k), jnp.float32))


def _store(
    desc: WgradDesc, config: WgradConfig, sums: Any, target: TileRef, first_column: Scalar, staging: TileRef
) -> None:
    """Write (64, block_k) to the rows ``target`` of one expert from ``first_column`` on. What lies past N and K is
    not stored.
    """
    width = store_columns(desc)
    starts = range(0, config.block_k, width)
    for index, start in enumerate(starts):
        slot, column = index % 2, first_column + start
        plgpu.wait_smem_to_gmem(stores_under_way(index, len(starts), 2), wait_read_only=True)
        staging[slot] = sums[:, start : start + width].astype(desc.out_dtype)
        plgpu.commit_smem()
        inside = mosaic.column_predicate(desc.k, config.block_k, column)
        plgpu.copy_smem_to_gmem(staging.at[slot], target.at[:, pl.ds(column, width)], predicate=inside)
