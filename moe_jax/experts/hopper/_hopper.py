"""``Hopper``: the kernels for compute capability 9.0, with a gradient and products outside the experts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moe_jax._config import MoEConfig
from moe_jax._typing import Array
from moe_jax.experts._backend import Biases, LayerArguments, Matrices, MatrixProblem, Problem
from moe_jax.experts.hopper import _backward, _matrix
from moe_jax.experts.hopper._adapters import adapter_refusal
from moe_jax.experts.hopper._backward import Static, differentiable
from moe_jax.experts.hopper._kernel_backend import KernelBackend, shared_config, traced_refusal
from moe_jax.experts.hopper._kernel_layout import in_kernel_layout, kernel_operand
from moe_jax.experts.hopper._plan import Plan, describe_products, layer_key, make_plan
from moe_jax.experts.hopper._rows import kind_of, rounded_by_xla
from moe_jax.quantization import ExpertWeights, QuantizedMatrix, method_for
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.grouped_gemm.packed import HEIGHTS
from pallas_kernels.grouped_gemm.packed.format import FOLDED_RANGE
from pallas_kernels.grouped_gemm.problem import ROW_BYTES
from pallas_kernels.quantize_and_permute import PermuteConfig, PermuteDesc
from pallas_kernels.quantize_and_permute import config_error as permute_error
from pallas_kernels.tuning.layer import AnyKey

_multiply = jax.jit(_matrix.multiply, static_argnums=3)
_multiply_in_parts = jax.jit(_matrix.multiply_in_parts, static_argnums=2)
_multiply_rows = jax.jit(_matrix.multiply_rows, static_argnums=(2, 5, 6))


class Hopper(KernelBackend):
    """Pallas kernels for Hopper GPUs; the default on every GPU, tried first."""

    name = "hopper"
    takes_adapters = True
    joins_matrices = True
    is_all_kernels = True
    leaves_rows = True
    row_bytes = ROW_BYTES

    def device(self) -> int:
        return hopper_sms()

    def describe_plan(self, problem: Problem, plan: Plan) -> list[str]:
        config, weights = problem.config, problem.weights
        lines = describe_products(plan, weights)
        if weights.has_adapters:
            lines.append("adapters: by kernels between the products, GEMM 1 stored before its activation")
        lines.append(_backward.describe_gradient(config, weights))
        return lines + (_operand_notes(problem) if in_kernel_layout(weights) else _row_notes(problem, plan))

    def in_brief(self, problem: Problem) -> str:
        return "packed grouped GEMM" if in_kernel_layout(problem.weights) else "grouped GEMM"

    def run(
        self,
        x: Array,
        topk_weights: Array,
        topk_ids: Array,
        weights: ExpertWeights,
        config: MoEConfig,
        out_dtype: DTypeLike = jnp.float32,
    ) -> Array:
        if self.gradient_refusal(Problem(config, weights, x.shape[0], "gpu")) is None:
            static = Static(shared_config(config), jnp.dtype(out_dtype))
            return differentiable(static, x, topk_weights, topk_ids, weights)
        return super().run(x, topk_weights, topk_ids, weights, config, out_dtype)

    def gradient_refusal(self, problem: Problem) -> str | None:
        return _backward.gradient_refusal(problem.config, problem.weights)

    def describe_kept(self, problem: Problem) -> str | None:
        return _backward.describe_kept(problem.config, problem.weights, int(problem.num_tokens))

    def tuning_key(self, config: MoEConfig) -> AnyKey:
        weights = self._abstract_weights(config)
        if reason := self.refusal(Problem(config, weights, 1, "gpu")):
            raise NotImplementedError(reason)
        return layer_key(config, weights)

    def tuning_refusal(self, config: MoEConfig, num_tokens: int) -> str | None:
        block_m = make_plan(config, self._abstract_weights(config), num_tokens, self.name).block_m
        if block_m in HEIGHTS:
            rows = "one row" if block_m == 1 else f"{block_m} rows"
            return f"multiplied without wgmma, in tiles of {rows}, which no table holds"
        return None

    def _abstract_weights(self, config: MoEConfig) -> ExpertWeights:
        """In the layout in which the kernels read them."""
        weights = method_for(config.scheme).abstract_weights(config)
        if self.layout_refusal(weights, config) is None:
            return jax.eval_shape(functools.partial(self.kernel_layout, config=config), weights)
        return weights

    def refusal(self, problem: Problem) -> str | None:
        return adapter_refusal(problem.config, problem.weights) or super().refusal(problem)

    def layer_refusal(self, config: MoEConfig, arguments: LayerArguments) -> str | None:
        if arguments[2].has_adapters:
            return "the whole layer in one takes no adapters"
        return super().layer_refusal(config, arguments)

    # -- matrices outside the experts ---------------------------------------------------------------------------------

    def matrix_refusal(self, problem: MatrixProblem) -> str | None:
        reason = _matrix.refusal(problem.matrix, problem.dtype) or self.device_refusal()
        if reason is not None:
            return reason
        if not isinstance(problem.num_tokens, int):
            return f"kernels are compiled for one number of tokens, found the symbolic {problem.num_tokens}"
        matrices = _matrix.each(problem.matrix)
        x = jax.ShapeDtypeStruct((problem.num_tokens, matrices[0].shape[1]), problem.dtype)
        bias: Any = None
        if problem.has_bias:
            bias = tuple(jax.ShapeDtypeStruct(matrix.shape[:1], problem.dtype) for matrix in matrices)
            bias = bias if isinstance(problem.matrix, tuple) else bias[0]
        out_dtype = jnp.dtype(problem.out_dtype)
        return traced_refusal(self.device(), _matrix.multiply, (), (x, problem.matrix, bias), out_dtype=out_dtype)

    def multiply(self, x: Array, matrix: Matrices, bias: Biases, out_dtype: DTypeLike) -> Array:
        return _multiply(x, matrix, bias, jnp.dtype(out_dtype))

    def matrix_parts(self, problem: MatrixProblem) -> int:
        return _matrix.choose_parts(problem.matrix, problem.num_tokens)

    def multiply_in_parts(self, x: Array, matrix: Matrices, parts: int) -> Array:
        return _multiply_in_parts(x, matrix, parts)

    def matrix_rows(self, problem: MatrixProblem, parts: int = 1) -> tuple[str, int] | None:
        return _matrix.rows_of_tiles(problem.matrix, problem.num_tokens, problem.out_dtype, parts)

    def multiply_rows(
        self,
        codes: Array,
        scales: Array,
        num_tokens: int,
        matrix: Matrices,
        bias: Biases,
        out_dtype: DTypeLike,
        parts: int = 1,
    ) -> Array:
        return _multiply_rows(codes, scales, num_tokens, matrix, bias, jnp.dtype(out_dtype), parts)

    def matrix_layout(self, matrix: QuantizedMatrix, dtype: DTypeLike) -> QuantizedMatrix:
        return _matrix.to_kernel_layout(matrix, dtype)

    def plain_matrix(self, matrix: QuantizedMatrix) -> QuantizedMatrix:
        return _matrix.to_plain_layout(matrix)


def _row_notes(problem: Problem, plan: Plan) -> list[str]:
    """Which rows of plain products XLA quantizes and moves, since the kernel refuses them."""
    config, weights = problem.config, problem.weights
    kind, hidden = kind_of(weights), plan.products[1]
    rows = {} if plan.unpermuted else {"input": (problem.num_tokens, weights.hidden_size, config.top_k)}
    if kind != "none" and plan.requantize == plan.hidden_quantization == "none":
        rows["hidden"] = (hidden.rows, weights.intermediate_size, 0)
    lines = []
    for name, (count, width, top_k) in rows.items():
        desc = PermuteDesc(count, width, top_k, hidden.rows, config.dtype.name, str(kind))
        if reason := permute_error(desc, PermuteConfig(1)):
            lines.append(f"{name} rows: quantized and moved by XLA, since the kernel refuses {reason}")
    return lines


def _operand_notes(problem: Problem) -> list[str]:
    """What becomes of columns, activations and group scales of weights in kernel layout."""
    config, weights, lines = problem.config, problem.weights, []
    if weights.w13.g_idx is not None:
        lines.append("act-order: columns of each row gathered for its expert, w13's rows in the order of w2's columns")
    activations, fmt = weights.scheme.activations, kernel_operand(weights.w13).fmt
    if activations is not None and not fmt.is_8bit:
        lines.append("activations rounded to their format's grid and multiplied in bfloat16, which holds it exactly")
        widths = dict(input=weights.hidden_size, hidden=weights.intermediate_size)
        lines += rounded_by_xla(activations, widths, config.dtype.name)
    if fmt.is_8bit and fmt.scale == "e8m0":
        lines.append(
            f"scales of groups folded into e4m3 operands: exact down to 2**-{FOLDED_RANGE} of their channel's largest, "
            "zero below"
        )
    return lines
