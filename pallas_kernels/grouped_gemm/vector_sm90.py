"""Matrix times vector: tiles of one row, as a token by itself has them.

A CTA is one warpgroup. Each of its warps takes a few columns of one row of the output: it loads their weight rows into
registers, a vector a lane and piece of K, multiplies them with the row, and adds up over its lanes. Nothing is staged
in shared memory and no warp waits for another one, so loads are under way as soon as the launch begins. Where the CTA
quantizes its rows first (vector_rows_sm90.py), it does so while weights come, and warps read their codes from shared
memory.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.numerics import reciprocal
from pallas_kernels.common.row_kernel_sm90 import row_kernel
from pallas_kernels.common.sm90 import LANES, WARPS
from pallas_kernels.common.types import Kernel, Ref, Scalar, Value
from pallas_kernels.grouped_gemm.problem import SCALE_GROUP, GemmDesc
from pallas_kernels.grouped_gemm.vector import (
    CHUNK,
    MOST_LOADS,
    MOST_PIECES,
    Piece,
    VectorConfig,
    pieces_of_row,
)
from pallas_kernels.grouped_gemm.vector_rows_sm90 import RowsOfCta, rolled, scratch_types

_RESULT = plgpu.ShapeDtypeStruct((WARPS * LANES,), jnp.int32, simt.LANES)


def grouped_gemv_sm90(desc: GemmDesc, config: VectorConfig) -> Kernel:
    """The kernel: operands by name (``desc.operand_names``) -> (rows, N), or with ``desc.top_k`` their sum (1, N).

    config must pass ``vector_error``.
    """
    rows = 1 if desc.top_k else desc.rows
    out = jax.ShapeDtypeStruct((rows * desc.n,), desc.stored_dtype)
    scratch = scratch_types(desc) if desc.quantization != "none" else {}
    num_ctas = rows * (desc.n // config.block_n)
    call = row_kernel(functools.partial(_kernel, desc, config), out, num_ctas, scratch_types=scratch)
    flat = [name for name in desc.operand_names if name.startswith(("w_scale", "bias", "x_scale", "shared"))]

    def run(operands):
        given = {name: operands[name].reshape(-1) if name in flat else operands[name] for name in desc.operand_names}
        return call(*given.values()).reshape(rows, desc.n)

    return run


def _kernel(desc: GemmDesc, config: VectorConfig, *refs: Ref, **scratch: Ref) -> None:
    mosaic.begin()
    operands = dict(zip(desc.operand_names, refs, strict=False))
    out = refs[-1]
    blocks = desc.n // config.block_n
    cta = lax.axis_index("cta")
    if desc.top_k:
        _sum_of_rows(desc, config, operands, out, cta * config.block_n, scratch)
        return
    tile, first = lax.div(cta, jnp.int32(blocks)), lax.rem(cta, jnp.int32(blocks)) * config.block_n
    operands, prepare = _quantizing(desc, operands, tile, scratch)
    if desc.num_experts == 1:
        columns_of_one(desc, config, operands, out, tile, first, prepare)
        return
    # In one condition, so that neither load waits for the other.
    expert = jnp.where(tile < operands["num_tiles"][0], operands["tile_expert"][tile], -1)

    @pl.when(expert >= 0)
    def _():
        weight = _Weight(desc, config, operands, prepare, first, desc.n)
        _multiply_and_store(weight, tile, expert, out, 0)


def _quantizing(
    desc: GemmDesc, operands: dict[str, Ref], tile: Scalar, scratch: dict[str, Ref]
) -> tuple[dict[str, Ref], Callable[[], None] | None]:
    """(operands with codes and scales in ``scratch`` for the rows from ``tile`` on, what fills it) where a CTA
    quantizes its rows; else operands as they are, and None."""
    if not scratch:
        return operands, None
    rows = RowsOfCta(desc, operands, 0 if desc.unpermuted_rows else tile, **scratch)
    return operands | dict(x=rows.codes, x_scale=rows.scales), rows.quantize


def columns_of_one(
    desc: GemmDesc,
    config: VectorConfig,
    operands: dict[str, Ref],
    out: Ref,
    tile: Scalar,
    first: Scalar,
    prepare: Callable[[], None] | None = None,
) -> None:
    """The columns from ``first`` on of a CTA, of one expert: of one weight, or of one of those side by side.

    prepare: as of ``_Weight``.
    """
    for index, (start, width) in enumerate(zip(desc.starts or (0,), desc.widths or (desc.n,), strict=True)):
        given = [name for name in ("w", "w_scale", "bias") if name in operands]
        own = operands | {name: operands[desc.of_each_weight(name)[index]] for name in given}

        def run(own=own, start=start, width=width):
            weight = _Weight(desc, config, own, prepare, first - start, width)
            _multiply_and_store(weight, tile, 0, out, start)

        pl.when((first >= start) & (first < start + width))(run) if desc.widths else run()


def _multiply_and_store(weight: "_Weight", tile: Scalar, expert: Scalar, out: Ref, start: int) -> None:
    """start: of this weight's columns in the output."""
    desc = weight.desc
    (values,) = weight.multiply([(tile, expert)])
    for column, value in zip(weight.columns, values, strict=True):
        _store(desc, weight.operands, out, column + (tile * desc.n + start), value)


def _sum_of_rows(
    desc: GemmDesc, config: VectorConfig, operands: dict[str, Ref], out: Ref, first: Scalar, scratch: dict[str, Ref]
) -> None:
    """Columns from ``first`` on of the weighted sum of one token's rows, in the order of tiles."""
    slots = range(desc.top_k)
    row_of = [operands["row_of"][0, slot] for slot in slots]
    weights = [operands["slot_weights"][0, slot].astype(jnp.float32) for slot in slots]
    tiles = []
    for tile in range(desc.rows):
        expert = operands["tile_expert"][tile]
        is_own = [row == tile for row in row_of]
        is_used = functools.reduce(lax.bitwise_or, is_own)
        parts = [jnp.where(own, weight, 0.0) for own, weight in zip(is_own, weights, strict=True)]
        factor = functools.reduce(jnp.add, parts)
        tiles.append((expert, is_used, factor))
    weight = _Weight(desc, config, *_quantizing(desc, operands, 0, scratch), first, desc.n)
    rows = weight.multiply([(tile, lax.max(expert, jnp.int32(0))) for tile, (expert, _, _) in enumerate(tiles)])
    for channel, column in enumerate(weight.columns):
        total = weight.zero
        for values, (_, is_used, factor) in zip(rows, tiles, strict=True):
            # A tile that is out of use may hold anything.
            used = lax.broadcast_in_dim(is_used, total.shape, ())
            total = total + jnp.where(used, values[channel] * factor, 0.0)
        if desc.shared_dtype is not None:
            total = total + weight.number("shared", column)
        _store(desc, operands, out, column, total)


class _Weight:
    """What a CTA multiplies single rows with: the columns from ``first`` on of a weight of N = ``n`` columns.

    prepare: makes the rows and their scales, where operands do not hold them before; weights are on their way then.
    """

    def __init__(
        self,
        desc: GemmDesc,
        config: VectorConfig,
        operands: dict[str, Ref],
        prepare: Callable[[], None] | None,
        first: Scalar,
        n: int,
    ):
        self.desc, self.config, self.operands, self.first, self.n = desc, config, operands, first, n
        self.prepare = prepare
        self.rows = operands["x"].shape[0]
        self.pieces = pieces_of_row(desc.k, desc.dtype)
        thread = simt.thread_index()
        self.lane, warp = thread & (LANES - 1), lax.shift_right_logical(thread, jnp.full_like(thread, 5))
        self.nothing = simt.constant(0)
        self.zero = lax.bitcast_convert_type(self.nothing, jnp.float32)
        self.columns = [warp + (first + channel * WARPS) for channel in range(config.channels)]

    def number(self, name: str, index: Value) -> Value:
        """Each thread's element of a vector of floats, in float32."""
        return simt.load_float(self.operands[name], index, self.nothing == 0, 0.0)

    def multiply(self, tiles: list[tuple[Scalar, Scalar]]) -> list[list[Value]]:
        """For each (tile, expert) the columns of its row: scaled, with bias and activation, in all lanes of their warp.

        Weights of several tiles are under way together, as many as threads have room for.
        """
        desc = self.desc
        sums, turns = [], 0
        if len(self.pieces) > MOST_PIECES:
            # Loads behind the loop are under way while rows are made.
            whole = sum(piece.vector == self.pieces[0].vector for piece in self.pieces)
            turns = (whole - (self.prepare is not None)) // CHUNK
        rest = self.pieces[turns * CHUNK :]
        at_once = max(1, MOST_LOADS // max(1, desc.projections * self.config.channels * len(rest)))
        for start in range(0, len(tiles), at_once):
            some = tiles[start : start + at_once]
            loaded = [(self._weights(expert, 0, rest), self._of_channels(expert)) for _, expert in some]
            if start == 0 and self.prepare is not None:
                self.prepare()
            for (tile, expert), (own, of_channels) in zip(some, loaded, strict=True):
                total = self._of_long_row(tile, expert, turns)
                values, scales, scale = self._row(tile, 0, rest)
                total = self._added(total, expert, 0, rest, own, values, scales)
                sums.append(self._finished(total, scale, of_channels))
        return sums

    def _of_long_row(self, tile: Scalar, expert: Scalar, turns: int) -> tuple[Value, ...]:
        """Sums over the part of a row that a loop of so many turns takes."""
        desc, some = self.desc, self.pieces[:CHUNK]
        zero = self.nothing if desc.accumulator == "int32" else self.zero

        def one_turn(i, sums):
            offset = i * (CHUNK * some[0].width)
            loaded = self._weights(expert, offset, some)
            values, scales, _ = self._row(tile, offset, some)
            return self._added(sums, expert, offset, some, loaded, values, scales)

        sums = (zero,) * (desc.projections * self.config.channels)
        return lax.fori_loop(0, rolled(turns, self.operands["num_tiles"]), one_turn, sums) if turns else sums

    def _matrices(self, expert: Scalar) -> list[Scalar]:
        return [expert * self.desc.projections + projection for projection in range(self.desc.projections)]

    def _weights(self, expert: Scalar, offset: Scalar, some: list[Piece]) -> list[list[Value]]:
        """Of each piece: those of each projection and channel."""

        def load(matrix, channel, piece):
            rows = pl.ds(self.first + channel * WARPS, WARPS)
            part = self.operands["w"].at[matrix, rows, pl.ds(offset + piece.start, piece.width)]
            return mosaic.load(part, layout=mosaic.row_a_warp(piece.vector), optimized=False)

        channels, matrices = range(self.config.channels), self._matrices(expert)
        return [[load(matrix, channel, piece) for matrix in matrices for channel in channels] for piece in some]

    def _row(
        self, tile: Scalar, offset: Scalar, some: list[Piece]
    ) -> tuple[list[Value], list[Value | None], Value | None]:
        """Pieces of a row as they are multiplied, the scales of each lane's columns there, and the row's scale."""
        desc, row = self.desc, 0 if self.rows == 1 else tile
        given = [
            mosaic.load(
                self.operands["x"].at[row, pl.ds(offset + piece.start, piece.width)],
                layout=mosaic.row_a_warp(piece.vector).reduce(0),
                optimized=False,
            )
            for piece in some
        ]
        scales: list[Value | None] = [None] * len(some)
        if desc.is_block_scaled:
            scales = [self.number("x_scale", self._groups(piece, offset) * self.rows + row) for piece in some]
        scale = None
        if desc.lhs_scale in ("row", "tensor"):
            scale = self.number("x_scale", self.nothing + (row if desc.lhs_scale == "row" else 0))
        return [*map(_wide, given)], scales, scale

    def _block_scale(self, piece: Piece, offset: Scalar, place: Scalar) -> Value:
        """Of each lane's columns. place: of the first block of these rows of weights."""
        return self.number("w_scale", self._groups(piece, offset) + place)

    def _groups(self, piece: Piece, offset: Scalar) -> Value:
        """The 128 columns of K to which each lane's belong."""
        column = self.lane * piece.vector + (offset + piece.start)
        return lax.shift_right_logical(column, jnp.full_like(column, SCALE_GROUP.bit_length() - 1))

    def _added(
        self,
        sums: tuple[Value, ...],
        expert: Scalar,
        offset: Scalar,
        some: list[Piece],
        loaded: list[list[Value]],
        values: list[Value],
        scales: list[Value | None],
    ) -> tuple[Value, ...]:
        """``sums`` of each projection and channel, and the products of some pieces."""
        k_groups, n_groups = -(-self.desc.k // SCALE_GROUP), -(-self.n // SCALE_GROUP)
        block = lax.div(self.first, jnp.int32(SCALE_GROUP))
        places = [(matrix * n_groups + block) * k_groups for matrix in self._matrices(expert)]
        factors: list[list[Value]] = []  # of each piece, by projection
        for piece, scale in zip(some, scales, strict=True):
            own = [] if scale is None else [scale * self._block_scale(piece, offset, place) for place in places]
            factors.append(own)
        for piece, of_piece, own, by_matrix in zip(some, loaded, values, factors, strict=True):
            products = [_dot(piece, one, own) for one in of_piece]
            if by_matrix:
                products = [value * by_matrix[i // self.config.channels] for i, value in enumerate(products)]
            sums = tuple(a + b for a, b in zip(sums, products, strict=True))
        return sums

    def _of_channels(self, expert: Scalar) -> list[tuple[Value | None, Value | None]]:
        """(scale, bias) of each projection and channel."""
        desc, found = self.desc, []
        for matrix in self._matrices(expert):
            for column in self.columns:
                scale = bias = None
                if desc.rhs_scale == "tensor":
                    scale = self.number("w_scale", self.nothing + matrix)
                if desc.rhs_scale == "channel":
                    scale = self.number("w_scale", column + matrix * self.n)
                if desc.bias_dtype is not None:
                    bias = self.number("bias", column + matrix * self.n)
                found.append((scale, bias))
        return found

    def _finished(
        self,
        sums: tuple[Value, ...],
        row_scale: Value | None,
        of_channels: list[tuple[Value | None, Value | None]],
    ) -> list[Value]:
        """Each channel of a row from the sums of its lanes."""
        desc, channels = self.desc, self.config.channels
        of_lanes = simt.warp_add if desc.accumulator == "int32" else simt.warp_sum
        values = []
        for total, (scale, bias) in zip(sums, of_channels, strict=True):
            value = of_lanes(total).astype(jnp.float32)
            value = value if row_scale is None else value * row_scale
            value = value if scale is None else value * scale
            values.append(value if bias is None else value + bias)
        return [
            values[channel] if desc.activation is None else desc.activation(*values[channel::channels])
            for channel in range(channels)
        ]


def _store(desc: GemmDesc, operands: dict[str, Ref], out: Ref, index: Value, value: Value) -> None:
    """What every lane of a warp has, by its first."""
    thread = simt.thread_index()
    if desc.requantize == "tensor":
        value = value.astype(jnp.bfloat16).astype(jnp.float32) if desc.is_rounded_first else value
        bits = simt.e4m3_bits(value * reciprocal(operands["out_scale"][0]))
    elif desc.out_dtype == "float32":
        bits = lax.bitcast_convert_type(value, jnp.int32)
    else:
        bits = simt.half_bits(value, desc.out_dtype)
    simt.store_bits(out, index, bits, (thread & (LANES - 1)) == 0, jnp.dtype(desc.stored_dtype).itemsize)


def _wide(values: Value) -> Value:
    """Codes and 16-bit numbers as they are multiplied: int8 as it is, others in float32."""
    if values.dtype == jnp.int8:
        return values
    values = values.astype(jnp.float16) if values.dtype == jnp.float8_e4m3fn else values
    return values.astype(jnp.float32)


# Below: one value a thread from the vectors that it holds, and back.


def _dot(piece: Piece, weights: Value, row: Value) -> Value:
    """Each thread's share of the products of (4, width) weights and a row of that width."""
    layout, is_int8 = mosaic.row_a_warp(piece.vector), weights.dtype == jnp.int8
    multiply = _dot_int8 if is_int8 else _dot_float32

    @simt.inline(layout, layout.reduce(0), result=_RESULT)
    def run(ctx, weights, row):
        del ctx
        (a,), (b,) = weights.registers.flat, row.registers.flat
        return simt.wrap(multiply(a, b))

    total = run(_wide(weights), row)
    return total if is_int8 else lax.bitcast_convert_type(total, jnp.float32)


def _dot_float32(a: ir.Value, b: ir.Value) -> ir.Value:
    (x, y), *others = zip(simt.elements_of(a), simt.elements_of(b), strict=True)
    total = arith.mulf(x, y)
    for x, y in others:
        total = llvm.intr_fma(x, y, total)
    return arith.bitcast(simt.integer(32), total)


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
    yield from simt.elements_of(words)
