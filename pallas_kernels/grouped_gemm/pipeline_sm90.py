"""The shared-memory ring of the Hopper kernel: what is allocated, who fills it, two ways to multiply from it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic, sm90
from pallas_kernels.grouped_gemm.config import (
    SCALE_GROUP,
    GemmConfig,
    GemmDesc,
    block_k,
    piece_n,
    row_scales_shape,
    staging_shape,
    store_swizzle,
    vector_shape,
)
from pallas_kernels.grouped_gemm.persistent_sm90 import PAIR


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Shared memory and barriers of a block; what a call does not need is None.

    x, w: (stages, rows, block_k) operands. x_scale: (stages, >= block_m), one K step's activation scales. full, empty:
    per stage. full_pieces: per stage and weight piece after the first. rows, columns, bias, vectors_full,
    vectors_empty: vectors of the current tile. staging: see ``staging_shape``.
    """

    x: Any
    w: Any
    full: Any
    empty: Any
    staging: Any
    full_pieces: Any = None
    x_scale: Any = None
    rows: Any = None
    columns: Any = None
    bias: Any = None
    vectors_full: Any = None
    vectors_empty: Any = None


def scratch_types(desc: GemmDesc, config: GemmConfig) -> dict[str, Any]:
    """Allocations for ``Scratch``, by field name."""
    stages, consumers = config.num_stages, config.num_consumers
    step, tile_rows = block_k(desc, config), desc.projections * config.block_n
    operand = mosaic.tiled(desc.dtype, sm90.swizzle_bytes(desc.k * desc.itemsize))
    staged = staging_shape(desc, config)
    stored = mosaic.tiled(desc.stored_dtype, store_swizzle(desc, config))
    copies, pieces = _copies_per_piece(desc, config), tile_rows // piece_n(desc, config)
    types: dict[str, Any] = dict(
        x=plgpu.SMEM((stages, config.block_m, step), desc.dtype, transforms=operand),
        w=plgpu.SMEM((stages, tile_rows, step), desc.dtype, transforms=operand),
        full=plgpu.Barrier(
            num_arrivals=config.block_m // config.rows_moved + desc.is_block_scaled + copies, num_barriers=stages
        ),
        empty=_empty_type(config),
        staging=plgpu.SMEM(staged, desc.stored_dtype, transforms=stored),
    )
    if pieces > 1:
        types["full_pieces"] = plgpu.Barrier(num_arrivals=copies, num_barriers=stages * (pieces - 1))
    if desc.is_block_scaled:
        types["x_scale"] = plgpu.SMEM(row_scales_shape(config), jnp.float32)
    vectors = 0
    if desc.lhs_scale == "row":
        types["rows"], vectors = plgpu.SMEM((config.block_m,), jnp.float32), vectors + 1
    if desc.rhs_scale == "channel":
        types["columns"] = plgpu.SMEM(vector_shape(desc, config, "float32"), jnp.float32)
        vectors += desc.projections
    if desc.bias_dtype is not None:
        types["bias"] = plgpu.SMEM(vector_shape(desc, config, desc.bias_dtype), desc.bias_dtype)
        vectors += desc.projections
    if vectors:
        types["vectors_full"] = plgpu.Barrier(num_arrivals=vectors)
        types["vectors_empty"] = plgpu.Barrier(num_arrivals=consumers)
    return types


def _empty_type(config: GemmConfig) -> Any:
    """Barriers by which consumers hand slots back, in a cluster to the producers of both blocks.

    At the latter one thread arrives for its warpgroup, whose warps have come together in a matrix instruction, or by
    ``commit_smem`` where they waited or read by themselves.
    """
    counts: dict[str, Any] = dict(num_arrivals=config.num_consumers, num_barriers=config.num_stages)
    if config.cluster == 1:
        return plgpu.Barrier(**counts)
    return plgpu.ClusterBarrier(collective_axes=(PAIR,), **counts)


def k_steps(desc: GemmDesc, config: GemmConfig, row_tiles: Any) -> Any:
    """Slots of the ring that one tile passes through; ``row_tiles``, a value >= 0 read on the device, changes nothing.

    It hides the number from LLVM, which unrolls loops of up to about eight steps: 32 bulk copies in the producer, and
    spills in both roles.
    """
    steps = -(-desc.k // block_k(desc, config))
    return lax.min(jnp.int32(steps), row_tiles + steps)


def _copies_per_piece(desc: GemmDesc, config: GemmConfig) -> int:
    """Bulk copies that bring one piece of a weight tile; a copy stays inside one half."""
    return -(-piece_n(desc, config) // config.block_n)


def produce(
    desc: GemmDesc,
    config: GemmConfig,
    operands: Mapping[str, Any],
    scratch: Scratch,
    steps: Any,
    num_tiles: Any,
    tile: Callable[[Any], tuple[Any, Any, Any]],
) -> None:
    """The producer warpgroup: keep the ring full over all tiles, without a break between two of them."""
    stages, step = config.num_stages, block_k(desc, config)
    piece = piece_n(desc, config)
    copied = min(piece, config.block_n)
    pieces = desc.projections * config.block_n // piece
    # Each block of a cluster then copies its part, to all.
    to_all: dict[str, Any] = dict(collective_axes=PAIR)
    of_rows = to_all if config.cluster > 1 and not config.shares_weights else {}

    def one_tile(t, count):
        m, n, e = tile(t)
        # Past the last of the same rows a bulk copy of x brings zeros; they have scales of a whole tile.
        rows = pl.ds(0 if desc.unpermuted_rows else m * config.block_m, config.block_m)
        in_use = operands["tile_rows"][m] if config.row_chunk is not None else config.block_m
        if config.shares_weights:
            other = lax.min(lax.bitwise_xor(m, jnp.int32(1)), operands["num_tiles"][0] - 1)
            is_shared = operands["tile_expert"][other] == e

        def load_rows(depth, slot):
            for start in range(0, config.block_m, config.rows_moved):
                chunk = pl.ds(start, config.rows_moved)
                source = operands["x"].at[rows, depth].at[chunk]
                if config.row_chunk is None or start == 0:
                    plgpu.copy_gmem_to_smem(source, scratch.x.at[slot, chunk], scratch.full.at[slot], **of_rows)
                    continue

                # What lies in the slot from before is multiplied instead, into rows that nobody reads.
                @pl.when(start < in_use)
                def _(source=source, chunk=chunk):
                    plgpu.copy_gmem_to_smem(source, scratch.x.at[slot, chunk], scratch.full.at[slot])

                @pl.when(start >= in_use)
                def _():
                    plgpu.barrier_arrive(scratch.full.at[slot])

        def one_step(k, count):
            slot = lax.rem(count, jnp.int32(stages))
            depth = pl.ds(k * step, step)

            @pl.when(count >= stages)
            def _():
                plgpu.barrier_wait(scratch.empty.at[slot])

            load_rows(depth, slot)
            if desc.is_block_scaled:
                own = scratch.x_scale.at[slot, pl.ds(0, config.block_m)]
                plgpu.copy_gmem_to_smem(operands["x_scale"].at[k, rows], own, scratch.full.at[slot])
            for start in range(0, desc.projections * config.block_n, copied):
                half, column = divmod(start, config.block_n)
                index = start // piece
                full = scratch.full.at[slot] if index == 0 else scratch.full_pieces.at[slot * (pieces - 1) + index - 1]
                copy_weights = functools.partial(
                    plgpu.copy_gmem_to_smem,
                    operands["w"].at[e * desc.projections + half, pl.ds(n * config.block_n + column, copied), depth],
                    scratch.w.at[slot, pl.ds(start, copied)],
                    full,
                )
                if config.shares_weights:
                    pl.when(is_shared)(functools.partial(copy_weights, **to_all))
                    pl.when(jnp.logical_not(is_shared))(copy_weights)
                else:
                    copy_weights()
            return count + 1

        count = lax.fori_loop(0, steps, one_step, count)
        if scratch.vectors_full is not None:
            # Behind the tile's last step, so that waiting for the previous epilogue never holds up the ring.
            @pl.when(t >= 1)
            def _():
                plgpu.barrier_wait(scratch.vectors_empty)

            _load_vectors(desc, config, operands, scratch, rows, n, e)
        return count

    count = lax.fori_loop(0, num_tiles, one_tile, jnp.int32(0))

    # Leave no completed phase unobserved.
    def drain(index, _):
        plgpu.barrier_wait(scratch.empty.at[lax.rem(index, jnp.int32(stages))])
        return 0

    lax.fori_loop(lax.max(count - stages, 0), count, drain, 0)
    if scratch.vectors_full is not None:

        @pl.when(num_tiles >= 1)
        def _():
            plgpu.barrier_wait(scratch.vectors_empty)


def _load_vectors(desc, config, operands, scratch, rows, n, e):
    columns = pl.ds(n * config.block_n, config.block_n)
    if scratch.rows is not None:
        plgpu.copy_gmem_to_smem(operands["x_scale"].at[rows], scratch.rows, scratch.vectors_full)
    for name, target in (("w_scale", scratch.columns), ("bias", scratch.bias)):
        for half in range(desc.projections) if target is not None else ():
            source = operands[name].at[e * desc.projections + half, columns]
            own = target.at[half, pl.ds(0, config.block_n)]
            plgpu.copy_gmem_to_smem(source, own, scratch.vectors_full)


def multiply(
    desc: GemmDesc,
    config: GemmConfig,
    operands: Mapping[str, Any],
    scratch: Scratch,
    warpgroup: Any,
    steps: Any,
    count: Any,
    n: Any,
    e: Any,
) -> list[Any]:
    """One tile with one accumulator over all of K. count: steps taken before it. Returns [(64, projections *
    block_n)]."""
    rows = pl.ds(warpgroup * 64, 64)

    def scope(accumulator):
        def one_step(k, count):
            slot = lax.rem(count, jnp.int32(config.num_stages))
            plgpu.barrier_wait(scratch.full.at[slot])
            plgpu.wgmma(accumulator, scratch.x.at[slot, rows], scratch.w.at[slot].transpose((1, 0)))
            # The other warpgroup keeps the tensor core busy; leaving one product in flight here measured the same.
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch.empty.at[slot])
            return count + 1

        lax.fori_loop(0, steps, one_step, count)
        return accumulator[...]

    shape = (64, desc.projections * config.block_n)
    return [pl.run_scoped(scope, mosaic.Accumulator(shape, jnp.dtype(desc.accumulator)))]


def skip(desc: GemmDesc, config: GemmConfig, scratch: Scratch, steps: Any, count: Any) -> None:
    """Hand back what the other warpgroup multiplies, for a tile in which this one has no row."""
    pieces = desc.projections * config.block_n // piece_n(desc, config)

    def one_step(k, count):
        slot = lax.rem(count, jnp.int32(config.num_stages))
        plgpu.barrier_wait(scratch.full.at[slot])
        for index in range(pieces - 1):
            plgpu.barrier_wait(scratch.full_pieces.at[slot * (pieces - 1) + index])
        if config.cluster > 1:
            plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.empty.at[slot])
        return count + 1

    lax.fori_loop(0, steps, one_step, count)
    if scratch.vectors_full is not None:
        plgpu.barrier_wait(scratch.vectors_full)
        plgpu.barrier_arrive(scratch.vectors_empty)


def block_scales(
    desc: GemmDesc, operands: Mapping[str, Any], e: Any, columns: Sequence[tuple[int, Any]], k: Any
) -> list[Any]:
    """The weight scale () of one K step for each (half, column) asked for. Columns past N have those of the last."""
    last = -(-desc.n // SCALE_GROUP) - 1
    blocks = [lax.min(lax.div(column, jnp.int32(SCALE_GROUP)), jnp.int32(last)) for _, column in columns]
    return [operands["w_scale"][e * desc.projections + h, b, k] for (h, _), b in zip(columns, blocks, strict=True)]


def multiply_promoted(
    desc: GemmDesc,
    config: GemmConfig,
    operands: Mapping[str, Any],
    scratch: Scratch,
    warpgroup: Any,
    steps: Any,
    count: Any,
    n: Any,
    e: Any,
) -> list[Any]:
    """One tile with every K step of 128 scaled and added in float32. Returns its parts, each (64, <= 128).

    A tile's weight rows are multiplied in pieces of 128. Waiting for each piece on a barrier of its own also keeps
    ptxas from issuing the second product before the first is added, which needs 64 registers more than there are.
    """
    rows = pl.ds(warpgroup * 64, 64)
    piece = piece_n(desc, config)
    width = min(config.block_n, SCALE_GROUP)
    starts = range(0, desc.projections * config.block_n, width)
    pieces = desc.projections * config.block_n // piece
    columns = [(start // config.block_n, n * config.block_n + start % config.block_n) for start in starts]

    def one_step(k, carry):
        count, parts = carry
        slot = lax.rem(count, jnp.int32(config.num_stages))
        factors = block_scales(desc, operands, e, columns, k)
        plgpu.barrier_wait(scratch.full.at[slot])
        row_scales = mosaic.load(scratch.x_scale.at[slot, rows], layout=mosaic.ROWS, optimized=False)
        parts = list(parts)
        for index in range(pieces):
            if index:
                plgpu.barrier_wait(scratch.full_pieces.at[slot * (pieces - 1) + index - 1])
            w_piece = scratch.w.at[slot, pl.ds(index * piece, piece)]
            product = mosaic.fresh_product(
                (64, piece),
                jnp.float32,
                lambda fresh, w_piece=w_piece: plgpu.wgmma(fresh, scratch.x.at[slot, rows], w_piece.transpose((1, 0))),
            )
            if index == pieces - 1 and config.cluster > 1:
                plgpu.commit_smem()
                plgpu.barrier_arrive(scratch.empty.at[slot])
            elif index == pieces - 1:
                mosaic.release(scratch.empty.at[slot])
            for offset in range(0, piece, width):
                i = (index * piece + offset) // width
                value = product if width == piece else product[:, offset : offset + width]
                scale = lax.broadcast_in_dim(row_scales * factors[i], value.shape, [0])
                parts[i] = parts[i] + value * scale
        return count + 1, tuple(parts)

    zeros = plgpu.layout_cast(jnp.zeros((64, width), jnp.float32), mosaic.WGMMA)
    _, parts = lax.fori_loop(0, steps, one_step, (count, (zeros,) * len(starts)))
    return list(parts)
