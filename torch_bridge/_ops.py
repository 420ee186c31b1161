"""The torch operators of the bridge: what ``torch.compile`` and ``torch.export`` see of a layer, with gradients.

An operator takes its tensors and the name of a layer, and has the layer's calls run. Gradients flow to activations,
router logits and router weights; quantized experts have none.
"""

import gc
import os
import warnings
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from torch_bridge._process import check_process
from torch_bridge._tensors import check_tensor

# Layers by name, vLLM's "static forward context": operators carry names, since they cannot carry modules.
layers: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()


# torch.compile leaves them out of the CUDA graphs that it makes by itself.
_TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


# Whether torch.func is at work (vmap, grad), whose tensors hide others.
_is_transformed = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


def _operator(name: str) -> Any:
    return torch.library.custom_op(f"torch_bridge::{name}", mutates_args=(), tags=_TAGS)


def call(operator: Any, x: torch.Tensor, *args: Any) -> Any:
    """An operator on x and the rest; its function alone where nobody looks on, since the dispatcher costs more than all
    the rest of a call: nothing is traced or transformed, and no gradient is asked for.
    """
    if (
        torch.compiler.is_compiling()
        or type(x) is not torch.Tensor
        or _get_current_dispatch_mode() is not None
        or _is_transformed()
        or (torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in (x, *args)))
    ):
        check_tensor(f"{args[-1]}: x", x)
        return operator(x, *args)
    return operator._init_fn(x, *args)


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
    chosen = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR")
    if not any(os.environ.get(name) for name in chosen):
        warnings.warn(
            "JAX preallocates 75% of the GPU, which torch then cannot use: set XLA_PYTHON_CLIENT_PREALLOCATE=false, or "
            "XLA_PYTHON_CLIENT_MEM_FRACTION, before the first use of JAX",
            stacklevel=4,
        )


def _run(layer_name: str, method: str, *tensors: torch.Tensor | None, bias: int | None = None) -> Any:
    """What ``JaxCalls.run`` returns for the layer of this name."""
    check_process(layer_name)
    layer = layers.get(layer_name)
    if layer is None:
        raise RuntimeError(f"layer {layer_name!r} does not exist any more; a traced program needs its layers alive")
    return layer.calls_for(method).run(method, *tensors, bias=bias)


@_operator("fused_moe")
def fused_moe_op(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    e_score_correction_bias: torch.Tensor | None,
    token_ids: torch.Tensor | None,
    layer_name: str,
) -> torch.Tensor:
    """x (T, H), router_logits (T, E) -> (T, H) in x's dtype: routing and experts of the layer of this name."""
    y = _run(layer_name, "moe", x, router_logits, e_score_correction_bias, token_ids, bias=2)
    return torch.empty_like(x) if y is None else y


@_operator("fused_moe_backward")
def fused_moe_backward_op(
    grad: torch.Tensor,
    x: torch.Tensor,
    router_logits: torch.Tensor,
    e_score_correction_bias: torch.Tensor | None,
    token_ids: torch.Tensor | None,
    layer_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients with respect to x and router_logits; the forward pass is computed again."""
    grads = _run(layer_name, "moe_gradients", grad, x, router_logits, e_score_correction_bias, token_ids, bias=3)
    return (torch.empty_like(x), torch.empty_like(router_logits)) if grads is None else grads


@_operator("fused_experts")
def fused_experts_op(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str
) -> torch.Tensor:
    """x (T, H), topk_weights and topk_ids (T, k) -> (T, H) in x's dtype.

    ids are global; unknown ones contribute zero.
    """
    y = _run(layer_name, "experts", x, topk_weights, topk_ids)
    return torch.empty_like(x) if y is None else y


@_operator("fused_experts_backward")
def fused_experts_backward_op(
    grad: torch.Tensor, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients with respect to x and topk_weights; the forward pass is computed again."""
    grads = _run(layer_name, "experts_gradients", grad, x, topk_weights, topk_ids)
    return (torch.empty_like(x), torch.empty_like(topk_weights)) if grads is None else grads


@_operator("select_experts")
def select_experts_op(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    e_score_correction_bias: torch.Tensor | None,
    token_ids: torch.Tensor | None,
    top_k: int,
    layer_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's router alone: topk_weights (T, top_k) float32 and topk_ids (T, top_k) int32, global."""
    routed = _run(layer_name, "select", x, router_logits, e_score_correction_bias, token_ids, bias=2)
    if routed is None:
        return x.new_empty((0, top_k), dtype=torch.float32), x.new_empty((0, top_k), dtype=torch.int32)
    return routed


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


def _no_second_derivative(ctx, *grads):
    raise NotImplementedError("FusedMoE has first derivatives only; take its gradient without create_graph=True")


for _first in (fused_moe_backward_op, fused_experts_backward_op):
    _first.register_autograd(_no_second_derivative)
