"""``KernelBackend``: what the backends on the kernel sequence of ``_experts`` have in common, and why kernels refuse.

[route] -> align -> quantize and permute -> grouped GEMM 1 (scales, bias, activation) -> requantize
-> grouped GEMM 2 (scales, bias) -> combine in float32
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from moe_jax._config import MoEConfig
from moe_jax._typing import Array
from moe_jax.experts._backend import Backend, LayerArguments, Problem
from moe_jax.experts.hopper import _kernel_layout
from moe_jax.experts.hopper._experts import (
    aligns_and_moves,
    forward,
    forward_arrived,
    forward_layer,
    route_alone,
    routing_refusal,
)
from moe_jax.experts.hopper._kernel_layout import in_kernel_layout, is_kernel_layout, kernel_format
from moe_jax.experts.hopper._plan import Plan, make_plan
from moe_jax.experts.hopper._rows import kind_of_tokens, row_kind
from moe_jax.quantization import ExpertWeights, QuantizedTensor
from moe_jax.routing import Routing, RoutingParams
from pallas_kernels.combine import RoutedRows
from pallas_kernels.common import WeightLayout
from pallas_kernels.common.shapes import shapes_of
from pallas_kernels.nvlink_dispatch import DispatchedRows
from pallas_kernels.nvlink_dispatch.config import GROUPED_WIDTH
from pallas_kernels.route.config import fused_tokens

_16_BIT = ("bfloat16", "float16")

# Jitted, so that a program has equal layers of a model once: 24 layers of Qwen3 lowered in 2 s instead of 96.
_forward = jax.jit(forward, static_argnums=0, static_argnames=("kernels", "out_dtype"))
_forward_layer = jax.jit(forward_layer, static_argnums=0, static_argnames=("kernels", "is_combined"))


class KernelBackend(Backend):
    """One family of kernels for the products of ``_experts``; ``name`` is the family's.

    row_bytes: rows of K of plain weights are a multiple of this.
    """

    plans_for_local_experts = True
    serves_arrived = True
    row_bytes: ClassVar[int]

    @abc.abstractmethod
    def device(self) -> Hashable:
        """What the kernels know of this process's GPU. Raises NotImplementedError where they run on none."""

    @abc.abstractmethod
    def describe_plan(self, problem: Problem, plan: Plan) -> list[str]:
        """The configuration of both products, and what else the kernels do with these weights, one line each."""

    def is_default(self, platform: str) -> bool:
        return platform == "gpu"

    def device_refusal(self) -> str | None:
        try:
            self.device()
        except NotImplementedError as error:
            return str(error)
        return None

    def refusal(self, problem: Problem) -> str | None:
        config, weights = problem.config, problem.weights
        if config.dtype.name not in _16_BIT:
            return f"computes in bfloat16 or float16, the layer in {config.dtype.name}"
        if row_kind(weights.scheme) is None and not in_kernel_layout(weights):
            return self.layout_refusal(weights, config) or (
                f"weights of scheme {weights.scheme.name!r} are in layout 'plain'; the kernel reads kernel_layout's"
            )
        if not weights.scheme.is_quantized and weights.w13.data.dtype != config.dtype:
            return f"unquantized weights are {weights.w13.data.dtype}, expected the layer's dtype {config.dtype.name}"
        if (reason := self.device_refusal()) is not None:
            return reason
        if not isinstance(problem.num_tokens, int):
            return f"kernels are compiled for one number of tokens, found the symbolic {problem.num_tokens}"
        return self.faster_elsewhere(problem) or self._refusal_of_call(problem)

    def faster_elsewhere(self, problem: Problem) -> str | None:
        """Why the next backend is the better one for a problem that these kernels might run, or None."""
        return None

    def _refusal_of_call(self, problem: Problem) -> str | None:
        config, weights = problem.config, problem.weights
        x = jax.ShapeDtypeStruct((problem.num_tokens, weights.hidden_size), config.dtype)
        slots = (problem.num_tokens, config.top_k)
        topk = (jax.ShapeDtypeStruct(slots, jnp.float32), jax.ShapeDtypeStruct(slots, jnp.int32))
        return self._refusal_of(forward, config, (x, *topk, weights))

    def _refusal_of(self, function: Callable[..., Any], config: MoEConfig, arguments: tuple[Any, ...]) -> str | None:
        return traced_refusal(self.device(), function, (shared_config(config),), arguments, kernels=self.name)

    def describe(self, problem: Problem) -> list[str]:
        """Who routes, and the configuration of both products with where it comes from."""
        config, weights = problem.config, problem.weights
        reason = self.routing_refusal(config, weights, None, has_mask=False)
        lines = ["routing: by the kernel" if reason is None else f"routing: by XLA, since the kernel has no {reason}"]
        plan = make_plan(config, weights, problem.num_tokens, self.name)
        if plan.unpermuted:
            quantized = "" if plan.quantization == "none" else "tokens are quantized where they are, "
            lines.append(f"rows: none are moved, {quantized}GEMM 1 takes all tokens as the rows of every tile")
        elif reason is not None or problem.num_tokens > fused_tokens(config.num_experts):
            x = jax.ShapeDtypeStruct((problem.num_tokens, weights.hidden_size), config.dtype)
            if aligns_and_moves(config, weights, plan, x, (problem.num_tokens, config.top_k), self.name):
                lines.append("rows: one launch aligns the tokens and moves them")
        return lines + self.describe_plan(problem, plan)

    def run(
        self,
        x: Array,
        topk_weights: Array,
        topk_ids: Array,
        weights: ExpertWeights,
        config: MoEConfig,
        out_dtype: DTypeLike = jnp.float32,
    ) -> Array:
        options: Any = dict(kernels=self.name, out_dtype=out_dtype)
        return _forward(shared_config(config), x, topk_weights, topk_ids, weights, **options)

    # -- a layout of its own ------------------------------------------------------------------------------------------

    def reads(self, layout: WeightLayout) -> bool:
        return layout.is_plain or is_kernel_layout(layout)

    def layout_refusal(self, weights: ExpertWeights, config: MoEConfig) -> str | None:
        scheme = weights.scheme
        if row_kind(scheme) is not None:
            return f"{self.name} reads weights of scheme {scheme.name!r} as they are stored"
        if kernel_format(scheme, config.dtype) is None:
            if kernel_format(scheme, "bfloat16") is not None:
                return f"the kernel for scheme {scheme.name!r} multiplies in bfloat16, the layer in {config.dtype.name}"
            return f"there is no kernel for scheme {scheme.name!r} yet"
        return _kernel_layout.layout_refusal(weights, config)

    def kernel_layout(self, weights: ExpertWeights, config: MoEConfig) -> ExpertWeights:
        return _kernel_layout.to_kernel_layout(weights, config)

    def plain_layout(self, weights: ExpertWeights) -> ExpertWeights:
        return _kernel_layout.to_plain_layout(weights)

    def shard_axis(self, tensor: QuantizedTensor, field: str, is_w2: bool) -> int | None:
        return _kernel_layout.shard_axis(tensor, field, is_w2)

    def intermediate_unit(self, config: MoEConfig) -> int:
        if row_kind(config.scheme) is None:
            return 1
        element = config.dtype if config.scheme.weights is None else config.scheme.weights.storage
        return self.row_bytes // jnp.dtype(element).itemsize

    # -- routing and the whole layer ----------------------------------------------------------------------------------

    def routing_refusal(
        self, config: MoEConfig, weights: ExpertWeights, params: RoutingParams | None, *, has_mask: bool
    ) -> str | None:
        return routing_refusal(config, params, has_mask=has_mask)

    def route(
        self, config: MoEConfig, router_logits: Array, params: RoutingParams | None, token_mask: Array | None
    ) -> Routing:
        return route_alone(config, router_logits, params, token_mask, (self.name, "reference"))

    def layer_refusal(self, config: MoEConfig, arguments: LayerArguments) -> str | None:
        _, _, weights, params, token_mask, _ = arguments
        reason = self.routing_refusal(config, weights, params, has_mask=token_mask is not None)
        return reason or self._refusal_of(forward_layer, config, arguments)

    def run_layer(
        self,
        config: MoEConfig,
        x: Array,
        router_logits: Array,
        weights: ExpertWeights,
        params: RoutingParams | None,
        token_mask: Array | None,
        shared: Array | None,
        is_combined: bool = True,
    ) -> tuple[Array | RoutedRows, Array, Array]:
        options: Any = dict(kernels=self.name, is_combined=is_combined)
        return _forward_layer(shared_config(config), x, router_logits, weights, params, token_mask, shared, **options)

    # -- a share of a layer over a mesh -------------------------------------------------------------------------------

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
        return forward_arrived(config, arrived, first_slot, weights, send_back, kernels=self.name)


def shared_config(config: MoEConfig) -> MoEConfig:
    """What layers have in common that differ by name, or in a routing function of their own, which XLA runs; caches
    would also keep alive what it holds.
    """
    return dataclasses.replace(config, name="", custom_routing_function=None)


def traced_refusal(
    device: Hashable, function: Callable[..., Any], static: tuple[Any, ...], arguments: tuple[Any, ...], **options: Any
) -> str | None:
    """The first kernel that refuses ``function(*static, *arguments, **options)``, or None.

    Equal calls share one answer, as those of a model's layers. static and options are hashable, arguments are pytrees
    of arrays or of their shapes. device: on which the answer depends.
    """
    leaves, structure = jax.tree.flatten(arguments)
    shapes = tuple((leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves)
    return _refusal_of_shapes(device, function, static, tuple(options.items()), structure, shapes)


@functools.lru_cache(maxsize=1024)
def _refusal_of_shapes(
    device: Hashable,
    function: Callable[..., Any],
    static: tuple[Any, ...],
    options: tuple[tuple[str, Any], ...],
    structure: Any,
    shapes: tuple[tuple[tuple[int, ...], np.dtype], ...],
) -> str | None:
    del device  # a part of the key alone
    arguments = structure.unflatten([jax.ShapeDtypeStruct(*shape) for shape in shapes])
    try:
        shapes_of(functools.partial(function, *static, **dict(options)), *arguments)
    except NotImplementedError as error:
        return str(error)
    return None
