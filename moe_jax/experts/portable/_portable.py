"""``Portable``: which layers and calls the kernels by ``mma.sync`` take, and why not others.

    XLA: align -> quantize and permute -> grouped GEMM 1 (scales, bias, activation) -> XLA: requantize -> grouped GEMM 2
    (scales, bias) -> XLA: combine in float32

The sequence, the plan and the layout of packed weights are the hopper backend's, whose words are the register operands
of ``mma.sync`` too.
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
from moe_jax.experts._backend import Backend, Problem
from moe_jax.experts.hopper import _kernel_layout
from moe_jax.experts.hopper._experts import forward, forward_arrived
from moe_jax.experts.hopper._kernel_layout import in_kernel_layout, is_kernel_layout, kernel_format
from moe_jax.experts.hopper._plan import describe_portable, make_plan
from moe_jax.experts.hopper._rows import kind_of_tokens, row_kind
from moe_jax.quantization import ExpertWeights, QuantizedTensor
from pallas_kernels.common import WeightLayout
from pallas_kernels.common.device import portable_target
from pallas_kernels.common.targets import Target
from pallas_kernels.grouped_gemm.portable.config import ALIGNMENT
from pallas_kernels.nvlink_dispatch import DispatchedRows
from pallas_kernels.nvlink_dispatch.config import GROUPED_WIDTH

_16_BIT = ("bfloat16", "float16")
_forward_portable = functools.partial(forward, kernels="portable")
# Jitted, so that a program has equal layers of a model once.
_forward = jax.jit(_forward_portable, static_argnums=0, static_argnames="out_dtype")


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
        x = jax.ShapeDtypeStruct((problem.num_tokens, weights.hidden_size), config.dtype)
        slots = (problem.num_tokens, config.top_k)
        topk = (jax.ShapeDtypeStruct(slots, jnp.float32), jax.ShapeDtypeStruct(slots, jnp.int32))
        leaves, structure = jax.tree.flatten((x, *topk, weights))
        shapes = tuple((leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves)
        return _refusal_of_shapes(_shared(config), structure, shapes, portable_target())

    def describe(self, problem: Problem) -> list[str]:
        plan = make_plan(problem.config, problem.weights, problem.num_tokens, "portable")
        lines = ["routing, alignment, quantization of rows and combine: by XLA"]
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


def _shared(config: MoEConfig) -> MoEConfig:
    """What layers have in common that differ by name, or in a routing function of their own."""
    return dataclasses.replace(config, name="", custom_routing_function=None)


@functools.lru_cache(maxsize=512)
def _refusal_of_shapes(
    config: MoEConfig,
    structure: Any,
    shapes: tuple[tuple[tuple[int, ...], np.dtype], ...],
    target: Target,
) -> str | None:
    """The first kernel that refuses the call; the layers of a model share one answer."""
    del target  # part of the key: the answer depends on the device
    arguments = structure.unflatten([jax.ShapeDtypeStruct(*shape) for shape in shapes])
    try:
        jax.eval_shape(functools.partial(_forward_portable, config), *arguments)
    except NotImplementedError as error:
        return str(error)
    return None
