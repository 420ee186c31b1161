"""Functions of float32 accumulators (layout WGMMA) by few instructions, for what runs once per element of a tile.

Pallas' own take twice as many: its exponential and its division guard against subnormals, which no caller needs. JAX's
GPU interpreter cannot run these, but ``lax.logistic`` and ``lax.reduce_precision``.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common import mosaic, simt


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)) to 4 ulp and |x| / 2 ulp more, 0 from x = -88 down."""
    return _elementwise(x, _sigmoid)


def round_to_bfloat16(x: Any) -> Any:
    """float32 values rounded to bfloat16, ties to even, in float32."""
    return _elementwise(x, _rounded)


def _elementwise(x: Any, function: Callable[[list[Any]], list[Any]]) -> Any:
    """function: of the neighbouring elements that a register holds."""

    @simt.inline(mosaic.WGMMA, result=plgpu.ShapeDtypeStruct(x.shape, jnp.dtype("float32"), mosaic.WGMMA))
    def apply(ctx, x):
        del ctx
        registers = x.registers.copy()
        for index, register in enumerate(x.registers.flat):
            (length,) = ir.VectorType(register.type).shape
            for i, value in enumerate(function([vector.extract(register, [], [i]) for i in range(length)])):
                register = vector.insert(value, register, dynamic_position=[], static_position=[i])
            registers.flat[index] = register
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return apply(x)


def _sigmoid(values: list[Any]) -> list[Any]:
    minus_log2_e, one = "0fBFB8AA3B", "0f3F800000"
    text = (
        f"{{ .reg .f32 e; mul.f32 e, $1, {minus_log2_e}; ex2.approx.ftz.f32 e, e; add.f32 e, e, {one}; "
        "rcp.approx.ftz.f32 $0, e; }"
    )
    return [llvm.inline_asm(ir.F32Type.get(), [value], text, "=f,f", asm_dialect=0) for value in values]


def _rounded(values: list[Any]) -> list[Any]:
    """Two at a time: packed, and unpacked by bits. (One at a time the conversion runs at an eighth of the rate.)"""
    i32 = ir.IntegerType.get_signless(32)

    def constant(value):
        return arith.constant(i32, ir.IntegerAttr.get(i32, value))

    found = []
    for low, high in zip(values[::2], values[1::2], strict=True):
        pair: Any = llvm.inline_asm(i32, [high, low], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", asm_dialect=0)
        bits = arith.shli(pair, constant(16)), arith.andi(pair, constant(-(1 << 16)))
        found += [arith.bitcast(ir.F32Type.get(), half) for half in bits]
    return found
