"""From the words of a block to the register operand of ``wgmma``, in inline PTX; the interpreter cannot run these.

``load_block`` has a twin in plain arrays, ``blocks.unpack_words`` with ``decode``: both give the same operands.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.grouped_gemm_packed.blocks import BLOCK_N, PackedFormat

# 128 and 1024 twice: numbers whose last mantissa bits count ones.
_MAGIC = {"bfloat16": 0x43004300, "float16": 0x64006400}


def load_block(
    fmt: PackedFormat, block: Any, width: int, rows: tuple[int, ...] = (), zeros: Any = None, scales: Any = None
) -> Any:
    """The operands of one block: block_k / width arrays (64, width) of ``fmt.operand``, side by side along K.

    block: shared memory, ``fmt.block_shape`` int32. zeros, scales: shared memory (groups, 64) of ``fmt.operand``: what
    is subtracted from the codes of each channel (``zero_offset``), what the difference is multiplied with, rounding
    once. rows: their row for each 16 of K.
    """
    layout, plgpu_layout, columns = (
        (mgpu.WGMMA_LAYOUT_8BIT, plgpu.Layout.WGMMA_8BIT, 16)
        if fmt.is_8bit
        else (mgpu.WGMMA_LAYOUT, plgpu.Layout.WGMMA, 8)
    )
    part: Any = plgpu.ShapeDtypeStruct((BLOCK_N, width), jnp.dtype(fmt.operand), plgpu_layout)
    result = (part,) * (fmt.block_k // width)
    vectors = [vector for vector in (zeros, scales) if vector is not None]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (1 + len(vectors)), return_type=result)
    def load(ctx, block, *vectors):
        del ctx
        thread = _lane()
        words = _words(fmt, block, thread)
        per_group = [_per_channel(fmt, vector, thread, rows) for vector in vectors]
        offset = per_group.pop(0) if zeros is not None else None
        is_folded = fmt.is_8bit and fmt.scale_words > 0
        if is_folded:
            offset, factor = _tables(fmt, block, thread), None
        else:
            factor = per_group.pop(0) if scales is not None else _block_scales(fmt, block, thread)
        registers = [np.empty(layout.registers_shape((BLOCK_N, width)), dtype=object) for _ in result]
        convert = _CONVERT_8BIT[fmt.element, fmt.operand] if fmt.is_8bit else _CONVERT[fmt.element]
        for q, k_half, row_half in np.ndindex(4, 2, 2):
            if fmt.bits == 4 and not fmt.is_8bit:
                word, pair = words[q], 2 * k_half + row_half
            else:
                word, pair = words[2 * q + k_half], row_half
            value = convert(fmt.operand, word, pair, None if offset is None else offset(q, row_half))
            if factor is not None:
                value = _binary(fmt.operand, "mul", value, factor(q, row_half))
            place, index = divmod(2 * q + k_half, width // columns)
            where = [0] * registers[place].ndim
            where[1], where[4] = index, row_half
            registers[place][tuple(where)] = _as_operand(fmt.operand, value)
        is_signed = True if fmt.operand == "int8" else None
        return tuple(mgpu.FragmentedArray(_registers=r, _layout=layout, _is_signed=is_signed) for r in registers)

    return load(block, *vectors)


def _lane() -> Any:
    return _asm([], "{ .reg .b32 t; mov.u32 t, %tid.x; and.b32 $0, t, 127; }")


def _words(fmt: PackedFormat, block: Any, thread: Any) -> list[Any]:
    """All words of a thread: one 16-byte load for every 512 of the block."""
    pointer = mgpu.utils.memref_ptr(block)
    four = ir.VectorType.get((4,), _i32())
    words = []
    for first in range(0, BLOCK_N * fmt.block_k * fmt.bits // 32, 512):
        offset = arith.addi(arith.muli(thread, _constant(4)), _constant(first))
        loaded = llvm.load(four, _element(pointer, offset), alignment=16)
        words += [vector.extract(loaded, [], [i]) for i in range(4)]
    return words


def _block_scales(fmt: PackedFormat, block: Any, thread: Any) -> Callable[[int, int], Any] | None:
    """(step of K, half of the rows) -> the block's own scale in both halves of a register, or what moved bits lack."""
    if fmt.element in _EXPONENT_SHIFT and not fmt.scale_words:
        shift = _asm([], f"mov.b32 $0, {_EXPONENT_SHIFT[fmt.element][fmt.operand]:#x};")
        return lambda q, row_half: shift
    if not fmt.scale_words:
        return None
    rows, columns = fmt.block_shape
    pointer = mgpu.utils.memref_ptr(block)
    entry = arith.shrui(thread, _constant(2))
    first = rows * columns - fmt.scale_words
    made: dict[tuple[int, int], Any] = {}
    if fmt.scale == "e4m3":
        words = _scale_words(fmt, block, thread)

        def scale(q, row_half):
            # e5m3 << 4 is a bfloat16 with the exponent's low bits; the constant makes it 2**119 times the scale.
            if (q, row_half) not in made:
                text = f"{{ .reg .b32 t; prmt.b32 t, $1, 0, 0x4{q}4{q}; mad.lo.u32 $0, t, 16, 0x76807680; }}"
                made[q, row_half] = _asm([words[row_half]], text)
            return made[q, row_half]

        return scale
    word = llvm.load(_i32(), _element(pointer, arith.addi(entry, _constant(first))), alignment=4)

    def power(q, row_half):
        byte = 2 * row_half + q // 2
        if (byte, 0) not in made:
            made[byte, 0] = _asm([word], f"{{ .reg .b32 t; prmt.b32 t, $1, 0, 0x4{byte}4{byte}; shl.b32 $0, t, 7; }}")
        return made[byte, 0]

    return power


def _scale_words(fmt: PackedFormat, block: Any, thread: Any) -> list[Any]:
    """The four scales of a thread's row, and of the row 8 further down."""
    rows, columns = fmt.block_shape
    entry = arith.shrui(thread, _constant(2))
    offset = arith.addi(arith.muli(entry, _constant(2)), _constant(rows * columns - fmt.scale_words))
    loaded = llvm.load(ir.VectorType.get((2,), _i32()), _element(mgpu.utils.memref_ptr(block), offset), alignment=8)
    return [vector.extract(loaded, [], [i]) for i in range(2)]


def _tables(fmt: PackedFormat, block: Any, thread: Any) -> Callable[[int, int], tuple[Any, Any]]:
    """(step of K, half of the rows) -> the eight magnitudes of e2m1 in e4m3, times the group's power of two: 254 is the
    channel's largest and stands for 2**6; under 2**-5 they are zeros.
    """
    words = _scale_words(fmt, block, thread)
    made: dict[tuple[int, int], tuple[Any, Any]] = {}

    def table(q, row_half):
        if (q, row_half) not in made:
            made[q, row_half] = _asm_table(words[row_half], q)
        return made[q, row_half]

    return table


def _asm_table(word: Any, byte: int) -> tuple[Any, Any]:
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


def _per_channel(fmt: PackedFormat, vector: Any, thread: Any, rows: tuple[int, ...]) -> Callable[[int, int], Any]:
    """(step of K, half of the rows) -> the channel's number in all parts of a register."""
    pointer = mgpu.utils.memref_ptr(vector)
    warp, row = arith.shrui(thread, _constant(5)), arith.andi(arith.shrui(thread, _constant(2)), _constant(7))
    channel = arith.addi(arith.muli(warp, _constant(16)), row)
    bits, spread = (8, 0) if fmt.is_8bit else (16, 0x1010)
    kind = ir.IntegerType.get_signless(bits)
    made: dict[tuple[int, int], Any] = {}

    def number(q, row_half):
        key = (rows[q], row_half)
        if key not in made:
            at = arith.addi(channel, _constant(BLOCK_N * rows[q] + 8 * row_half))
            loaded = llvm.load(kind, _element(pointer, at, kind), alignment=bits // 8)
            made[key] = _asm([arith.extui(_i32(), loaded)], f"prmt.b32 $0, $1, 0, {spread:#x};")
        return made[key]

    return number


def _from_int4(operand: str, word: Any, pair: int, offset: Any) -> Any:
    """Unsigned codes u = q + 8 -> 128 + u by its bits, minus 136 or 136 + zero point."""
    if pair:
        word = arith.shrui(word, _constant(4 * pair))
    placed = _asm([word], f"lop3.b32 $0, $1, 0x000F000F, {_MAGIC[operand]:#x}, 0xEA;")
    if offset is None:
        offset = _asm([], f"mov.b32 $0, {_SIGN_OFFSET[operand]:#x};")
    return _binary(operand, "sub", placed, offset)


def _from_int8(operand: str, word: Any, pair: int, offset: Any) -> Any:
    """Two's complement bytes: 128 + low seven bits, minus 128 or 256, which is the sign bit at the exponent's end."""
    if pair:
        word = arith.shrui(word, _constant(8))
    if operand == "float16":
        # Unsigned by flipping the sign bit: 1024 + (q + 128), minus 1152.
        placed = _asm([word], "{ .reg .b32 t; and.b32 t, $1, 0x00FF00FF; xor.b32 $0, t, 0x64806480; }")
        value = _binary(operand, "sub", placed, _asm([], "mov.b32 $0, 0x64806480;"))
    else:
        low = _asm([word], "lop3.b32 $0, $1, 0x007F007F, 0x43004300, 0xEA;")
        sign = _asm([word], "lop3.b32 $0, $1, 0x00800080, 0x43004300, 0xEA;")
        value = _binary(operand, "sub", low, sign)
    return value if offset is None else _binary(operand, "sub", value, offset)


def _from_e2m1(operand: str, word: Any, pair: int, offset: Any) -> Any:
    """Sign and magnitude moved to where they mean 2**-126 times the value."""
    del operand, offset
    if pair < 3:
        text = {0: "", 1: "shl.b32 t, $1, 3;", 2: "shl.b32 t, $1, 6;"}[pair]
        source = "t" if text else "$1"
        return _asm([word], f"{{ .reg .b32 t; {text} and.b32 $0, {source}, 0x81C081C0; }}")
    return _asm(
        [word],
        "{ .reg .b32 a, b, s; shr.u32 a, $1, 5; shr.u32 b, $1, 6; shl.b32 s, $1, 5; and.b32 a, a, 0x00400040;"
        " lop3.b32 a, b, 0x01800180, a, 0xEA; lop3.b32 $0, s, 0x80008000, a, 0xEA; }",
    )


def _from_e4m3(operand: str, word: Any, pair: int, offset: Any) -> Any:
    """Sign kept, seven bits moved to where they mean 2**-120 (bfloat16) or 2**-8 (float16) times the value."""
    del offset
    if not pair:
        word = _asm([word], "shl.b32 $0, $1, 8;")
    shift, mask = (4, 0x07F007F0) if operand == "bfloat16" else (1, 0x3F803F80)
    return _asm(
        [word],
        f"{{ .reg .b32 t; shr.u32 t, $1, {shift}; and.b32 t, t, {mask:#x}; lop3.b32 $0, $1, 0x80008000, t, 0xEA; }}",
    )


def _to_int8(operand: str, word: Any, part: int, offset: Any) -> Any:
    """Nibbles at the top of their bytes: 16 times the value. With zero points unsigned codes less theirs, -15 to 15,
    byte by byte, where 128 keeps each difference from borrowing.
    """
    del operand
    if offset is not None:
        word = _asm([word], "shr.u32 $0, $1, 4;") if not part else word
        high = _asm([word], "lop3.b32 $0, $1, 0x0F0F0F0F, 0x80808080, 0xEA;")
        return _asm([high, offset], "{ .reg .b32 t; sub.u32 t, $1, $2; xor.b32 $0, t, 0x80808080; }")
    return _asm(
        [word], f"{{ .reg .b32 t; {'shl.b32 t, $1, 4;' if part else 'mov.b32 t, $1;'} and.b32 $0, t, 0xF0F0F0F0; }}"
    )


def _to_e4m3(operand: str, word: Any, part: int, offset: Any) -> Any:
    """Two's complement nibbles by two tables of eight bytes, 0 to 7 and -8 to -1; the sign bit chooses between them."""
    del operand, offset
    return _asm(
        [word],
        f"{{ .reg .b32 x, i, p, n, s; {'shr.u32 x, $1, 16;' if part else 'mov.b32 x, $1;'} and.b32 i, x, 0x77777777;"
        " prmt.b32 p, 0x44403800, 0x4E4C4A48, i; prmt.b32 n, 0xCACCCED0, 0xB8C0C4C8, i;"
        " shr.u32 s, x, 1; lop3.b32 s, s, 0x44444444, 0x32103210, 0xEA; prmt.b32 $0, p, n, s; }",
    )


def _from_e2m1_by_table(operand: str, word: Any, part: int, table: tuple[Any, Any]) -> Any:
    """Magnitudes from the group's table; signs are moved to the top of their bytes."""
    del operand
    shift, sign = ("shr.u32 i, $1, 16;", "shl.b32 s, $1, 4;") if part else ("mov.b32 i, $1;", "mov.b32 s, $1;")
    return _asm(
        [word, *table],
        f"{{ .reg .b32 i, s, m; {shift} {sign} and.b32 i, i, 0x7777; prmt.b32 m, $2, $3, i;"
        " lop3.b32 $0, s, 0x80808080, m, 0xEA; }",
    )


_CONVERT_8BIT: dict[tuple[str, str], Callable[..., Any]] = {
    ("int4", "int8"): _to_int8,
    ("int4", "float8_e4m3fn"): _to_e4m3,
    ("e2m1", "float8_e4m3fn"): _from_e2m1_by_table,
}
_CONVERT: dict[str, Callable[..., Any]] = {
    "int4": _from_int4,
    "int8": _from_int8,
    "e2m1": _from_e2m1,
    "e4m3": _from_e4m3,
}
# 2**126 and 2**120 in bfloat16, 2**8 in float16: from the moved bits to the value.
_EXPONENT_SHIFT = {"e2m1": {"bfloat16": 0x7E807E80}, "e4m3": {"bfloat16": 0x7B807B80, "float16": 0x5C005C00}}
_SIGN_OFFSET = {"bfloat16": 0x43084308, "float16": 0x64086408}  # 128 + 8 and 1024 + 8, twice


def _binary(operand: str, op: str, a: Any, b: Any) -> Any:
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[operand]
    return _asm([a, b], f"{op}.rn.{kind} $0, $1, $2;")


def _asm(operands: list[Any], text: str) -> Any:
    constraints = "=r" + ",r" * len(operands)
    return llvm.inline_asm(_i32(), operands, text, constraints, has_side_effects=False, asm_dialect=0)


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _as_operand(operand: str, register: Any) -> Any:
    """32 bits as a vector of the operand's elements."""
    element = mgpu.utils.dtype_to_ir_type(jnp.dtype(operand))
    count = 4 // jnp.dtype(operand).itemsize
    if count == 4:
        register = mgpu.utils.bitcast(register, ir.VectorType.get((4,), ir.IntegerType.get_signless(8)))
    return register if operand == "int8" else mgpu.utils.bitcast(register, ir.VectorType.get((count,), element))


def _constant(value: int) -> Any:
    return arith.constant(_i32(), ir.IntegerAttr.get(_i32(), value))


def _element(pointer: Any, index: Any, kind: Any = None) -> Any:
    return mgpu.utils.getelementptr(pointer, [index], kind or _i32())
