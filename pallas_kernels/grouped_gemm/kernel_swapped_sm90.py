"""Grouped GEMM on Hopper for few rows per expert, weights as the left operand: tiles of 64 channels by 8 to 64 rows.

A tile's product is computed transposed, W X^T: weights fill the 64 rows of a wgmma whatever the number of tokens, which
are its N. One persistent block per multiprocessor takes every num_sms-th tile. Its warpgroups, by role:

    producer (1)          as in kernel_sm90.py: rings of weights and rows, then the tile's scales and bias
    consumers (1 to 4)    for each tile, for each K step:
      64 channels each        wait full[slot] -> wgmma w[slot, half] x[slot]^T for each half -> empty[slot]
                          after a tile's last step:
                              wait vectors_full -> scales, bias, activation -> transposed staging -> bulk store

Registers: a consumer accumulates halves * 64 * block_m / 128 values a thread; what all enter with is enough (50 used at
2 x 64 channels by 16 rows). Shared memory goes to the ring: at 2 x 128 channels and 16 rows, 6 stages of 34 KiB.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.grouped_gemm.config import GemmConfig, GemmDesc
from pallas_kernels.grouped_gemm.operands import operand_names
from pallas_kernels.grouped_gemm.persistent_sm90 import launch, run_tiles
from pallas_kernels.grouped_gemm.pipeline_sm90 import Scratch, k_steps, produce, scratch_types

CHANNELS = 64  # of a consumer, in each half


def grouped_gemm_swapped_sm90(desc: GemmDesc, config: GemmConfig) -> Callable[[Mapping[str, Any]], Any]:
    """The kernel for ``desc``, a function of the operands by name. config must pass ``config_error``."""
    out = jax.ShapeDtypeStruct((desc.rows, desc.n), desc.stored_dtype)
    call = launch(functools.partial(_kernel, desc, config), config, out, scratch_types(desc, config))
    return lambda operands: call(*(operands[name] for name in operand_names(desc)))


def _kernel(desc: GemmDesc, config: GemmConfig, *refs: Any, **allocated: Any) -> None:
    operands = dict(zip(operand_names(desc), refs, strict=False))
    out = refs[-1]
    scratch = Scratch(**allocated)
    warpgroup = lax.axis_index("warpgroup")
    steps = k_steps(desc, config, operands["num_tiles"][0])

    def consume(m, n, e, count):
        parts = _multiply(desc, config, scratch, warpgroup, steps, count)
        if scratch.vectors_full is not None:
            plgpu.barrier_wait(scratch.vectors_full)
        value = _epilogue(desc, operands, scratch, parts, warpgroup, e)
        if scratch.vectors_full is not None:
            mosaic.release(scratch.vectors_empty)
        staging = scratch.staging.at[warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staging.transpose((1, 0))[...] = plgpu.layout_cast(
            value.astype(desc.stored_dtype), plgpu.Layout.WGMMA_TRANSPOSED
        )
        plgpu.commit_smem()
        first = n * config.block_n + warpgroup * CHANNELS
        target = out.at[pl.ds(m * config.block_m, config.block_m), pl.ds(first, CHANNELS)]
        inside = mosaic.column_predicate(desc.n, config.block_n, first)
        plgpu.copy_smem_to_gmem(staging, target, predicate=inside)

    run_tiles(
        config,
        operands,
        -(-desc.n // config.block_n),
        steps,
        registers=None,
        produce=functools.partial(produce, desc, config, operands, scratch, steps),
        consume=consume,
    )


def _multiply(
    desc: GemmDesc, config: GemmConfig, scratch: Scratch, warpgroup: Any, steps: Any, count: Any
) -> list[Any]:
    """This warpgroup's channels of one tile, (64, block_m) for each half."""

    def scope(*accumulators):
        def one_step(k, count):
            slot = lax.rem(count, jnp.int32(config.num_stages))
            plgpu.barrier_wait(scratch.full.at[slot])
            for half, accumulator in enumerate(accumulators):
                channels = pl.ds(half * config.block_n + warpgroup * CHANNELS, CHANNELS)
                plgpu.wgmma(accumulator, scratch.w.at[slot, channels], scratch.x.at[slot].transpose((1, 0)))
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch.empty.at[slot])
            return count + 1

        lax.fori_loop(0, steps, one_step, count)
        return [accumulator[...] for accumulator in accumulators]

    shape = (CHANNELS, config.block_m)
    return pl.run_scoped(scope, *[mosaic.Accumulator(shape, jnp.dtype(desc.accumulator))] * desc.halves)


def _epilogue(
    desc: GemmDesc, operands: Mapping[str, Any], scratch: Scratch, parts: list[Any], warpgroup: Any, e: Any
) -> Any:
    """Channels by rows, float32: scales, bias, activation."""
    channels = pl.ds(warpgroup * CHANNELS, CHANNELS)

    def half(h: int) -> Any:
        value = parts[h].astype(jnp.float32)

        def of_channels(ref):
            loaded = mosaic.load(ref.at[h, channels], layout=mosaic.ROWS, optimized=False).astype(jnp.float32)
            return lax.broadcast_in_dim(loaded, value.shape, [0])

        if desc.lhs_scale == "row":
            rows = mosaic.load(scratch.rows, layout=mosaic.COLUMNS, optimized=False)
            value = value * lax.broadcast_in_dim(rows, value.shape, [1])
        elif desc.lhs_scale == "tensor":
            value = value * operands["x_scale"][0]
        if desc.rhs_scale == "channel":
            value = value * of_channels(scratch.columns)
        elif desc.rhs_scale == "tensor":
            value = value * operands["w_scale"][e * desc.halves + h]
        return value if desc.bias_dtype is None else value + of_channels(scratch.bias)

    values = [half(h) for h in range(desc.halves)]
    return values[0] if desc.activation is None else desc.activation(*values)
