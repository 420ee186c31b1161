"""Each head's rows times a part of the head's own matrix on Hopper.

A CTA makes the outputs of 64 tokens and one head. With few tokens reading the matrices binds, and there are about as
many heads as SMs: so a CTA asks for all steps that fit at once.

    producer      for each step of 64 of the sum: rows of x, weights
    consumers     for each step: acc += x W[:, own half of the columns]
                  then acc -> rounded -> shared memory -> the output

Rows past the tokens are zeros in shared memory, and are not stored.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.types import Kernel, TileRef, Value
from pallas_kernels.multiply_heads.config import DEPTH, ROWS, WARPGROUPS, HeadsConfig, HeadsDesc


def multiply_heads_sm90(desc: HeadsDesc, config: HeadsConfig) -> Kernel:
    """The kernel: (x (T, N, K or more), w (N, R, C)) -> (T, N, outputs). T is below 8 or a multiple of it; config must
    pass config_error."""
    dtype, stages = jnp.dtype(desc.dtype), config.num_stages
    tiled = mosaic.tiled(dtype, 128)
    weights = (desc.num_rows, DEPTH) if desc.transposes_w else (DEPTH, desc.columns)
    return plgpu.kernel(
        functools.partial(_kernel, desc, config),
        out_type=jax.ShapeDtypeStruct((desc.num_tokens, desc.num_heads, desc.width), dtype),
        grid=(desc.num_heads, -(-desc.num_tokens // ROWS)),
        grid_names=("head", "tile"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=dict(
            x=plgpu.SMEM((stages, ROWS, DEPTH), dtype, transforms=tiled),
            w=plgpu.SMEM((stages, *weights), dtype, transforms=tiled),
            out=plgpu.SMEM((WARPGROUPS, ROWS, desc.width // WARPGROUPS), dtype, transforms=tiled),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            empty=plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        ),
        compiler_params=mosaic.compiler_params(),
        kernel_name="multiply_heads",
    )


def _kernel(desc: HeadsDesc, config: HeadsConfig, *refs: TileRef, **scratch: TileRef) -> None:
    mosaic.begin()
    x, w, y = refs
    stages, steps, width = config.num_stages, desc.depth // DEPTH, desc.width // WARPGROUPS
    warpgroup, head = lax.axis_index("warpgroup"), lax.axis_index("head")
    tokens = pl.ds(pl.multiple_of(lax.axis_index("tile") * ROWS, ROWS), ROWS)

    @pl.when(warpgroup == WARPGROUPS)
    def _():
        for step in range(steps):
            stage, part = step % stages, pl.ds(step * DEPTH, DEPTH)
            if step >= stages:
                plgpu.barrier_wait(scratch["empty"].at[stage])
            full = scratch["full"].at[stage]
            plgpu.copy_gmem_to_smem(x.at[tokens, head, part], scratch["x"].at[stage], full)
            if desc.transposes_w:
                weights = w.at[head, pl.ds(desc.first_row, desc.num_rows), part]
            else:
                weights = w.at[head, pl.ds(desc.first_row + step * DEPTH, DEPTH)]
            plgpu.copy_gmem_to_smem(weights, scratch["w"].at[stage], full)
        for step in range(max(steps - stages, 0), steps):  # leave no completed phase unobserved
            plgpu.barrier_wait(scratch["empty"].at[step % stages])

    @pl.when(warpgroup < WARPGROUPS)
    def _():
        own = pl.ds(pl.multiple_of(warpgroup * width, width), width)

        def multiply(accumulator: TileRef) -> Value:
            for step in range(steps):
                stage = step % stages
                weights = scratch["w"].at[stage]
                weights = weights.at[own].transpose((1, 0)) if desc.transposes_w else weights.at[:, own]
                plgpu.barrier_wait(scratch["full"].at[stage])
                plgpu.wgmma(accumulator, scratch["x"].at[stage], weights)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(scratch["empty"].at[stage])
            return accumulator[...]

        sums = pl.run_scoped(multiply, mosaic.Accumulator((ROWS, width), jnp.float32))
        staging = scratch["out"].at[warpgroup]
        staging[...] = sums.astype(desc.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, y.at[tokens, head, own])
        plgpu.wait_smem_to_gmem(0)
