"""The ring of the packed kernel: what is allocated, who fills it, and the two ways to multiply from it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic, sm90
from pallas_kernels.grouped_gemm_packed.blocks import BLOCK_N
from pallas_kernels.grouped_gemm_packed.config import (
    PackedConfig,
    PackedDesc,
    are_halves_together,
    block_k,
    fragment_k,
    promoted_k,
    promoted_rows,
    scale_rows,
)
from pallas_kernels.grouped_gemm_packed.dequantize_sm90 import load_block


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Shared memory and barriers of a block; what a call does not need is None.

    w: (stages, blocks, step_blocks, *block_shape) int32, a warpgroup's blocks side by side, gate then up. x: (stages,
    block_m, block_k). scale, zero: (stages, blocks, scale_rows, 64). staging: (consumers, block_m, 64) of the output.
    """

    w: Any
    x: Any
    full: Any
    empty: Any
    staging: Any
    scale: Any = None
    zero: Any = None


def scratch_types(desc: PackedDesc, config: PackedConfig) -> dict[str, Any]:
    """Allocations for ``Scratch``, by field name."""
    stages, blocks = config.num_stages, config.num_consumers * desc.halves
    itemsize, out_itemsize = jnp.dtype(desc.fmt.operand).itemsize, jnp.dtype(desc.out_dtype).itemsize
    grouped = (stages, blocks, scale_rows(desc, config), BLOCK_N)
    types: dict[str, Any] = dict(
        w=plgpu.SMEM((stages, blocks, config.step_blocks, *desc.fmt.block_shape), jnp.int32),
        x=plgpu.SMEM(
            (stages, config.block_m, block_k(desc, config)),
            desc.fmt.operand,
            transforms=mosaic.tiled(desc.fmt.operand, sm90.swizzle_bytes(fragment_k(desc, config) * itemsize)),
        ),
        full=plgpu.Barrier(
            num_arrivals=2 + (desc.fmt.scale == "group") + desc.fmt.has_zero_point, num_barriers=config.num_stages
        ),
        empty=plgpu.Barrier(num_arrivals=config.num_consumers, num_barriers=config.num_stages),
        staging=plgpu.SMEM(
            (config.num_consumers, config.block_m, BLOCK_N),
            desc.out_dtype,
            transforms=mosaic.tiled(desc.out_dtype, sm90.swizzle_bytes(desc.n * out_itemsize)),
        ),
    )
    if desc.fmt.scale == "group":
        types["scale"] = plgpu.SMEM(grouped, desc.scale_dtype)
    if desc.fmt.has_zero_point:
        types["zero"] = plgpu.SMEM(grouped, desc.fmt.operand)
    return types


def k_steps(desc: PackedDesc, config: PackedConfig, row_tiles: Any) -> Any:
    """Slots of the ring that one tile passes through; ``row_tiles`` >= 0 hides the number from LLVM, which would unroll
    the loop.
    """
    steps = desc.k // block_k(desc, config)
    return lax.min(jnp.int32(steps), row_tiles + steps)


def produce(
    desc: PackedDesc,
    config: PackedConfig,
    operands: Mapping[str, Any],
    scratch: Scratch,
    steps: Any,
    num_tiles: Any,
    tile: Callable[[Any], tuple[Any, Any, Any]],
) -> None:
    """The producer warpgroup: keep the ring full over all tiles, without a break between two of them."""
    stages, step = config.num_stages, block_k(desc, config)
    blocks, groups = config.num_consumers * desc.halves, scale_rows(desc, config)

    def one_tile(t, count):
        m, n, e = tile(t)
        rows = pl.ds(m * config.block_m, config.block_m)
        channels = pl.ds((e * desc.channel_blocks + n * config.num_consumers) * desc.halves, blocks)

        def one_step(k, count):
            slot = lax.rem(count, jnp.int32(stages))

            @pl.when(count >= stages)
            def _():
                plgpu.barrier_wait(scratch.empty.at[slot])

            full = scratch.full.at[slot]
            depth = pl.ds(k * config.step_blocks, config.step_blocks)
            plgpu.copy_gmem_to_smem(operands["w"].at[channels, depth], scratch.w.at[slot], full)
            plgpu.copy_gmem_to_smem(operands["x"].at[rows, pl.ds(k * step, step)], scratch.x.at[slot], full)
            for name, target in (("scale", scratch.scale), ("zero", scratch.zero)):
                if target is not None:
                    first = group_of(desc, config, k)
                    plgpu.copy_gmem_to_smem(operands[name].at[channels, pl.ds(first, groups)], target.at[slot], full)
            return count + 1

        return lax.fori_loop(0, steps, one_step, count)

    count = lax.fori_loop(0, num_tiles, one_tile, jnp.int32(0))

    # Leave no completed phase unobserved.
    def drain(index, _):
        plgpu.barrier_wait(scratch.empty.at[lax.rem(index, jnp.int32(stages))])
        return 0

    lax.fori_loop(lax.max(count - stages, 0), count, drain, 0)


def group_of(desc: PackedDesc, config: PackedConfig, k: Any) -> Any:
    """First group of K step k; 0 where a channel has one zero point for all of K."""
    step, group = block_k(desc, config), desc.fmt.group_size
    if group is None:
        return 0
    return k * (step // group) if step >= group else lax.div(k, jnp.int32(group // step))


def _fragments(
    desc: PackedDesc, config: PackedConfig, scratch: Scratch, slot: Any, warpgroup: Any, half: int, depth: int
) -> list[tuple[int, Any]]:
    """Register operands of one block: pairs (first column in the slot, array (64, fragment_k))."""
    first, width = depth * desc.fmt.block_k, fragment_k(desc, config)
    block = warpgroup * desc.halves + half
    group = desc.fmt.group_size or desc.k
    rows = tuple((first + desc.fmt.block_k // 4 * q) // group % scale_rows(desc, config) for q in range(4))
    parts = load_block(
        desc.fmt,
        scratch.w.at[slot, block, depth],
        width,
        rows,
        None if scratch.zero is None else scratch.zero.at[slot, block],
        scratch.scale.at[slot, block] if config.folds_scales else None,
    )
    return [(first + i * width, part) for i, part in enumerate(parts)]


def multiply(
    desc: PackedDesc, config: PackedConfig, scratch: Scratch, warpgroup: Any, steps: Any, count: Any
) -> list[list[Any]]:
    """One tile with one accumulator a half over all of K. count: steps taken before it.

    Returns for each half [(64, block_m)].
    """
    width = fragment_k(desc, config)

    def scope(*accumulators):
        def one_step(k, count):
            slot = lax.rem(count, jnp.int32(config.num_stages))
            plgpu.barrier_wait(scratch.full.at[slot])
            for batch in _batches(desc, config):
                for half, depth in batch:
                    for column, part in _fragments(desc, config, scratch, slot, warpgroup, half, depth):
                        x = scratch.x.at[slot, :, pl.ds(column, width)]
                        plgpu.wgmma(accumulators[half], part, x.transpose((1, 0)))
                # Operands in registers must not be in flight when the loop comes round and rewrites them.
                plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch.empty.at[slot])
            return count + 1

        lax.fori_loop(0, steps, one_step, count)
        return [[accumulator[...].astype(jnp.float32)] for accumulator in accumulators]

    shape = mosaic.Accumulator((BLOCK_N, config.block_m), jnp.dtype(desc.accumulator))
    return pl.run_scoped(scope, *[shape] * desc.halves)


def multiply_promoted(
    desc: PackedDesc, config: PackedConfig, scratch: Scratch, warpgroup: Any, steps: Any, count: Any
) -> list[list[Any]]:
    """One tile with the partial sum of every group scaled and added in float32.

    Returns for each half its pieces (64, promoted_rows), rows of x side by side.
    """
    width, chunk, rows = fragment_k(desc, config), promoted_k(desc, config), promoted_rows(config)
    shape = mosaic.Accumulator((BLOCK_N, rows), jnp.dtype(desc.accumulator))
    pieces = range(config.block_m // rows)

    def one_step(k, carry):
        count, sums = carry
        sums = [list(half) for half in sums]
        slot = lax.rem(count, jnp.int32(config.num_stages))
        plgpu.barrier_wait(scratch.full.at[slot])
        for batch in _batches(desc, config):
            halves = sorted({half for half, _ in batch})
            operands = {
                (half, column): part
                for half, depth in batch
                for column, part in _fragments(desc, config, scratch, slot, warpgroup, half, depth)
            }
            for index, first in enumerate(range(0, block_k(desc, config), chunk)):
                factors = []
                for half in halves:
                    scale = scratch.scale.at[slot, warpgroup * desc.halves + half, index]
                    scale = mosaic.load(scale, layout=mosaic.ROWS, optimized=False).astype(jnp.float32)
                    factors.append(lax.broadcast_in_dim(scale, (BLOCK_N, rows), [0]))
                for piece in pieces:

                    def products(*fresh, first=first, piece=piece, halves=halves, operands=operands):
                        for half, accumulator in zip(halves, fresh, strict=True):
                            for column in range(first, first + chunk, width):
                                x = scratch.x.at[slot, pl.ds(piece * rows, rows), pl.ds(column, width)]
                                plgpu.wgmma(accumulator, operands[half, column], x.transpose((1, 0)))
                        return [accumulator[...] for accumulator in fresh]

                    found = pl.run_scoped(products, *[shape] * len(halves))
                    for half, factor, product in zip(halves, factors, found, strict=True):
                        sums[half][piece] = sums[half][piece] + _to_float32(product) * factor
        plgpu.barrier_arrive(scratch.empty.at[slot])
        return count + 1, tuple(tuple(half) for half in sums)

    zeros = plgpu.layout_cast(jnp.zeros((BLOCK_N, rows), jnp.float32), mosaic.WGMMA)
    _, sums = lax.fori_loop(0, steps, one_step, (count, ((zeros,) * len(pieces),) * desc.halves))
    return [list(half) for half in sums]


def _to_float32(partial: Any) -> Any:
    """Partial sums as float32. Integers below 2**22 in magnitude become the mantissa of 1.5 * 2**23, which takes no
    conversion instruction; those of 128 products of int8 by 16 times int4 do not exceed 2**21.
    """
    if partial.dtype == jnp.float32:
        return partial
    return lax.bitcast_convert_type(partial + jnp.int32(0x4B400000), jnp.float32) - jnp.float32(3 << 22)


def _batches(desc: PackedDesc, config: PackedConfig) -> list[list[tuple[int, int]]]:
    """(half, block of K) of a step, in lists whose products are in flight together."""
    halves = [[(half, depth) for depth in range(config.step_blocks)] for half in range(desc.halves)]
    return [sum(halves, [])] if are_halves_together(desc, config) else halves
