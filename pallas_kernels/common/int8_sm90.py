"""Rounding to int8 inside a kernel by single instructions, where ``numerics.cast_int8`` takes a dozen operations."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.common import simt


def cast_int8_in(x: Any, layout: Any) -> Any:
    """``numerics.cast_int8`` of float32 values above -127.5, to the nearest with ties to even; NaN becomes 0. layout:
    of x, with 2, 4 or 8 neighbouring elements a thread.
    """

    @simt.inline(layout, result=plgpu.ShapeDtypeStruct(x.shape, jnp.dtype("int8"), layout))
    def cast(ctx, x):
        del ctx
        registers = np.empty_like(x.registers)
        for index, register in enumerate(x.registers.flat):
            registers.flat[index] = _codes(register)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=True)

    return cast(x)


def _codes(values: Any) -> Any:
    (length,) = ir.VectorType(values.type).shape
    elements = [vector.extract(values, [], [i]) for i in range(length)]
    step = min(length, 4)
    words = ir.IntegerType.get_signless(8 * step)
    packed: Any = llvm.mlir_undef(ir.VectorType.get((length // step,), words))
    for place, start in enumerate(range(0, length, step)):
        word = _pack(elements[start : start + step], words)
        packed = vector.insert(word, packed, dynamic_position=[], static_position=[place])
    return mgpu.utils.bitcast(packed, ir.VectorType.get((length,), ir.IntegerType.get_signless(8)))


def _pack(elements: list[Any], kind: Any) -> Any:
    """Two or four codes in one integer, the first lowest."""
    rounded = " ".join(f"cvt.rni.s32.f32 a{i}, ${i + 1};" for i in range(len(elements)))
    if len(elements) == 4:
        pack = "cvt.pack.sat.s8.s32.b32 c, a3, a2, 0; cvt.pack.sat.s8.s32.b32 $0, a1, a0, c;"
    else:
        pack = "cvt.pack.sat.s8.s32.b32 c, a1, a0, 0; cvt.u16.u32 $0, c;"
    text = f"{{ .reg .b32 a<4>, c; {rounded} {pack} }}"
    constraints = ("=r" if len(elements) == 4 else "=h") + ",f" * len(elements)
    return llvm.inline_asm(kind, elements, text, constraints, asm_dialect=0)
