"""Grouped gradients of weights on Hopper: products that contract over the rows of each expert.

One persistent CTA per SM; tile after tile of (expert, rows of the output, columns of the output).

    producer (1 warpgroup)     for each 64 rows of the expert: wait empty[slot] -> TMA copies of 64 x block_n of dy and
                               64 x block_k of x -> full[slot]
    consumers (1 or 2)         64 rows of the output tile each
        main loop                  wait full[slot] -> wgmma dy[slot]^T x[slot] -> empty[slot]
        epilogue                   staged TMA stores, two under way; of results of 16 bits a piece of the columns in
                                   each of the next tile's first steps, while its products are computed

Rows are the contracted dimension of both operands, which wgmma reads transposed from shared memory as they lie in
global memory. An expert without rows has no steps: its sums are the zeros that accumulators start with. Steps of an
expert's last rows contain zeros in one operand, so nothing is masked. A tile with fewer steps than pieces first stores
the one before it.

With 1,024 rows an expert a tile of 128 x 256 multiplies for 16,400 clocks. What remains between two tiles is to round
the sums and to clear the accumulators.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.shapes import or_shapes
from pallas_kernels.common.types import Kernel, Scalar, TileRef
from pallas_kernels.grouped_gemm.epilogue_sm90 import stores_under_way
from pallas_kernels.grouped_gemm.scheduler_sm90 import tile_index, tiles_of_cta
from pallas_kernels.grouped_gemm.wgrad.config import (
    STEP,
    UNIT,
    WgradConfig,
    WgradDesc,
    overlaps,
    shared_arrays,
    store_columns,
)


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
    out_type = jax.ShapeDtypeStruct((desc.num_experts, desc.n, desc.k), jnp.dtype(desc.out_dtype))
    kernel = plgpu.kernel(
        functools.partial(_kernel, desc, config),
        out_type=out_type,
        grid=(config.num_sms,),
        grid_names=("block",),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=mosaic.compiler_params(),
        kernel_name="wgrad",
    )
    return or_shapes(kernel, out_type)


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

        def multiply(first_step, steps, pieces=()):
            with jax.named_scope("main_loop"):
                return _multiply(config, scratch, warpgroup, first_step, steps, slot_of, pieces).astype(desc.out_dtype)

        def pieces_of(t, values):
            """Functions that store tile t, one after the other."""
            expert, n, k, _ = tile(t)
            own = out.at[expert, pl.ds(n * config.block_n + warpgroup * UNIT, UNIT)]
            return _stores(desc, config, values, own, k * config.block_k, scratch["staging"].at[warpgroup])

        def store(pieces):
            with jax.named_scope("epilogue"):
                for store_piece in pieces:
                    store_piece()

        def one_tile(t, first_step):
            steps = tile(t)[-1]
            store(pieces_of(t, multiply(first_step, steps)))
            return first_step + steps

        def behind_another(t, state):
            first_step, values = state
            steps, pieces = tile(t)[-1], pieces_of(t - 1, values)

            def at_once():
                store(pieces)
                return multiply(first_step, steps)

            return first_step + steps, lax.cond(
                steps < len(pieces), at_once, functools.partial(multiply, first_step, steps, pieces)
            )

        if not overlaps(desc):
            lax.fori_loop(0, num_tiles, one_tile, jnp.int32(0))
        else:

            @pl.when(num_tiles > 0)
            def _():
                first = tile(0)[-1]
                state = first, multiply(jnp.int32(0), first)
                _, values = lax.fori_loop(1, num_tiles, behind_another, state)
                store(pieces_of(num_tiles - 1, values))

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
    meanwhile: Sequence[Callable[[], None]],
) -> Any:
    """(64, block_k) float32: this warpgroup's rows of the output tile.

    meanwhile: what is done while products of the first steps are computed, of which there are at least as many.
    """

    def scope(accumulator):
        def one_step(index, beside=None):
            slot = slot_of(first_step + index)
            plgpu.barrier_wait(scratch["full"].at[slot])
            plgpu.wgmma(accumulator, scratch["dy"].at[slot, warpgroup].transpose((1, 0)), scratch["x"].at[slot])
            if beside is not None:
                beside()
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch["empty"].at[slot])

        for index, beside in enumerate(meanwhile):
            one_step(index, beside)
        pl.loop(len(meanwhile), steps)(one_step)
        return accumulator[...]

    return pl.run_scoped(scope, mosaic.Accumulator((UNIT, config.block_k), jnp.float32))


def _stores(
    desc: WgradDesc, config: WgradConfig, values: Any, target: TileRef, first_column: Scalar, staging: TileRef
) -> list[Callable[[], None]]:
    """Functions that write (64, block_k), a piece of the columns each, to the rows ``target`` of one expert from
    ``first_column`` on. What lies past N and K is not stored.
    """
    width = store_columns(desc)
    count = config.block_k // width

    def store(index: int) -> None:
        slot, start = index % 2, index * width
        plgpu.wait_smem_to_gmem(stores_under_way(index, count, 2), wait_read_only=True)
        staging[slot] = values if count == 1 else values[:, start : start + width]
        plgpu.commit_smem()
        column = first_column + start
        inside = mosaic.column_predicate(desc.k, config.block_k, column)
        plgpu.copy_smem_to_gmem(staging.at[slot], target.at[:, pl.ds(column, width)], predicate=inside)

    return [functools.partial(store, index) for index in range(count)]
