"""The torch operators of the bridge: what ``torch.compile`` and ``torch.export`` see of a layer, with gradients.

An operator takes its tensors and the name of a layer, finds the layer's weights and runs one jitted JAX function on
them. The number of tokens is padded to a bucket beyond 16, so that few programs are compiled; padding is masked.
Gradients flow to activations, router logits and router weights; quantized experts have none.
"""

import dataclasses
import gc
import os
import warnings
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import torch

from moe_jax import ExpertWeights, MoEConfig, fused_experts, fused_moe
from moe_jax.models._compiled import SMALLEST_BUCKET, bucket
from moe_jax.routing import RoutingParams, route
from torch_bridge._tensors import to_jax, to_torch

# Layers by name, vLLM's "static forward context": operators carry names, since they cannot carry modules.
layers: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()


def register(layer: Any, name: str) -> str:
    """Enter a layer under a unique name, made up where none is given. Raises ValueError for a name that is taken."""
    if name in layers:
        gc.collect()  # a layer and its parameters refer to each other; one that was let go may still be there
    if name in layers:
        raise ValueError(f"Duplicate layer name: {name}; give every FusedMoE a prefix of its own")
    number = len(layers)
    while not name or name in layers:
        name, number = f"fused_moe.{number}", number + 1
    layers[name] = layer
    return name


def warn_of_preallocation() -> None:
    """JAX takes three quarters of a GPU by itself, which leaves torch in the same process with the rest."""
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() not in ("false", "0"):
        warnings.warn(
            "JAX preallocates 75% of the GPU, which torch then cannot use: set XLA_PYTHON_CLIENT_PREALLOCATE=false, or "
            "XLA_PYTHON_CLIENT_MEM_FRACTION, before the first use of JAX",
            stacklevel=4,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Experts:
    """What a call needs of a layer on one rank, as one pytree.

    weights and config: of this rank. global_config: of the whole layer, for routing. routing: its arrays, without the
    correction bias. expert_map: (P,) int32, global to local expert, or None when all are local.
    """

    weights: ExpertWeights
    config: MoEConfig
    global_config: MoEConfig
    routing: RoutingParams
    expert_map: Any = None


@jax.jit
def _moe(x, logits, mask, token_ids, bias, experts: Experts):
    config, routing = experts.global_config, dataclasses.replace(experts.routing, correction_bias=bias)
    if config == experts.config:
        return fused_moe(x, logits, experts.weights, config, routing=routing, token_mask=mask, token_ids=token_ids)
    routed = route(logits, config, params=routing, hidden_states=x, token_ids=token_ids, token_mask=mask)
    y = _experts(x, routed.topk_weights, routed.topk_ids, mask, experts)
    return y * jnp.asarray(config.routed_scaling_factor, y.dtype) if config.apply_routed_scale_to_output else y


@jax.jit
def _experts(x, topk_weights, topk_ids, mask, experts: Experts):
    if experts.expert_map is not None:
        is_known = (topk_ids >= 0) & (topk_ids < experts.expert_map.shape[0])
        topk_ids = jnp.where(is_known, experts.expert_map[jnp.where(is_known, topk_ids, 0)], -1)
    return fused_experts(x, topk_weights, topk_ids, experts.weights, experts.config, token_mask=mask)


@jax.jit
def _moe_gradients(grad, x, logits, *rest):
    return jax.vjp(lambda x, logits: _moe(x, logits, *rest), x, logits)[1](grad)


@jax.jit
def _experts_gradients(grad, x, topk_weights, *rest):
    return jax.vjp(lambda x, topk_weights: _experts(x, topk_weights, *rest), x, topk_weights)[1](grad)


@jax.jit
def _select(x, logits, token_ids, bias, experts: Experts):
    routing = dataclasses.replace(experts.routing, correction_bias=bias)
    routed = route(logits, experts.global_config, params=routing, hidden_states=x, token_ids=token_ids)
    return routed.topk_weights, routed.topk_ids


def _padded(*tensors: torch.Tensor | None) -> list[Any]:
    """The tensors as JAX arrays with a bucket's number of tokens, and the mask of those that are real or None."""
    first = next(tensor for tensor in tensors if tensor is not None)
    count = first.shape[0]
    size = count if count <= SMALLEST_BUCKET else bucket(count)
    if size == count:
        return [None if tensor is None else to_jax(tensor) for tensor in tensors] + [None]
    padded = [
        None if tensor is None else to_jax(torch.cat([tensor, tensor.new_zeros(size - count, *tensor.shape[1:])]))
        for tensor in tensors
    ]
    return [*padded, to_jax(torch.arange(size, device=first.device) < count)]


def _layer(name: str) -> Any:
    layer = layers.get(name)
    if layer is None:
        raise RuntimeError(f"layer {name!r} does not exist any more; a traced program needs its layers alive")
    return layer


def _trimmed(array: jax.Array, like: torch.Tensor) -> torch.Tensor:
    return to_torch(array)[: like.shape[0]]


@torch.library.custom_op("torch_bridge::fused_moe", mutates_args=())
def fused_moe_op(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    e_score_correction_bias: torch.Tensor | None,
    token_ids: torch.Tensor | None,
    layer_name: str,
) -> torch.Tensor:
    """x (T, H), router_logits (T, E) -> (T, H) in x's dtype: routing and experts of the layer of this name."""
    experts = _layer(layer_name).experts_for(x, router_logits)
    if x.shape[0] == 0:
        return torch.empty_like(x)
    x_, logits, ids, mask = _padded(x, router_logits, token_ids)
    return _trimmed(_moe(x_, logits, mask, ids, _bias(e_score_correction_bias), experts), x)


@torch.library.custom_op("torch_bridge::fused_moe_backward", mutates_args=())
def fused_moe_backward_op(
    grad: torch.Tensor,
    x: torch.Tensor,
    router_logits: torch.Tensor,
    e_score_correction_bias: torch.Tensor | None,
    token_ids: torch.Tensor | None,
    layer_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients with respect to x and router_logits; the forward pass is computed again."""
    experts = _layer(layer_name).experts_for(x, router_logits)
    if x.shape[0] == 0:
        return torch.empty_like(x), torch.empty_like(router_logits)
    grad_, x_, logits, ids, mask = _padded(grad, x, router_logits, token_ids)
    dx, dlogits = _moe_gradients(grad_, x_, logits, mask, ids, _bias(e_score_correction_bias), experts)
    return _trimmed(dx, x), _trimmed(dlogits, x)


@torch.library.custom_op("torch_bridge::fused_experts", mutates_args=())
def fused_experts_op(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str
) -> torch.Tensor:
    """x (T, H), topk_weights and topk_ids (T, k) -> (T, H) in x's dtype.

    ids are global; unknown ones contribute zero.
    """
    experts = _layer(layer_name).experts_for(x, topk_weights, topk_ids)
    if x.shape[0] == 0:
        return torch.empty_like(x)
    x_, weights, ids, mask = _padded(x, topk_weights, topk_ids)
    return _trimmed(_experts(x_, weights, ids, mask, experts), x)


@torch.library.custom_op("torch_bridge::fused_experts_backward", mutates_args=())
def fused_experts_backward_op(
    grad: torch.Tensor, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients with respect to x and topk_weights; the forward pass is computed again."""
    experts = _layer(layer_name).experts_for(x, topk_weights, topk_ids)
    if x.shape[0] == 0:
        return torch.empty_like(x), torch.empty_like(topk_weights)
    grad_, x_, weights, ids, mask = _padded(grad, x, topk_weights, topk_ids)
    dx, dweights = _experts_gradients(grad_, x_, weights, ids, mask, experts)
    return _trimmed(dx, x), _trimmed(dweights, x)


@torch.library.custom_op("torch_bridge::select_experts", mutates_args=())
def select_experts_op(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    e_score_correction_bias: torch.Tensor | None,
    token_ids: torch.Tensor | None,
    top_k: int,
    layer_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's router alone: topk_weights (T, top_k) float32 and topk_ids (T, top_k) int32, global."""
    experts = _layer(layer_name).experts_for(x, router_logits)
    if x.shape[0] == 0:
        return x.new_empty((0, top_k), dtype=torch.float32), x.new_empty((0, top_k), dtype=torch.int32)
    x_, logits, ids, _ = _padded(x, router_logits, token_ids)
    weights, chosen = _select(x_, logits, ids, _bias(e_score_correction_bias), experts)
    return _trimmed(weights, x), _trimmed(chosen, x)


def _bias(bias: torch.Tensor | None) -> Any:
    return None if bias is None else to_jax(bias)


@fused_moe_op.register_fake
def _(x, router_logits, e_score_correction_bias, token_ids, layer_name):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@fused_experts_op.register_fake
def _(x, topk_weights, topk_ids, layer_name):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@fused_moe_backward_op.register_fake
def _(grad, x, router_logits, e_score_correction_bias, token_ids, layer_name):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, router_logits))


@fused_experts_backward_op.register_fake
def _(grad, x, topk_weights, topk_ids, layer_name):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, topk_weights))


@select_experts_op.register_fake
def _(x, router_logits, e_score_correction_bias, token_ids, top_k, layer_name):
    shape = (x.shape[0], top_k)
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int32)


def _save_moe(ctx, inputs, output):
    x, router_logits, bias, token_ids, ctx.layer_name = inputs
    ctx.save_for_backward(x, router_logits, bias, token_ids)


def _moe_backward(ctx, grad):
    x, router_logits, bias, token_ids = ctx.saved_tensors
    dx, dlogits = fused_moe_backward_op(grad.contiguous(), x, router_logits, bias, token_ids, ctx.layer_name)
    return dx, dlogits, None, None, None


def _save_experts(ctx, inputs, output):
    x, topk_weights, topk_ids, ctx.layer_name = inputs
    ctx.save_for_backward(x, topk_weights, topk_ids)


def _experts_backward(ctx, grad):
    dx, dweights = fused_experts_backward_op(grad.contiguous(), *ctx.saved_tensors, ctx.layer_name)
    return dx, dweights, None, None


fused_moe_op.register_autograd(_moe_backward, setup_context=_save_moe)
fused_experts_op.register_autograd(_experts_backward, setup_context=_save_experts)
