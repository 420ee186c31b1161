"""The ring of the packed kernel: what is allocated, who fills it, and the two ways to multiply from it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic, sm90
from pallas_kernels.grouped_gemm.packed.config import (
    PackedConfig,
    PackedDesc,
    are_groups_together,
    are_projections_together,
    block_k,
    converts_sums,
    fragment_k,
    own_projections,
    partial_shape,
    products_in_flight,
    promoted_k,
    promoted_rows,
    scale_rows,
    unpacks_late,
)
from pallas_kernels.grouped_gemm.packed.dequantize_sm90 import load_block
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Shared memory and barriers of a block; what a call does not need is None.

    w: (stages, blocks, step_blocks, *block_shape) int32, a channel group's blocks side by side, gate then up. x:
    (stages, k_split, block_m, columns of a part). scale, zero: (stages, blocks, scale_rows, 64). staging: (channel
    groups, block_m, 64) of the output. partial, partial_full, partial_empty: see ``gather_sums``.
    """

    w: Any
    x: Any
    full: Any
    empty: Any
    staging: Any
    scale: Any = None
    zero: Any = None
    partial: Any = None
    partial_full: Any = None
    partial_empty: Any = None


def scratch_types(desc: PackedDesc, config: PackedConfig) -> dict[str, Any]:
    """Allocations for ``Scratch``, by field name."""
    stages, blocks = config.num_stages, config.channel_groups * desc.projections
    itemsize, out_itemsize = jnp.dtype(desc.fmt.operand).itemsize, jnp.dtype(desc.out_dtype).itemsize
    grouped = (stages, blocks, scale_rows(desc, config), BLOCK_N)
    types: dict[str, Any] = dict(
        w=plgpu.SMEM((stages, blocks, config.step_blocks, *desc.fmt.block_shape), jnp.int32),
        x=plgpu.SMEM(
            (stages, config.k_split, config.block_m, config.part_blocks * desc.fmt.block_k),
            desc.fmt.operand,
            transforms=mosaic.tiled(desc.fmt.operand, sm90.swizzle_bytes(fragment_k(desc, config) * itemsize)),
        ),
        full=plgpu.Barrier(
            num_arrivals=1 + config.k_split + (desc.fmt.scale == "group") + desc.fmt.has_zero_point,
            num_barriers=config.num_stages,
        ),
        empty=plgpu.Barrier(num_arrivals=config.num_consumers, num_barriers=config.num_stages),
        staging=plgpu.SMEM(
            (config.channel_groups, config.block_m, BLOCK_N),
            desc.out_dtype,
            transforms=mosaic.tiled(desc.out_dtype, sm90.swizzle_bytes(desc.n * out_itemsize)),
        ),
    )
    if desc.fmt.scale == "group":
        types["scale"] = plgpu.SMEM(grouped, desc.scale_dtype)
    if desc.fmt.has_zero_point:
        types["zero"] = plgpu.SMEM(grouped, desc.fmt.operand)
    if config.sharers > 1:
        types["partial"] = plgpu.SMEM(partial_shape(desc, config), jnp.float32)
        types["partial_full"] = plgpu.Barrier(num_arrivals=config.sharers - 1, num_barriers=config.channel_groups)
        types["partial_empty"] = plgpu.Barrier(num_arrivals=1, num_barriers=config.channel_groups)
    return types


def k_steps(desc: PackedDesc, config: PackedConfig, row_tiles: Any) -> Any:
    """Slots of the ring that one tile passes through; ``row_tiles`` >= 0 hides the number from LLVM, which would unroll
    the loop.
    """
    steps = -(-desc.k // block_k(desc, config))
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
    """The producer warpgroup: keep the ring full over all tiles, without a break between two of them.

    Bulk copies fill with zeros what lies past K: x, weights, scales.
    """
    stages, step, part = config.num_stages, block_k(desc, config), config.part_blocks * desc.fmt.block_k
    blocks, groups = config.channel_groups * desc.projections, scale_rows(desc, config)

    def one_tile(t, count):
        m, n, e = tile(t)
        # Past the last of the same rows a bulk copy brings zeros.
        rows = pl.ds(0 if desc.unpermuted_rows else m * config.block_m, config.block_m)
        channels = pl.ds((e * desc.channel_blocks + n * config.channel_groups) * desc.projections, blocks)

        def one_step(k, count):
            slot = lax.rem(count, jnp.int32(stages))

            @pl.when(count >= stages)
            def _():
                plgpu.barrier_wait(scratch.empty.at[slot])

            full = scratch.full.at[slot]
            depth = pl.ds(k * config.step_blocks, config.step_blocks)
            plgpu.copy_gmem_to_smem(operands["w"].at[channels, depth], scratch.w.at[slot], full)
            for index in range(config.k_split):
                columns = pl.ds(k * step + index * part, part)
                plgpu.copy_gmem_to_smem(operands["x"].at[rows, columns], scratch.x.at[slot, index], full)
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
    """Register operands of one block: pairs (first column in the part, array (64, fragment_k))."""
    first, width = depth * desc.fmt.block_k, fragment_k(desc, config)
    channels, first_half, part = place(config, warpgroup)
    block = channels * desc.projections + first_half + half
    group = desc.fmt.group_size or desc.k
    rows = tuple((first + desc.fmt.block_k // 4 * q) // group % scale_rows(desc, config) for q in range(4))
    parts = load_block(
        desc.fmt,
        scratch.w.at[slot, block, part * config.part_blocks + depth],
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

    Returns for each half of its own [(64, block_m)].
    """
    width, (_, _, part) = fragment_k(desc, config), place(config, warpgroup)
    in_flight = products_in_flight(config)

    def scope(*accumulators):
        def one_step(k, count):
            slot = lax.rem(count, jnp.int32(config.num_stages))
            plgpu.barrier_wait(scratch.full.at[slot])
            for batch in _batches(desc, config):
                for index, (half, depth) in enumerate(batch):
                    if index >= in_flight:
                        plgpu.wgmma_wait(in_flight - 1)
                    ((column, weights),) = _fragments(desc, config, scratch, slot, warpgroup, half, depth)
                    x = scratch.x.at[slot, part, :, pl.ds(column, width)]
                    plgpu.wgmma(accumulators[half], weights, x.transpose((1, 0)))
                # Operands in registers must not be in flight when the loop comes round and rewrites them.
                plgpu.wgmma_wait(0)
            mosaic.release(scratch.empty.at[slot])
            return count + 1

        lax.fori_loop(0, steps, one_step, count)
        return [[accumulator[...].astype(jnp.float32)] for accumulator in accumulators]

    shape = mosaic.Accumulator((BLOCK_N, config.block_m), jnp.dtype(desc.accumulator))
    return pl.run_scoped(scope, *[shape] * own_projections(desc, config))


def multiply_promoted(
    desc: PackedDesc, config: PackedConfig, scratch: Scratch, warpgroup: Any, steps: Any, count: Any
) -> list[list[Any]]:
    """One tile with the partial sum of every group scaled and added in float32, groups in their order.

    Returns for each half of its own the pieces (64, promoted_rows), rows of x side by side.
    """
    width, chunk, rows = fragment_k(desc, config), promoted_k(desc, config), promoted_rows(config)
    shape = mosaic.Accumulator((BLOCK_N, rows), jnp.dtype(desc.accumulator))
    pieces = range(config.block_m // rows)
    channels, first_half, part = place(config, warpgroup)
    part_k = config.part_blocks * desc.fmt.block_k
    first_group = lax.div(part * part_k, jnp.int32(desc.fmt.group_size)) if config.k_split > 1 else 0
    is_late = unpacks_late(desc, config)

    def one_step(k, carry):
        count, sums = carry
        sums = [list(half) for half in sums]
        slot = lax.rem(count, jnp.int32(config.num_stages))
        plgpu.barrier_wait(scratch.full.at[slot])
        for batch in _batches(desc, config):
            projections = sorted({half for half, _ in batch})
            operands: dict[tuple[int, int], Any] = {}

            def unpack(half, depth, operands=operands):
                found = _fragments(desc, config, scratch, slot, warpgroup, half, depth)
                operands.update({(half, column): weights for column, weights in found})

            if not is_late:
                for half, depth in batch:
                    unpack(half, depth)
            groups = list(enumerate(range(0, part_k, chunk)))
            for together in [groups] if are_groups_together(desc, config) else [[one] for one in groups]:
                parts = [(index, first, half) for index, first in together for half in projections]
                factors = []
                for index, _, half in parts:
                    block = channels * desc.projections + first_half + half
                    scale = scratch.scale.at[slot, block, first_group + index]
                    scale = mosaic.load(scale, layout=mosaic.ROWS, optimized=False).astype(jnp.float32)
                    factors.append(lax.broadcast_in_dim(scale, (BLOCK_N, rows), [0]))
                for piece in pieces:

                    def products(*fresh, parts=parts, piece=piece, operands=operands, unpack=unpack):
                        for (_, first, half), accumulator in zip(parts, fresh, strict=True):
                            for column in range(first, first + chunk, width):
                                if is_late and column % desc.fmt.block_k == 0:
                                    unpack(half, column // desc.fmt.block_k)
                                x = scratch.x.at[slot, part, pl.ds(piece * rows, rows), pl.ds(column, width)]
                                plgpu.wgmma(accumulator, operands[half, column], x.transpose((1, 0)))
                        return [accumulator[...] for accumulator in fresh]

                    found = pl.run_scoped(products, *[shape] * len(parts))
                    for (_, _, half), factor, product in zip(parts, factors, found, strict=True):
                        sums[half][piece] = sums[half][piece] + _to_float32(desc, product) * factor
        mosaic.release(scratch.empty.at[slot])
        return count + 1, tuple(tuple(half) for half in sums)

    zeros = plgpu.layout_cast(jnp.zeros((BLOCK_N, rows), jnp.float32), mosaic.WGMMA)
    _, sums = lax.fori_loop(0, steps, one_step, (count, ((zeros,) * len(pieces),) * own_projections(desc, config)))
    return [list(half) for half in sums]


def place(config: PackedConfig, warpgroup: Any) -> tuple[Any, Any, Any]:
    """(channel group, first half, part of K) of a consumer."""
    if config.sharers == 1:
        return warpgroup, 0, 0
    group, sharer = (op(warpgroup, jnp.int32(config.sharers)) for op in (lax.div, lax.rem))
    return (group, sharer, 0) if config.splits_projections else (group, 0, sharer)


def gather_sums(
    config: PackedConfig,
    scratch: Scratch,
    warpgroup: Any,
    sums: list[list[Any]],
    store: Callable[[list[list[Any]]], None],
) -> None:
    """Call ``store`` with the sums of all projections over all of K, in one warpgroup of each channel group.

    The other sharers' sums pass through scratch.partial: written -> partial_full -> read, the first sharer's first ->
    partial_empty.
    """
    if config.sharers == 1:
        store(sums)
        return
    group, sharer = (op(warpgroup, jnp.int32(config.sharers)) for op in (lax.div, lax.rem))

    @pl.when(sharer > 0)
    def _():
        for half, pieces in enumerate(sums):
            for index, value in enumerate(pieces):
                scratch.partial.at[group, sharer - 1, half, index][...] = value
        plgpu.barrier_arrive(scratch.partial_full.at[group])
        plgpu.barrier_wait(scratch.partial_empty.at[group])

    @pl.when(sharer == 0)
    def _():
        plgpu.barrier_wait(scratch.partial_full.at[group])

        def passed(other, half, index):
            return mosaic.load(scratch.partial.at[group, other, half, index], layout=mosaic.WGMMA, optimized=False)

        total = [list(pieces) for pieces in sums]
        if config.splits_projections:
            total.append([passed(0, 0, index) for index in range(len(sums[0]))])
        for other in range(config.k_split - 1):
            for half, pieces in enumerate(total):
                for index in range(len(pieces)):
                    pieces[index] = pieces[index] + passed(other, half, index)
        plgpu.barrier_arrive(scratch.partial_empty.at[group])
        store(total)


def _to_float32(desc: PackedDesc, partial: Any) -> Any:
    """Partial sums as float32. A conversion takes one instruction and a register of its own; without room for that,
    integers below 2**22 in magnitude become the mantissa of 1.5 * 2**23, those of 128 products of int8 by 16 times int4
    not exceeding 2**21.
    """
    if partial.dtype == jnp.float32 or converts_sums(desc):
        return partial.astype(jnp.float32)
    return lax.bitcast_convert_type(partial + jnp.int32(0x4B400000), jnp.float32) - jnp.float32(3 << 22)


def _batches(desc: PackedDesc, config: PackedConfig) -> list[list[tuple[int, int]]]:
    """(half, block of K) of a step, in lists whose products are in flight together."""
    depths = range(config.part_blocks)
    projections = [[(half, depth) for depth in depths] for half in range(own_projections(desc, config))]
    return [sum(projections, [])] if are_projections_together(desc, config) else projections
