"""From the words of a block to register operands of ``wgmma`` and ``mma.sync``, in inline PTX; the interpreter cannot
run these.

``registers_of_words`` has a twin in plain arrays, ``format.from_words`` with ``reference.dequantized``.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common.types import TileRef, Value
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N, PackedFormat, rotations_of, zero_term

IrValue: TypeAlias = Any  # an MLIR value or memory reference; the tests run this file on NumPy arrays of threads
OfPart: TypeAlias = Callable[[int, int], Any]  # (step of K, half of the rows) -> a register, or two


def load_block(
    fmt: PackedFormat,
    block: TileRef,
    width: int,
    rows: tuple[int, ...] = (),
    zeros: TileRef = None,
    scales: TileRef = None,
    wide_scales: TileRef = None,
    *,
    for_mma: bool = False,
    has_bf16_mul: bool = True,
) -> tuple[Value, ...]:
    """The operands of one block, a 1 being ``fmt.unit``, with scales ``fmt.folded_unit``: block_k / width arrays (64,
    width) of ``fmt.operand``, side by side along K.

    block: shared memory, ``fmt.block_shape`` int32. zeros, scales: shared memory (groups, 64) of ``fmt.operand``:
    ``zero_term`` of each channel, what the numbers are multiplied with, rounding once. rows: their row for each 16 of
    K. for_mma: the layout is that of ``mma.sync``, where a thread holds the same elements. has_bf16_mul: two bfloat16
    are multiplied in one instruction.
    """
    layout: Any
    plgpu_layout: Any
    layout, plgpu_layout, columns = (
        (mgpu.WGMMA_LAYOUT_8BIT, plgpu.Layout.WGMMA_8BIT, 16)
        if fmt.is_8bit
        else (mgpu.WGMMA_LAYOUT, plgpu.Layout.WGMMA, 8)
    )
    if for_mma:
        layout, plgpu_layout = _mma_layouts(fmt.operand)
    part: Any = plgpu.ShapeDtypeStruct((BLOCK_N, width), jnp.dtype(fmt.operand), plgpu_layout)
    result = (part,) * (fmt.block_k // width)
    vectors = [vector for vector in (zeros, scales, wide_scales) if vector is not None]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (1 + len(vectors)), return_type=result)
    def load(ctx, block, *vectors) -> Any:
        del ctx
        thread = _lane()
        words, scale_words = _words(fmt, block, thread), _scale_words(fmt, block, thread)
        parts = None
        if wide_scales is not None:
            *vectors, last = vectors
            parts = _two_parts(last, thread, rows)
        per_group = [_per_channel(fmt, vector, thread, rows) for vector in vectors]
        zero = per_group.pop(0) if zeros is not None else None
        scale = per_group.pop(0) if scales is not None else None
        if scale is not None and fmt.scales_integers:
            scale = _scaled_units(fmt, scale, rows, has_bf16_mul)
        registers = [np.empty(layout.registers_shape((BLOCK_N, width)), dtype=object) for _ in result]
        found = registers_of_words(fmt, words, scale_words, zero, scale, parts, has_bf16_mul=has_bf16_mul)
        for (q, k_half, row_half), value in found.items():
            place, index = divmod(2 * q + k_half, width // columns)
            if for_mma:  # steps of K, their halves, halves of the rows
                registers[place].flat[2 * index + row_half] = _as_operand(fmt.operand, value)
                continue
            where = [0] * registers[place].ndim
            where[1], where[4] = index, row_half
            registers[place][tuple(where)] = _as_operand(fmt.operand, value)
        is_signed = True if fmt.operand == "int8" else None
        return tuple(mgpu.FragmentedArray(_registers=r, _layout=layout, _is_signed=is_signed) for r in registers)

    return load(block, *vectors)


def registers_of_words(
    fmt: PackedFormat,
    words: list[IrValue],
    scale_words: list[IrValue],
    zero: OfPart | None = None,
    scale: OfPart | None = None,
    parts: OfPart | None = None,
    *,
    has_bf16_mul: bool = True,
) -> dict[tuple[int, int, int], IrValue]:
    """(step of K, half of the step, half of the rows) -> a register of a thread's fragment, from its words of a block.

    scale_words: of its channel and the one 8 further down, where the block ends in scales. zero, scale, parts: a
    group's zero term (``spread``), what operands are multiplied with in place of the block's scales (``_scaled_units``
    where ``fmt.scales_integers``), and float32 factors as two numbers.
    """
    factor, units = (None, scale) if fmt.scales_integers else (scale, None)
    if fmt.is_8bit and fmt.scale_words:
        zero = _tables(scale_words)
    elif scale is None:
        factor = _block_scales(fmt, scale_words)
    convert = _CONVERT_8BIT[fmt.element, fmt.operand] if fmt.is_8bit else _CONVERT[fmt.element]
    registers = {}
    for q, k_half, row_half in np.ndindex(4, 2, 2):
        if fmt.bits == 4 and not fmt.is_8bit:
            word, pair = words[q], 2 * k_half + row_half
        else:
            word, pair = words[2 * q + k_half], row_half
        if units is not None:
            value = _from_integer(fmt, word, pair, *units(q, row_half))
        else:
            value = convert(fmt, word, pair, None if zero is None else zero(q, row_half))
        if factor is not None:
            value = _product(fmt.operand, value, factor(q, row_half), has_bf16_mul)
        if parts is not None:
            text = "{ .reg .b32 t; mul.rn.bf16x2 t, $1, $3; fma.rn.bf16x2 $0, $1, $2, t; }"
            value = _asm([value, *parts(q, row_half)], text)
        registers[q, k_half, row_half] = value
    return registers


def _lane() -> IrValue:
    return _asm([], "{ .reg .b32 t; mov.u32 t, %tid.x; and.b32 $0, t, 127; }")


def _words(fmt: PackedFormat, block: TileRef, thread: IrValue) -> list[IrValue]:
    """All words of a thread: one 16-byte load for every 512 of the block."""
    pointer = mgpu.utils.memref_ptr(block)
    four = ir.VectorType.get((4,), _i32())
    words = []
    for first in range(0, BLOCK_N * fmt.block_k * fmt.bits // 32, 512):
        offset = arith.addi(arith.muli(thread, _constant(4)), _constant(first))
        loaded = llvm.load(four, _element(pointer, offset), alignment=16)
        words += [vector.extract(loaded, [], [i]) for i in range(4)]
    return words


def _block_scales(fmt: PackedFormat, words: list[IrValue]) -> OfPart | None:
    """(step of K, half of the rows) -> the block's own scale in both halves of a register, or what moved bits lack."""
    if fmt.element in _EXPONENT_SHIFT and not fmt.scale_words:
        shift = _register(_EXPONENT_SHIFT[fmt.element][fmt.operand])
        return lambda q, row_half: shift
    if not fmt.scale_words:
        return None
    two_scales = functools.cache(lambda word, place: _two_scales(fmt, words[word], place))

    def scale(q, row_half):
        byte = q if fmt.scale == "e4m3" else 2 * row_half + q // 2
        return _one_of(two_scales(row_half % len(words), byte % 2), byte // 2)

    return scale


def _two_scales(fmt: PackedFormat, word: IrValue, place: int) -> IrValue:
    """Scales place and place + 2 of a word of four as bfloat16: powers of two as they are, e5m3 with exponents from 224
    on, which is 2**106 times the scale.
    """
    if place:
        word = _asm([word], "shf.r.wrap.b32 $0, $1, $1, 8;")
    mask, exponent = {"e4m3": (0x0FF00FF0, 0x70007000), "e8m0": (0x7F807F80, 0)}[fmt.scale]
    return _asm([word], f"lop3.b32 $0, $1, {mask:#x}, {exponent:#x}, 0xEA;")


def _one_of(two: IrValue, half: int) -> IrValue:
    """One half of a register in both; ptxas makes it part of the instruction that multiplies."""
    return _asm([two], f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, $1; mov.b32 $0, {{{'lh'[half]}, {'lh'[half]}}}; }}")


def _scale_words(fmt: PackedFormat, block: TileRef, thread: IrValue) -> list[IrValue]:
    """The scales of a thread's row and of the row 8 further down: a word each of four, or one of two and two; none
    where the block ends in none.
    """
    if not fmt.scale_words:
        return []
    rows, columns = fmt.block_shape
    count = fmt.scale_words // 32
    entry = arith.muli(arith.shrui(thread, _constant(2)), _constant(count))
    offset = arith.addi(entry, _constant(rows * columns - fmt.scale_words))
    kind = ir.VectorType.get((count,), _i32())
    loaded = llvm.load(kind, _element(mgpu.utils.memref_ptr(block), offset), alignment=4 * count)
    return [vector.extract(loaded, [], [i]) for i in range(count)]


def _tables(words: list[IrValue]) -> OfPart:
    """(step of K, half of the rows) -> the eight magnitudes of e2m1 in e4m3, times the group's power of two: 254 is the
    channel's largest and stands for 2**6; under 2**-5 they are zeros.
    """
    return functools.cache(lambda q, row_half: _table(words[row_half], q))


def _table(word: IrValue, byte: int) -> tuple[IrValue, IrValue]:
    low, high = (_asm([word], _table_text(byte, each, step)) for each, step in _TABLE)
    return low, high


# 0, .5, 1, 1.5 and 2, 3, 4, 6 in e4m3, and what one more in their exponents adds.
_TABLE = ((0x3C383000, 0x08080800), (0x4C484440, 0x08080808))


def _table_text(byte: int, at_one: int, step: int) -> str:
    start = (at_one - 248 * step) % (1 << 32)
    return (
        f"{{ .reg .b32 e, t; .reg .pred p; prmt.b32 e, $1, 0, 0x444{byte}; mad.lo.u32 t, e, {step:#x}, {start:#x};"
        " setp.gt.u32 p, e, 242; selp.b32 $0, t, 0, p; }"
    )


def _channel(thread: IrValue) -> IrValue:
    """Of a thread's numbers in the first half of the rows; those in the second are of the channel 8 further down."""
    warp, row = arith.shrui(thread, _constant(5)), arith.andi(arith.shrui(thread, _constant(2)), _constant(7))
    return arith.addi(arith.muli(warp, _constant(16)), row)


def _per_channel(fmt: PackedFormat, vector: TileRef, thread: IrValue, rows: tuple[int, ...]) -> OfPart:
    """(step of K, half of the rows) -> the channel's number in all parts of a register."""
    pointer, channel = mgpu.utils.memref_ptr(vector), _channel(thread)
    bits = 8 if fmt.is_8bit else 16
    kind = ir.IntegerType.get_signless(bits)

    @functools.cache
    def number(group, row_half):
        at = arith.addi(channel, _constant(BLOCK_N * group + 8 * row_half))
        return spread(fmt, arith.extui(_i32(), llvm.load(kind, _element(pointer, at, kind), alignment=bits // 8)))

    return lambda q, row_half: number(rows[q], row_half)


def _scaled_units(fmt: PackedFormat, scale: OfPart, rows: tuple[int, ...], has_bf16_mul: bool) -> OfPart:
    """(step of K, half of the rows) -> (zero term, units by place) of ``_from_integer``, times the group's scale."""
    less = fmt.folded_unit / fmt.unit
    numbers = (zero_term(fmt, 0.0), *(_unit(fmt, place) for place in range(8 // fmt.bits)))
    constants = [_register(_twice(fmt.operand, number * less)) for number in numbers]

    @functools.cache
    def of_group(group, row_half):
        own = scale(rows.index(group), row_half)
        term, *units = (_product(fmt.operand, own, constant, has_bf16_mul) for constant in constants)
        return term, units

    return lambda q, row_half: of_group(rows[q], row_half)


def spread(fmt: PackedFormat, bits: IrValue) -> IrValue:
    """A number of ``fmt.operand`` in all parts of a register."""
    return _asm([bits], "prmt.b32 $0, $1, 0, 0;") if fmt.is_8bit else _one_of(bits, 0)


def _two_parts(vector: TileRef, thread: IrValue, rows: tuple[int, ...]) -> OfPart:
    """(step of K, half of the rows) -> the channel's float32 rounded to bfloat16, and what that lacks, each twice."""
    pointer, channel = mgpu.utils.memref_ptr(vector), _channel(thread)

    @functools.cache
    def number(group, row_half):
        at = arith.addi(channel, _constant(BLOCK_N * group + 8 * row_half))
        loaded = llvm.load(_i32(), _element(pointer, at), alignment=4)
        high = _asm([loaded], "{ .reg .f32 s; mov.b32 s, $1; cvt.rn.bf16x2.f32 $0, s, s; }")
        text = (
            "{ .reg .b32 t; .reg .f32 s, h; mov.b32 s, $1; and.b32 t, $2, 0xFFFF0000; mov.b32 h, t;"
            " sub.rn.f32 h, s, h; cvt.rn.bf16x2.f32 $0, h, h; }"
        )
        return high, _asm([loaded, high], text)

    return lambda q, row_half: number(rows[q], row_half)


def _from_integer(
    fmt: PackedFormat, word: IrValue, pair: int, term: IrValue, units: Sequence[IrValue] | None = None
) -> IrValue:
    """Unsigned codes by masks, then one sum or product and sum: (u + zero_term) * fmt.unit, or with what term and units
    hold in place of both.
    """
    byte, place = divmod(pair, 8 // fmt.bits)
    if byte:
        word = arith.shrui(word, _constant(8))
    mask = ((1 << fmt.bits) - 1 << fmt.bits * place) * 0x10001
    if term is None:
        term = _register(_twice(fmt.operand, zero_term(fmt, 0.0)))
    if fmt.operand == "bfloat16":
        # The last bit of the exponent is where the mantissa's eighth would be: the least normal numbers go on counting.
        unit = _register(_twice(fmt.operand, _unit(fmt, place))) if units is None else units[place]
        text = f"{{ .reg .b32 t; and.b32 t, $1, {mask:#x}; fma.rn.bf16x2 $0, t, $2, $3; }}"
        return _asm([word, unit, term], text)
    placed = _asm([word], f"lop3.b32 $0, $1, {mask:#x}, 0x64006400, 0xEA;")  # 1024 and what the last bits count
    if not place:
        return _asm([placed, term], "add.rn.f16x2 $0, $1, $2;")
    # A code counts 16 here, but 1024 / 16 is 960 less.
    less, unit = _twice(fmt.operand, 960.0), _twice(fmt.operand, 1 / 16)
    other = _asm([term], f"{{ .reg .b32 t; mov.b32 t, {less:#x}; add.rn.f16x2 $0, $1, t; }}")
    return _asm([placed, other], f"{{ .reg .b32 u; mov.b32 u, {unit:#x}; fma.rn.f16x2 $0, $1, u, $2; }}")


def _unit(fmt: PackedFormat, place: int) -> float:
    """What a code at ``place``, as the bits of a bfloat16, is multiplied with."""
    return 2.0 ** (127 - fmt.bits * place)


def _register(bits: int) -> IrValue:
    return _asm([], f"mov.b32 $0, {bits:#x};")


def _twice(dtype: str, value: float) -> int:
    """A number in both halves of a register."""
    return int(np.asarray(value, jnp.dtype(dtype)).view(np.uint16)) * 0x10001


def _from_float(fmt: PackedFormat, word: IrValue, pair: int, term: IrValue) -> IrValue:
    """Sign and magnitude rotated to their places, where they mean ``_EXPONENT_SHIFT`` less than the value."""
    del term
    rotations = rotations_of(fmt)
    value = None
    for rotation, mask in rotations.masks(pair).items():
        rotated = _rotated(word, rotation, rotations.wrap)
        if value is None:
            value = _asm([rotated], f"and.b32 $0, $1, {mask:#x};")
        else:
            value = _asm([rotated, value], f"lop3.b32 $0, $1, {mask:#x}, $2, 0xEA;")
    return value


def _rotated(word: IrValue, bits: int, wrap: int) -> IrValue:
    """The word rotated to the left, but for low bits that nobody takes: a shift takes another pipe than a rotation."""
    if bits >= wrap:
        word, bits = _asm([word], f"shf.l.wrap.b32 $0, $1, $1, {wrap};"), bits - wrap
    return _asm([word], f"shl.b32 $0, $1, {bits};") if bits else word


def _to_int8(fmt: PackedFormat, word: IrValue, part: int, offset: IrValue) -> IrValue:
    """Nibbles at the top of their bytes: 16 times the value. With zero points unsigned codes less theirs, -15 to 15,
    byte by byte, where 128 keeps each difference from borrowing.
    """
    del fmt
    if offset is not None:
        word = _asm([word], "shr.u32 $0, $1, 4;") if not part else word
        high = _asm([word], "lop3.b32 $0, $1, 0x0F0F0F0F, 0x80808080, 0xEA;")
        return _asm([high, offset], "{ .reg .b32 t; sub.u32 t, $1, $2; xor.b32 $0, t, 0x80808080; }")
    return _asm(
        [word], f"{{ .reg .b32 t; {'shl.b32 t, $1, 4;' if part else 'mov.b32 t, $1;'} and.b32 $0, t, 0xF0F0F0F0; }}"
    )


def _to_e4m3(fmt: PackedFormat, word: IrValue, part: int, offset: IrValue) -> IrValue:
    """Two's complement nibbles by two tables of eight bytes, 0 to 7 and -8 to -1; the sign bit chooses between them."""
    del fmt, offset
    return _asm(
        [word],
        f"{{ .reg .b32 x, i, p, n, s; {'shr.u32 x, $1, 16;' if part else 'mov.b32 x, $1;'} and.b32 i, x, 0x77777777;"
        " prmt.b32 p, 0x44403800, 0x4E4C4A48, i; prmt.b32 n, 0xCACCCED0, 0xB8C0C4C8, i;"
        " shr.u32 s, x, 1; lop3.b32 s, s, 0x44444444, 0x32103210, 0xEA; prmt.b32 $0, p, n, s; }",
    )


def _from_e2m1_by_table(fmt: PackedFormat, word: IrValue, part: int, table: tuple[IrValue, IrValue]) -> IrValue:
    """Magnitudes from the group's table; signs are moved to the top of their bytes."""
    del fmt
    shift, sign = ("shr.u32 i, $1, 16;", "shl.b32 s, $1, 4;") if part else ("mov.b32 i, $1;", "mov.b32 s, $1;")
    return _asm(
        [word, *table],
        f"{{ .reg .b32 i, s, m; {shift} {sign} and.b32 i, i, 0x7777; prmt.b32 m, $2, $3, i;"
        " lop3.b32 $0, s, 0x80808080, m, 0xEA; }",
    )


_CONVERT_8BIT: dict[tuple[str, str], Callable[..., IrValue]] = {
    ("int4", "int8"): _to_int8,
    ("int4", "float8_e4m3fn"): _to_e4m3,
    ("e2m1", "float8_e4m3fn"): _from_e2m1_by_table,
}
_CONVERT: dict[str, Callable[..., IrValue]] = {
    "int4": _from_integer,
    "int8": _from_integer,
    "e2m1": _from_float,
    "e4m3": _from_float,
}
# 2**126 and 2**120 in bfloat16, 2**8 in float16: from the moved bits to the value.
_EXPONENT_SHIFT = {"e2m1": {"bfloat16": 0x7E807E80}, "e4m3": {"bfloat16": 0x7B807B80, "float16": 0x5C005C00}}


def _mma_layouts(operand: str) -> tuple[Any, Any]:
    """Of the left operand of ``mma.sync``, four warps along its rows: Mosaic's and Pallas' name. jax 0.10 has none."""
    dtype = jnp.dtype(operand)
    mosaic: Any = mgpu
    pallas: Any = plgpu.Layout
    return mosaic.MMALayouts(dtype, m_warps=4).lhs, pallas.MMA_LHS(dtype, m_warps=4)


def _product(operand: str, a: IrValue, b: IrValue, has_bf16_mul: bool) -> IrValue:
    if operand == "bfloat16" and not has_bf16_mul:
        return _asm([a, b], "{ .reg .b32 n; mov.b32 n, 0x80008000; fma.rn.bf16x2 $0, $1, $2, n; }")
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[operand]
    return _asm([a, b], f"mul.rn.{kind} $0, $1, $2;")


def _asm(operands: list[IrValue], text: str) -> IrValue:
    constraints = "=r" + ",r" * len(operands)
    return llvm.inline_asm(_i32(), operands, text, constraints, has_side_effects=False, asm_dialect=0)


def _i32() -> IrValue:
    return ir.IntegerType.get_signless(32)


def _as_operand(operand: str, register: IrValue) -> IrValue:
    """32 bits as a vector of the operand's elements."""
    element = mgpu.utils.dtype_to_ir_type(jnp.dtype(operand))
    count = 4 // jnp.dtype(operand).itemsize
    if count == 4:
        register = mgpu.utils.bitcast(register, ir.VectorType.get((4,), ir.IntegerType.get_signless(8)))
    return register if operand == "int8" else mgpu.utils.bitcast(register, ir.VectorType.get((count,), element))


def _constant(value: int) -> IrValue:
    return arith.constant(_i32(), ir.IntegerAttr.get(_i32(), value))


def _element(pointer: IrValue, index: IrValue, kind: IrValue = None) -> IrValue:
    return mgpu.utils.getelementptr(pointer, [index], kind or _i32())
