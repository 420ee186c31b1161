"""Matrix times vector with packed weights: tiles of one row, as a token by itself has them.

The words of 16 channels in a block are 512 bytes that lie together, and each lane's unpack into its fragment of the
left operand of ``mma.sync``. So a warp takes 16 channels of every projection and a part of K:

    cp.async of words, scales, zero points and the row -> the warp's ring in shared memory
    its next block -> registers -> operands by bit moves -> mma.sync with the row
    sums of the warps that share channels -> shared memory -> barrier -> scales, bias, activation -> stores

Every column of the right operand is the row, so that each lane has the sums of two channels. Nothing is shuffled, and
up to the last sums no warp waits for another.

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
    call = row_kernel(
        functools.partial(_kernel, desc, config),
        jax.ShapeDtypeStruct((rows * desc.n,), jnp.dtype(desc.out_dtype)),
        rows * -(-desc.n // config.block_n),
        "grouped_gemm_of_one_row",
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
        "row": (ROW_PIECES, "int32"),
        "scale": (ring.scales * desc.projections, desc.scale_dtype),
        "zero": (ring.zeros * desc.projections, fmt.operand),
    }
    sizes = {
        name: (ring.slots * WARPS * count * simt.CHUNK // jnp.dtype(dtype).itemsize, dtype)
        for name, (count, dtype) in pieces.items()
    }
    sizes["sums"] = desc.projections * WARPS * CHANNELS, "int32"
    found = {name: plgpu.SMEM((warpgroups, size), jnp.dtype(dtype)) for name, (size, dtype) in sizes.items() if size}
    return found | (dict(columns=plgpu.SMEM((desc.rows * config.block_n,), jnp.int32)) if desc.top_k else {})


def _kernel(desc: PackedDesc, config: PackedVectorConfig, *refs: Ref, **scratch: Ref) -> None:
    mosaic.begin()
    operands, out = dict(zip(desc.operand_names, refs, strict=False)), refs[-1]
    ctas_of_row = -(-desc.n // config.block_n)
    cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
    columns_of_rows = scratch.pop("columns", None)
    scratch = {name: ref.at[warpgroup] for name, ref in scratch.items()}
    if columns_of_rows is not None:
        expert = lax.max(operands["tile_expert"][warpgroup], jnp.int32(0))
        own = _Columns(desc, config, operands, scratch, expert, cta * config.block_n, desc.n)
        own.store_sum(warpgroup, columns_of_rows, out)
        return
    tile, first = lax.div(cta, jnp.int32(ctas_of_row)), lax.rem(cta, jnp.int32(ctas_of_row)) * config.block_n

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
        self.is_own = (self.thread < config.block_n) & (self.thread + first < n)
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
        """Multiply the row of a tile and store its columns. start: of this weight's columns in the output."""
        value = self._finished(tile)
        self._store(out, self.thread + (self.first + start + tile * self.desc.n), value)

    def _store(self, out: Ref, index: Value, value: Value) -> None:
        dtype = jnp.dtype(self.desc.out_dtype)
        simt.store_bits(out, index, simt.float_bits(value, dtype), self.is_own, dtype.itemsize)

    def store_sum(self, tile: Scalar, columns: Ref, out: Ref) -> None:
        """Multiply the row of this warpgroup's tile, and store the weighted sum of all, in the order of tiles. One that
        is out of use is multiplied with the first expert's weights and left out.

        columns: (rows * block_n,) int32, the bits of each row's weighted columns.
        """
        operands, block_n = self.operands, self.config.block_n
        slots = [operands["row_of"][0, slot] == tile for slot in range(self.desc.top_k)]
        parts = [jnp.where(own, operands["slot_weights"][0, i].astype(jnp.float32), 0.0) for i, own in enumerate(slots)]
        is_used, factor = functools.reduce(lax.bitwise_or, slots), functools.reduce(jnp.add, parts)
        value = self._finished(tile) * factor
        # A tile that is out of use may hold anything.
        value = jnp.where(lax.broadcast_in_dim(is_used, value.shape, ()), value, 0.0)
        simt.store(columns, self.thread + tile * block_n, lax.bitcast_convert_type(value, jnp.int32), self.is_own)
        simt.barrier()

        @pl.when(tile == 0)
        def _():
            rows = [simt.load(columns, self.thread + row * block_n, self.is_own, 0) for row in range(self.desc.rows)]
            total = functools.reduce(jnp.add, [lax.bitcast_convert_type(bits, jnp.float32) for bits in rows])
            index = self.thread + self.first
            if self.desc.shared_dtype is not None:
                total = total + simt.load_float(operands["shared"], index, self.is_own, 0.0)
            self._store(out, index, total)

    def _finished(self, tile: Scalar) -> Value:
        """The columns of the row of a tile, float32, one in each of the first threads."""
        desc, row, is_own = self.desc, 0 if self.desc.unpermuted_rows else tile, self.is_own
        of_channels = self._of_channels(is_own)
        scale = None
        if desc.lhs_scale != "none":
            index = self.nothing + (row if desc.lhs_scale == "row" else 0)
            scale = simt.load_float(self.operands["x_scale"], index, self.always, 0.0)
        values: list[Any] = self._gathered(self._multiply(self.operands["x"].at[row]), is_own)
        for projection, (channel_scale, bias) in enumerate(of_channels):
            value = values[projection]
            if scale is not None:
                value = value * (scale * (1 / desc.fmt.unit))
            elif desc.fmt.unit != 1:
                value = value * (1 / desc.fmt.unit)
            value = value if channel_scale is None else value * channel_scale
            values[projection] = value if bias is None else value + bias
        return values[0] if desc.activation is None else desc.activation(*values)

    def _of_channels(self, is_own: Value) -> list[tuple[Value | None, Value | None]]:
        """(scale, bias) of each projection, of the channel that each thread stores."""
        places = dict(channel_scale=self.places, bias=self.bias_places)

        def load(name, projection):
            if name not in self.operands:
                return None
            vector = self.operands[name].at[places[name][projection]]
            return simt.load_float(vector, self.thread + self.in_block, is_own, 0.0)

        return [(load("channel_scale", g), load("bias", g)) for g in self.projections]

    def _multiply(self, row: Ref) -> list[Value]:
        """The bits of each warp's sums over its part of K, of both channels of a thread, projection after projection:
        float32, or where nothing scales them of the accumulator's type.
        """
        ring = self.ring
        for step in range(ring.ahead):
            self._copy(row, step)

        def one_step(step, sums):
            simt.wait_for_copies(ring.ahead - 1)
            if ring.ahead < ring.steps:
                self._copy(row, step + ring.ahead)
            else:
                simt.end_copies()
            return self._added(sums, lax.rem(step, jnp.int32(ring.slots)))

        # Of each projection both channels' scaled sums, or the four accumulators of mma.sync.
        empty = lax.bitcast_convert_type(self.nothing, jnp.float32) if self.is_scaled else self.nothing
        sums = ((empty,) * (2 if self.is_scaled else 4),) * self.desc.projections
        # A number that LLVM does not know: it unrolls no loop of so many steps.
        steps = lax.min(jnp.int32(ring.steps), self.operands["num_tiles"][0] + ring.steps)
        sums = lax.fori_loop(0, steps, one_step, sums)
        if self.is_scaled:
            return [lax.bitcast_convert_type(value, jnp.int32) for own in sums for value in own]
        return [own[index] for own in sums for index in (0, 2)]

    def _copy(self, row: Ref, step: Scalar) -> None:
        """Start to copy a block of every projection, its part of the row and what lies beside it; zeros past the warp's
        part of K, and nothing after the last step.
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

        def copy(name, source, own, of_block, target, of_slot, count=LANES, is_inside=is_inside):
            mask = self.lane < count if count < LANES else None
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
        target = slot * ROW_PIECES + self.lane
        copy("row", row, place * ROW_PIECES + self.lane, ROW_PIECES, target, ROW_PIECES, ROW_PIECES)
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
        row = _load_row(self.scratch["row"], own_slot * ROW_PIECES + _shifted(self.lane, 3))
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
            products = _products(fmt, words, zeros, row, () if self.is_scaled else own)
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
        """Both channels' ``sums`` and the partial sums of a block's groups times their scales."""
        for index in range(self.num_sums):
            parts = [products[4 * index + 2 * half] for half in range(2)]
            if self.desc.accumulator == "int32":
                parts = [part.astype(jnp.float32) for part in parts]
            else:
                parts = [lax.bitcast_convert_type(part, jnp.float32) for part in parts]
            sums = tuple(a + b * scales[2 * index + half] for half, (a, b) in enumerate(zip(sums, parts, strict=True)))
        return sums

    def _gathered(self, sums: list[Value], is_own: Value) -> list[Value]:
        """Each projection's float32 sum over all of K, of the column that a thread stores, warps in their order."""
        is_first, row = (self.lane & 3) == 0, _shifted(self.lane, 2)
        for index, bits in enumerate(sums):
            projection, half = divmod(index, 2)
            place = (self.warp + projection * WARPS) * CHANNELS + row + 8 * half
            simt.store(self.scratch["sums"], place, bits, is_first)
        simt.barrier()
        first_warp = _shifted(self.thread, 4) * self.config.k_split
        found = []
        for projection in self.projections:
            total = None
            for part in range(self.config.k_split):
                place = (first_warp + (part + projection * WARPS)) * CHANNELS + (self.thread & (CHANNELS - 1))
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


def _load_row(ref: Ref, piece: Value) -> tuple[Value, ...]:
    """A thread's words of the right operand of a block, whose columns are all the row: ``ldmatrix`` of eight matrices
    with equal rows. piece: of 16 bytes, counted from the ref's first; lane l gives that of matrix l / 8.
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
    fmt: PackedFormat, words: list[Value], zeros: list[Value], row: tuple[Value, ...], sums: tuple[Value, ...]
) -> tuple[Value, ...]:
    """The bits of four accumulators of ``mma.sync`` for each partial sum of a block: two of a thread's channel, equal
    since all columns are, and two of the channel 8 further down.

    words: a thread's, its scales last. zeros: terms of both channels for each partial sum. sums: what is added, ()
    for nothing.
    """
    number, given = sums_of_block(fmt), (*words, *zeros, *row, *sums)
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
