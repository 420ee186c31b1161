"""Division that rounds correctly inside a kernel, where Pallas gives ``div.full`` (2 ulp). Outside: numerics.divide."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector


def divide_in(layout: Any) -> Any:
    """``numerics.divide`` for float32 arrays in ``layout``; either operand may be a scalar."""

    def divide(x: Any, divisor: Any) -> Any:
        shape = jnp.broadcast_shapes(jnp.shape(x), jnp.shape(divisor))
        operands = [plgpu.layout_cast(jnp.broadcast_to(array, shape), layout) for array in (x, divisor)]

        @plgpu.inline_mgpu(
            arg_types=(layout, layout), return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype("float32"), layout)
        )
        def quotient(ctx, x, divisor):
            del ctx
            registers = x.registers.copy()
            for index, register in enumerate(x.registers.flat):
                registers.flat[index] = _quotients(register, divisor.registers.flat[index])
            return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

        return quotient(*operands)

    return divide


def _quotients(x: Any, divisor: Any) -> Any:
    """Element by element of two vectors."""
    (length,) = ir.VectorType(x.type).shape
    result = x
    for i in range(length):
        pair = [vector.extract(operand, [], [i]) for operand in (x, divisor)]
        value: Any = llvm.inline_asm(ir.F32Type.get(), pair, "div.rn.f32 $0, $1, $2;", "=f,f,f", asm_dialect=0)
        result = vector.insert(value, result, dynamic_position=[], static_position=[i])
    return result
