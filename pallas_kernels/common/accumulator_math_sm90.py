"""Functions of float32 accumulators (layout WGMMA) by few instructions, for what runs once per element of a tile.

Pallas' own take twice as many: its exponential and its division guard against subnormals, which no caller needs. JAX's
GPU interpreter cannot run these, but ``lax.logistic`` and ``lax.reduce_precision``.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.types import Value


def sigmoid(x: Value) -> Value:
    """1 / (1 + exp(-x)) to 4 ulp and |x| / 2 ulp more, 0 from x = -88 down."""
    return _elementwise(x, _sigmoid)


def round_to_bfloat16(x: Value) -> Value:
    """float32 values rounded to bfloat16, ties to even, in float32."""
    return _elementwise(x, _rounded)


def _elementwise(x: Value, function: Callable[[Sequence[ir.Value]], Sequence[ir.Value]]) -> Value:
    """function: of the neighbouring elements that a register holds."""

    def of_register(register):
        (length,) = ir.VectorType(register.type).shape
        for i, value in enumerate(function([vector.extract(register, [], [i]) for i in range(length)])):
            register = vector.insert(value, register, dynamic_position=[], static_position=[i])
        return register

    return simt.map_registers(of_register, mosaic.WGMMA, x)


def _sigmoid(values: Sequence[ir.Value]) -> Sequence[ir.Value]:
    minus_log2_e, one = "0fBFB8AA3B", "0f3F800000"
    text = (
        f"{{ .reg .f32 e; mul.f32 e, $1, {minus_log2_e}; ex2.approx.ftz.f32 e, e; add.f32 e, e, {one}; "
        "rcp.approx.ftz.f32 $0, e; }"
    )
    asm: Any = llvm.inline_asm
    return [asm(ir.F32Type.get(), [value], text, "=f,f", asm_dialect=0) for value in values]


def _rounded(values: Sequence[ir.Value]) -> Sequence[ir.Value]:
    """Two at a time: packed, and unpacked by bits. (One at a time the conversion runs at an eighth of the rate.)"""
    found = []
    for low, high in zip(values[::2], values[1::2], strict=True):
        pair: Any = llvm.inline_asm(
            simt.integer(32), [high, low], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", asm_dialect=0
        )
        bits = arith.shli(pair, simt.integer_constant(16, 32)), arith.andi(pair, simt.integer_constant(-(1 << 16), 32))
        found += [arith.bitcast(ir.F32Type.get(), half) for half in bits]
    return found
