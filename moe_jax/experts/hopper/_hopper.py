"""``Hopper``: which layers and calls the kernels for compute capability 9.0 take, and why not others."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from moe_jax._config import MoEConfig
from moe_jax._typing import Array
from moe_jax.experts._backend import Backend, LayerArguments, MatrixProblem, Problem
from moe_jax.experts.hopper import _backward, _kernel_layout, _matrix
from moe_jax.experts.hopper._backward import Static, differentiable
from moe_jax.experts.hopper._experts import forward, forward_arrived, forward_layer, route_alone, routing_refusal
from moe_jax.experts.hopper._kernel_layout import in_kernel_layout, is_kernel_layout, kernel_format, kernel_operand
from moe_jax.experts.hopper._plan import Plan, describe_products, layer_key, make_plan
from moe_jax.experts.hopper._rows import kind_of, kind_of_tokens, rounded_by_xla, row_kind
from moe_jax.quantization import ExpertWeights, QuantizedMatrix, QuantizedTensor, method_for
from moe_jax.routing import Routing, RoutingParams
from pallas_kernels.common import WeightLayout
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.grouped_gemm.packed.format import FOLDED_RANGE
from pallas_kernels.grouped_gemm.problem import ROW_BYTES
from pallas_kernels.nvlink_dispatch import DispatchedRows
from pallas_kernels.nvlink_dispatch.config import GROUPED_WIDTH
from pallas_kernels.quantize_and_permute import PermuteConfig, PermuteDesc
from pallas_kernels.quantize_and_permute import config_error as permute_error
from pallas_kernels.tuning.layer import AnyKey

_16_BIT = ("bfloat16", "float16")

# Jitted, so that a program has equal layers of a model once: 24 layers of Qwen3 lowered in 2 s instead of 96.
_forward = jax.jit(forward, static_argnums=0, static_argnames="out_dtype")
_forward_layer = jax.jit(forward_layer, static_argnums=0)
_multiply = jax.jit(_matrix.multiply, static_argnums=3)
_multiply_rows = jax.jit(_matrix.multiply_rows, static_argnums=(2, 4))


class Hopper(Backend):
    """Pallas kernels for Hopper GPUs; the default on every GPU, tried first."""

    name = "hopper"
    plans_for_local_experts = True
    serves_arrived = True
    is_all_kernels = True

    def is_default(self, platform: str) -> bool:
        return platform == "gpu"

    def device_refusal(self) -> str | None:
        try:
            hopper_sms()
        except NotImplementedError as error:
            return str(error)
        return None

    def refusal(self, problem: Problem) -> str | None:
        config, weights = problem.config, problem.weights
        if config.dtype.name not in _16_BIT:
            return f"computes in bfloat16 or float16, the layer in {config.dtype.name}"
        if row_kind(weights.scheme) is None and not in_kernel_layout(weights):
            if kernel_format(weights.scheme, config.dtype) is None:
                name = f"scheme {weights.scheme.name!r}"
                if kernel_format(weights.scheme, "bfloat16") is not None:
                    return f"the kernel for {name} multiplies in bfloat16, the layer in {config.dtype.name}"
                return f"there is no kernel for {name} yet"
            if (reason := self.layout_refusal(weights, config)) is not None:
                return reason
            return f"weights of scheme {weights.scheme.name!r} are in layout 'plain'; the kernel reads kernel_layout's"
        if not weights.scheme.is_quantized and weights.w13.data.dtype != config.dtype:
            return f"unquantized weights are {weights.w13.data.dtype}, expected the layer's dtype {config.dtype.name}"
        if (reason := self.device_refusal()) is not None:
            return reason
        if not isinstance(problem.num_tokens, int):
            return f"kernels are compiled for one number of tokens, found the symbolic {problem.num_tokens}"
        x = jax.ShapeDtypeStruct((problem.num_tokens, weights.hidden_size), config.dtype)
        slots = (problem.num_tokens, config.top_k)
        topk = (jax.ShapeDtypeStruct(slots, jnp.float32), jax.ShapeDtypeStruct(slots, jnp.int32))
        return _kernel_refusal(forward, config, (x, *topk, weights))

    def describe(self, problem: Problem) -> list[str]:
        """Who routes, and the configuration of both products with where it comes from."""
        config, weights = problem.config, problem.weights
        reason = self.routing_refusal(config, weights, None, has_mask=False)
        lines = ["routing: by the kernel" if reason is None else f"routing: by XLA, since the kernel has no {reason}"]
        plan = make_plan(config, weights, problem.num_tokens)
        if plan.unpermuted:
            quantized = "" if plan.quantization == "none" else "tokens are quantized where they are, "
            lines.append(f"rows: none are moved, {quantized}GEMM 1 takes all tokens as the rows of every tile")
        lines += describe_products(plan, weights)
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
            return differentiable(Static(_shared(config), jnp.dtype(out_dtype)), x, topk_weights, topk_ids, weights)
        return _forward(_shared(config), x, topk_weights, topk_ids, weights, out_dtype=out_dtype)

    def gradient_refusal(self, problem: Problem) -> str | None:
        return _backward.gradient_refusal(problem.config, problem.weights)

    def reads(self, layout: WeightLayout) -> bool:
        return layout.is_plain or is_kernel_layout(layout)

    def layout_refusal(self, weights: ExpertWeights, config: MoEConfig) -> str | None:
        return _kernel_layout.layout_refusal(weights, config)

    def kernel_layout(self, weights: ExpertWeights, config: MoEConfig) -> ExpertWeights:
        return _kernel_layout.to_kernel_layout(weights, config)

    def plain_layout(self, weights: ExpertWeights) -> ExpertWeights:
        return _kernel_layout.to_plain_layout(weights)

    def shard_axis(self, tensor: QuantizedTensor, field: str, is_w2: bool) -> int | None:
        return _kernel_layout.shard_axis(tensor, field, is_w2)

    def intermediate_unit(self, config: MoEConfig) -> int:
        scheme = config.scheme
        if row_kind(scheme) is None:
            return 1
        element = config.dtype if scheme.weights is None else scheme.weights.storage
        return ROW_BYTES // jnp.dtype(element).itemsize

    def tuning_key(self, config: MoEConfig) -> AnyKey:
        weights = method_for(config.scheme).abstract_weights(config)
        if self.layout_refusal(weights, config) is None:
            weights = jax.eval_shape(functools.partial(self.kernel_layout, config=config), weights)
        if reason := self.refusal(Problem(config, weights, 1, "gpu")):
            raise NotImplementedError(reason)
        return layer_key(config, weights)

    def routing_refusal(
        self, config: MoEConfig, weights: ExpertWeights, params: RoutingParams | None, *, has_mask: bool
    ) -> str | None:
        return routing_refusal(config, params, has_mask=has_mask)

    def route(
        self, config: MoEConfig, router_logits: Array, params: RoutingParams | None, token_mask: Array | None
    ) -> Routing:
        return route_alone(config, router_logits, params, token_mask, ("hopper", "reference"))

    def layer_refusal(self, config: MoEConfig, arguments: LayerArguments) -> str | None:
        _, _, weights, params, token_mask, _ = arguments
        reason = self.routing_refusal(config, weights, params, has_mask=token_mask is not None)
        return reason or _kernel_refusal(forward_layer, config, arguments)

    def run_layer(
        self,
        config: MoEConfig,
        x: Array,
        router_logits: Array,
        weights: ExpertWeights,
        params: RoutingParams | None,
        token_mask: Array | None,
        shared: Array | None,
    ) -> tuple[Array, Array, Array]:
        return _forward_layer(_shared(config), x, router_logits, weights, params, token_mask, shared)

    def matrix_refusal(self, problem: MatrixProblem) -> str | None:
        reason = _matrix.refusal(problem.matrix, problem.dtype) or self.device_refusal()
        if reason is not None:
            return reason
        if not isinstance(problem.num_tokens, int):
            return f"kernels are compiled for one number of tokens, found the symbolic {problem.num_tokens}"
        n, k = problem.matrix.shape
        x = jax.ShapeDtypeStruct((problem.num_tokens, k), problem.dtype)
        bias = jax.ShapeDtypeStruct((n,), problem.dtype) if problem.has_bias else None
        return _traced_refusal(_multiply_as, jnp.dtype(problem.out_dtype), (x, problem.matrix, bias))

    def multiply(self, x: Array, matrix: QuantizedMatrix, bias: Array | None, out_dtype: DTypeLike) -> Array:
        return _multiply(x, matrix, bias, jnp.dtype(out_dtype))

    def matrix_rows(self, problem: MatrixProblem) -> tuple[str, int] | None:
        return _matrix.rows_of_tiles(problem.matrix, problem.num_tokens, problem.out_dtype)

    def multiply_rows(
        self, codes: Array, scales: Array, num_tokens: int, matrix: QuantizedMatrix, out_dtype: DTypeLike
    ) -> Array:
        return _multiply_rows(codes, scales, num_tokens, matrix, jnp.dtype(out_dtype))

    def matrix_layout(self, matrix: QuantizedMatrix, dtype: DTypeLike) -> QuantizedMatrix:
        return _matrix.to_kernel_layout(matrix, dtype)

    def plain_matrix(self, matrix: QuantizedMatrix) -> QuantizedMatrix:
        return _matrix.to_plain_layout(matrix)

    def row_dtype(self, config: MoEConfig) -> DTypeLike:
        return config.dtype

    def arriving_quantization(self, weights: ExpertWeights) -> str:
        """By row or group, where scales come from the token itself and a kernel quantizes rows of this length."""
        kind = kind_of_tokens(weights)
        is_ragged = kind.startswith("e4m3_group") and weights.hidden_size % GROUPED_WIDTH
        return "none" if is_ragged or kind == "e4m3_tensor" else kind

    def serve_arrived(
        self,
        config: MoEConfig,
        arrived: DispatchedRows,
        first_slot: Array,
        weights: ExpertWeights,
        send_back: Callable[[Array, Array], Array],
    ) -> Array:
        return forward_arrived(config, arrived, first_slot, weights, send_back)


def _shared(config: MoEConfig) -> MoEConfig:
    """What layers have in common that differ by name, or in a routing function of their own, which XLA runs; caches
    would also keep alive what it holds.
    """
    return dataclasses.replace(config, name="", custom_routing_function=None)


def _kernel_refusal(function: Callable[..., Any], config: MoEConfig, arguments: tuple[Any, ...]) -> str | None:
    """The first kernel that refuses ``function(config, *arguments)``; the layers of a model share one answer."""
    return _traced_refusal(function, _shared(config), arguments)


def _multiply_as(out_dtype: np.dtype, x: Array, matrix: QuantizedMatrix, bias: Array | None) -> Array:
    return _matrix.multiply(x, matrix, bias, out_dtype)


def _traced_refusal(function: Callable[..., Any], static: Any, arguments: tuple[Any, ...]) -> str | None:
    leaves, structure = jax.tree.flatten(arguments)
    shapes = tuple((leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves)
    return _refusal_of_shapes(function, static, structure, shapes, hopper_sms())


@functools.lru_cache(maxsize=512)
def _refusal_of_shapes(
    function: Callable[..., Any],
    static: Any,
    structure: Any,
    shapes: tuple[tuple[tuple[int, ...], np.dtype], ...],
    num_sms: int,
) -> str | None:
    del num_sms  # part of the key: the answer depends on the device
    arguments = structure.unflatten([jax.ShapeDtypeStruct(*shape) for shape in shapes])
    try:
        jax.eval_shape(functools.partial(function, static), *arguments)
    except NotImplementedError as error:
        return str(error)
    return None


def _row_notes(problem: Problem, plan: Plan) -> list[str]:
    """Which rows of plain products XLA quantizes and moves, since the kernel refuses them."""
    config, weights = problem.config, problem.weights
    kind, hidden = kind_of(weights), plan.products[1]
    rows = {} if plan.unpermuted else {"input": (problem.num_tokens, weights.hidden_size, config.top_k)}
    if plan.requantize == "none" and kind != "none":
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
