"""How words of packed weights become operands of wgmma, run in NumPy from the PTX that is emitted:
every conversion against all codes and zero points, then whole blocks as the threads of a warpgroup load them.
"""

import re
import types
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.grouped_gemm.packed import PackedFormat, dequantize_sm90, to_kernel_layout
from pallas_kernels.grouped_gemm.packed import format as blocks
from pallas_kernels.grouped_gemm.packed.format import zero_point_of, zero_term
from tests.support.kernels.packed_problem import E2M1, KINDS, make_stored

IS_EXACT = True  # whether products and sums that round fail
E2M1_TO_E4M3 = PackedFormat("e2m1", "float8_e4m3fn", "e8m0", 32)


def run_ptx(operands, text):
    """A NumPy machine for the few instructions the conversions use; operands and the result are uint32 arrays."""
    registers: dict[str, Any] = {f"${i}": np.asarray(operand, np.uint32) for i, operand in enumerate(operands, 1)}

    def value(token):
        return registers[token] if token in registers else np.uint32(int(token, 0))

    text = re.sub(r"\.reg[^;]*;", "", text)
    # The two halves of a register by name.
    text = re.sub(r"mov\.b32 \{(\w+), (\w+)\}, (\S+);", r"and.b32 \1, \3, 0xFFFF; shr.u32 \2, \3, 16;", text)
    text = re.sub(r"mov\.b32 (\S+), \{(\w+), (\w+)\};", r"mad.lo.u32 \1, \3, 0x10000, \2;", text)
    for line in re.findall(r"([a-z][\w.]+ [^;{}]+);", text):
        op, rest = line.split(" ", 1)
        target, *names = [token.strip() for token in rest.split(",")]
        args = [value(name) for name in names]
        registers[target] = _instruction(op, *args)
    return registers["$0"]


def _instruction(op: str, a: Any, b: Any = None, c: Any = None, d: Any = None) -> Any:
    match op.split(".")[0]:
        case "mov":
            return a
        case "and":
            return a & b
        case "xor":
            return a ^ b
        case "shl":
            return a << b
        case "shr":
            return a >> b
        case "shf":
            assert op in ("shf.l.wrap.b32", "shf.r.wrap.b32")
            left = c if ".l." in op else np.uint32(32) - c
            return b << left | a >> np.uint32(32) - left
        case "mad":
            return (a.astype(np.uint64) * b + c).astype(np.uint32)
        case "lop3":
            assert d == 0xEA  # (a & b) | c
            return (a & b) | c
        case "prmt":
            source = a.astype(np.uint64) | (np.asarray(b).astype(np.uint64) << np.uint64(32))
            out = np.uint32(0)
            for byte in range(4):
                index = (c >> np.uint32(4 * byte) & np.uint32(7)).astype(np.uint64)
                out = out | (
                    (source >> (np.uint64(8) * index) & np.uint64(255)).astype(np.uint32) << np.uint32(8 * byte)
                )
            return out
        case "setp":
            assert op == "setp.gt.u32"
            return a > b
        case "selp":
            return np.where(c, a, b)
        case "sub" if op == "sub.u32":
            return a - b
        case "sub" if op == "sub.rn.f32":
            return (a.view(np.float32) - b.view(np.float32)).view(np.uint32)
        case "cvt":
            assert op == "cvt.rn.bf16x2.f32"
            high, low = (
                v.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32) for v in (a, b)
            )
            return high << np.uint32(16) | low
        case "add" | "mul" | "fma":
            dtype = ml_dtypes.bfloat16 if "bf16" in op else np.float16
            x, y, *z = (
                np.ascontiguousarray(v).reshape(-1, 1).view(dtype).astype(np.float64)
                for v in np.broadcast_arrays(*(v for v in (a, b, c) if v is not None))
            )
            exact = x + y if op.startswith("add") else x * y + z[0] if z else x * y
            assert not IS_EXACT or (exact.astype(dtype).astype(np.float64) == exact).all(), "every step is exact"
            return exact.astype(dtype).view(np.uint32).reshape(-1)
    raise NotImplementedError(op)


@pytest.fixture
def on_numpy(monkeypatch):
    monkeypatch.setattr(dequantize_sm90, "_asm", run_ptx)
    monkeypatch.setattr(dequantize_sm90, "_constant", np.uint32)
    monkeypatch.setattr(dequantize_sm90, "arith", types.SimpleNamespace(shrui=lambda a, b: a >> b))


def words_with_codes(fmt) -> tuple[Any, Any]:
    """Random words, and the codes in them: (words, registers, columns)."""
    words = np.random.default_rng(2).integers(0, 1 << 32, 4096, dtype=np.uint64).astype(np.uint32)
    places = blocks._places(fmt)
    codes = sum((words[:, None, None] >> places[..., bit].astype(np.uint32) & 1) << bit for bit in range(fmt.bits))
    return words, codes


def in_registers(register, dtype):
    return np.ascontiguousarray(register).reshape(-1, 1).view(dtype).astype(np.float64)


@pytest.mark.parametrize(
    ("element", "operand"),
    [
        (e, o)
        for e in ("int4", "int8", "e4m3", "e2m1")
        for o in ("bfloat16", "float16")
        if (e, o) != ("e2m1", "float16")
    ],
)
def test_conversions_to_16_bits(element, operand, on_numpy):
    fmt = PackedFormat(element, operand)
    words, codes = words_with_codes(fmt)
    dtype = jnp.dtype(operand)
    shift = dequantize_sm90._EXPONENT_SHIFT.get(element, {}).get(operand)
    for pair in range(codes.shape[1]):
        value = dequantize_sm90._CONVERT[element](fmt, words, pair, None)
        if shift is not None:
            value = _instruction("mul.bf16x2" if operand == "bfloat16" else "mul.f16x2", value, np.uint32(shift))
        match element:
            case "int4":
                expected = (codes[:, pair] - 8.0) * fmt.unit
            case "int8":
                expected = (codes[:, pair] - 128.0) * fmt.unit
            case "e2m1":
                expected = E2M1[codes[:, pair]]
            case _:
                expected = codes[:, pair].astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        real = np.isfinite(expected)
        np.testing.assert_array_equal(in_registers(value, dtype)[real], np.asarray(expected, np.float64)[real])


@pytest.mark.parametrize("operand", ["int8", "float8_e4m3fn"])
def test_conversions_to_8_bits(operand, on_numpy):
    fmt = PackedFormat("int4", operand)
    words, codes = words_with_codes(fmt)
    for part in range(2):
        value = dequantize_sm90._CONVERT_8BIT["int4", operand](fmt, words, part, None)
        expected = ((codes[:, part] ^ 8) - 8.0) * fmt.unit
        np.testing.assert_array_equal(in_registers(value, jnp.dtype(operand)), expected)


@pytest.mark.parametrize("operand", ["bfloat16", "float16"])
@pytest.mark.parametrize("element", ["int4", "int8"])
def test_conversions_with_zero_points_to_16_bits(element, operand, on_numpy):
    fmt = PackedFormat(element, operand, has_zero_point=True)
    words, codes = words_with_codes(fmt)
    dtype = jnp.dtype(operand)
    half = 1 << (fmt.bits - 1)
    zero = np.random.default_rng(3).integers(-half, half, len(words))
    zero[:2] = -half, half - 1
    term = zero_term(fmt, zero.astype(np.float32)).astype(dtype)
    np.testing.assert_array_equal(zero_point_of(fmt, term.astype(np.float32)), zero)
    for pair in range(codes.shape[1]):
        in_both = term.view(np.uint16).astype(np.uint32) * np.uint32(0x10001)
        value = dequantize_sm90._CONVERT[element](fmt, words, pair, in_both)
        expected = (codes[:, pair].astype(np.float64) - half - zero[:, None]) * fmt.unit
        np.testing.assert_array_equal(in_registers(value, dtype), expected)


def test_conversion_of_e2m1_with_its_scale_to_e4m3(on_numpy):
    """Exact from the channel's largest scale (byte 254, which stands for 2**6) down to 2**-11 of it, zeros below."""
    words, codes = words_with_codes(E2M1_TO_E4M3)
    scales = np.random.default_rng(4).integers(236, 255, (len(words), 4)).astype(np.uint8)
    for byte, part in np.ndindex(4, 2):
        table = dequantize_sm90._table(scales.view(np.uint32)[:, 0], byte)
        value = dequantize_sm90._from_e2m1_by_table(E2M1_TO_E4M3, words, part, table)
        scale = scales[:, byte, None].astype(np.float64)
        expected = E2M1[codes[:, part]] * np.where(scale < 254 - blocks.FOLDED_RANGE, 0, np.exp2(scale - 248))
        np.testing.assert_array_equal(in_registers(value, jnp.dtype("float8_e4m3fn")), expected)


def test_conversion_with_zero_points_to_8_bits(on_numpy):
    fmt = PackedFormat("int4", "int8", has_zero_point=True)
    words, codes = words_with_codes(fmt)
    zero = np.random.default_rng(3).integers(0, 16, len(words)).astype(np.uint32)
    for part in range(2):
        value = dequantize_sm90._to_int8(fmt, words, part, zero * np.uint32(0x01010101))
        np.testing.assert_array_equal(in_registers(value, np.int8), codes[:, part] - zero[:, None].astype(np.float64))


def load(kind, place, alignment):
    """What the threads find at ``place`` (array, index of each thread, bits): a number, or ``kind`` in a row."""
    array, index, bits = place
    flat = np.ascontiguousarray(array).reshape(-1)
    assert 8 * flat.itemsize == bits and (index * flat.itemsize % alignment == 0).all()
    return [flat[index + i] for i in range(kind[0])] if isinstance(kind, tuple) else flat[index]


@pytest.fixture
def on_threads(on_numpy, monkeypatch):
    """``load_block`` of arrays in place of shared memory: every number is one of 128 threads, a fragment an array of
    registers.
    """
    mgpu = dequantize_sm90.mgpu
    for name, stub in {
        "_lane": lambda: np.arange(128, dtype=np.uint32),
        "_i32": lambda: 32,
        "_element": lambda array, index, bits=32: (array, index, bits),
        "_as_operand": lambda operand, register: register,
        "arith": types.SimpleNamespace(
            shrui=lambda a, b: a >> b,
            andi=lambda a, b: a & b,
            addi=lambda a, b: a + b,
            muli=lambda a, b: a * b,
            extui=lambda kind, a: a.astype(np.uint32),
        ),
        "ir": types.SimpleNamespace(
            VectorType=types.SimpleNamespace(get=lambda shape, element: shape),
            IntegerType=types.SimpleNamespace(get_signless=lambda bits: bits),
        ),
        "llvm": types.SimpleNamespace(load=load),
        "vector": types.SimpleNamespace(extract=lambda loaded, _, at: loaded[at[0]]),
        "mgpu": types.SimpleNamespace(
            utils=types.SimpleNamespace(memref_ptr=lambda array: array),
            FragmentedArray=lambda _registers, _layout, _is_signed: _registers,
            WGMMA_LAYOUT=mgpu.WGMMA_LAYOUT,
            WGMMA_LAYOUT_8BIT=mgpu.WGMMA_LAYOUT_8BIT,
        ),
    }.items():
        monkeypatch.setattr(dequantize_sm90, name, stub)
    at_once = lambda **_: lambda function: lambda *arrays: function(None, *arrays)  # noqa: E731
    monkeypatch.setattr(dequantize_sm90.plgpu, "inline_mgpu", at_once)


def as_matrix(fmt, fragments) -> np.ndarray:
    """(64, block_k) from registers (PTX ISA, fragments of A)."""
    found = np.full((64, fmt.block_k), np.nan)
    threads, columns = np.arange(128), 4 if fmt.is_8bit else 2
    first = 0
    for registers in fragments:
        assert registers.size == 2 * registers.shape[1]
        for index, row_half in np.ndindex(registers.shape[1], 2):
            place = [0] * registers.ndim
            place[1], place[4] = index, row_half
            values = np.broadcast_to(registers[tuple(place)], 128)
            row = 16 * (threads // 32) + 8 * row_half + threads % 32 // 4
            for column in range(columns):
                at = first + 4 * columns * index + columns * (threads % 4) + column
                found[row, at] = in_registers(values, jnp.dtype(fmt.operand))[:, column]
        first += 4 * columns * registers.shape[1]
    return found


CASES = [(kind, False) for kind in KINDS]
CASES += [(k, True) for k, (f, *_) in KINDS.items() if f.scale == "group" and not f.is_8bit and f.element != "e4m3"]


@pytest.mark.parametrize(("kind", "is_folded"), CASES)
def test_operands_of_blocks(kind, is_folded, on_threads):
    """Every number of two blocks is the stored one times ``unit``, after the scales of groups and the factors of
    channels that follow the product; folded scales are powers of two, so that nothing rounds.
    """
    fmt = KINDS[kind][0]
    rng = np.random.default_rng(5)
    stored, expected = make_stored(kind, (1, 1), 64, 2 * fmt.block_k, rng)
    group = fmt.group_size or 2 * fmt.block_k
    if fmt.scale == "e4m3":
        scale = np.arange(512).astype(np.uint8)  # every one, on even and odd groups
        scale = np.where(scale & 127 == 127, 0, scale).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
        stored["scale"] = rng.permutation(scale).reshape(1, 1, 64, 8)
        expected = E2M1[stored["codes"]] * np.repeat(stored["scale"].astype(np.float64), group, -1)
        expected = expected * stored["channel_scale"].astype(np.float64)[..., None]
    if is_folded:
        powers = np.exp2(rng.integers(-9, 3, stored["scale"].shape)).astype(fmt.operand)
        expected = expected / np.repeat(stored["scale"].astype(np.float64), group, -1)
        expected = np.rint(expected) * np.repeat(powers.astype(np.float64), group, -1)
        stored["scale"] = powers
    packed = to_kernel_layout(fmt, **stored)
    factor = np.ones((64, 1)) if packed.channel_scale is None else packed.channel_scale.reshape(64, 1)
    unit = fmt.folded_unit if is_folded else fmt.unit
    factor = np.broadcast_to(factor.astype(np.float64) / unit, expected.shape[-2:])
    if fmt.scale == "group" and not is_folded:
        factor = factor * np.repeat(stored["scale"][0, 0].astype(np.float64), group, -1)
    width = min(group, fmt.block_k) if fmt.scale == "group" and not is_folded else fmt.block_k
    per_block = max(fmt.block_k // group, 1)
    rows = tuple(fmt.block_k // 4 * q // group % per_block for q in range(4))
    for block in range(2):
        first = block * fmt.block_k // group
        beside = [
            None if given is None else given[0, 0, 0, first : first + per_block].view(f"u{given.itemsize}")
            for given in (packed.zero, packed.scale if is_folded else None)
        ]
        words = packed.words[0, 0, 0, block].view(np.uint32)
        found = as_matrix(fmt, dequantize_sm90.load_block(fmt, words, width, rows, *beside))
        columns = slice(block * fmt.block_k, (block + 1) * fmt.block_k)
        np.testing.assert_array_equal(found * factor[:, columns], expected[0, 0, :, columns])


@pytest.mark.parametrize("kind", ["int4 g128", "int4 g64", "int8 g128"])
def test_folded_scales_round_once(kind, on_threads, monkeypatch):
    """Operands are the product of code and scale in bfloat16, rounded once, for scales from 2**-72 to 2**48."""
    monkeypatch.setitem(globals(), "IS_EXACT", False)
    fmt = KINDS[kind][0]
    rng = np.random.default_rng(6)
    stored, values = make_stored(kind, (1, 1), 64, fmt.block_k, rng)
    codes = np.rint(values / np.repeat(stored["scale"].astype(np.float64), fmt.block_k, -1))[0, 0]
    scale = (rng.uniform(1, 2, (1, 1, 64, 1)) * np.exp2(rng.integers(-72, 48, (1, 1, 64, 1)))).astype(fmt.operand)
    scale[..., :2, :] = np.array([[2.0**-72], [2.0**48 - 2.0**40]]).astype(fmt.operand)
    stored["scale"] = scale
    packed = to_kernel_layout(fmt, **stored)
    given = packed.scale[0, 0, 0].view(np.uint16)
    words = packed.words[0, 0, 0, 0].view(np.uint32)
    found = as_matrix(fmt, dequantize_sm90.load_block(fmt, words, fmt.block_k, (0,) * 4, None, given))
    expected = (codes * scale.astype(np.float64)[0, 0]).astype(fmt.operand).astype(np.float64)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found / fmt.folded_unit, expected)
