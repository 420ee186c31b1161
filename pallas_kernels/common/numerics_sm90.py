"""Rules of numerics.py for the bodies of kernels, in a fraction of the operations that Pallas makes of those."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.common import simt
from pallas_kernels.common.numerics import E4M3_MAX, TINY, e4m3_group_scale, e4m3_row_scale
from pallas_kernels.common.types import Layout, Value

# e4m3: five operations an element where numerics.py takes sixteen.


def e4m3_of_row(x: Value, amax: Value) -> tuple[Value, Value]:
    """``quantize_e4m3_row``: (codes, scale) of float32 values; amax: () float32, of their whole row."""
    scale = e4m3_row_scale(amax)
    return e4m3_codes(x, *divisor(scale)), scale


def e4m3_of_tensor(pieces: Sequence[Value], amax: Value, layout: Layout) -> tuple[list[Value], Value]:
    """``quantize_e4m3_tensor``: (codes, scale) of float32 values in pieces of one shape; amax: () float32, of all.

    layout: of a piece. A value times the inverse is often a tie of two codes: both divisions are rounded correctly.
    """
    divide = divide_in(layout)
    whole = plgpu.layout_cast(jnp.full(pieces[0].shape, amax), layout)
    scale = jnp.maximum(divide(whole, E4M3_MAX), TINY)
    inverse = jnp.where(scale < jnp.inf, divide(1.0, scale), 0.0)
    return [(piece * inverse).astype(jnp.float8_e4m3fn) for piece in pieces], jnp.max(scale)


def e4m3_of_rows(x: Value, amax: Value) -> tuple[Value, Value]:
    """``quantize_e4m3_row`` of several rows: codes of float32 x (rows, columns) and their scales; amax: (rows,)."""
    return _e4m3_codes_by_group(x, e4m3_row_scale(amax))


def e4m3_in_groups(x: Value, amax: Value, is_power_of_two: bool) -> tuple[Value, Value]:
    """``quantize_e4m3_group``: codes of float32 x (groups, columns) and their scales; amax: (groups,) float32."""
    return _e4m3_codes_by_group(x, e4m3_group_scale(amax, is_power_of_two))


def _e4m3_codes_by_group(x: Value, scale: Value) -> tuple[Value, Value]:
    return e4m3_codes(x, *(lax.broadcast_in_dim(one, x.shape, [0]) for one in divisor(scale))), scale


def divisor(scale: Value) -> tuple[Value, Value]:
    """(1 / scale, scale); an infinite scale becomes 0, so that its finite values get code 0 and the others NaN."""
    return 1.0 / scale, jnp.where(scale < jnp.inf, scale, 0.0)


def e4m3_codes(x: Value, inverse: Value, scale: Value) -> Value:
    """x / scale in e4m3.

    The product with the inverse is corrected once by its remainder (Markstein). The remainder is exact where the
    compiler fuses a product and a sum; then only a quotient within 2**-20 ulp of a tie may be one ulp off. Subtracting
    the remainder, not adding it, keeps -0. The conversion saturates from 465 on; no quotient comes near, since |x| is
    at most 448 scales.
    """
    return _quotient(x, inverse, scale).astype(jnp.float8_e4m3fn)


def _quotient(x: Value, inverse: Value, scale: Value) -> Value:
    quotient = x * inverse
    return quotient - (quotient * scale - x) * inverse


def divided(x: Value, scale: Value) -> Value:
    """The float32 x / scale that is rounded to e4m3 codes; both of one shape."""
    return _quotient(x, *divisor(scale))


# int8: single instructions, where numerics.py takes a dozen operations.


def cast_int8_in(x: Value, layout: Layout) -> Value:
    """``numerics.cast_int8`` of float32 values above -127.5, to the nearest with ties to even; NaN becomes 0.

    layout: of x, with 2, 4 or 8 neighbouring elements a thread.
    """
    return simt.map_registers(_int8_codes, layout, x, dtype=jnp.int8)


def _int8_codes(values: ir.Value) -> ir.Value:
    (length,) = ir.VectorType(values.type).shape
    elements = [vector.extract(values, [], [i]) for i in range(length)]
    step = min(length, 4)
    words = simt.integer(8 * step)
    packed: Any = llvm.mlir_undef(ir.VectorType.get((length // step,), words))
    for i in range(0, length, step):
        word = _pack_int8(elements[i : i + step], words)
        packed = vector.insert(word, packed, dynamic_position=[], static_position=[i // step])
    return mgpu.utils.bitcast(packed, ir.VectorType.get((length,), simt.integer(8)))


def _pack_int8(elements: Sequence[ir.Value], kind: ir.Type) -> Any:
    """Two or four codes in one integer, the first lowest."""
    rounded = " ".join(f"cvt.rni.s32.f32 a{i}, ${i + 1};" for i in range(len(elements)))
    if len(elements) == 4:
        pack = "cvt.pack.sat.s8.s32.b32 c, a3, a2, 0; cvt.pack.sat.s8.s32.b32 $0, a1, a0, c;"
    else:
        pack = "cvt.pack.sat.s8.s32.b32 c, a1, a0, 0; cvt.u16.u32 $0, c;"
    text = f"{{ .reg .b32 a<4>, c; {rounded} {pack} }}"
    constraints = ("=r" if len(elements) == 4 else "=h") + ",f" * len(elements)
    return llvm.inline_asm(kind, elements, text, constraints, asm_dialect=0)


# Division that rounds correctly, where Pallas gives ``div.full`` (2 ulp).


def divide_in(layout: Layout) -> Callable[[Value | float, Value | float], Value]:
    """``numerics.divide`` for float32 arrays in ``layout``; either operand may be a scalar."""

    def divide(x: Value | float, divisor: Value | float) -> Value:
        shape = jnp.broadcast_shapes(jnp.shape(x), jnp.shape(divisor))
        operands = [plgpu.layout_cast(jnp.broadcast_to(array, shape), layout) for array in (x, divisor)]
        return simt.map_registers(_quotients, layout, *operands)

    return divide


def _quotients(x: ir.Value, divisor: ir.Value) -> ir.Value:
    """Element by element of two vectors."""
    (length,) = ir.VectorType(x.type).shape
    result = x
    for i in range(length):
        pair = [vector.extract(operand, [], [i]) for operand in (x, divisor)]
        value: Any = llvm.inline_asm(ir.F32Type.get(), pair, "div.rn.f32 $0, $1, $2;", "=f,f,f", asm_dialect=0)
        result = vector.insert(value, result, dynamic_position=[], static_position=[i])
    return result
