"""Grouped GEMM on Hopper with weights as the left operand: tiles of 64 channels by 8 to 192 rows.

A tile's product is computed transposed, W X^T: weights fill the 64 rows of a wgmma whatever the number of tokens, which
are its N. Low tiles serve few rows an expert, tall ones have heights between the multiples of 64. One persistent block
per multiprocessor takes every num_sms-th tile. Its warpgroups, by role:

    producer (1)          as in kernel_sm90.py: rings of weights and rows, then the tile's scales and bias
    consumers (1 to 4)    for each tile, for each K step:
      64 channels each        wait full[slot] -> wgmma w[slot, half] x[slot]^T for each half -> empty[slot]
                          after a tile's last step:
                              wait vectors_full -> for each piece of rows:
                                  scales, bias, activation -> transposed staging -> bulk store

Clusters of two blocks share rows or weights as in kernel_sm90.py. With block scales the products of each K step are
scaled and added in float32, as there.

Registers: a consumer accumulates projections * 64 * block_m / 128 values a thread. What all enter with is enough
for low
tiles (50 used at 2 x 64 channels by 16 rows); for tall ones the producer gives up most of its own. Shared memory goes
to the ring: at 2 x 128 channels and 16 rows 6 stages of 34 KiB, at 144 rows 4 of 50 KiB beside 12 KiB of staging.
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
from pallas_kernels.common.accumulator_math_sm90 import sigmoid
from pallas_kernels.grouped_gemm.config import GemmConfig, GemmDesc, reassigns_registers, store_rows
from pallas_kernels.grouped_gemm.epilogue_sm90 import stores_under_way
from pallas_kernels.grouped_gemm.operands import operand_names
from pallas_kernels.grouped_gemm.persistent_sm90 import launch, run_tiles
from pallas_kernels.grouped_gemm.pipeline_sm90 import Scratch, block_scales, k_steps, produce, scratch_types, skip

CHANNELS = 64  # of one matrix instruction
# (consumer, producer) registers a thread, by number of consumers, for tiles whose sums do not leave room for the rest
# in what all enter with. Asking for more than that together never returns. One consumer enters with up to 255; four
# have no tiles that high.
_REGISTERS = {2: (240, 24), 3: (160, 32)}


def grouped_gemm_swapped_sm90(desc: GemmDesc, config: GemmConfig) -> Callable[[Mapping[str, Any]], Any]:
    """The kernel for ``desc``, a function of the operands by name. config must pass ``config_error``."""
    out = jax.ShapeDtypeStruct((desc.rows, desc.n), desc.stored_dtype)
    body = functools.partial(_kernel, desc, config)
    call = launch(body, config, out, scratch_types(desc, config), cluster=config.cluster)
    return lambda operands: call(*(operands[name] for name in operand_names(desc)))


def _kernel(desc: GemmDesc, config: GemmConfig, *refs: Any, **allocated: Any) -> None:
    operands = dict(zip(operand_names(desc), refs, strict=False))
    out = refs[-1]
    scratch = Scratch(**allocated)
    warpgroup = lax.axis_index("warpgroup")
    steps = k_steps(desc, config, operands["num_tiles"][0])

    def compute(m, n, e, count):
        if desc.is_block_scaled:
            parts = _multiply_promoted(desc, config, operands, scratch, warpgroup, steps, count, n, e)
        else:
            parts = _multiply(desc, config, scratch, warpgroup, steps, count)
        if scratch.vectors_full is not None:
            plgpu.barrier_wait(scratch.vectors_full)
        pieces = _pieces(config)
        num_slots = scratch.staging.shape[1]
        for index, (block, start, rows) in enumerate(pieces):
            channels = warpgroup * config.consumer_channels + block * CHANNELS
            piece = pl.ds(start, rows)
            value = _epilogue(desc, operands, scratch, parts[block], pl.ds(channels, CHANNELS), piece, e)
            if scratch.vectors_full is not None and index == len(pieces) - 1:
                mosaic.release(scratch.vectors_empty)
            staging = scratch.staging.at[warpgroup, index % num_slots, pl.ds(0, rows)]
            plgpu.wait_smem_to_gmem(stores_under_way(index, len(pieces), num_slots), wait_read_only=True)
            staging.transpose((1, 0))[...] = plgpu.layout_cast(
                value.astype(desc.stored_dtype), plgpu.Layout.WGMMA_TRANSPOSED
            )
            plgpu.commit_smem()
            first = n * config.block_n + channels
            target = out.at[pl.ds(m * config.block_m, config.block_m), pl.ds(first, CHANNELS)].at[piece]
            inside = mosaic.column_predicate(desc.n, config.cluster * config.block_n, first)
            plgpu.copy_smem_to_gmem(staging, target, predicate=inside)

    def consume(m, n, e, count):
        if not config.shares_weights:
            compute(m, n, e, count)
            return
        # The last row tile may have no partner: its cluster's other block keeps in step.
        is_tile = m < operands["num_tiles"][0]
        pl.when(is_tile)(lambda: compute(m, n, e, count))
        pl.when(jnp.logical_not(is_tile))(lambda: skip(desc, config, scratch, steps, count))

    run_tiles(
        config,
        operands,
        -(-desc.n // config.block_n),
        steps,
        registers=_REGISTERS[config.num_consumers] if reassigns_registers(desc, config) else None,
        produce=functools.partial(produce, desc, config, operands, scratch, steps),
        consume=consume,
        cluster=config.cluster,
        pairs_rows=config.shares_weights,
    )


def _pieces(config: GemmConfig) -> list[tuple[int, int, int]]:
    """What a consumer stores at a time: (block of 64 channels, first row, rows)."""
    step = store_rows(config)
    starts = range(0, config.block_m, step)
    blocks = range(config.consumer_channels // CHANNELS)
    return [(block, start, min(step, config.block_m - start)) for block in blocks for start in starts]


def _multiply(
    desc: GemmDesc, config: GemmConfig, scratch: Scratch, warpgroup: Any, steps: Any, count: Any
) -> list[list[Any]]:
    """This warpgroup's channels of one tile: for each 64 of them, (64, block_m) of each half."""
    blocks = config.consumer_channels // CHANNELS

    def scope(*accumulators):
        def one_step(k, count):
            slot = lax.rem(count, jnp.int32(config.num_stages))
            plgpu.barrier_wait(scratch.full.at[slot])
            for index, accumulator in enumerate(accumulators):
                block, half = divmod(index, desc.projections)
                first = half * config.block_n + warpgroup * config.consumer_channels + block * CHANNELS
                channels = pl.ds(first, CHANNELS)
                plgpu.wgmma(accumulator, scratch.w.at[slot, channels], scratch.x.at[slot].transpose((1, 0)))
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch.empty.at[slot])
            return count + 1

        lax.fori_loop(0, steps, one_step, count)
        return [accumulator[...] for accumulator in accumulators]

    accumulator = mosaic.Accumulator((CHANNELS, config.block_m), jnp.dtype(desc.accumulator))
    parts = pl.run_scoped(scope, *[accumulator] * (blocks * desc.projections))
    return [parts[first : first + desc.projections] for first in range(0, len(parts), desc.projections)]


def _multiply_promoted(
    desc: GemmDesc,
    config: GemmConfig,
    operands: Mapping[str, Any],
    scratch: Scratch,
    warpgroup: Any,
    steps: Any,
    count: Any,
    n: Any,
    e: Any,
) -> list[list[Any]]:
    """As ``_multiply``, with every K step of 128 scaled and added in float32. A consumer's 64 channels lie in one
    weight block.
    """
    shape, channels = (CHANNELS, config.block_m), warpgroup * CHANNELS
    columns = [(half, n * config.block_n + channels) for half in range(desc.projections)]

    def one_step(k, carry):
        count, parts = carry
        slot = lax.rem(count, jnp.int32(config.num_stages))
        factors = block_scales(desc, operands, e, columns, k)
        plgpu.barrier_wait(scratch.full.at[slot])
        own = scratch.x_scale.at[slot, pl.ds(0, config.block_m)]
        row_scales = mosaic.load(own, layout=mosaic.COLUMNS, optimized=False)

        def products(*fresh):
            for half, accumulator in enumerate(fresh):
                w = scratch.w.at[slot, pl.ds(half * config.block_n + channels, CHANNELS)]
                plgpu.wgmma(accumulator, w, scratch.x.at[slot].transpose((1, 0)))
            return [accumulator[...] for accumulator in fresh]

        found = pl.run_scoped(products, *[mosaic.Accumulator(shape, jnp.float32)] * desc.projections)
        mosaic.release(scratch.empty.at[slot])
        scales = [lax.broadcast_in_dim(row_scales * factor, shape, [1]) for factor in factors]
        return count + 1, tuple(p + f * s for p, f, s in zip(parts, found, scales, strict=True))

    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), mosaic.WGMMA)
    _, parts = lax.fori_loop(0, steps, one_step, (count, (zeros,) * desc.projections))
    return [list(parts)]


def _epilogue(
    desc: GemmDesc,
    operands: Mapping[str, Any],
    scratch: Scratch,
    parts: list[Any],
    channels: Any,
    piece: Any,
    e: Any,
) -> Any:
    """64 channels by the rows of ``piece``, float32: scales, bias, activation. parts: (64, block_m) of each half."""

    def half(h: int) -> Any:
        part = parts[h]
        if piece.size < part.shape[1]:
            part = part[:, piece.start : piece.start + piece.size]
        value = part.astype(jnp.float32)

        def of_channels(ref):
            loaded = mosaic.load(ref.at[h, channels], layout=mosaic.ROWS, optimized=False).astype(jnp.float32)
            return lax.broadcast_in_dim(loaded, value.shape, [0])

        if desc.lhs_scale == "row":
            rows = mosaic.load(scratch.rows.at[piece], layout=mosaic.COLUMNS, optimized=False)
            value = value * lax.broadcast_in_dim(rows, value.shape, [1])
        elif desc.lhs_scale == "tensor":
            value = value * operands["x_scale"][0]
        if desc.rhs_scale == "channel":
            value = value * of_channels(scratch.columns)
        elif desc.rhs_scale == "tensor":
            value = value * operands["w_scale"][e * desc.projections + h]
        return value if desc.bias_dtype is None else value + of_channels(scratch.bias)

    values = [half(h) for h in range(desc.projections)]
    return values[0] if desc.activation is None else desc.activation(*values, sigmoid=sigmoid)
