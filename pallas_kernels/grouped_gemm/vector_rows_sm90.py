"""Rows that a CTA of matrix times vector quantizes first: its warps share the work, and find codes in shared memory.

    each warp takes rows, or parts of them: loads -> largest magnitude -> codes and scale -> shared memory; a barrier

The codes and scales are those of ``quantize_and_permute``, bit for bit.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.numerics import e4m3_group_scale, e4m3_row_scale, int8_token_factors
from pallas_kernels.common.numerics_sm90 import cast_int8_in, divisor, e4m3_codes
from pallas_kernels.common.sm90 import LANES, WARPGROUP, WARPS
from pallas_kernels.common.types import Layout, Ref, Scalar, Value
from pallas_kernels.grouped_gemm.problem import SCALE_GROUP, GemmDesc
from pallas_kernels.grouped_gemm.vector import COLUMNS_AT_ONCE, Piece, parts_of_row, pieces_of_row, rows_of_cta

_RESULT = plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.int32, simt.LANES)


def scratch_types(desc: GemmDesc) -> dict[str, Any]:
    """Shared memory of a CTA: codes (rows, K) and their scales as ``grouped_gemm`` takes them, and maxima of parts."""
    rows, groups = rows_of_cta(desc), -(-desc.k // SCALE_GROUP) if desc.lhs_scale == "group" else 1
    found = dict(
        codes=plgpu.SMEM((rows, desc.k), jnp.dtype(desc.dtype)), scales=plgpu.SMEM((groups * rows,), jnp.float32)
    )
    if desc.lhs_scale == "row":
        found["maxima"] = plgpu.SMEM((rows * parts_of_row(desc),), jnp.int32)
    return found


class RowsOfCta:
    """The rows of x from ``first`` on that a CTA multiplies. Refs behind operands are those of ``scratch_types``."""

    def __init__(
        self,
        desc: GemmDesc,
        operands: dict[str, Ref],
        first: Scalar,
        *,
        codes: Ref,
        scales: Ref,
        maxima: Ref | None = None,
    ) -> None:
        self.desc, self.first, self.codes, self.scales, self.maxima = desc, first, codes, scales, maxima
        self.x, self.num_tiles = operands["x"], operands["num_tiles"]
        self.rows, self.columns = rows_of_cta(desc), desc.k // parts_of_row(desc)
        self.has_parts = self.columns < desc.k
        self.is_apart = self.has_parts or self.rows >= WARPS  # whether each warp has its own; else all do the same
        self.pieces = pieces_of_row(self.columns, self.x.dtype)
        thread = simt.thread_index()
        self.lane = thread & (LANES - 1)
        self.warp = lax.shift_right_logical(thread, jnp.full_like(thread, LANES.bit_length() - 1))
        self.nothing = simt.constant(0)

    def quantize(self) -> None:
        """Fill ``codes`` and ``scales``; all threads of the CTA come here, and may read both then."""
        if self.maxima is not None:
            self._for_rows(self._store_maximum)
            simt.barrier()
        self._for_rows(self._of_groups if self.desc.lhs_scale == "group" else self._of_row)
        simt.barrier()

    def _for_rows(self, body: Callable[[Scalar, list[Value]], None]) -> None:
        """Call ``body`` with the first row that warps take, and with what they have loaded."""
        step = WARPS if self.is_apart and not self.has_parts else 1
        count = -(-self.rows // step)
        turns = -(-count // max(1, COLUMNS_AT_ONCE // self.columns))
        at_once = -(-count // turns)

        def one_turn(i, carry):
            # The last rows may begin with some that other warps or turns have: what they store is the same.
            firsts = [lax.min(jnp.int32((i * at_once + j) * step), jnp.int32(self.rows - step)) for j in range(at_once)]
            for first, given in zip(firsts, [self._load(first) for first in firsts], strict=True):
                body(first, given)
            return carry

        if turns == 1:
            one_turn(0, 0)
        else:
            lax.fori_loop(0, rolled(turns, self.num_tiles), one_turn, 0)

    def _store_maximum(self, row: Scalar, given: list[Value]) -> None:
        assert self.maxima is not None
        own, _ = self._place(row)
        place = own * WARPS + self.warp if self.has_parts else own
        simt.store(self.maxima, place, simt.warp_max(self._largest(given)), self.lane == 0)

    def _columns(self, ref: Ref, row: Scalar, piece: Piece) -> Ref:
        """A piece of what each warp has, from a row on."""
        columns = pl.ds(piece.start, piece.width)
        if self.has_parts:
            return ref.at[row].reshape(WARPS, self.columns).at[:, columns]
        return ref.at[pl.ds(row, WARPS) if self.is_apart else row, columns]

    def _layout(self, piece: Piece) -> Layout:
        layout = mosaic.row_a_warp(piece.vector)
        return layout if self.is_apart else layout.reduce(0)

    def _load(self, row: Scalar) -> list[Value]:
        parts = [(self._columns(self.x, self.first + row, piece), self._layout(piece)) for piece in self.pieces]
        return [mosaic.load(part, layout=layout, optimized=False) for part, layout in parts]

    def _place(self, row: Scalar) -> tuple[Value, Value]:
        """(row, first of its columns) of each warp, from a row on."""
        own, start = self.nothing + row, self.nothing
        if self.has_parts:
            return own, self.warp * self.columns
        return own + self.warp if self.is_apart else own, start

    def _of_groups(self, first: Scalar, given: list[Value]) -> None:
        """Each lane has one scale in each piece."""
        row, start = self._place(first)
        for piece, value in zip(self.pieces, given, strict=True):
            amax = _over_group(piece, self._largest_of_piece(piece, value))
            scale = e4m3_group_scale(amax, self.desc.quantization.endswith("_ue8m0"))
            self._store(first, piece, self._e4m3(piece, value, scale))
            column = start + self.lane * piece.vector + piece.start
            group = lax.shift_right_logical(column, jnp.full_like(column, SCALE_GROUP.bit_length() - 1))
            is_first = (column & (SCALE_GROUP - 1)) == 0
            simt.store(self.scales, group * self.rows + row, lax.bitcast_convert_type(scale, jnp.int32), is_first)

    def _of_row(self, first: Scalar, given: list[Value]) -> None:
        row, _ = self._place(first)
        assert self.maxima is not None
        parts = parts_of_row(self.desc)
        maxima = [simt.load(self.maxima, row * parts + part, self.lane >= 0, 0) for part in range(parts)]
        bits = functools.reduce(jnp.maximum, maxima)
        amax = lax.bitcast_convert_type(bits, jnp.float32)
        if self.desc.dtype == "int8":
            inverse, scale = int8_token_factors(amax)
            for piece, value in zip(self.pieces, given, strict=True):
                factors = value.astype(jnp.float32) * self._spread(piece, inverse)
                self._store(first, piece, cast_int8_in(factors, self._layout(piece)))
        else:
            scale = e4m3_row_scale(amax)
            for piece, value in zip(self.pieces, given, strict=True):
                self._store(first, piece, self._e4m3(piece, value, scale))
        simt.store(self.scales, row, lax.bitcast_convert_type(scale, jnp.int32), self.lane == 0)

    def _store(self, row: Scalar, piece: Piece, codes: Value) -> None:
        self._columns(self.codes, row, piece)[...] = codes

    def _e4m3(self, piece: Piece, values: Value, scale: Value) -> Value:
        """Codes of a piece. scale: each thread's."""
        inverse, scale = (self._spread(piece, one) for one in divisor(scale))
        return e4m3_codes(values.astype(jnp.float32), inverse, scale)

    def _largest(self, values: list[Value]) -> Value:
        """The bits of each thread's largest magnitude in all pieces."""
        return functools.reduce(jnp.maximum, map(self._largest_of_piece, self.pieces, values))

    def _largest_of_piece(self, piece: Piece, given: Value) -> Value:
        """The bits of each thread's largest magnitude of a piece, as float32. NaN is above all."""

        @simt.inline(self._layout(piece), result=_RESULT)
        def run(ctx, given):
            del ctx
            (register,) = given.registers.flat
            return simt.wrap(_largest_bits(register))

        return run(given)

    def _spread(self, piece: Piece, value: Value) -> Value:
        """Each thread's float32 ``value`` in all that it holds of a piece."""
        layout, shape = self._layout(piece), (WARPS, piece.width) if self.is_apart else (piece.width,)

        @simt.inline(simt.LANES, result=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout))
        def run(ctx, value):
            del ctx
            kind = ir.VectorType.get((piece.vector,), ir.F32Type.get())
            register = vector.broadcast(kind, simt.value_of(value))
            registers = np.full(layout.to_mgpu().registers_shape(shape), register, dtype=object)
            return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

        return run(value)


def rolled(turns: int, num_tiles: Ref) -> Scalar:
    """``turns`` as a number that LLVM does not know, which unrolls no loop of so many."""
    return lax.min(jnp.int32(turns), num_tiles[0] + turns)


def _over_group(piece: Piece, bits: Value) -> Value:
    """The largest of each 128 columns, as float32, in the threads that hold them. bits: of each thread's largest."""
    distance = min(SCALE_GROUP // piece.vector, LANES) // 2
    while distance:
        bits = jnp.maximum(bits, simt.of_lane(bits, distance))
        distance //= 2
    return lax.bitcast_convert_type(bits, jnp.float32)


def _largest_bits(register: ir.Value) -> ir.Value:
    """Of the magnitudes of an MLIR vector of floats, as a float32's."""
    kind = ir.VectorType(register.type)
    words = kind.shape[0] * kind.element_type.width // 32
    bits = simt.elements_of(mgpu.utils.bitcast(register, ir.VectorType.get((words,), simt.integer(32))))
    if kind.element_type.width == 32:
        sign = simt.integer_constant(0x7FFFFFFF, 32)
        return functools.reduce(arith.maxsi, [arith.andi(word, sign) for word in bits])
    sign = simt.integer_constant(0x7FFF7FFF, 32)  # of two numbers, which order as their bits do
    pair = functools.reduce(_larger_pair, [arith.andi(word, sign) for word in bits])
    sixteen = simt.integer_constant(16, 32)
    largest = arith.maxui(arith.shrui(pair, sixteen), arith.andi(pair, simt.integer_constant(0xFFFF, 32)))
    if isinstance(kind.element_type, ir.BF16Type):
        return arith.shli(largest, sixteen)
    half = arith.bitcast(ir.F16Type.get(), arith.trunci(simt.integer(16), largest))
    return arith.bitcast(simt.integer(32), arith.extf(ir.F32Type.get(), half))


def _larger_pair(a: ir.Value, b: ir.Value) -> ir.Value:
    """The larger of both lower and of both upper halves."""
    return llvm.inline_asm(simt.integer(32), [a, b], "max.u16x2 $0, $1, $2;", "=r,r,r", asm_dialect=0)
