"""Matrix times vector: tiles of one row, as a token by itself has them.

A CTA is one warpgroup. Each of its warps takes a few columns of one row of the output: it loads their weight rows into
registers, a vector a lane and piece of K, multiplies them with the row, and adds up over its lanes. Nothing is staged
in shared memory and no warp waits for another one, so loads are under way as soon as the launch begins. A CTA that
quantizes its row does so while its weights come; every warp quantizes the whole row for itself.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.numerics import (
    e4m3_group_scale,
    e4m3_row_scale,
    int8_token_factors,
    power_of_two_scale,
    reciprocal,
)
from pallas_kernels.common.numerics_sm90 import cast_int8_in, divisor, e4m3_codes
from pallas_kernels.common.row_kernel_sm90 import row_kernel
from pallas_kernels.common.types import Kernel, Layout, Ref, Scalar, Value
from pallas_kernels.grouped_gemm.problem import SCALE_GROUP, GemmDesc
from pallas_kernels.grouped_gemm.vector import CHUNK, LANES, MOST_PIECES, WARPS, Piece, VectorConfig, pieces_of_row

_RESULT = plgpu.ShapeDtypeStruct((WARPS * LANES,), jnp.int32, simt.LANES)
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def grouped_gemv_sm90(desc: GemmDesc, config: VectorConfig) -> Kernel:
    """The kernel: operands by name (``desc.operand_names``) -> (rows, N). config must pass ``vector_error``."""
    out = jax.ShapeDtypeStruct((desc.rows * desc.n,), desc.stored_dtype)
    call = row_kernel(functools.partial(_kernel, desc, config), out, desc.rows * (desc.n // config.block_n))
    flat = [name for name in desc.operand_names if name.startswith(("w_scale", "bias", "x_scale"))]

    def run(operands):
        given = {name: operands[name].reshape(-1) if name in flat else operands[name] for name in desc.operand_names}
        return call(*given.values()).reshape(desc.rows, desc.n)

    return run


def _kernel(desc: GemmDesc, config: VectorConfig, *refs: Ref) -> None:
    mosaic.begin()
    operands = dict(zip(desc.operand_names, refs, strict=False))
    blocks = desc.n // config.block_n
    cta = lax.axis_index("cta")
    tile, first = lax.div(cta, jnp.int32(blocks)), lax.rem(cta, jnp.int32(blocks)) * config.block_n

    if desc.num_experts > 1:
        expert = operands["tile_expert"][tile]
        is_used = tile < operands["num_tiles"][0]
        pl.when(is_used)(lambda: _columns(desc, config, operands, refs[-1], tile, expert, first))
        return
    widths = desc.widths or (desc.n,)
    for index, (start, width) in enumerate(zip(desc.starts or (0,), widths, strict=True)):
        own = {
            name: operands[desc.of_each_weight(name)[index]] for name in ("w", "w_scale", "bias") if name in operands
        }
        run = functools.partial(
            _columns, desc, config, operands | own, refs[-1], tile, 0, first - start, start=start, width=width
        )
        pl.when((first >= start) & (first < start + width))(run) if desc.widths else run()


def _columns(
    desc: GemmDesc,
    config: VectorConfig,
    operands: dict[str, Ref],
    out: Ref,
    tile: Scalar,
    expert: Scalar,
    first: Scalar,
    *,
    start: int = 0,
    width: int | None = None,
) -> None:
    """Columns from ``first`` on of one weight, whose product begins at column ``start`` and has ``width`` columns."""
    w, x, n = operands["w"], operands["x"], width or desc.n
    row = 0 if desc.unpermuted_rows else tile
    pieces = pieces_of_row(desc.k, desc.dtype)
    lane, warp = _lane_and_warp()
    nothing = simt.constant(0)
    everywhere = nothing == 0
    zero = nothing if desc.accumulator == "int32" else lax.bitcast_convert_type(nothing, jnp.float32)
    matrices = [expert * desc.projections + projection for projection in range(desc.projections)]

    def number(name: str, index: Value) -> Value:
        """Each thread's element of a vector of floats."""
        return simt.load_float(operands[name], index, everywhere, 0.0)

    def weights(offset: Scalar, some: list[Piece]) -> list[list[Value]]:
        """Of each piece: those of each projection and channel."""
        return [
            [
                mosaic.load(
                    w.at[matrix, pl.ds(first + channel * WARPS, WARPS), pl.ds(offset + piece.start, piece.width)],
                    layout=_layout(piece),
                    optimized=False,
                )
                for matrix in matrices
                for channel in range(config.channels)
            ]
            for piece in some
        ]

    def of_row(offset: Scalar, some: list[Piece]) -> list[Value]:
        return [
            mosaic.load(x.at[row, pl.ds(offset + p.start, p.width)], layout=_layout(p).reduce(0), optimized=False)
            for p in some
        ]

    def group_of(piece: Piece, offset: Scalar) -> Value:
        """Of each lane's columns, where every 128 of K are scaled."""
        return lax.shift_right_logical(lane * piece.vector + (offset + piece.start), jnp.full_like(lane, 7))

    def row_scales(piece: Piece, offset: Scalar) -> Value | None:
        """Of each lane's columns of the row."""
        if not desc.is_block_scaled:
            return None
        return number("x_scale", group_of(piece, offset) * (1 if desc.unpermuted_rows else desc.rows) + row)

    def block_scales(piece: Piece, offset: Scalar) -> list[Value]:
        """Of each lane's columns of the weights, for each projection."""
        k_groups, n_groups = -(-desc.k // SCALE_GROUP), -(-n // SCALE_GROUP)
        block = lax.div(first, jnp.int32(SCALE_GROUP))
        return [
            number("w_scale", group_of(piece, offset) + (matrix * n_groups + block) * k_groups) for matrix in matrices
        ]

    def added(sums: tuple[Value, ...], offset: Scalar, some: list[Piece], loaded: Any, values: Any, scales: Any):
        """``sums`` and the products of some pieces."""
        for piece, of_piece, own, scale in zip(some, loaded, values, scales, strict=True):
            products = [_dot(piece, one, own) for one in of_piece]
            if desc.is_block_scaled:
                by_matrix = [scale * block for block in block_scales(piece, offset)]
                products = [value * by_matrix[i // config.channels] for i, value in enumerate(products)]
            sums = tuple(a + b for a, b in zip(sums, products, strict=True))
        return sums

    sums = (zero,) * (desc.projections * config.channels)
    row_scale = None
    many = 0  # turns of a loop over a row that is longer than a warp holds
    if len(pieces) > MOST_PIECES:
        many = sum(piece.vector == pieces[0].vector for piece in pieces) // CHUNK
        some = pieces[:CHUNK]
        step = CHUNK * pieces[0].width

        def one_chunk(i, sums):
            offset = i * step
            loaded, values = weights(offset, some), of_row(offset, some)
            return added(sums, offset, some, loaded, map(_wide, values), [row_scales(p, offset) for p in some])

        sums = lax.fori_loop(0, _hidden(many, operands), one_chunk, sums)
    rest = pieces[many * CHUNK :]
    if rest:
        loaded, values = weights(0, rest), of_row(0, rest)
        if desc.quantization == "none":
            values, scales = [*map(_wide, values)], [row_scales(piece, 0) for piece in rest]
        else:
            values, scales, row_scale = _quantized(desc, rest, values)
        sums = added(sums, 0, rest, loaded, values, scales)

    totals: list[Any] = []
    for value in sums:
        totals.append(simt.warp_add(value).astype(jnp.float32) if desc.accumulator == "int32" else simt.warp_sum(value))
    if row_scale is None and desc.lhs_scale in ("row", "tensor"):
        row_scale = number("x_scale", nothing + (row if desc.lhs_scale == "row" else 0))
    for channel in range(config.channels):
        column = warp + (first + channel * WARPS)
        values = []
        for matrix, value in zip(matrices, totals[channel :: config.channels], strict=True):
            if row_scale is not None:
                value = value * row_scale
            if desc.rhs_scale in ("channel", "tensor"):
                place = column + matrix * n if desc.rhs_scale == "channel" else nothing + matrix
                value = value * number("w_scale", place)
            values.append(value if desc.bias_dtype is None else value + number("bias", column + matrix * n))
        value = values[0] if desc.activation is None else desc.activation(*values)
        _store(desc, operands, out, column + (tile * desc.n + start), value, lane == 0)


def _store(desc: GemmDesc, operands: dict[str, Ref], out: Ref, index: Value, value: Value, mask: Value) -> None:
    if desc.requantize == "tensor":
        value = value.astype(jnp.bfloat16).astype(jnp.float32) if desc.is_rounded_first else value
        bits = simt.e4m3_bits(value * reciprocal(operands["out_scale"][0]))
    elif desc.out_dtype == "float32":
        bits = lax.bitcast_convert_type(value, jnp.int32)
    else:
        bits = simt.half_bits(value, desc.out_dtype)
    simt.store_bits(out, index, bits, mask, _BYTES[desc.stored_dtype])


def _quantized(
    desc: GemmDesc, pieces: list[Piece], given: list[Value]
) -> tuple[list[Value], list[Value | None], Value | None]:
    """A row in ``pieces`` -> its codes as they are multiplied, the scales of each lane's groups, the row's scale."""
    values = [value.astype(jnp.float32) for value in given]
    largest = [_largest(piece, value) for piece, value in zip(pieces, values, strict=True)]
    if desc.lhs_scale == "group":
        scales = [_group_scale(desc, _over_group(piece, bits)) for piece, bits in zip(pieces, largest, strict=True)]
        codes = [_codes(*one) for one in zip(pieces, values, scales, strict=True)]
        return codes, [*scales], None
    amax = lax.bitcast_convert_type(simt.warp_max(functools.reduce(jnp.maximum, largest)), jnp.float32)
    if desc.dtype == "int8":
        inverse, scale = int8_token_factors(amax)
        codes = []
        for piece, value in zip(pieces, values, strict=True):
            layout = _layout(piece).reduce(0)
            codes.append(cast_int8_in(value * _spread(piece, inverse), layout))
        return codes, [None] * len(pieces), scale
    scale = e4m3_row_scale(amax)
    return (
        [_codes(piece, value, scale) for piece, value in zip(pieces, values, strict=True)],
        [None] * len(pieces),
        scale,
    )


def _group_scale(desc: GemmDesc, amax: Value) -> Value:
    scale = e4m3_group_scale(amax)
    return power_of_two_scale(scale) if desc.quantization.endswith("ue8m0") else scale


def _codes(piece: Piece, values: Value, scale: Value) -> Value:
    """e4m3 codes of a piece, in float32. scale: each thread's."""
    inverse, scale = (_spread(piece, one) for one in divisor(scale))
    return _wide(e4m3_codes(values, inverse, scale))


def _wide(values: Value) -> Value:
    """Codes and 16-bit numbers as they are multiplied: int8 as it is, others in float32."""
    if values.dtype == jnp.int8:
        return values
    values = values.astype(jnp.float16) if values.dtype == jnp.float8_e4m3fn else values
    return values.astype(jnp.float32)


def _over_group(piece: Piece, bits: Value) -> Value:
    """The largest of each 128 columns, as float32, in the threads that hold them. bits: of each thread's largest."""
    distance = min(SCALE_GROUP // piece.vector, LANES) // 2
    while distance:
        bits = jnp.maximum(bits, simt.of_lane(bits, distance))
        distance //= 2
    return lax.bitcast_convert_type(bits, jnp.float32)


def _hidden(number: int, operands: dict[str, Ref]) -> Value:
    """``number``, which LLVM does not know and so unrolls no loop of so many turns."""
    return lax.min(jnp.int32(number), operands["num_tiles"][0] + number)


def _lane_and_warp() -> tuple[Value, Value]:
    thread = simt.thread_index()
    return thread & (LANES - 1), lax.shift_right_logical(thread, jnp.full_like(thread, 5))


def _layout(piece: Piece) -> Layout:
    """Of weights (4, width), a row a warp, neighbouring columns a lane; without its rows, of one row in all warps."""
    tiling = plgpu.Tiling(((WARPS, piece.width), (piece.vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


# Below: one value a thread from the vectors that it holds, and back.


def _dot(piece: Piece, weights: Value, row: Value) -> Value:
    """Each thread's share of the products of (4, width) weights and a row of that width."""
    layout, is_int8 = _layout(piece), weights.dtype == jnp.int8
    multiply = _dot_int8 if is_int8 else _dot_float32

    @simt.inline(layout, layout.reduce(0), result=_RESULT)
    def run(ctx, weights, row):
        del ctx
        (a,), (b,) = weights.registers.flat, row.registers.flat
        return simt.wrap(multiply(a, b))

    total = run(_wide(weights), row)
    return total if is_int8 else lax.bitcast_convert_type(total, jnp.float32)


def _dot_float32(a: ir.Value, b: ir.Value) -> ir.Value:
    products = [arith.mulf(x, y) for x, y in zip(_elements(a), _elements(b), strict=True)]
    return arith.bitcast(simt.integer(32), functools.reduce(arith.addf, products))


def _dot_int8(a: ir.Value, b: ir.Value) -> ir.Value:
    total = simt.integer_constant(0, 32)
    for words in zip(_words(a), _words(b), strict=True):
        total = simt.asm([*words, total], "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", has_result=True)
    return total


def _words(codes: ir.Value) -> Iterator[ir.Value]:
    """Four int8 codes each, zeros where there are only two."""
    (length,) = ir.VectorType(codes.type).shape
    if length == 2:
        yield arith.extui(simt.integer(32), mgpu.utils.bitcast(codes, simt.integer(16)))
        return
    words = mgpu.utils.bitcast(codes, ir.VectorType.get((length // 4,), simt.integer(32)))
    yield from _elements(words)


def _elements(register: ir.Value) -> list[ir.Value]:
    (length,) = ir.VectorType(register.type).shape
    return [vector.extract(register, [], [i]) for i in range(length)]


def _largest(piece: Piece, values: Value) -> Value:
    """The bits of each thread's largest magnitude of a row's piece in float32. NaN is above all."""

    @simt.inline(_layout(piece).reduce(0), result=_RESULT)
    def run(ctx, values):
        del ctx
        (register,) = values.registers.flat
        sign = simt.integer_constant(0x7FFFFFFF, 32)
        bits = [arith.andi(arith.bitcast(simt.integer(32), x), sign) for x in _elements(register)]
        return simt.wrap(functools.reduce(arith.maxsi, bits))

    return run(values)


def _spread(piece: Piece, value: Value) -> Value:
    """Each thread's float32 ``value`` in all that it holds of a row's piece."""
    layout = _layout(piece).reduce(0)

    @simt.inline(simt.LANES, result=plgpu.ShapeDtypeStruct((piece.width,), jnp.float32, layout))
    def run(ctx, value):
        del ctx
        kind = ir.VectorType.get((piece.vector,), ir.F32Type.get())
        register = vector.broadcast(kind, simt.value_of(value))
        shape = layout.to_mgpu().registers_shape((piece.width,))
        registers = np.full(shape, register, dtype=object)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return run(value)
