"""Tiles of a few rows of packed weights, without TMA and wgmma; of one row: matrix times vector.

The words of 16 channels in a block are 512 bytes that lie together, and each lane's unpack into its fragment of the
left operand of ``mma.sync``.

Where a token's rows are added up, a CTA has a warpgroup for each, which weights the columns that it made; the first one
adds them.
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.row_kernel_sm90 import row_kernel
from pallas_kernels.common.sm90 import LANES, WARPS
from pallas_kernels.common.types import Kernel, Ref, Scalar, Value
from pallas_kernels.grouped_gemm.columns import CHANNELS, ROW_PIECES
from pallas_kernels.grouped_gemm.columns_sm90 import (
    RESULT,
    Columns,
    Copy,
    as_floats,
    for_columns_of_cta,
    ring_scratch,
    shifted,
)
from pallas_kernels.grouped_gemm.packed.dequantize_sm90 import registers_of_words, spread
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N, PackedFormat
from pallas_kernels.grouped_gemm.packed.problem import PackedDesc
from pallas_kernels.grouped_gemm.packed.vector import PackedVectorConfig, ring_of, sums_of_block, words_a_thread


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
    """``ring_scratch``, and the columns of the rows that are added up."""
    ring = ring_of(desc, config)
    beside = {"scale": (ring.scales, desc.scale_dtype), "zero": (ring.zeros, desc.fmt.operand)}
    found = ring_scratch(ring, desc.projections, config.block_m, beside, warpgroups)
    return found | (dict(columns=plgpu.SMEM((desc.rows * config.block_n,), jnp.int32)) if desc.top_k else {})


def _kernel(desc: PackedDesc, config: PackedVectorConfig, *refs: Ref, **scratch: Ref) -> None:
    mosaic.begin()
    operands, out = dict(zip(desc.operand_names, refs, strict=False)), refs[-1]
    cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
    columns_of_rows = scratch.pop("columns", None)
    scratch = {name: ref.at[warpgroup] for name, ref in scratch.items()}
    if columns_of_rows is not None:
        expert = lax.max(operands["tile_expert"][warpgroup], jnp.int32(0))
        own = _PackedColumns(desc, config, operands, scratch, expert, cta * config.block_n, desc.n)
        own.store_sum(warpgroup, columns_of_rows, out)
        return

    def columns(tile: Scalar, expert: Scalar, operands: dict[str, Ref], first: Scalar, n: int, start: int) -> None:
        _PackedColumns(desc, config, operands, scratch, expert, first, n).store(tile, out, start)

    for_columns_of_cta(desc, config, ("w", "scale", "zero", "channel_scale", "bias"), operands, columns)


class _PackedColumns(Columns):
    """``Columns`` of packed weights."""

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
        fmt = desc.fmt
        super().__init__(
            desc,
            config,
            ring_of(desc, config),
            operands,
            scratch,
            first,
            n,
            blocks=desc.k // fmt.block_k,
            itemsize=jnp.dtype(fmt.operand).itemsize,
            is_scaled=fmt.scale == "group",
            unit=fmt.unit,
        )
        self.num_sums = sums_of_block(fmt)
        self.in_block = lax.rem(first, jnp.int32(BLOCK_N))
        self.quarter = self.group + lax.div(self.in_block, jnp.int32(CHANNELS))  # of the block's channels
        self.blocks = -(-n // BLOCK_N)
        block = lax.div(first, jnp.int32(BLOCK_N))
        self.places = [(expert * self.blocks + block) * desc.projections + g for g in self.projections]
        self.bias_places = [(expert * desc.projections + g) * self.blocks + block for g in self.projections]

    def store_sum(self, tile: Scalar, columns: Ref, out: Ref) -> None:
        """Multiply the row of this warpgroup's tile, and store the weighted sum of all, in the order of tiles. One that
        is out of use is multiplied with the first expert's weights and left out.

        columns: (rows * block_n,) int32, the bits of each row's weighted columns.
        """
        operands, block_n = self.operands, self.config.block_n
        slots = [operands["row_of"][0, slot] == tile for slot in range(self.desc.top_k)]
        parts = [jnp.where(own, operands["slot_weights"][0, i].astype(jnp.float32), 0.0) for i, own in enumerate(slots)]
        is_used, factor = functools.reduce(lax.bitwise_or, slots), functools.reduce(jnp.add, parts)
        (of_row,) = self.finished(tile)
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
            self.store_values(out, index, total, self.is_own)

    def of_channels(self) -> list[tuple[Value | None, Value | None]]:
        places = dict(channel_scale=self.places, bias=self.bias_places)

        def load(name, projection):
            if name not in self.operands:
                return None
            vector = self.operands[name].at[places[name][projection]]
            return simt.load_float(vector, self.column + self.in_block, self.is_own, 0.0)

        return [(load("channel_scale", g), load("bias", g)) for g in self.projections]

    def copy_weights(self, copy: Copy, place: Value, known: int, slot: Value, is_inside: Value | None) -> None:
        desc, ring, loads = self.desc, self.ring, words_a_thread(self.desc.fmt) // 4
        block_pieces = math.prod(desc.fmt.block_shape) // 4
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

    def products(
        self, projection: int, slot: Value, rows: tuple[Value, ...], sums: tuple[Value, ...]
    ) -> tuple[Value, ...]:
        fmt, ring, words = self.desc.fmt, self.ring, list[Value]()
        loads = words_a_thread(fmt) // 4
        first = (slot * self.desc.projections + projection) * (ring.words * 4)
        for load in range(loads):
            words += simt.load_words(self.scratch["words"], first + (self.lane * 4 + load * LANES * 4), 4)
        words += self._scale_words(first + loads * LANES * 4)
        zeros = [
            simt.load_bits(self.scratch["zero"], at, self.always, self.itemsize)
            for at in self._beside(ring.zeros, self.itemsize, slot, projection)
        ]
        return _products(fmt, words, zeros, rows, sums)

    def _scale_words(self, first: Value) -> tuple[Value, ...]:
        """Those of a thread's channels, in a slot whose scales begin at word ``first``."""
        count = self.desc.fmt.scale_words // LANES
        if not count:
            return ()
        place = first + shifted(self.lane, 2) * count
        return simt.load_words(self.scratch["words"], place, count)

    def _beside(self, pieces: int, itemsize: int, slot: Value, projection: int) -> list[Value]:
        """Where a ring of numbers beside the blocks has those of each group of a slot's block: of a thread's channel,
        and of the one 8 further down.
        """
        if not pieces:
            return []
        first = (slot * self.desc.projections + projection) * (pieces * 16 // itemsize) + shifted(self.lane, 2)
        return [first + (index * CHANNELS + 8 * half) for index in range(self.num_sums) for half in range(2)]

    def scaled(
        self, projection: int, slot: Value, sums: tuple[Value, ...], products: Any, scales: list[Value]
    ) -> tuple[Value, ...]:
        """``sums`` and the partial sums of a block's groups times the scales of their channels."""
        itemsize = jnp.dtype(self.desc.scale_dtype).itemsize
        places = self._beside(self.ring.scales, itemsize, slot, projection)
        scales = [simt.load_float(self.scratch["scale"], at, self.always, 0.0) for at in places]
        for index in range(self.num_sums):
            parts = as_floats(self.desc, [products[4 * index + kept] for kept in self.kept])
            own = [scales[2 * index + kept // 2] for kept in self.kept]
            sums = tuple(a + b * scale for a, b, scale in zip(sums, parts, own, strict=True))
        return sums


def _divided(value: Value, by: int) -> Value:
    """By a number above 0, of one that is not negative."""
    return lax.div(value, jnp.full_like(value, by)) if by > 1 else value


# Below: products of registers.


def _products(
    fmt: PackedFormat, words: list[Value], zeros: list[Value], rows: tuple[Value, ...], sums: tuple[Value, ...]
) -> tuple[Value, ...]:
    """The bits of four accumulators of ``mma.sync`` for each partial sum of a block: of a thread's channel with two
    rows, and of the channel 8 further down.

    words: a thread's, its scales last. zeros: terms of both channels for each partial sum. sums: what is added, ()
    for nothing.
    """
    number, given = sums_of_block(fmt), (*words, *zeros, *rows, *sums)
    result = (RESULT,) * (4 * number)

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
