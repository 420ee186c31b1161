"""The reference: what a layer of experts means, in float32, one readable step after another. It judges the others.

    y[t] = sum_k p[t, k] * (W2[e] . A(W13[e] . x[t] + b13[e]) + b2[e])        e = topk_ids[t, k]

Weights are dequantized to float32. Quantized activations are rounded to their format's grid and stay float32 (with a
straight-through gradient). Every expert multiplies every row and a row keeps its own expert's answer: E times the work
of the layer, and memory for T * top_k rows beside one dequantized expert at a time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from moe_jax._config import MoEConfig
from moe_jax._typing import Array, Float, Int
from moe_jax.activations import apply_activation
from moe_jax.experts._backend import Backend, MatrixProblem, Problem
from moe_jax.experts._gradient import vary_together
from moe_jax.experts._low_rank import low_rank_product, with_rows_chosen
from moe_jax.quantization import (
    ExpertWeights,
    LowRank,
    QuantFormat,
    QuantizedMatrix,
    QuantizedTensor,
    dequantize_tensor,
    fake_quantize,
)


class Reference(Backend):
    """Every expert on every row in float32; never the default."""

    name = "reference"
    takes_adapters = True

    def refusal(self, problem: Problem) -> str | None:
        return None

    def describe(self, problem: Problem) -> list[str]:
        return ["every expert dequantized to float32 and applied to every row; meant for judging, not for speed"]

    def describe_kept(self, problem: Problem) -> str | None:
        return "what JAX keeps of every expert on every row"

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

    weights = with_rows_chosen(weights, lambda chosen: jnp.repeat(chosen, top_k, axis=0))
    fmt = weights.scheme.activations
    rows = _quantized(x, fmt, weights.w13.input_scale, config.scale_axes(fmt, is_hidden=False))
    rows = jnp.repeat(rows, top_k, axis=0)  # row t * top_k + k
    hidden = _product(rows, expert, weights.w13, weights.w13_bias)
    if weights.w13_lora is not None:
        hidden = hidden + _addend(jnp.repeat(x, top_k, axis=0), expert, weights.w13_lora)
    hidden = apply_activation(hidden, config)
    hidden = jnp.where(expert[:, None] >= 0, hidden, 0.0)  # a row without an expert takes no part in a per-tensor scale
    rows = _quantized(hidden, fmt, weights.w2.input_scale, config.scale_axes(fmt, is_hidden=True))
    rows = _product(rows, expert, weights.w2, weights.w2_bias)
    if weights.w2_lora is not None:
        rows = rows + _addend(hidden, expert, weights.w2_lora)
    return jnp.sum(rows.reshape(num_tokens, top_k, -1) * topk_weights[..., None], axis=1)


def _quantized(x: Array, fmt: QuantFormat | None, input_scale: Array | None, axes: tuple[str, ...]) -> Array:
    return x.astype(jnp.float32) if fmt is None else fake_quantize(x, fmt, input_scale, axes)


def _product(rows: Array, expert: Array, tensor: QuantizedTensor, bias: Array | None) -> Array:
    """``W[expert[r]] . rows[r] + bias[expert[r]]`` for every row r; 0 where expert is -1.

    rows: (R, K) float32. expert: (R,) int32. tensor: (E,) + lead + (N, K). Returns (R,) + lead + (N,) float32.
    """

    def of_expert(stacked):
        one_expert, one_bias = stacked
        y = jnp.einsum("rk,...nk->r...n", rows, dequantize_tensor(one_expert), precision=lax.Precision.HIGHEST)
        return y if one_bias is None else y + one_bias.astype(jnp.float32)

    stacked = (dataclasses.replace(tensor, input_scale=None), bias)
    return _each_by_its_expert(of_expert, expert, stacked, tensor.data.shape[1:-1])


def _addend(rows: Array, expert: Array, lora: LowRank) -> Array:
    """``_product`` with a low-rank addend; rows: as they were before they were quantized."""
    stacked = dataclasses.replace(lora, chosen=None)  # which has no expert axis

    def of_expert(one):
        return low_rank_product(rows, dataclasses.replace(one, chosen=lora.chosen))

    return _each_by_its_expert(of_expert, expert, stacked, lora.b.shape[1:-1])


def _each_by_its_expert(
    function: Callable[[Any], Array], expert: Array, stacked: Any, lead_and_n: tuple[int, ...]
) -> Array:
    """For every row what ``function`` of its own expert gives, (R,) + lead_and_n float32; 0 where expert is -1."""

    def add_expert(out, scanned):
        index, one_expert = scanned
        is_mine = (expert == index).reshape(-1, *(1,) * len(lead_and_n))
        return jnp.where(is_mine, function(one_expert), out), None

    indices = jnp.arange(jax.tree.leaves(stacked)[0].shape[0], dtype=expert.dtype)
    out = jnp.zeros_like(expert, jnp.float32, shape=(expert.shape[0], *lead_and_n))
    return jax.lax.scan(add_expert, out, (indices, stacked))[0]
