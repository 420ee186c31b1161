"""Grouped GEMM in plain JAX: one tile of rows after another, each against the weights of its expert.

The pieces are ``plan_product`` and ``plan_gpu_product`` (how one product of a format is computed), ``quantize_rows``
(the left operand, once per token), ``tile_gemm`` (one tile against one expert) and ``for_each_tile`` (the loop). Which
products make up a layer, and the layer's gradient, is the business of ``_experts``.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax.experts.xla._align import Alignment
from moe_jax.quantization import (
    QuantFormat,
    QuantizedTensor,
    Strategy,
    dequantize,
    dequantize_tensor,
    quantize_activations,
    stored_codes,
)
from pallas_kernels.common.numerics import widen
from pallas_kernels.common.types import Dtype


@dataclasses.dataclass(frozen=True)
class Product:
    """How rows times a weight matrix are multiplied.

    operand_dtype: of both operands of the dot. accumulator_dtype: of its result. scales_after: the operands are stored
    codes, exact in operand_dtype, and scales multiply the accumulated sum; otherwise both operands are real values.
    reduces: products are multiplied and summed value by value in accumulator_dtype, which XLA fuses with what makes the
    matrix; no dot.
    """

    operand_dtype: Dtype
    accumulator_dtype: Dtype
    scales_after: bool
    reduces: bool = False

    def __str__(self) -> str:
        operands = "codes" if self.scales_after else "values"
        fused = ", fused with what reads the weights" if self.reduces else ""
        return f"{operands} in {jnp.dtype(self.operand_dtype)}, sums in {jnp.dtype(self.accumulator_dtype)}{fused}"


def plan_product(weights: QuantFormat | None, activations: QuantFormat | None, dtype: Dtype) -> Product:
    """Choose operand types so that every product is exact and sums are float32 (int32 for integers by integers).

    dtype: the layer's compute dtype. bfloat16 operands are used where they hold the operand exactly (e4m3 and integer
    codes) or where the layer computes in bfloat16; float16 is computed in float32.
    Scales of blocks and groups vary along the sum, so there the values are dequantized first, in float32.
    """
    float_operand = jnp.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float32
    if weights is None:
        return Product(float_operand, jnp.float32, scales_after=False)
    if weights.strategy not in (Strategy.TENSOR, Strategy.CHANNEL):
        return Product(jnp.float32, jnp.float32, scales_after=False)
    if activations is None:
        return Product(float_operand, jnp.float32, scales_after=True)
    if not (weights.element_type.is_float or activations.element_type.is_float):
        is_byte = weights.symmetric and activations.symmetric  # a code less its zero point takes nine bits
        return Product(jnp.int8 if is_byte else jnp.int16, jnp.int32, scales_after=True)
    return Product(jnp.bfloat16, jnp.float32, scales_after=True)


def plan_gpu_product(weights: QuantFormat | None, activations: QuantFormat | None, dtype: Dtype) -> Product:
    """``plan_product`` for tensor cores: in layers of 16 bits no operand is float32, nor an integer.

    Values of blocks and groups are rounded once to ``dtype`` (power-of-two scales are exact in bfloat16). Integers are
    exact in bfloat16, and their sums rounded as float32 is. float16 layers with quantized activations are left in
    float32 where scales vary along the sum: their hidden values may be too large for float16.
    """
    product = plan_product(weights, activations, dtype)
    dtype = jnp.dtype(dtype)
    if dtype.itemsize != 2:
        return product
    if product.accumulator_dtype == jnp.int32:
        return Product(jnp.bfloat16, jnp.float32, scales_after=True)
    if product.operand_dtype == jnp.float32 and (activations is None or dtype == jnp.bfloat16):
        return dataclasses.replace(product, operand_dtype=dtype)
    return product


def without_dot(product: Product) -> Product:
    """The same product value by value: operands of float sums are float32, since nothing stores them."""
    operand = product.operand_dtype if product.accumulator_dtype == jnp.int32 else jnp.float32
    return dataclasses.replace(product, operand_dtype=operand, reduces=True)


def quantize_rows(
    x: jax.Array,
    product: Product,
    fmt: QuantFormat | None,
    input_scale: jax.Array | None,
    axes: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array | None]:
    """The left operand of ``product``: (operand of x's shape (rows, K), scale).

    scale multiplies the product: () or (rows,) float32; None when the operand already holds real values.
    axes: see ``quantize_activations``.
    """
    if fmt is None:
        return x.astype(product.operand_dtype), None
    codes, scale = quantize_activations(x, fmt, input_scale, axes=axes)
    if product.scales_after:
        return widen(codes, product.operand_dtype), scale
    return dequantize(codes, scale, fmt).astype(product.operand_dtype), None


def tile_gemm(
    rows: jax.Array, row_scale: jax.Array | None, weight: QuantizedTensor, bias: jax.Array | None, product: Product
) -> jax.Array:
    """One tile against one expert: ``rows @ weight.T * scales + bias`` in float32.

    rows, row_scale: as ``quantize_rows`` returns them, (tile, K) and () or (tile,). weight: data lead + (N, K).
    bias: lead + (N,) or None. Returns (tile,) + lead + (N,).
    """
    if product.scales_after or weight.fmt is None:
        matrix = widen(weight.data if weight.fmt is None else stored_codes(weight), product.operand_dtype)
    else:
        matrix = dequantize_tensor(weight, product.operand_dtype)
    lead_and_n, k = matrix.shape[:-1], matrix.shape[-1]
    if product.reduces:
        wide = (rows.reshape(-1, *(1,) * len(lead_and_n), k), matrix)
        left, right = (values.astype(product.accumulator_dtype) for values in wide)
        out = jnp.sum(left * right, axis=-1)
    elif product.accumulator_dtype == jnp.int32:
        out = dot_of_integers(rows, matrix.reshape(-1, k))
    else:
        out = lax.dot_general(
            rows,
            matrix.reshape(-1, k),
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST if product.operand_dtype == jnp.float32 else None,
            preferred_element_type=product.accumulator_dtype,
        )
    out = out.reshape(rows.shape[0], *lead_and_n).astype(jnp.float32)
    if product.scales_after and weight.fmt is not None and weight.scale is not None:
        scale = weight.scale[..., None] if weight.fmt.strategy is Strategy.TENSOR else weight.scale
        out = out * scale
    if row_scale is not None:
        out = out * row_scale.reshape(-1, *(1,) * len(lead_and_n))
    return out if bias is None else out + bias.astype(jnp.float32)


def dot_of_integers(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    """rows (M, K) by matrix (N, K), int8 or int16 within 9 bits, -> int32 (M, N), exactly.

    On a GPU through bfloat16: XLA's own kernel for int8 gives twice the product there when autotuning is off (jax
    0.11.2, --xla_gpu_autotune_level=0), its untuned tiles having fewer columns of K than the MMA instruction.
    """
    return lax.platform_dependent(rows, matrix, cuda=dot_in_bfloat16, default=_dot)


def _dot(rows, matrix):
    return lax.dot_general(rows, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)


def dot_in_bfloat16(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    """``dot_of_integers`` by products of bfloat16, which holds nine bits, over parts of K whose sums, up to 2**24, are
    exact in float32.
    """
    k = rows.shape[1]
    part = min(1024 if rows.dtype == jnp.int8 else 256, max(k, 1))
    count = -(-k // part)

    def parts(values):
        padded = jnp.pad(values, ((0, 0), (0, count * part - k))).astype(jnp.bfloat16)
        return padded.reshape(values.shape[0], count, part)

    sums = jnp.einsum("mpk,npk->pmn", parts(rows), parts(matrix), preferred_element_type=jnp.float32)
    return jnp.sum(sums.astype(jnp.int32), axis=0, dtype=jnp.int32)


def for_each_tile(
    body: Callable[[Any, jax.Array, jax.Array, Any], Any], carry: Any, alignment: Alignment, tile: int, experts: Any
) -> Any:
    """Run ``carry = body(carry, start, expert, slices)`` over the tiles in use; gaps past the last one cost nothing.

    start: () first row of the tile. expert: () its expert. slices: ``experts``, a pytree of (E, ...) arrays, at it.
    """

    def step(i, carry):
        # The barrier ties the weights to the loop counter. Without it XLA CPU hoists what comes before the slice out of
        # the loop, and copies or converts *all* experts: 21 ms against 2.4 ms for 64 bf16 matrices of 512 x 512.
        stacked, _ = lax.optimization_barrier((experts, i))
        expert = _at(alignment.tile_expert, i)
        return body(carry, i * tile, expert, jax.tree.map(lambda leaf: _at(leaf, expert), stacked))

    return lax.fori_loop(0, alignment.num_tiles, step, carry)


def _at(stacked: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(stacked, index, keepdims=False, allow_negative_indices=False)


def slice_rows(values: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(values, start, size, allow_negative_indices=False)


def store_rows(values: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(values, rows, start, 0, allow_negative_indices=False)
