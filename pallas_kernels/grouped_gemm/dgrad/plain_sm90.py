"""Plain weights of 8 bits in shared memory to the numbers that wgmma multiplies."""

from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.types import TileRef, Value

IrValue: TypeAlias = Any  # an MLIR value; the tests run this file on NumPy arrays of threads

# Of (64, 64): a thread has eight neighbours of a row, 8 bytes that it loads at once and the 16 bytes that a swizzle of
# the result keeps together. Four rows a warp: eight threads store the 128 bytes of a row, in all banks.
_CHUNKS = plgpu.Layout.TILED(plgpu.Tiling(((16, 64), (4, 8))), warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1)


def dequantize(codes: TileRef, scale: Any, dtype: str) -> Value:
    """(64, 64) codes, float8_e4m3fn or int8, times their float32 scale, rounded once to ``dtype``.

    scale: a reference (64,), the scale of each row; or a number.
    """
    value = mosaic.load(codes, layout=_CHUNKS)
    if value.dtype == jnp.int8:
        value = int8_to_half(value)
    if scale.shape:
        of_rows = mosaic.load(scale, layout=_CHUNKS.reduce(1), optimized=False)
        scale = lax.broadcast_in_dim(of_rows, value.shape, [0])
    return (value.astype(jnp.float32) * scale).astype(dtype)


def int8_to_half(codes: Value) -> Value:
    """The same numbers in float16, in inline PTX: the GPU's own conversion of integers takes eight clocks for each."""

    def eight(register: IrValue) -> IrValue:
        words = mgpu.utils.bitcast(register, ir.VectorType.get((2,), simt.integer(32)))
        pairs = [_two_halves(vector.extract(words, [], [i]), pair) for i in range(2) for pair in range(2)]
        two = ir.VectorType.get((2,), ir.F16Type.get())
        return mgpu.utils.vector_concat([mgpu.utils.bitcast(pair, two) for pair in pairs])

    return simt.map_registers(eight, _CHUNKS, codes, dtype=jnp.float16)


def _two_halves(word: IrValue, pair: int) -> IrValue:
    """Bytes 2 * pair and the next: code + 128 in the last bits of 1024, less 1152."""
    select = (0x4140, 0x4342)[pair]
    return _asm(
        [word],
        "{ .reg .b32 u, b; xor.b32 u, $1, 0x80808080;"
        f" mov.b32 b, 0x64646464; prmt.b32 u, u, b, {select:#x}; mov.b32 b, 0xE480E480; add.rn.f16x2 $0, u, b; }}",
    )


def _asm(operands: list[IrValue], text: str) -> IrValue:
    constraints = "=r" + ",r" * len(operands)
    return llvm.inline_asm(simt.integer(32), operands, text, constraints, has_side_effects=False, asm_dialect=0)
