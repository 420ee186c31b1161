"""The reference: what a layer of experts means, in float32, one readable step after another. It judges the others.

    y[t] = sum_k p[t, k] * (W2[e] . A(W13[e] . x[t] + b13[e]) + b2[e])        e = topk_ids[t, k]

Weights are dequantized to float32. Quantized activations are rounded to their format's grid and stay float32 (with a
straight-through gradient). Every expert multiplies every row and a row keeps its own expert's answer: E times the work
of the layer, and memory for T * top_k rows beside one dequantized expert at a time.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from moe_jax._config import MoEConfig
from moe_jax._typing import Array, Float, Int
from moe_jax.activations import apply_activation
from moe_jax.experts._backend import Backend, MatrixProblem, Problem
from moe_jax.experts._gradient import vary_together
from moe_jax.quantization import (
    ExpertWeights,
    QuantFormat,
    QuantizedMatrix,
    QuantizedTensor,
    dequantize_tensor,
    fake_quantize,
)


class Reference(Backend):
    """Every expert on every row in float32; never the default."""

    name = "reference"

    def refusal(self, problem: Problem) -> str | None:
        return None

    def describe(self, problem: Problem) -> list[str]:
        return ["every expert dequantized to float32 and applied to every row; meant for judging, not for speed"]

    def run(
        self,
        x: Array,
        topk_weights: Array,
        topk_ids: Array,
        weights: ExpertWeights,
        config: MoEConfig,
        out_dtype: DTypeLike = jnp.float32,
    ) -> Array:
        return _run(x, topk_weights, topk_ids, weights, config).astype(out_dtype)

    def matrix_refusal(self, problem: MatrixProblem) -> str | None:
        return None

    def multiply(self, x: Array, matrix: QuantizedMatrix, bias: Array | None, out_dtype: DTypeLike) -> Array:
        rows = _quantized(x, matrix.scheme.activations, matrix.tensor.input_scale, ())
        y = jnp.matmul(rows, dequantize_tensor(matrix.tensor)[0].T, precision=lax.Precision.HIGHEST)
        return (y if bias is None else y + bias.astype(jnp.float32)).astype(out_dtype)


def _run(
    x: Float[Array, "T H"],
    topk_weights: Float[Array, "T top_k"],
    topk_ids: Int[Array, "T top_k"],
    weights: ExpertWeights,
    config: MoEConfig,
) -> Float[Array, "T H"]:
    x, topk_weights, topk_ids, weights = vary_together((x, topk_weights, topk_ids, weights))
    num_tokens, top_k = topk_ids.shape
    expert = topk_ids.reshape(-1)

    fmt = weights.scheme.activations
    rows = _quantized(x, fmt, weights.w13.input_scale, config.scale_axes(fmt, is_hidden=False))
    rows = jnp.repeat(rows, top_k, axis=0)  # row t * top_k + k
    hidden = apply_activation(_product(rows, expert, weights.w13, weights.w13_bias), config)
    hidden = jnp.where(expert[:, None] >= 0, hidden, 0.0)  # a row without an expert takes no part in a per-tensor scale
    hidden = _quantized(hidden, fmt, weights.w2.input_scale, config.scale_axes(fmt, is_hidden=True))
    rows = _product(hidden, expert, weights.w2, weights.w2_bias)
    return jnp.sum(rows.reshape(num_tokens, top_k, -1) * topk_weights[..., None], axis=1)


def _quantized(x: Array, fmt: QuantFormat | None, input_scale: Array | None, axes: tuple[str, ...]) -> Array:
    return x.astype(jnp.float32) if fmt is None else fake_quantize(x, fmt, input_scale, axes)


def _product(rows: Array, expert: Array, tensor: QuantizedTensor, bias: Array | None) -> Array:
    """``W[expert[r]] . rows[r] + bias[expert[r]]`` for every row r; 0 where expert is -1.

    rows: (R, K) float32. expert: (R,) int32. tensor: (E,) + lead + (N, K). Returns (R,) + lead + (N,) float32.
    """
    lead_and_n = tensor.data.shape[1:-1]

    def add_expert(out, scanned):
        index, one_expert, one_bias = scanned
        matrix = dequantize_tensor(one_expert)
        y = jnp.einsum("rk,...nk->r...n", rows, matrix, precision=lax.Precision.HIGHEST)
        if one_bias is not None:
            y = y + one_bias.astype(jnp.float32)
        is_mine = (expert == index).reshape(-1, *(1,) * len(lead_and_n))
        return jnp.where(is_mine, y, out), None

    stacked = dataclasses.replace(tensor, input_scale=None)
    indices = jnp.arange(tensor.data.shape[0], dtype=expert.dtype)
    out = jnp.zeros_like(rows, shape=(rows.shape[0], *lead_and_n))
    return jax.lax.scan(add_expert, out, (indices, stacked, bias))[0]
