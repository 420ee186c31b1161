"""Tiles of a few rows of packed weights, without TMA and wgmma; of one row: matrix times vector.

The words of 16 channels in a block are 512 bytes that lie together, and each lane's unpack into its fragment of the
left operand of ``mma.sync``. So a warp takes 16 channels of every projection and a part of K:

    cp.async of words, scales, zero points and rows in use -> the warp's ring in shared memory
    its next block -> registers -> operands by bit moves -> mma.sync with the rows
    sums of the warps that share channels -> shared memory -> barrier -> scales, bias, activation -> stores

The columns of the right operand are the tile's rows, again and again up to 8, so that each lane has the sums of two
channels with two rows. Nothing is shuffled, and up to the last sums no warp waits for another.

Where a token's rows are added up, a CTA has a warpgroup for each, which weights the columns that it made; the first one
adds them.
"""

import functools
import itertools
import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.row_kernel_sm90 import row_kernel
from pallas_kernels.common.sm90 import LANES, WARPGROUP, WARPS
from pallas_kernels.common.types import Kernel, Ref, Scalar, Value
from pallas_kernels.grouped_gemm.packed.dequantize_sm90 import registers_of_words, spread
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N, PackedFormat
from pallas_kernels.grouped_gemm.packed.problem import PackedDesc
from pallas_kernels.grouped_gemm.packed.vector import (
    CHANNELS,
    ROW_PIECES,
    PackedVectorConfig,
    ring_of,
    sums_of_block,
    words_a_thread,
)
from pallas_kernels.grouped_gemm.vector_sm90 import for_own_weight

_RESULT = plgpu.ShapeDtypeStruct((WARPS * LANES,), jnp.int32, simt.LANES)
Sums: TypeAlias = tuple[tuple[Value, ...], ...]  # for each projection


def packed_gemv_sm90(desc: PackedDesc, config: PackedVectorConfig) -> Kernel:
    """The kernel: operands by name (``desc.operand_names``) -> (rows, N), or with ``desc.top_k`` their sum (1, N).

    config must pass ``vector_error``.
    """
    rows, warpgroups = (1, desc.rows) if desc.top_k else (desc.rows, 1)
    tiles = rows // config.block_m
    call = row_kernel(
        functools.partial(_kernel, desc, config),
        jax.ShapeDtypeStruct((rows * desc.n,), jnp.dtype(desc.out_dtype)),
        tiles * -(-desc.n // config.block_n),
        "grouped_gemm_of_one_row" if config.block_m == 1 else "grouped_gemm_of_few_rows",
        num_warpgroups=warpgroups,
        scratch_types=_scratch(desc, config, warpgroups),
    )

    def run(operands):
        given = operands | {"shared": operands["shared"].reshape(-1)} if desc.shared_dtype else operands
        return call(*(given[name] for name in desc.operand_names)).reshape(rows, desc.n)

    return run


def _scratch(desc: PackedDesc, config: PackedVectorConfig, warpgroups: int) -> dict[str, Any]:
    """Of each warpgroup the rings of its warps, and where those that share channels leave their sums; the columns of
    the rows that are added up."""
    ring, fmt = ring_of(desc, config), desc.fmt
    pieces = {
        "words": (ring.words * desc.projections, "int32"),
        "row": (ROW_PIECES * config.block_m, "int32"),
        "scale": (ring.scales * desc.projections, desc.scale_dtype),
        "zero": (ring.zeros * desc.projections, fmt.operand),
    }
    sizes = {
        name: (ring.slots * WARPS * count * simt.CHUNK // jnp.dtype(dtype).itemsize, dtype)
        for name, (count, dtype) in pieces.items()
    }
    sizes["sums"] = config.block_m * desc.projections * WARPS * CHANNELS, "int32"
    found = {name: plgpu.SMEM((warpgroups, size), jnp.dtype(dtype)) for name, (size, dtype) in sizes.items() if size}
    return found | (dict(columns=plgpu.SMEM((desc.rows * config.block_n,), jnp.int32)) if desc.top_k else {})


def _kernel(desc: PackedDesc, config: PackedVectorConfig, *refs: Ref, **scratch: Ref) -> None:
    mosaic.begin()
    operands, out = dict(zip(desc.operand_names, refs, strict=False)), refs[-1]
    ctas_of_tile = -(-desc.n // config.block_n)
    cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
    columns_of_rows = scratch.pop("columns", None)
    scratch = {name: ref.at[warpgroup] for name, ref in scratch.items()}
    if columns_of_rows is not None:
        expert = lax.max(operands["tile_expert"][warpgroup], jnp.int32(0))
        own = _Columns(desc, config, operands, scratch, expert, cta * config.block_n, desc.n)
        own.store_sum(warpgroup, columns_of_rows, out)
        return
    tile, first = lax.div(cta, jnp.int32(ctas_of_tile)), lax.rem(cta, jnp.int32(ctas_of_tile)) * config.block_n

    def columns(operands: dict[str, Ref], first: Scalar, n: int, start: int, expert: Scalar = 0) -> None:
        _Columns(desc, config, operands, scratch, expert, first, n).store(tile, out, start)

    if desc.num_experts == 1:
        names = ("w", "scale", "zero", "channel_scale", "bias")
        for_own_weight(desc, names, operands, first, columns)
        return
    # In one condition, so that neither load waits for the other.
    expert = jnp.where(tile < operands["num_tiles"][0], operands["tile_expert"][tile], -1)
    pl.when(expert >= 0)(lambda: columns(operands, first, desc.n, 0, expert))


class _Columns:
    """The columns from ``first`` on of a CTA, of a weight of N = ``n`` columns."""

    def __init__(
        self,
        desc: PackedDesc,
        config: PackedVectorConfig,
        operands: dict[str, Ref],
        scratch: dict[str, Ref],
        expert: Scalar,
        first: Scalar,
        n: int,
    ):
        self.desc, self.config, self.operands, self.scratch = desc, config, operands, scratch
        self.first, self.n = first, n
        self.projections = range(desc.projections)
        self.ring, self.num_sums, self.is_scaled = (
            ring_of(desc, config),
            sums_of_block(desc.fmt),
            desc.fmt.scale == "group",
        )
        self.thread = simt.thread_index() & (WARPGROUP - 1)
        self.lane, self.warp = self.thread & (LANES - 1), _shifted(self.thread, 5)
        group = _shifted(self.warp, config.k_split.bit_length() - 1)
        self.nothing = simt.constant(0)
        self.always = self.nothing == 0
        # Threads take the columns of the first row, then those of the next. Of one row nothing is divided: its kernels
        # have no registers to spare.
        self.column, is_column = self.thread, self.thread < config.block_n
        self.rows: list[Any] = [0]
        if config.block_m > 1:
            self.column, is_column = self.thread & (config.block_n - 1), self.always
            row = _shifted(self.thread, config.block_n.bit_length() - 1)
            self.rows = [row + start for start in range(0, config.block_m, WARPGROUP // config.block_n)]
        self.is_own = is_column & (self.column + first < n)
        self.kept = (0, 2) if config.block_m == 1 else (0, 1, 2, 3)  # accumulators of mma.sync
        # Parts of K are as long as each other, but for one block more in the first few.
        least, longer = divmod(desc.k // desc.fmt.block_k, config.k_split)
        self.least, self.first_block, self.own_blocks = least, self.nothing, self.nothing + least
        if config.k_split > 1:
            part = self.warp & (config.k_split - 1)
            self.first_block = part * least + lax.min(part, jnp.full_like(part, longer))
            self.own_blocks = jnp.where(part < longer, self.own_blocks + 1, self.own_blocks)
        self.in_block = lax.rem(first, jnp.int32(BLOCK_N))
        self.quarter = group + lax.div(self.in_block, jnp.int32(CHANNELS))  # of the block's channels
        self.blocks = -(-n // BLOCK_N)
        block = lax.div(first, jnp.int32(BLOCK_N))
        self.places = [(expert * self.blocks + block) * desc.projections + g for g in self.projections]
        self.bias_places = [(expert * desc.projections + g) * self.blocks + block for g in self.projections]

    def store(self, tile: Scalar, out: Ref, start: int) -> None:
        """Multiply the rows of a tile and store their columns. start: of this weight's columns in the output."""
        first = self.column + (self.first + start + tile * (self.config.block_m * self.desc.n))
        for row, value, is_own in self._finished(tile):
            self._store(out, first + row * self.desc.n, value, is_own)

    def _store(self, out: Ref, index: Value, value: Value, is_own: Value) -> None:
        dtype = jnp.dtype(self.desc.out_dtype)
        simt.store_bits(out, index, simt.float_bits(value, dtype), is_own, dtype.itemsize)

    def store_sum(self, tile: Scalar, columns: Ref, out: Ref) -> None:
        """Multiply the row of this warpgroup's tile, and store the weighted sum of all, in the order of tiles. One that
        is out of use is multiplied with the first expert's weights and left out.

        columns: (rows * block_n,) int32, the bits of each row's weighted columns.
        """
        operands, block_n = self.operands, self.config.block_n
        slots = [operands["row_of"][0, slot] == tile for slot in range(self.desc.top_k)]
        parts = [jnp.where(own, operands["slot_weights"][0, i].astype(jnp.float32), 0.0) for i, own in enumerate(slots)]
        is_used, factor = functools.reduce(lax.bitwise_or, slots), functools.reduce(jnp.add, parts)
        (of_row,) = self._finished(tile)
        value = of_row[1] * factor
        # A tile that is out of use may hold anything.
        value = jnp.where(lax.broadcast_in_dim(is_used, value.shape, ()), value, 0.0)
        simt.store(columns, self.column + tile * block_n, lax.bitcast_convert_type(value, jnp.int32), self.is_own)
        simt.barrier()

        @pl.when(tile == 0)
        def _():
            rows = [simt.load(columns, self.column + row * block_n, self.is_own, 0) for row in range(self.desc.rows)]
            total = functools.reduce(jnp.add, [lax.bitcast_convert_type(bits, jnp.float32) for bits in rows])
            index = self.column + self.first
            if self.desc.shared_dtype is not None:
                total = total + simt.load_float(operands["shared"], index, self.is_own, 0.0)
            self._store(out, index, total, self.is_own)

    def _finished(self, tile: Scalar) -> list[tuple[Any, Value, Value]]:
        """(row of the tile, float32 value, whether it is one to store) of each column that a thread makes."""
        desc, block_m = self.desc, self.config.block_m
        first_row, used = (0, desc.unpermuted_rows) if desc.unpermuted_rows else (tile * block_m, block_m)
        if desc.has_tile_rows and not desc.unpermuted_rows and block_m > 1:
            used = self.operands["tile_rows"][tile]
        of_channels = self._of_channels()
        scales: list[Any] = [None] * len(self.rows)
        if desc.lhs_scale != "none":
            load = functools.partial(simt.load_float, self.operands["x_scale"], default=0.0)
            if desc.lhs_scale == "tensor":
                scales = [load(self.nothing, mask=self.always)] * len(self.rows)
            else:
                scales = [load(self.nothing + (row + first_row), mask=self._is_row(row, block_m)) for row in self.rows]
        self._share(self._multiply(first_row, used))
        found = []
        for row, scale in zip(self.rows, scales, strict=True):
            is_own = self.is_own & self._is_row(row, used) if block_m > 1 else self.is_own
            values: list[Any] = self._gathered(row, is_own)
            for projection, (channel_scale, bias) in enumerate(of_channels):
                value = values[projection]
                if scale is not None:
                    value = value * (scale * (1 / desc.fmt.unit))
                elif desc.fmt.unit != 1:
                    value = value * (1 / desc.fmt.unit)
                value = value if channel_scale is None else value * channel_scale
                values[projection] = value if bias is None else value + bias
            found.append((row, values[0] if desc.activation is None else desc.activation(*values), is_own))
        return found

    def _is_row(self, row: Any, used: Scalar) -> Value:
        return self.always if self.config.block_m == 1 else row < used

    def _of_channels(self) -> list[tuple[Value | None, Value | None]]:
        """(scale, bias) of each projection, of the channel that each thread stores."""
        places = dict(channel_scale=self.places, bias=self.bias_places)

        def load(name, projection):
            if name not in self.operands:
                return None
            vector = self.operands[name].at[places[name][projection]]
            return simt.load_float(vector, self.column + self.in_block, self.is_own, 0.0)

        return [(load("channel_scale", g), load("bias", g)) for g in self.projections]

    def _multiply(self, first_row: Scalar, used: Scalar) -> list[Value]:
        """The bits of each warp's sums over its part of K, the ``kept`` ones of a thread, projection after projection:
        float32, or where nothing scales them of the accumulator's type. used: rows in use from ``first_row`` on.
        """
        ring = self.ring
        rows = self._pieces_of_rows(first_row, used)
        for step in range(ring.ahead):
            self._copy(rows, step)

        def one_step(step, sums):
            simt.wait_for_copies(ring.ahead - 1)
            if ring.ahead < ring.steps:
                self._copy(rows, step + ring.ahead)
            else:
                simt.end_copies()
            return self._added(sums, lax.rem(step, jnp.int32(ring.slots)))

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
        row, piece = _shifted(self.lane, ROW_PIECES.bit_length() - 1), self.lane & (ROW_PIECES - 1)
        of_row = self.desc.k * jnp.dtype(self.desc.fmt.operand).itemsize // simt.CHUNK
        rows = x.at[pl.ds(first_row, self.desc.unpermuted_rows or block_m)]
        return rows, piece + row * of_row, self._row_place(row, piece), row < used

    def _row_place(self, row: Value, piece: Value) -> Value:
        """Where a slot has a row's piece: the same piece of four rows lies in banks of its own."""
        return row * ROW_PIECES + (piece ^ row)

    def _copy(self, rows: tuple[Ref, Value, Value, Value], step: Scalar) -> None:
        """Start to copy a block of every projection, its part of the rows and what lies beside it; zeros past the
        warp's part of K, and nothing after the last step.
        """
        desc, ring, loads = self.desc, self.ring, words_a_thread(self.desc.fmt) // 4
        # What is known when the kernel is built becomes a part of addresses: registers hold one for all such steps.
        if isinstance(step, int):
            known, place, slot, is_used = step, self.first_block, self._slot(0), None
            is_inside = None if step < self.least else self.own_blocks > step
        else:
            known, place, slot = 0, self.first_block + step, self._slot(lax.rem(step, jnp.int32(ring.slots)))
            is_inside, is_used = self.own_blocks > step, self.nothing + step < ring.steps
        block_pieces = math.prod(desc.fmt.block_shape) // 4

        def copy(name, source, own, of_block, target, of_slot, count=LANES, is_inside=is_inside, mask=None):
            mask = self.lane < count if count < LANES else mask
            if is_used is not None:
                mask = is_used if mask is None else mask & is_used
            ahead = known * of_block, known * WARPS * of_slot
            simt.copy(source, own, self.scratch[name], target, is_inside, mask, ahead=ahead, l1=name == "row")

        for g in self.projections:
            blocks, of_slot = self.operands["w"].at[self.places[g]], desc.projections * ring.words
            first, target = place * block_pieces, slot * of_slot + (g * ring.words + self.lane)
            for load in range(loads):
                own = first + (self.quarter * LANES + self.lane + load * WARPS * LANES)
                copy("words", blocks, own, block_pieces, target + load * LANES, of_slot)
            beside = ring.words - loads * LANES
            if beside:
                own = first + (self.quarter * beside + self.lane + loads * WARPS * LANES)
                copy("words", blocks, own, block_pieces, target + loads * LANES, of_slot, beside)
            for name, count in (("scale", ring.scales), ("zero", ring.zeros)):
                if count:
                    array, of_slot = self.operands[name].at[self.places[g]], desc.projections * count
                    own, of_block, is_there = self._beside_block(array, count, place, known, is_inside)
                    target = slot * of_slot + (g * count + self.lane)
                    copy(name, array, own, of_block, target, of_slot, count, is_there)
        of_slot, (source, own, target, mask) = ROW_PIECES * self.config.block_m, rows
        copy("row", source, own + place * ROW_PIECES, ROW_PIECES, target + slot * of_slot, of_slot, mask=mask)
        simt.end_copies()

    def _beside_block(
        self, array: Ref, count: int, place: Value, known: int, is_inside: Value | None
    ) -> tuple[Value, int, Value | None]:
        """Of the groups of block ``place`` + known, 16 channels each: (the piece of 16 bytes that each lane copies, by
        how much it moves on for a block of what is known, whether it is there).
        """
        size, depth, groups = self.desc.fmt.group_size or self.desc.k, self.desc.fmt.block_k, array.shape[0]
        of_group = count // self.num_sums
        index, piece = _divided(self.lane, of_group), self.lane & (of_group - 1)
        group, of_block = place * self.num_sums + index, self.num_sums
        if size > depth:
            group, of_block = _divided(place + known, size // depth), 0
        if groups * size < self.desc.k:  # the last block ends past the last group
            is_there = group + known * of_block < groups
            is_inside = is_there if is_inside is None else is_inside & is_there
        own = group * (of_group * WARPS) + self.quarter * of_group + piece
        return own, of_block * of_group * WARPS, is_inside

    def _slot(self, slot: Scalar) -> Value:
        """Of this warp."""
        return self.warp + slot * WARPS

    def _added(self, sums: Sums, slot: Scalar) -> Sums:
        """``sums`` and the products of the block in a slot."""
        fmt, ring, own_slot, found = self.desc.fmt, self.ring, self._slot(slot), []
        piece, block_m = _shifted(self.lane, 3), self.config.block_m
        piece = piece if block_m == 1 else self._row_place(self.lane & (block_m - 1), piece)
        rows = _load_rows(self.scratch["row"], own_slot * (ROW_PIECES * block_m) + piece)
        loads = words_a_thread(fmt) // 4
        for g, own in zip(self.projections, sums, strict=True):
            first = (own_slot * self.desc.projections + g) * (ring.words * 4)
            words: list[Value] = []
            for load in range(loads):
                words += simt.load_words(self.scratch["words"], first + (self.lane * 4 + load * LANES * 4), 4)
            words += self._scale_words(first + loads * LANES * 4)
            beside = functools.partial(self._beside, slot=own_slot, projection=g)
            itemsize = jnp.dtype(fmt.operand).itemsize
            load_zero = functools.partial(simt.load_bits, itemsize=itemsize)
            zeros = [load_zero(self.scratch["zero"], at, self.always) for at in beside(ring.zeros, itemsize)]
            products = _products(fmt, words, zeros, rows, () if self.is_scaled else own)
            if self.is_scaled:
                places = beside(ring.scales, jnp.dtype(self.desc.scale_dtype).itemsize)
                scales = [simt.load_float(self.scratch["scale"], at, self.always, 0.0) for at in places]
                products = self._scaled(own, products, scales)
            found.append(products)
        return tuple(found)

    def _scale_words(self, first: Value) -> tuple[Value, ...]:
        """Those of a thread's channels, in a slot whose scales begin at word ``first``."""
        count = self.desc.fmt.scale_words // LANES
        if not count:
            return ()
        place = first + _shifted(self.lane, 2) * count
        return simt.load_words(self.scratch["words"], place, count)

    def _beside(self, pieces: int, itemsize: int, *, slot: Value, projection: int) -> list[Value]:
        """Where a ring of numbers beside the blocks has those of each group of a slot's block: of a thread's channel,
        and of the one 8 further down.
        """
        if not pieces:
            return []
        first = (slot * self.desc.projections + projection) * (pieces * 16 // itemsize) + _shifted(self.lane, 2)
        return [first + (index * CHANNELS + 8 * half) for index in range(self.num_sums) for half in range(2)]

    def _scaled(self, sums: tuple[Value, ...], products: tuple[Value, ...], scales: list[Value]) -> tuple[Value, ...]:
        """``sums`` and the partial sums of a block's groups times the scales of their channels."""
        for index in range(self.num_sums):
            parts = [products[4 * index + kept] for kept in self.kept]
            if self.desc.accumulator == "int32":
                parts = [part.astype(jnp.float32) for part in parts]
            else:
                parts = [lax.bitcast_convert_type(part, jnp.float32) for part in parts]
            own = [scales[2 * index + kept // 2] for kept in self.kept]
            sums = tuple(a + b * scale for a, b, scale in zip(sums, parts, own, strict=True))
        return sums

    def _share(self, sums: list[Value]) -> None:
        """Each warp's sums to shared memory, for all warps."""
        channel, block_m = _shifted(self.lane, 2), self.config.block_m
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
        first_warp = _shifted(self.column, 4) * self.config.k_split
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


def _shifted(value: Value, bits: int) -> Value:
    return lax.shift_right_logical(value, jnp.full_like(value, bits)) if bits else value


def _divided(value: Value, by: int) -> Value:
    """By a number above 0, of one that is not negative."""
    return lax.div(value, jnp.full_like(value, by)) if by > 1 else value


# Below: products of registers.


def _load_rows(ref: Ref, piece: Value) -> tuple[Value, ...]:
    """A thread's words of the right operand of a block, whose columns are the tile's rows: ``ldmatrix`` of eight
    matrices. piece: of 16 bytes, counted from the ref's first; lane l gives that of row l % 8 of matrix l / 8.
    """

    @simt.inline(plgpu.RefType(), simt.LANES, result=(_RESULT,) * ROW_PIECES)
    def load(ctx, ref, piece):
        del ctx
        base = llvm.ptrtoint(simt.integer(32), mgpu.utils.memref_ptr(ref))
        offset = arith.muli(simt.value_of(piece), simt.integer_constant(16, 32))
        address, words = arith.addi(base, offset), []
        for half in range(2):
            text = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4 + {64 * half}];"
            words += simt.asm_of_several([address], text, "r,~{memory}", 4)
        return tuple(map(simt.wrap, words))

    return load(ref, piece)


def _products(
    fmt: PackedFormat, words: list[Value], zeros: list[Value], rows: tuple[Value, ...], sums: tuple[Value, ...]
) -> tuple[Value, ...]:
    """The bits of four accumulators of ``mma.sync`` for each partial sum of a block: of a thread's channel with two
    rows, and of the channel 8 further down.

    words: a thread's, its scales last. zeros: terms of both channels for each partial sum. sums: what is added, ()
    for nothing.
    """
    number, given = sums_of_block(fmt), (*words, *zeros, *rows, *sums)
    result = (_RESULT,) * (4 * number)

    @simt.inline(*[simt.LANES] * len(given), result=result)
    def multiply(ctx, *given):
        del ctx
        values = iter([simt.value_of(one) for one in given])
        own, scales, terms, columns, accumulators = (
            list(itertools.islice(values, count))
            for count in (words_a_thread(fmt), fmt.scale_words // LANES, len(zeros), ROW_PIECES, len(sums))
        )
        terms = [spread(fmt, term) for term in terms]
        zero = (lambda q, half: terms[q * number // 4 * 2 + half]) if terms else None
        registers = registers_of_words(fmt, own, scales, zero)
        found = []
        for index in range(number):
            total = accumulators or [simt.integer_constant(0, 32)] * 4
            for q in range(4 * index // number, 4 * (index + 1) // number):
                weights = [registers[q, k_half, row_half] for k_half, row_half in np.ndindex(2, 2)]
                total = simt.mma(fmt.operand, weights, columns[2 * q : 2 * q + 2], total)
            found += total
        return tuple(map(simt.wrap, found))

    return multiply(*given)
