"""The frame of kernels that multiply a few rows without TMA and wgmma, of plain and of packed weights.

A warp takes 16 channels of every projection and a part of K:

    cp.async of weights, what lies beside them and rows in use -> the warp's ring in shared memory
    its next block -> operands -> mma.sync with the rows
    sums of the warps that share channels -> shared memory -> barrier -> scales, bias, activation -> stores

The columns of the right operand are the tile's rows, again and again up to 8, so that each lane has the sums of two
channels with two rows. Nothing is shuffled, and up to the last sums no warp waits for another.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.common import simt
from pallas_kernels.common.sm90 import LANES, WARPGROUP, WARPS
from pallas_kernels.common.types import Ref, Scalar, Value
from pallas_kernels.grouped_gemm.columns import CHANNELS, ROW_PIECES, Ring
from pallas_kernels.grouped_gemm.problem import GroupedGemm
from pallas_kernels.grouped_gemm.vector_sm90 import for_own_weight

RESULT = plgpu.ShapeDtypeStruct((WARPS * LANES,), jnp.int32, simt.LANES)
Sums: TypeAlias = tuple[tuple[Value, ...], ...]  # for each projection
Copy: TypeAlias = Callable[..., None]


def ring_scratch(
    ring: Ring, projections: int, block_m: int, beside: dict[str, tuple[int, Any]], warpgroups: int = 1
) -> dict[str, Any]:
    """Of each warpgroup the rings of its warps, and where those that share channels leave their sums.

    beside: name: (pieces of a block of one projection, dtype) of what lies beside the blocks.
    """
    pieces = {"words": (ring.words * projections, "int32"), "row": (ROW_PIECES * block_m, "int32")}
    pieces |= {name: (count * projections, dtype) for name, (count, dtype) in beside.items()}
    sizes = {
        name: (ring.slots * WARPS * count * simt.CHUNK // jnp.dtype(dtype).itemsize, dtype)
        for name, (count, dtype) in pieces.items()
    }
    sizes["sums"] = block_m * projections * WARPS * CHANNELS, "int32"
    return {name: plgpu.SMEM((warpgroups, size), jnp.dtype(dtype)) for name, (size, dtype) in sizes.items() if size}


class Columns:
    """The columns from ``first`` on of a CTA, of a weight of N = ``n`` columns.

    desc: a description, of plain or of packed weights. blocks: of 128 bytes of x, the last of which may end past K.
    itemsize: of x. is_scaled: whether the sum over each block is, or several in it are, before they are added up. unit:
    by which all sums are too large. in_turn: warps that share K take its blocks in turn; else each has those of a part.
    """

    def __init__(
        self,
        desc: Any,
        config: Any,
        ring: Ring,
        operands: dict[str, Ref],
        scratch: dict[str, Ref],
        first: Scalar,
        n: int,
        *,
        blocks: int,
        itemsize: int,
        is_scaled: bool,
        unit: float = 1,
        in_turn: bool = False,
    ):
        self.desc, self.config, self.ring, self.operands, self.scratch = desc, config, ring, operands, scratch
        self.first, self.n, self.itemsize, self.is_scaled, self.unit = first, n, itemsize, is_scaled, unit
        self.row_pieces = desc.k * itemsize // simt.CHUNK
        self.projections = range(desc.projections)
        self.thread = simt.thread_index() & (WARPGROUP - 1)
        self.lane, self.warp = self.thread & (LANES - 1), shifted(self.thread, 5)
        self.group = shifted(self.warp, config.k_split.bit_length() - 1)  # of 16 channels of the CTA
        self.nothing = simt.constant(0)
        self.always = self.nothing == 0
        # Threads take the columns of the first row, then those of the next. Of one row nothing is divided: its kernels
        # have no registers to spare.
        self.column, is_column = self.thread, self.thread < config.block_n
        self.rows: list[Any] = [0]
        if config.block_m > 1:
            self.column, is_column = self.thread & (config.block_n - 1), self.always
            row = shifted(self.thread, config.block_n.bit_length() - 1)
            self.rows = [row + start for start in range(0, config.block_m, WARPGROUP // config.block_n)]
        self.is_own = is_column & (self.column + first < n)
        self.kept = (0, 2) if config.block_m == 1 else (0, 1, 2, 3)  # accumulators of mma.sync
        # Parts of K are as long as each other, but for one block more in the first few.
        self.stride = config.k_split if in_turn else 1
        least, longer = divmod(blocks, config.k_split)
        self.least, self.first_block, self.own_blocks = least, self.nothing, self.nothing + least
        if config.k_split > 1:
            part = self.warp & (config.k_split - 1)
            self.first_block = part if in_turn else part * least + lax.min(part, jnp.full_like(part, longer))
            self.own_blocks = jnp.where(part < longer, self.own_blocks + 1, self.own_blocks)

    # -- what the weights are -----------------------------------------------------------------------------------------

    def copy_weights(self, copy: Copy, place: Value, known: int, slot: Value, is_inside: Value | None) -> None:
        """Start to copy block ``place`` + ``known`` of every projection, and what lies beside it, to a slot."""
        raise NotImplementedError

    def scales_of_rows(self, step: Scalar, first_row: Scalar) -> list[Value]:
        """What the rows' sums over a block are scaled with, where they have scales of their own there."""
        del step, first_row
        return []

    def products(self, projection: int, slot: Value, rows: tuple[Value, ...], sums: tuple[Value, ...]) -> Any:
        """The bits of four accumulators for each partial sum of a block, with ``sums`` added where nothing scales
        them."""
        raise NotImplementedError

    def scaled(
        self, projection: int, slot: Value, sums: tuple[Value, ...], products: Any, scales: list[Value]
    ) -> tuple[Value, ...]:
        """``sums`` and the scaled ``products``."""
        raise NotImplementedError

    def of_channels(self) -> list[tuple[Value | None, Value | None]]:
        """(scale, bias) of each projection, of the channel that each thread stores."""
        raise NotImplementedError

    def bits(self, value: Value) -> Value:
        """Of float32 as they are stored."""
        return simt.float_bits(value, self.desc.out_dtype)

    # -- the frame ----------------------------------------------------------------------------------------------------

    def store(self, tile: Scalar, out: Ref, start: int) -> None:
        """Multiply the rows of a tile and store their columns. start: of this weight's columns in the output."""
        first = self.column + (self.first + start + tile * (self.config.block_m * self.desc.n))
        for row, value, is_own in self.finished(tile):
            self.store_values(out, first + row * self.desc.n, value, is_own)

    def store_values(self, out: Ref, index: Value, value: Value, is_own: Value) -> None:
        simt.store_bits(out, index, self.bits(value), is_own, jnp.dtype(self.desc.stored_dtype).itemsize)

    def finished(self, tile: Scalar) -> list[tuple[Any, Value, Value]]:
        """(row of the tile, float32 value, whether it is one to store) of each column that a thread makes."""
        desc, block_m = self.desc, self.config.block_m
        first_row, used = (0, desc.unpermuted_rows) if desc.unpermuted_rows else (tile * block_m, block_m)
        if desc.has_tile_rows and not desc.unpermuted_rows and block_m > 1:
            used = self.operands["tile_rows"][tile]
        of_channels = self.of_channels()
        scales: list[Any] = [None] * len(self.rows)
        if desc.lhs_scale in ("tensor", "row"):
            scales = [self._scale_of_row(row, first_row) for row in self.rows]
        self._share(self._multiply(first_row, used))
        found = []
        for row, scale in zip(self.rows, scales, strict=True):
            is_own = self.is_own & self._is_row(row, used) if block_m > 1 else self.is_own
            values: list[Any] = self._gathered(row, is_own)
            for projection, (channel_scale, bias) in enumerate(of_channels):
                value = values[projection]
                if scale is not None:
                    value = value * (scale * (1 / self.unit))
                elif self.unit != 1:
                    value = value * (1 / self.unit)
                value = value if channel_scale is None else value * channel_scale
                values[projection] = value if bias is None else value + bias
            found.append((row, values[0] if desc.activation is None else desc.activation(*values), is_own))
        return found

    def _scale_of_row(self, row: Any, first_row: Scalar) -> Value:
        if self.desc.lhs_scale == "tensor":
            return simt.load_float(self.operands["x_scale"], self.nothing, self.always, 0.0)
        mask = self._is_row(row, self.config.block_m)
        return simt.load_float(self.operands["x_scale"], self.nothing + (row + first_row), mask, 0.0)

    def _is_row(self, row: Any, used: Scalar) -> Value:
        return self.always if self.config.block_m == 1 else row < used

    def _multiply(self, first_row: Scalar, used: Scalar) -> list[Value]:
        """The bits of each warp's sums over its part of K, the ``kept`` ones of a thread, projection after projection:
        float32, or where nothing scales them of the accumulator's type. used: rows in use from ``first_row`` on.
        """
        ring = self.ring
        rows = self._pieces_of_rows(first_row, used)
        for step in range(ring.ahead):
            self._copy(rows, step)

        def one_step(step, sums):
            scales = self.scales_of_rows(step, first_row)
            simt.wait_for_copies(ring.ahead - 1)
            if ring.ahead < ring.steps:
                self._copy(rows, step + ring.ahead)
            else:
                simt.end_copies()
            return self._added(sums, lax.rem(step, jnp.int32(ring.slots)), scales)

        # Of each projection the scaled sums, or all accumulators.
        empty = lax.bitcast_convert_type(self.nothing, jnp.float32) if self.is_scaled else self.nothing
        sums = ((empty,) * (len(self.kept) if self.is_scaled else 4),) * self.desc.projections
        # A number that LLVM does not know: it unrolls no loop of so many steps.
        steps = lax.min(jnp.int32(ring.steps), self.operands["num_tiles"][0] + ring.steps)
        sums = lax.fori_loop(0, steps, one_step, sums)
        if self.is_scaled:
            return [lax.bitcast_convert_type(value, jnp.int32) for own in sums for value in own]
        return [own[index] for own in sums for index in self.kept]

    def _pieces_of_rows(self, first_row: Scalar, used: Scalar) -> tuple[Ref, Value, Value, Value]:
        """What a lane copies of a block's part of the rows: a piece of 16 bytes (of which rows, of these, of a slot,
        whether at all)."""
        x, block_m = self.operands["x"], self.config.block_m
        if block_m == 1:
            return x.at[first_row], self.lane, self.lane, self.lane < ROW_PIECES
        row, piece = shifted(self.lane, ROW_PIECES.bit_length() - 1), self.lane & (ROW_PIECES - 1)
        rows = x.at[pl.ds(first_row, self.desc.unpermuted_rows or block_m)]
        return rows, piece + row * self.row_pieces, self._row_place(row, piece), row < used

    def _row_place(self, row: Value, piece: Value) -> Value:
        """Where a slot has a row's piece: the same piece of four rows lies in banks of its own."""
        return row * ROW_PIECES + (piece ^ row)

    def _copy(self, rows: tuple[Ref, Value, Value, Value], step: Scalar) -> None:
        """Start to copy a block of every projection, its part of the rows and what lies beside it; zeros past the
        warp's part of K, and nothing after the last step.
        """
        ring = self.ring
        # What is known when the kernel is built becomes a part of addresses: registers hold one for all such steps.
        if isinstance(step, int):
            known, place, slot, is_used = step, self.first_block, self.slot(0), None
            is_inside = None if step < self.least else self.own_blocks > step
        else:
            known, place, slot = (
                0,
                self.first_block + step * self.stride,
                self.slot(lax.rem(step, jnp.int32(ring.slots))),
            )
            is_inside, is_used = self.own_blocks > step, self.nothing + step < ring.steps
        if self.row_pieces % ROW_PIECES and not (isinstance(step, int) and step < self.least - 1):
            ends = self.row_pieces - known * self.stride * ROW_PIECES
            is_there = place * ROW_PIECES + (self.lane & (ROW_PIECES - 1)) < ends
            is_inside = is_there if is_inside is None else is_inside & is_there

        def copy(name, source, own, of_block, target, of_slot, count=LANES, is_inside=is_inside, mask=None):
            mask = self.lane < count if count < LANES else mask
            if is_used is not None:
                mask = is_used if mask is None else mask & is_used
            ahead = known * self.stride * of_block, known * WARPS * of_slot
            simt.copy(source, own, self.scratch[name], target, is_inside, mask, ahead=ahead, l1=name == "row")

        self.copy_weights(copy, place, known, slot, is_inside)
        of_slot, (source, own, target, mask) = ROW_PIECES * self.config.block_m, rows
        copy("row", source, own + place * ROW_PIECES, ROW_PIECES, target + slot * of_slot, of_slot, mask=mask)
        simt.end_copies()

    def slot(self, slot: Scalar) -> Value:
        """Of this warp."""
        return self.warp + slot * WARPS

    def _added(self, sums: Sums, slot: Scalar, scales: list[Value]) -> Sums:
        """``sums`` and the products of the block in a slot."""
        own_slot, found = self.slot(slot), []
        piece, block_m = shifted(self.lane, 3), self.config.block_m
        piece = piece if block_m == 1 else self._row_place(self.lane & (block_m - 1), piece)
        rows = _load_rows(self.scratch["row"], own_slot * (ROW_PIECES * block_m) + piece)
        for g, own in zip(self.projections, sums, strict=True):
            products = self.products(g, own_slot, rows, () if self.is_scaled else own)
            found.append(self.scaled(g, own_slot, own, products, scales) if self.is_scaled else products)
        return tuple(found)

    def _share(self, sums: list[Value]) -> None:
        """Each warp's sums to shared memory, for all warps."""
        channel, block_m = shifted(self.lane, 2), self.config.block_m
        for index, bits in enumerate(sums):
            projection, kept = divmod(index, len(self.kept))
            half, column = divmod(self.kept[kept], 2)
            row = (self.lane & 3) * 2 + column
            place = self._sum_place(row, projection, self.warp) + (channel + 8 * half)
            simt.store(self.scratch["sums"], place, bits, row < block_m)
        simt.barrier()

    def _sum_place(self, row: Any, projection: int, warp: Value) -> Value:
        """Of a warp's first channel."""
        return ((row * self.desc.projections + projection) * WARPS + warp) * CHANNELS

    def _gathered(self, row: Any, is_own: Value) -> list[Value]:
        """Each projection's float32 sum over all of K, of the column of a row that a thread stores, warps in their
        order."""
        first_warp = shifted(self.column, 4) * self.config.k_split
        found = []
        for projection in self.projections:
            total = None
            for part in range(self.config.k_split):
                place = self._sum_place(row, projection, first_warp + part) + (self.column & (CHANNELS - 1))
                value = simt.load(self.scratch["sums"], place, is_own, 0)
                if self.is_scaled or self.desc.accumulator == "float32":
                    value = lax.bitcast_convert_type(value, jnp.float32)
                total = value if total is None else total + value
            assert total is not None
            found.append(total.astype(jnp.float32))
        return found


def for_columns_of_cta(
    desc: GroupedGemm, config: Any, names: Sequence[str], operands: dict[str, Ref], run: Callable[..., None]
) -> None:
    """``run(tile, expert, operands, column counted from the weight's first, N, start)`` of a CTA, ``start`` being the
    weight's first column in the output; nothing for a tile out of use. names: of operands that each weight has.
    """
    ctas_of_tile, cta = -(-desc.n // config.block_n), lax.axis_index("cta")
    tile, first = lax.div(cta, jnp.int32(ctas_of_tile)), lax.rem(cta, jnp.int32(ctas_of_tile)) * config.block_n
    if desc.num_experts == 1:
        for_own_weight(desc, names, operands, first, functools.partial(run, tile, 0))
        return
    # In one condition, so that neither load waits for the other.
    expert = jnp.where(tile < operands["num_tiles"][0], operands["tile_expert"][tile], -1)
    pl.when(expert >= 0)(lambda: run(tile, expert, operands, first, desc.n, 0))


def shifted(value: Value, bits: int) -> Value:
    return lax.shift_right_logical(value, jnp.full_like(value, bits)) if bits else value


def as_floats(desc: Any, sums: Sequence[Value]) -> list[Value]:
    """The bits of accumulators as float32."""
    if desc.accumulator == "int32":
        return [value.astype(jnp.float32) for value in sums]
    return [lax.bitcast_convert_type(value, jnp.float32) for value in sums]


# Below: products of registers.


def load_matrices(ref: Ref, piece: Value, later: tuple[int, ...] = (0,)) -> tuple[Value, ...]:
    """Four words a thread of fragments of ``mma.sync``, and as many for each further place: ``ldmatrix`` of four
    matrices. piece: of 16 bytes, counted from the ref's first; lane l gives that of row l % 8 of matrix l / 8. later:
    bytes that are added.
    """

    @simt.inline(plgpu.RefType(), simt.LANES, result=(RESULT,) * (4 * len(later)))
    def load(ctx, ref, piece):
        del ctx
        base = llvm.ptrtoint(simt.integer(32), mgpu.utils.memref_ptr(ref))
        offset = arith.muli(simt.value_of(piece), simt.integer_constant(simt.CHUNK, 32))
        address, words = arith.addi(base, offset), []
        for more in later:
            text = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4 + {more}];"
            words += simt.asm_of_several([address], text, "r,~{memory}", 4)
        return tuple(map(simt.wrap, words))

    return load(ref, piece)


def _load_rows(ref: Ref, piece: Value) -> tuple[Value, ...]:
    """A thread's words of the right operand of a block, whose columns are the tile's rows."""
    return load_matrices(ref, piece, (0, ROW_PIECES * simt.CHUNK // 2))
