"""``Portable``: which layers and calls the kernels by ``mma.sync`` take, and why not others.

    [route] -> align -> quantize and permute -> grouped GEMM 1 (scales, bias, activation) -> requantize
    -> grouped GEMM 2 (scales, bias) -> combine in float32

The sequence, the plan, the kernels for rows and the layout of packed weights are the hopper backend's. Its kernels for
rows need neither TMA nor wgmma, and the words of packed weights are the register operands of ``mma.sync`` too.
"""

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
from moe_jax.experts._backend import Backend, LayerArguments, Problem
from moe_jax.experts.hopper import _kernel_layout
from moe_jax.experts.hopper._experts import forward, forward_arrived, forward_layer, route_alone, routing_refusal
from moe_jax.experts.hopper._kernel_layout import in_kernel_layout, is_kernel_layout, kernel_format
from moe_jax.experts.hopper._plan import describe_portable, make_plan
from moe_jax.experts.hopper._rows import kind_of_tokens, row_kind
from moe_jax.experts.xla._batches import plan_batches
from moe_jax.quantization import ExpertWeights, QuantizedTensor
from moe_jax.routing import Routing, RoutingParams
from pallas_kernels.common import WeightLayout
from pallas_kernels.common.device import portable_target
from pallas_kernels.common.targets import Target
from pallas_kernels.grouped_gemm.portable.config import ALIGNMENT
from pallas_kernels.nvlink_dispatch import DispatchedRows
from pallas_kernels.nvlink_dispatch.config import GROUPED_WIDTH

_16_BIT = ("bfloat16", "float16")
_forward_portable = functools.partial(forward, kernels="portable")
_forward_layer_portable = functools.partial(forward_layer, kernels="portable")
# Jitted, so that a program has equal layers of a model once.
_forward = jax.jit(_forward_portable, static_argnums=0, static_argnames="out_dtype")
_forward_layer = jax.jit(_forward_layer_portable, static_argnums=0)


class Portable(Backend):
    """Pallas kernels for NVIDIA GPUs from sm_80 on; the default on every GPU, after those for Hopper."""

    name = "portable"
    has_gradient = False
    plans_for_local_experts = True
    serves_arrived = True

    def is_default(self, platform: str) -> bool:
        return platform == "gpu"

    def device_refusal(self) -> str | None:
        try:
            portable_target()
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
        if config.implementation is None and _xla_reads_as_fast(problem):
            return f"unquantized weights of {problem.num_tokens} token(s): xla reads them as fast in fewer launches"
        x = jax.ShapeDtypeStruct((problem.num_tokens, weights.hidden_size), config.dtype)
        slots = (problem.num_tokens, config.top_k)
        topk = (jax.ShapeDtypeStruct(slots, jnp.float32), jax.ShapeDtypeStruct(slots, jnp.int32))
        return _kernel_refusal(_forward_portable, config, (x, *topk, weights))

    def describe(self, problem: Problem) -> list[str]:
        plan = make_plan(problem.config, problem.weights, problem.num_tokens, "portable")
        reason = self.routing_refusal(problem.config, problem.weights, None, has_mask=False)
        lines = ["routing: by the kernel" if reason is None else f"routing: by XLA, since the kernel has no {reason}"]
        if plan.unpermuted:
            lines.append("rows: none are moved, GEMM 1 takes all tokens as the rows of every tile")
        return lines + describe_portable(plan)

    def in_brief(self, problem: Problem) -> str:
        return "grouped GEMM by mma.sync"

    def run(
        self,
        x: Array,
        topk_weights: Array,
        topk_ids: Array,
        weights: ExpertWeights,
        config: MoEConfig,
        out_dtype: DTypeLike = jnp.float32,
    ) -> Array:
        return _forward(_shared(config), x, topk_weights, topk_ids, weights, out_dtype=out_dtype)

    def routing_refusal(
        self, config: MoEConfig, weights: ExpertWeights, params: RoutingParams | None, *, has_mask: bool
    ) -> str | None:
        return routing_refusal(config, params, has_mask=has_mask)

    def route(
        self, config: MoEConfig, router_logits: Array, params: RoutingParams | None, token_mask: Array | None
    ) -> Routing:
        return route_alone(config, router_logits, params, token_mask, ("portable", "reference"))

    def layer_refusal(self, config: MoEConfig, arguments: LayerArguments) -> str | None:
        _, _, weights, params, token_mask, _ = arguments
        reason = self.routing_refusal(config, weights, params, has_mask=token_mask is not None)
        return reason or _kernel_refusal(_forward_layer_portable, config, arguments)

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

    def reads(self, layout: WeightLayout) -> bool:
        return layout.is_plain or is_kernel_layout(layout)

    def layout_refusal(self, weights: ExpertWeights, config: MoEConfig) -> str | None:
        if row_kind(weights.scheme) is not None:
            return f"{self.name} reads weights of scheme {weights.scheme.name!r} as they are stored"
        if kernel_format(weights.scheme, config.dtype) is None:
            return f"there is no kernel for scheme {weights.scheme.name!r} in {config.dtype.name} yet"
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
        return ALIGNMENT // jnp.dtype(element).itemsize

    def row_dtype(self, config: MoEConfig) -> DTypeLike:
        return config.dtype

    def arriving_quantization(self, weights: ExpertWeights) -> str:
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
        return forward_arrived(config, arrived, first_slot, weights, send_back, kernels="portable")


def _xla_reads_as_fast(problem: Problem) -> bool:
    """Whether xla multiplies each pair of a token and an expert with unquantized weights where they lie.

    It takes one launch a product: on an H100 29 us for both of Qwen3 at one token, 2.6 TB/s.
    """
    config, scheme = problem.config, problem.weights.scheme
    if scheme.is_quantized or not isinstance(problem.num_tokens, int):
        return False
    batches = plan_batches(config, scheme, problem.num_tokens, config.top_k, config.dtype.itemsize)
    return batches is not None and batches.kind == "pairs"


def _shared(config: MoEConfig) -> MoEConfig:
    """What layers have in common that differ by name, or in a routing function of their own."""
    return dataclasses.replace(config, name="", custom_routing_function=None)


def _kernel_refusal(function: Callable[..., Any], config: MoEConfig, arguments: tuple[Any, ...]) -> str | None:
    """The first kernel that refuses ``function(config, *arguments)``; the layers of a model share one answer."""
    leaves, structure = jax.tree.flatten(arguments)
    shapes = tuple((leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves)
    return _refusal_of_shapes(function, _shared(config), structure, shapes, portable_target())


@functools.lru_cache(maxsize=512)
def _refusal_of_shapes(
    function: Callable[..., Any],
    config: MoEConfig,
    structure: Any,
    shapes: tuple[tuple[tuple[int, ...], np.dtype], ...],
    target: Target,
) -> str | None:
    del target  # part of the key: the answer depends on the device
    arguments = structure.unflatten([jax.ShapeDtypeStruct(*shape) for shape in shapes])
    try:
        jax.eval_shape(functools.partial(function, config), *arguments)
    except NotImplementedError as error:
        return str(error)
    return None
