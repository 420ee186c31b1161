"""Matrix times vector with packed weights: tiles of one row, as a token by itself has them.

The words of 16 channels in a block are 512 bytes that lie together, and each lane's unpack into its fragment of the
left operand of ``mma.sync``. So a warp takes 16 channels of every projection and a part of K:

    16-byte loads of words, scales, zero points -> registers -> operands by bit moves -> mma.sync with the row
    sums of the warps that share channels -> shared memory -> barrier -> scales, bias, activation -> stores

Every column of the right operand is the row, so that each lane has the sums of two channels, and nothing is shuffled.
"""

import functools
import itertools
import math
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.row_kernel_sm90 import row_kernel
from pallas_kernels.common.sm90 import LANES, WARPS
from pallas_kernels.common.types import Kernel, Ref, Scalar, Value
from pallas_kernels.grouped_gemm.packed import dequantize_sm90 as dequantize
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N, PackedFormat
from pallas_kernels.grouped_gemm.packed.problem import PackedDesc
from pallas_kernels.grouped_gemm.packed.vector import (
    CHANNELS,
    PackedVectorConfig,
    share_of_warp,
    sums_of_block,
    words_a_thread,
)
from pallas_kernels.grouped_gemm.vector_sm90 import for_own_weight

_RESULT = plgpu.ShapeDtypeStruct((WARPS * LANES,), jnp.int32, simt.LANES)
_BLOCK_WORDS = 32  # of a row that a block is multiplied with
_ROW_LOADS = 8  # of a thread among them
_INSTRUCTIONS = {
    "bfloat16": ("m16n8k16", "bf16"),
    "float16": ("m16n8k16", "f16"),
    "int8": ("m16n8k32", "s8"),
    "float8_e4m3fn": ("m16n8k32", "e4m3"),
}
Sums: TypeAlias = tuple[tuple[Value, ...], ...]  # for each projection


def packed_gemv_sm90(desc: PackedDesc, config: PackedVectorConfig) -> Kernel:
    """The kernel: operands by name (``desc.operand_names``) -> (rows, N). config must pass ``vector_error``."""
    out = jax.ShapeDtypeStruct((desc.rows * desc.n,), jnp.dtype(desc.out_dtype))
    exchange = [plgpu.SMEM((desc.projections * WARPS * CHANNELS,), jnp.int32)]
    ctas = desc.rows * -(-desc.n // config.block_n)
    call = row_kernel(functools.partial(_kernel, desc, config), out, ctas, scratch_types=exchange)
    return lambda operands: call(*(operands[name] for name in desc.operand_names)).reshape(desc.rows, desc.n)


def _kernel(desc: PackedDesc, config: PackedVectorConfig, *refs: Ref) -> None:
    mosaic.begin()
    operands = dict(zip(desc.operand_names, refs, strict=False))
    out, exchange = refs[-2:]
    ctas_of_row = -(-desc.n // config.block_n)
    cta = lax.axis_index("cta")
    tile, first = lax.div(cta, jnp.int32(ctas_of_row)), lax.rem(cta, jnp.int32(ctas_of_row)) * config.block_n

    def columns(operands, first, n, start, expert=0):
        _Columns(desc, config, operands, expert, first, n).store(tile, out, exchange, start)

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
        expert: Scalar,
        first: Scalar,
        n: int,
    ):
        self.desc, self.config, self.operands, self.first, self.n = desc, config, operands, first, n
        self.projections = range(desc.projections)
        self.share, self.num_sums = share_of_warp(desc, config), sums_of_block(desc.fmt)
        self.thread = simt.thread_index()
        self.is_scaled = desc.fmt.scale == "group"
        self.lane, self.warp = self.thread & (LANES - 1), _shifted(self.thread, 5)
        group = _shifted(self.warp, config.k_split.bit_length() - 1)
        self.part = self.warp & (config.k_split - 1)
        self.in_block = lax.rem(first, jnp.int32(BLOCK_N))
        quarter = group + lax.div(self.in_block, jnp.int32(CHANNELS))  # of the block's channels
        self.fragment_thread = quarter * LANES + self.lane  # whose fragment of 64 channels this thread unpacks
        self.channel = quarter * CHANNELS + _shifted(self.lane, 2)  # in the block; the thread's other one is 8 further
        self.blocks = -(-n // BLOCK_N)
        block = lax.div(first, jnp.int32(BLOCK_N))
        self.places = [(expert * self.blocks + block) * desc.projections + g for g in self.projections]
        self.bias_places = [(expert * desc.projections + g) * self.blocks + block for g in self.projections]
        self.nothing = simt.constant(0)
        self.always = self.nothing == 0

    def store(self, tile: Scalar, out: Ref, exchange: Ref, start: int) -> None:
        """Multiply the row of a tile and store its columns. start: of this weight's columns in the output."""
        desc, row = self.desc, 0 if self.desc.unpermuted_rows else tile
        is_own = (self.thread < self.config.block_n) & (self.thread + self.first < self.n)
        of_channels = self._of_channels(is_own)
        scale = None
        if desc.lhs_scale != "none":
            index = self.nothing + (row if desc.lhs_scale == "row" else 0)
            scale = simt.load_float(self.operands["x_scale"], index, self.always, 0.0)
        values = self._gathered(self._multiply(self.operands["x"].at[row]), exchange, is_own)
        for projection, (channel_scale, bias) in enumerate(of_channels):
            value = values[projection]
            if scale is not None:
                value = value * (scale * (1 / desc.fmt.unit))
            elif desc.fmt.unit != 1:
                value = value * (1 / desc.fmt.unit)
            value = value if channel_scale is None else value * channel_scale
            values[projection] = value if bias is None else value + bias
        value = values[0] if desc.activation is None else desc.activation(*values)
        index = self.thread + (self.first + start + tile * desc.n)
        bits, itemsize = simt.float_bits(value, desc.out_dtype), jnp.dtype(desc.out_dtype).itemsize
        simt.store_bits(out, index, bits, is_own, itemsize)

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
        share = self.share
        first = self.nothing
        if self.config.k_split > 1:
            first = self.part * share.least + lax.min(self.part, jnp.full_like(self.part, share.longer))
        zeros = {} if self.desc.fmt.group_size else {g: self._zeros(g, self.nothing) for g in self.projections}

        def turn(i, sums):
            return self._added(sums, row, [first + (i * share.at_once + j) for j in range(share.at_once)], zeros)

        # Of each projection both channels' scaled sums, or the four accumulators of mma.sync.
        empty = lax.bitcast_convert_type(self.nothing, jnp.float32) if self.is_scaled else self.nothing
        sums = ((empty,) * (2 if self.is_scaled else 4),) * self.desc.projections
        if share.turns:
            # A number that LLVM does not know: it unrolls no loop of so many turns.
            hidden = lax.min(jnp.int32(share.turns), self.operands["num_tiles"][0] + share.turns)
            sums = lax.fori_loop(0, hidden, turn, sums)
        places = [first + (share.turns * share.at_once + j) for j in range(share.rest)]
        if share.longer:
            # A warp with one block less reads some block once more, and drops what it gets.
            places[-1] = lax.min(places[-1], jnp.full_like(places[-1], self.desc.k // self.desc.fmt.block_k - 1))
        sums = self._added(sums, row, places, zeros, drops_last=share.longer > 0)
        if self.is_scaled:
            return [lax.bitcast_convert_type(value, jnp.int32) for own in sums for value in own]
        return [own[index] for own in sums for index in (0, 2)]

    def _added(
        self,
        sums: Sums,
        row: Ref,
        places: list[Value],
        zeros: dict[int, list[Value]],
        *,
        drops_last: bool = False,
    ) -> Sums:
        """``sums`` and the products of blocks of K, all of whose weights are under way together. zeros: of channels."""
        fmt = self.desc.fmt
        loaded = []
        for place in places:
            of_block = []
            for g in self.projections:
                words = _load_words(fmt, self.operands["w"].at[self.places[g]], place, self.fragment_thread)
                of_block.append((words, zeros[g] if zeros else self._zeros(g, place), self._scales(g, place)))
            loaded.append(of_block)
        for index, (place, of_block) in enumerate(zip(places, loaded, strict=True)):
            of_row = _load_row(row, place * _BLOCK_WORDS + (self.lane & 3))
            before, found = sums, []
            for own, (words, zero, scales) in zip(sums, of_block, strict=True):
                products = _products(fmt, words, zero, of_row, () if self.is_scaled else own)
                found.append(self._scaled(own, products, scales) if self.is_scaled else products)
            sums = tuple(found)
            if drops_last and index + 1 == len(places):
                is_own = self.part < self.share.longer
                sums = jax.tree.map(functools.partial(jnp.where, is_own), sums, before)
        return sums

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

    def _beside(self, name: str, projection: int, place: Value) -> list[tuple[Ref, Value]]:
        """Where an array beside the blocks has the numbers of the groups in block ``place``, those of a thread's
        channel and of the one 8 further down.
        """
        array = self.operands[name].at[self.places[projection]]
        found, groups = [], array.shape[0]
        size, depth = self.desc.fmt.group_size or self.desc.k, self.desc.fmt.block_k
        for index in range(self.num_sums):
            group = place * self.num_sums + index
            if size > depth:
                group = lax.div(place, jnp.full_like(place, size // depth))
            if groups * size < self.desc.k:  # the last block ends past the last group
                group = lax.min(group, jnp.full_like(group, groups - 1))
            found += [(array, group * BLOCK_N + self.channel + 8 * half) for half in range(2)]
        return found

    def _scales(self, projection: int, place: Value) -> list[Value]:
        if not self.is_scaled:
            return []
        return [simt.load_float(*at, self.always, 0.0) for at in self._beside("scale", projection, place)]

    def _zeros(self, projection: int, place: Value) -> list[Value]:
        """The bits of the terms of zero points; none where there are none."""
        if not self.desc.fmt.has_zero_point:
            return []
        itemsize = jnp.dtype(self.desc.fmt.operand).itemsize
        return [simt.load_bits(*at, self.always, itemsize) for at in self._beside("zero", projection, place)]

    def _gathered(self, sums: list[Value], exchange: Ref, is_own: Value) -> list[Value]:
        """Each projection's float32 sum over all of K, of the column that a thread stores, warps in their order."""
        is_first, row = (self.lane & 3) == 0, _shifted(self.lane, 2)
        for index, bits in enumerate(sums):
            projection, half = divmod(index, 2)
            place = (self.warp + projection * WARPS) * CHANNELS + row + 8 * half
            simt.store(exchange, place, bits, is_first)
        simt.barrier()
        first_warp = _shifted(self.thread, 4) * self.config.k_split
        found = []
        for projection in self.projections:
            total = None
            for part in range(self.config.k_split):
                place = (first_warp + (part + projection * WARPS)) * CHANNELS + (self.thread & (CHANNELS - 1))
                value = simt.load(exchange, place, is_own, 0)
                if self.is_scaled or self.desc.accumulator == "float32":
                    value = lax.bitcast_convert_type(value, jnp.float32)
                total = value if total is None else total + value
            assert total is not None
            found.append(total.astype(jnp.float32))
        return found


def _shifted(value: Value, bits: int) -> Value:
    return lax.shift_right_logical(value, jnp.full_like(value, bits)) if bits else value


# Below: what a thread loads, and its products.


def _load_words(fmt: PackedFormat, blocks: Ref, place: Value, thread: Value) -> tuple[Value, ...]:
    """What the thread of that index in a warpgroup has of block ``place``: words, then words of scales."""
    result = (_RESULT,) * (words_a_thread(fmt) + fmt.scale_words // 32)

    @simt.inline(plgpu.RefType(), simt.LANES, simt.LANES, result=result)
    def load(ctx, blocks, place, thread):
        del ctx
        size = simt.integer_constant(math.prod(fmt.block_shape), 32)
        pointer, thread = _moved(mgpu.utils.memref_ptr(blocks), simt.value_of(place), size), simt.value_of(thread)
        words = dequantize.words_of_block(fmt, pointer, thread)
        return tuple(map(simt.wrap, words + dequantize.scale_words_of_block(fmt, pointer, thread)))

    return load(blocks, place, thread)


def _load_row(row: Ref, index: Value) -> tuple[Value, ...]:
    """A thread's words of a row in the order in which it multiplies them: that of ``index`` and each fourth after it."""

    @simt.inline(plgpu.RefType(), simt.LANES, result=(_RESULT,) * _ROW_LOADS)
    def load(ctx, row, index):
        del ctx
        pointer, one = mgpu.utils.memref_ptr(row), simt.integer_constant(1, 32)
        places = [arith.addi(simt.value_of(index), simt.integer_constant(4 * i, 32)) for i in range(_ROW_LOADS)]
        kind = simt.integer(32)
        return tuple(simt.wrap(llvm.load(kind, _moved(pointer, place, one), alignment=4)) for place in places)

    return load(row, index)


def _moved(pointer: ir.Value, index: ir.Value, size: ir.Value) -> ir.Value:
    """``index`` times ``size`` words further."""
    return mgpu.utils.getelementptr(pointer, [arith.muli(index, size)], simt.integer(32))


def _products(
    fmt: PackedFormat, words: tuple[Value, ...], zeros: list[Value], row: tuple[Value, ...], sums: tuple[Value, ...]
) -> tuple[Value, ...]:
    """The bits of four accumulators of ``mma.sync`` for each partial sum of a block: of a thread's channel, of the one 8
    further down at 2 and 3; the second of both is of another column with the same row.

    words: as ``_load_words`` gives them. zeros: terms of both channels for each partial sum. sums: what is added, ()
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
            for count in (words_a_thread(fmt), fmt.scale_words // 32, len(zeros), _ROW_LOADS, len(sums))
        )
        terms = [dequantize.spread(fmt, term) for term in terms]
        zero = (lambda q, half: terms[q * number // 4 * 2 + half]) if terms else None
        registers = dequantize.registers_of_words(fmt, own, scales, zero)
        found = []
        for index in range(number):
            total = accumulators or [simt.integer_constant(0, 32)] * 4
            for q in range(4 * index // number, 4 * (index + 1) // number):
                weights = [registers[q, k_half, row_half] for k_half, row_half in np.ndindex(2, 2)]
                total = _mma(fmt.operand, weights, columns[2 * q : 2 * q + 2], total)
            found += total
        return tuple(map(simt.wrap, found))

    return multiply(*given)


def _mma(operand: str, a: list[ir.Value], b: list[ir.Value], c: list[ir.Value]) -> list[ir.Value]:
    """``mma.sync`` of 16 channels, the bits of whose accumulators are given and returned."""
    shape, kind = _INSTRUCTIONS[operand]
    is_int = operand == "int8"
    element, letter, total = (simt.integer(32), "r", "s32") if is_int else (ir.F32Type.get(), "f", "f32")
    c = c if is_int else [arith.bitcast(element, value) for value in c]
    text = (
        f"mma.sync.aligned.{shape}.row.col.{total}.{kind}.{kind}.{total} "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    constraints = ",".join([f"={letter}"] * 4 + ["r"] * 6 + [letter] * 4)
    four = ir.Type.parse(f"!llvm.struct<({', '.join([str(element)] * 4)})>")
    found = llvm.inline_asm(four, [*a, *b, *c], text, constraints, has_side_effects=True, asm_dialect=0)
    values = [llvm.extractvalue(element, found, [index]) for index in range(4)]
    return values if is_int else [arith.bitcast(simt.integer(32), value) for value in values]
