"""Matrix times vector: tiles of one row, as a token by itself has them.

A CTA is one warpgroup. Each of its warps takes a few columns of one row of the output: it loads their weight rows into
registers, a vector a lane and piece of K, multiplies them with the row, and adds up over its lanes. Nothing is staged
in shared memory and no warp waits for another one, so loads are under way as soon as the launch begins. A CTA that
quantizes its row does so while its weights come; every warp quantizes the whole row for itself.

Numbers of 16 bits, to which e4m3 is widened, are multiplied by the tensor cores of the warp (``mma.sync``): the left
operand's rows are eight runs of four lanes' columns of one weight row, and of another one; the right operand's columns
are the same runs of the row of x. Of the products the diagonal is taken.
"""

import functools
from collections.abc import Callable, Sequence

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
from pallas_kernels.common.numerics import e4m3_group_scale, e4m3_row_scale, int8_token_factors, reciprocal
from pallas_kernels.common.numerics_sm90 import cast_int8_in, divisor, e4m3_codes
from pallas_kernels.common.row_kernel_sm90 import row_kernel
from pallas_kernels.common.sm90 import LANES, WARPS
from pallas_kernels.common.types import Kernel, Ref, Scalar, Value
from pallas_kernels.grouped_gemm.problem import SCALE_GROUP, GemmDesc, GroupedGemm
from pallas_kernels.grouped_gemm.vector import CHUNK, MOST_LOADS, MOST_PIECES, Piece, VectorConfig, pieces_of_row

_RESULT = plgpu.ShapeDtypeStruct((WARPS * LANES,), jnp.int32, simt.LANES)


def grouped_gemv_sm90(desc: GemmDesc, config: VectorConfig) -> Kernel:
    """The kernel: operands by name (``desc.operand_names``) -> (rows, N), or with ``desc.top_k`` their sum (1, N).

    config must pass ``vector_error``.
    """
    rows = 1 if desc.top_k else desc.rows
    out = jax.ShapeDtypeStruct((rows * desc.n,), desc.stored_dtype)
    body, ctas = functools.partial(_kernel, desc, config), rows * (desc.n // config.block_n)
    call = row_kernel(body, out, ctas, "grouped_gemm_of_one_row")
    flat = [name for name in desc.operand_names if name.startswith(("w_scale", "bias", "x_scale", "shared"))]

    def run(operands):
        given = {name: operands[name].reshape(-1) if name in flat else operands[name] for name in desc.operand_names}
        return call(*given.values()).reshape(rows, desc.n)

    return run


def _kernel(desc: GemmDesc, config: VectorConfig, *refs: Ref) -> None:
    mosaic.begin()
    operands = dict(zip(desc.operand_names, refs, strict=False))
    out = refs[-1]
    blocks = desc.n // config.block_n
    cta = lax.axis_index("cta")
    if desc.top_k:
        _sum_of_rows(desc, config, operands, out, cta * config.block_n)
        return
    tile, first = lax.div(cta, jnp.int32(blocks)), lax.rem(cta, jnp.int32(blocks)) * config.block_n
    if desc.num_experts == 1:
        columns_of_one(desc, config, operands, out, tile, first)
        return
    # In one condition, so that neither load waits for the other.
    expert = jnp.where(tile < operands["num_tiles"][0], operands["tile_expert"][tile], -1)

    @pl.when(expert >= 0)
    def _():
        weight = _Weight(desc, config, operands, first, desc.n)
        _multiply_and_store(weight, tile, expert, out, 0)


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

    prepare: makes the row, where operands do not hold it before; weights are on their way then.
    """

    def run(own, first, width, start):
        weight = _Weight(desc, config, own, first, width, prepare)
        _multiply_and_store(weight, tile, 0, out, start)

    for_own_weight(desc, ("w", "w_scale", "bias"), operands, first, run)


def for_own_weight(
    desc: GroupedGemm,
    names: Sequence[str],
    operands: dict[str, Ref],
    first: Scalar,
    run: Callable[[dict[str, Ref], Scalar, int, int], None],
) -> None:
    """``run(operands, column counted from the weight's first, N, start)`` of the weight that has output column
    ``first``. names: of operands that each weight has. Where there are several weights, ``run`` is in branches.
    """
    for index, (start, width) in enumerate(zip(desc.starts or (0,), desc.widths or (desc.n,), strict=True)):
        own = operands | {name: operands[desc.of_each_weight(name)[index]] for name in names if name in operands}
        one = functools.partial(run, own, first - start, width, start)
        pl.when((first >= start) & (first < start + width))(one) if desc.widths else one()


def _multiply_and_store(weight: "_Weight", tile: Scalar, expert: Scalar, out: Ref, start: int) -> None:
    """start: of this weight's columns in the output."""
    desc = weight.desc
    (values,) = weight.multiply([(tile, expert)])
    for column, value in zip(weight.columns, values, strict=True):
        _store(desc, weight.operands, out, column + (tile * desc.n + start), value)


def _sum_of_rows(desc: GemmDesc, config: VectorConfig, operands: dict[str, Ref], out: Ref, first: Scalar) -> None:
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
    weight = _Weight(desc, config, operands, first, desc.n)
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
    """What a CTA multiplies single rows with: the columns from ``first`` on of a weight of N = ``n`` columns."""

    def __init__(
        self,
        desc: GemmDesc,
        config: VectorConfig,
        operands: dict[str, Ref],
        first: Scalar,
        n: int,
        prepare: Callable[[], None] | None = None,
    ):
        self.desc, self.config, self.operands, self.first, self.n = desc, config, operands, first, n
        self.prepare = prepare
        self.pieces = pieces_of_row(desc.k, desc.dtype)
        thread = simt.thread_index()
        self.lane = thread & (LANES - 1)
        warp = simt.warp_of(thread)
        run = lax.shift_right_logical(self.lane, jnp.full_like(thread, 2))
        self.is_odd_run = (run & 1) != 0
        # Lane 4 g + j of a warp has columns 2 j and 2 j + 1 of row g of a product.
        self.is_on_diagonal = lax.shift_right_logical(run, jnp.full_like(thread, 1)) == (self.lane & 3)
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
            turns = sum(piece.vector == self.pieces[0].vector for piece in self.pieces) // CHUNK
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
        # A number that LLVM does not know: it unrolls no loop of so many turns.
        hidden = lax.min(jnp.int32(turns), self.operands["num_tiles"][0] + turns)
        return lax.fori_loop(0, hidden, one_turn, sums) if turns else sums

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
        desc, row = self.desc, 0 if self.desc.unpermuted_rows else tile
        given = [
            mosaic.load(
                self.operands["x"].at[row, pl.ds(offset + piece.start, piece.width)],
                layout=mosaic.row_a_warp(piece.vector).reduce(0),
                optimized=False,
            )
            for piece in some
        ]
        if desc.quantization != "none":
            return _quantized(desc, some, given)
        scales: list[Value | None] = [None] * len(some)
        if desc.is_block_scaled:
            room = 1 if desc.unpermuted_rows else desc.rows
            scales = [self.number("x_scale", self._groups(piece, offset) * room + row) for piece in some]
        scale = None
        if desc.lhs_scale in ("row", "tensor"):
            scale = self.number("x_scale", self.nothing + (row if desc.lhs_scale == "row" else 0))
        return [*map(_operand, given)], scales, scale

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
            products = self._dots(piece, of_piece, own)
            if by_matrix:
                products = [value * by_matrix[i // self.config.channels] for i, value in enumerate(products)]
            sums = tuple(a + b for a, b in zip(sums, products, strict=True))
        return sums

    def _dots(self, piece: Piece, weights: list[Value], row: Value) -> list[Value]:
        """Each thread's share of the products of (4, width) weights and a row of that width; of others than int8 what
        counts is in the threads on the diagonal."""
        if row.dtype == jnp.int8:
            return [_dot_int8(piece, one, row) for one in weights]
        shares = []
        for start in range(0, len(weights), 2):
            sums = _matrix_product(piece, weights[start : start + 2], row)
            shares += [jnp.where(self.is_odd_run, odd, even) for even, odd in zip(sums[::2], sums[1::2], strict=True)]
        return shares

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
            total = total if desc.accumulator == "int32" else jnp.where(self.is_on_diagonal, total, 0.0)
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
    thread, bits = simt.thread_index(), stored_bits(desc, operands, value)
    simt.store_bits(out, index, bits, (thread & (LANES - 1)) == 0, jnp.dtype(desc.stored_dtype).itemsize)


def stored_bits(desc: GemmDesc, operands: dict[str, Ref], value: Value) -> Value:
    """Of float32 as they are stored."""
    if desc.requantize == "tensor":
        value = value.astype(jnp.bfloat16).astype(jnp.float32) if desc.is_rounded_first else value
        return simt.e4m3_bits(value * reciprocal(operands["out_scale"][0]))
    return simt.float_bits(value, desc.out_dtype)


def _quantized(
    desc: GemmDesc, pieces: list[Piece], given: list[Value]
) -> tuple[list[Value], list[Value | None], Value | None]:
    """A row in ``pieces`` -> its codes as they are multiplied, the scales of each lane's groups, the row's scale."""
    values = [value.astype(jnp.float32) for value in given]
    largest = [_largest(piece, value) for piece, value in zip(pieces, values, strict=True)]
    if desc.lhs_scale == "group":
        amaxes = [_over_group(piece, bits) for piece, bits in zip(pieces, largest, strict=True)]
        scales = [e4m3_group_scale(amax, desc.quantization.endswith("_ue8m0")) for amax in amaxes]
        codes = [_codes(*one) for one in zip(pieces, values, scales, strict=True)]
        return codes, [*scales], None
    amax = lax.bitcast_convert_type(simt.warp_max(functools.reduce(jnp.maximum, largest)), jnp.float32)
    if desc.dtype == "int8":
        inverse, scale = int8_token_factors(amax)
        factors = [value * _spread(piece, inverse) for piece, value in zip(pieces, values, strict=True)]
        layouts = [mosaic.row_a_warp(piece.vector).reduce(0) for piece in pieces]
        return [*map(cast_int8_in, factors, layouts)], [None] * len(pieces), scale
    scale = e4m3_row_scale(amax)
    codes = [_codes(piece, value, scale) for piece, value in zip(pieces, values, strict=True)]
    return codes, [None] * len(pieces), scale


def _codes(piece: Piece, values: Value, scale: Value) -> Value:
    """e4m3 codes of a piece, as they are multiplied. scale: each thread's."""
    inverse, scale = (_spread(piece, one) for one in divisor(scale))
    return _operand(e4m3_codes(values, inverse, scale))


def _operand(values: Value) -> Value:
    """Codes and 16-bit numbers as they are multiplied: e4m3 in float16, others as they are."""
    return values.astype(jnp.float16) if values.dtype == jnp.float8_e4m3fn else values


def _over_group(piece: Piece, bits: Value) -> Value:
    """The largest of each 128 columns, as float32, in the threads that hold them. bits: of each thread's largest."""
    distance = min(SCALE_GROUP // piece.vector, LANES) // 2
    while distance:
        bits = jnp.maximum(bits, simt.of_lane(bits, distance))
        distance //= 2
    return lax.bitcast_convert_type(bits, jnp.float32)


# Below: one value a thread from the vectors that it holds, and back.


def _matrix_product(piece: Piece, weights: list[Value], row: Value) -> list[Value]:
    """Of one or two weights (4, width) and a row two numbers each: those of a thread of ``mma.sync``, in float32."""
    layout, count = mosaic.row_a_warp(piece.vector), len(weights)

    @simt.inline(*[layout] * count, layout.reduce(0), result=(_RESULT,) * (2 * count))
    def run(ctx, *operands):
        del ctx
        zero = simt.integer_constant(0, 32)
        # A step takes two words of each weight, or zeros for a second one that is not there, and two of the row.
        words = [_words(register) for operand in operands for register in operand.registers.flat]
        words = [own + [zero] * (len(own) % 2) for own in words]
        *left, right = words
        left = [*left, [zero] * len(right)][:2]
        sums = [zero] * 4
        for step in range(0, len(right), 2):
            rows = [own[step + half] for half in range(2) for own in left]
            sums = simt.mma(jnp.dtype(row.dtype).name, rows, right[step : step + 2], sums)
        return tuple(map(simt.wrap, sums[: 2 * count]))

    found = run(*map(_operand, weights), row)
    return [lax.bitcast_convert_type(one, jnp.float32) for one in found]


def _dot_int8(piece: Piece, weights: Value, row: Value) -> Value:
    layout = mosaic.row_a_warp(piece.vector)

    @simt.inline(layout, layout.reduce(0), result=_RESULT)
    def run(ctx, weights, row):
        del ctx
        (a,), (b,) = weights.registers.flat, row.registers.flat
        total = simt.integer_constant(0, 32)
        for words in zip(_words(a), _words(b), strict=True):
            total = simt.asm([*words, total], "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", has_result=True)
        return simt.wrap(total)

    return run(weights, row)


def _words(register: ir.Value) -> list[ir.Value]:
    """An MLIR vector's words of 32 bits; of 16 bits one with zeros above."""
    kind = ir.VectorType(register.type)
    bits = kind.shape[0] * mgpu.utils.bitwidth(kind.element_type)
    if bits == 16:
        return [arith.extui(simt.integer(32), mgpu.utils.bitcast(register, simt.integer(16)))]
    words = mgpu.utils.bitcast(register, ir.VectorType.get((bits // 32,), simt.integer(32)))
    return _elements(words)


def _elements(register: ir.Value) -> list[ir.Value]:
    (length,) = ir.VectorType(register.type).shape
    return [vector.extract(register, [], [i]) for i in range(length)]


def _largest(piece: Piece, values: Value) -> Value:
    """The bits of each thread's largest magnitude of a row's piece in float32. NaN is above all."""

    @simt.inline(mosaic.row_a_warp(piece.vector).reduce(0), result=_RESULT)
    def run(ctx, values):
        del ctx
        (register,) = values.registers.flat
        sign = simt.integer_constant(0x7FFFFFFF, 32)
        bits = [arith.andi(arith.bitcast(simt.integer(32), x), sign) for x in _elements(register)]
        return simt.wrap(functools.reduce(arith.maxsi, bits))

    return run(values)


def _spread(piece: Piece, value: Value) -> Value:
    """Each thread's float32 ``value`` in all that it holds of a row's piece."""
    layout = mosaic.row_a_warp(piece.vector).reduce(0)

    @simt.inline(simt.LANES, result=plgpu.ShapeDtypeStruct((piece.width,), jnp.float32, layout))
    def run(ctx, value):
        del ctx
        kind = ir.VectorType.get((piece.vector,), ir.F32Type.get())
        register = vector.broadcast(kind, simt.value_of(value))
        shape = layout.to_mgpu().registers_shape((piece.width,))
        registers = np.full(shape, register, dtype=object)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return run(value)
