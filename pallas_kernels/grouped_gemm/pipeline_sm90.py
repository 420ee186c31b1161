"""The ring in shared memory: what a CTA holds, who fills the slots, and the walk over the K steps of a tile.

producer     for each tile, for each K step, and for each step of the epilogue where it reads from the ring:
                 wait empty[slot] -> TMA copies into slot -> full[slot]
             after a tile's last step, where it has vectors (scales of rows and columns, bias):
                 wait vectors_empty -> TMA copies -> vectors_full
consumers    for each tile, for each K step:
                 wait full[slot] -> products -> empty[slot]
             after a tile's last step:
                 wait vectors_full -> epilogue -> vectors_empty
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.types import Scalar, TileRef, Value
from pallas_kernels.grouped_gemm.config import SharedArray
from pallas_kernels.grouped_gemm.scheduler_sm90 import Tile

Carry = TypeVar("Carry")
Sums = list[list[Value]]  # for each projection those of pieces of rows side by side, (64, rows)
LoadStep = Callable[[Scalar], Callable[[Scalar], None]]  # K step -> slot -> None, issuing its copies


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Shared memory and barriers of a CTA; what a kernel does not need is None.

    The configurations (``shared_arrays``) give the shapes.

    Args:
        x, w: operands of each slot.
        full, empty: barriers of each slot.
        staging: output on its way to global memory.
        handed_over, handed_over_by_all: rows that the consumers make together and requantize, and their barrier.
        full_pieces: barriers of each slot and weight piece after the first.
        x_scale: scales of the rows in each 128 of K.
        rows, columns, bias: vectors of the current tile.
        vectors_full, vectors_empty: barriers of these vectors.
        scale, zero: of packed weights, group scales and zero points of each slot.
        partial, partial_full, partial_empty: partial sums that consumers exchange, and their barriers.
    """

    x: TileRef
    w: TileRef
    full: TileRef
    empty: TileRef
    staging: TileRef = None
    full_pieces: TileRef = None
    x_scale: TileRef = None
    rows: TileRef = None
    columns: TileRef = None
    bias: TileRef = None
    vectors_full: TileRef = None
    vectors_empty: TileRef = None
    scale: TileRef = None
    zero: TileRef = None
    handed_over: TileRef = None
    handed_over_by_all: TileRef = None
    partial: TileRef = None
    partial_full: TileRef = None
    partial_empty: TileRef = None


@dataclasses.dataclass(frozen=True)
class CtaContext:
    """What the functions of a kernel body work with; the same for all tiles of a CTA.

    Args:
        desc: what is computed, a GemmDesc or a PackedDesc.
        config: how, a GemmConfig or a PackedConfig.
        operands: references to the arrays in global memory, by name (``desc.operand_names``).
        outputs: references to the output, and to its scales where it has some.
        scratch: shared memory and barriers.
        warpgroup: index of this warpgroup; the last one is the producer.
        steps: ring slots that the K steps of one tile take.
        epilogue_steps: ring slots that its epilogue takes behind them; None where it reads nothing from the ring.
        sharers: consumers that take the K steps of a tile in turn.
    """

    desc: Any
    config: Any
    operands: Mapping[str, TileRef]
    outputs: tuple[TileRef, ...]
    scratch: Scratch
    warpgroup: Scalar
    steps: Scalar
    epilogue_steps: Scalar | None = None
    sharers: int = 1

    @property
    def channel_group(self) -> Scalar:
        """Index of this consumer among those with channels of their own."""
        return self.warpgroup if self.sharers == 1 else jnp.int32(0)

    @property
    def all_steps(self) -> Scalar:
        """Ring slots that one tile takes."""
        return self.steps if self.epilogue_steps is None else self.steps + self.epilogue_steps

    def slot(self, step: Scalar) -> Scalar:
        """The slot of a K step, counted over all tiles."""
        return lax.rem(step, jnp.int32(self.config.num_stages))

    def first_row_of_x(self, tile: Tile) -> Scalar:
        """Row of x that the tile starts with."""
        return 0 if self.desc.unpermuted_rows else tile.row * self.config.block_m


@dataclasses.dataclass(frozen=True)
class MainLoop:
    """How a kernel multiplies: what it allocates, copies and computes around the shared ring and scheduler.

    Args:
        scratch: allocations by field of ``Scratch``.
        registers: of a thread, (consumer, producer); None to leave them as launched.
        load_tile: (cta, tile) -> the function that issues the copies of one K step.
        consume: (cta, tile): multiplies, and stores the result.
        load_vectors: (cta, tile): issues the copies of the tile's vectors, where ``scratch`` has some.
        epilogue_steps: ring slots that the epilogue of a tile reads.
        load_epilogue: as load_tile, of one step of the epilogue.
    """

    scratch: dict[str, Any]
    registers: tuple[int, int] | None
    load_tile: Callable[[CtaContext, Tile], LoadStep]
    consume: Callable[[CtaContext, Tile], None]
    load_vectors: Callable[[CtaContext, Tile], None] | None = None
    epilogue_steps: int = 0
    load_epilogue: Callable[[CtaContext, Tile], LoadStep] | None = None


def scratch_arrays(shapes: Mapping[str, SharedArray], transforms: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Shared-memory allocations for (shape, dtype) by name."""
    return {
        name: plgpu.SMEM(shape, jnp.dtype(dtype), transforms=transforms.get(name, ()))
        for name, (shape, dtype) in shapes.items()
    }


def produce(
    cta: CtaContext,
    main_loop: MainLoop,
    num_tiles: Scalar,
    tile_of: Callable[[Scalar, Scalar], Tile],
) -> None:
    """The producer warpgroup: keep the ring full over all tiles, without a break between two of them."""
    scratch, stages = cta.scratch, cta.config.num_stages

    def one_step(load_step):
        def body(k, step):
            slot = cta.slot(step)
            load_into = load_step(k)

            @pl.when(step >= stages)
            def _():
                plgpu.barrier_wait(scratch.empty.at[slot])

            load_into(slot)
            return step + 1

        return body

    def one_tile(t, first_step):
        tile = tile_of(t, first_step)
        step = lax.fori_loop(0, cta.steps, one_step(main_loop.load_tile(cta, tile)), first_step)
        if main_loop.load_epilogue is not None:
            step = lax.fori_loop(0, cta.epilogue_steps, one_step(main_loop.load_epilogue(cta, tile)), step)
        if scratch.vectors_full is not None:
            # Behind the tile's last step, so that waiting for the previous epilogue never holds up the ring.
            @pl.when(t >= 1)
            def _():
                plgpu.barrier_wait(scratch.vectors_empty)

            assert main_loop.load_vectors is not None
            main_loop.load_vectors(cta, tile)
        return step

    end = lax.fori_loop(0, num_tiles, one_tile, jnp.int32(0))

    # Leave no completed phase unobserved.
    def drain(step, _):
        plgpu.barrier_wait(scratch.empty.at[cta.slot(step)])
        return 0

    lax.fori_loop(lax.max(end - stages, 0), end, drain, 0)
    if scratch.vectors_full is not None:

        @pl.when(num_tiles >= 1)
        def _():
            plgpu.barrier_wait(scratch.vectors_empty)


def for_each_step(
    cta: CtaContext,
    tile: Tile,
    body: Callable[[Scalar, Scalar, Carry], Carry],
    carry: Carry,
    steps: Scalar | None = None,
) -> Carry:
    """Fold ``body(k, slot, carry)`` over the K steps of a tile, or over so many of its ``steps``; where several
    warpgroups share them, over every ``cta.sharers``-th."""
    first, every = cta.warpgroup if cta.sharers > 1 else 0, cta.sharers
    steps = cta.steps if steps is None else steps

    def one_step(i, state):
        step, carry = state
        carry = body(first + i * every, cta.slot(step), carry)
        return step + every, carry

    return lax.fori_loop(0, lax.div(steps, jnp.int32(every)), one_step, (tile.first_step + first, carry))[1]


def gather_sums(
    cta: CtaContext, sums: Sums, store: Callable[[Sums], None], *, splits_projections: bool = False
) -> None:
    """Call ``store`` with the sums of all projections over all of K, in one warpgroup of each channel group.

    The other sharers' sums pass through scratch.partial: written -> partial_full -> read, the first sharer's first ->
    partial_empty. splits_projections: the second of two sharers has another projection, not a part of K.
    """
    sharers, scratch = cta.config.sharers, cta.scratch
    if sharers == 1:
        store(sums)
        return
    group, sharer = (op(cta.warpgroup, jnp.int32(sharers)) for op in (lax.div, lax.rem))

    @pl.when(sharer > 0)
    def _():
        for projection, pieces in enumerate(sums):
            for index, value in enumerate(pieces):
                scratch.partial.at[group, sharer - 1, projection, index, :, pl.ds(0, value.shape[1])][...] = value
        plgpu.barrier_arrive(scratch.partial_full.at[group])
        plgpu.barrier_wait(scratch.partial_empty.at[group])

    @pl.when(sharer == 0)
    def _():
        plgpu.barrier_wait(scratch.partial_full.at[group])

        def passed(other, projection, index):
            columns = pl.ds(0, sums[0][index].shape[1])  # a tile may be multiplied at less than its height
            part = scratch.partial.at[group, other, projection, index, :, columns]
            return mosaic.load(part, layout=mosaic.WGMMA, optimized=False)

        total = [list(pieces) for pieces in sums]
        if splits_projections:
            total.append([passed(0, 0, index) for index in range(len(sums[0]))])
        for other in range(0 if splits_projections else sharers - 1):
            for projection, pieces in enumerate(total):
                for index in range(len(pieces)):
                    pieces[index] = pieces[index] + passed(other, projection, index)
        plgpu.barrier_arrive(scratch.partial_empty.at[group])
        store(total)


def accumulate(
    cta: CtaContext,
    tile: Tile,
    shape: tuple[int, int],
    number: int,
    multiply: Callable[[Scalar, tuple[TileRef, ...]], None],
    dtype: str | None = None,
) -> list[Value]:
    """``number`` accumulators of ``shape`` over all of K, as they are or converted to ``dtype``.

    multiply: (slot, accumulators): issues the products of a full slot, waits for them and hands the slot back.
    """
    kind = mosaic.Accumulator(shape, jnp.dtype(cta.desc.accumulator))

    def scope(*accumulators):
        def one_step(k, slot, _):
            plgpu.barrier_wait(cta.scratch.full.at[slot])
            multiply(slot, accumulators)
            return ()

        for_each_step(cta, tile, one_step, ())
        return [accumulator[...] if dtype is None else accumulator[...].astype(dtype) for accumulator in accumulators]

    return list(pl.run_scoped(scope, *[kind] * number))


def zeros(shape: tuple[int, int]) -> Value:
    """float32 sums to start from, in the layout of an accumulator."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), mosaic.WGMMA)
