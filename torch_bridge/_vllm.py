"""Layers of vLLM's kind to ours: an object with ``w13_...`` and ``w2_...`` parameters and what its constructor kept."""

from collections.abc import Mapping
from typing import Any

import torch

from moe_jax import Scheme
from torch_bridge._compressed_tensors import (
    CompressedTensorsW4A4Nvfp4MoEMethod,
    CompressedTensorsW4A8Int8MoEMethod,
    CompressedTensorsW8A8Fp8MoEMethod,
    CompressedTensorsWNA16MarlinMoEMethod,
    quantization_arguments,
)
from torch_bridge._layer import FusedMoE
from torch_bridge._method_base import FusedMoEMethodBase
from torch_bridge._online import Int8OnlineMoEMethod
from torch_bridge._tensors import refuse_foreign

_PREFIXES = ("w13_", "w2_")
# What vLLM keeps beside the leaves of a scheme, and what is told by the config already.
_NOT_LEAVES = ("weight_shape", "g_idx_sort_indices")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_ROUTING = (
    "renormalize",
    "use_grouped_topk",
    "num_expert_group",
    "topk_group",
    "scoring_func",
    "routed_scaling_factor",
    "e_score_correction_bias",
    "apply_router_weight_on_input",
)
# vLLM's names of methods -> ours that reads the same arguments.
_METHODS = {
    "CompressedTensorsW8A8Fp8MoEMethod": CompressedTensorsW8A8Fp8MoEMethod,
    "CompressedTensorsW4A8Int8MoEMethod": CompressedTensorsW4A8Int8MoEMethod,
    "CompressedTensorsWNA16MarlinMoEMethod": CompressedTensorsWNA16MarlinMoEMethod,
    "CompressedTensorsWNA16MoEMethod": CompressedTensorsWNA16MarlinMoEMethod,
}


def is_vllm_style(module: Any) -> bool:
    """Whether a module keeps its experts in parameters of vLLM's names."""
    names = dict(module.named_parameters(recurse=False)) if isinstance(module, torch.nn.Module) else vars(module)
    return any({f"w13_{kind}", f"w2_{kind}"} <= names.keys() for kind in ("weight", "weight_packed"))


def convert_vllm(layer: Any, quant_config: Any, **options: Any) -> FusedMoE:
    """A processed ``FusedMoE`` with the parameters of a layer of vLLM's kind, and its sizes, routing and ranks.

    layer: loaded, not processed, or processed under a scheme whose layout that keeps (see ``_views``). quant_config:
    what the parameters are; None asks the layer's quant_method. options: more arguments of ``FusedMoE``.
    """
    found = dict(layer.named_parameters(recurse=False)) if isinstance(layer, torch.nn.Module) else vars(layer)
    leaves = {n: p for n, p in found.items() if n.startswith(_PREFIXES) and isinstance(p, torch.Tensor)}
    refuse_foreign(leaves)
    for name, leaf in leaves.items():
        if leaf.is_meta:
            raise ValueError(f"{type(layer).__name__}.{name} is on the meta device; load its weights before converting")
    leaves = {name: leaf.detach() for name, leaf in leaves.items() if not name.endswith(_NOT_LEAVES) and leaf.numel()}
    config = quant_config if quant_config is not None else _config_of(layer, leaves)
    weight = leaves["w2_weight" if "w2_weight" in leaves else "w2_weight_packed"]
    if getattr(layer, "custom_routing_function", None) is not None:
        raise NotImplementedError(
            f"{type(layer).__name__} has a custom_routing_function, which takes tensors; route by yourself and call "
            "quant_method.apply of the converted layer"
        )
    params_dtype = getattr(layer, "params_dtype", None)
    if params_dtype is None and weight.dtype in _FLOATS:
        params_dtype = weight.dtype
    tp_size, ep_size = (getattr(layer, name, 1) or 1 for name in ("tp_size", "ep_size"))
    local = getattr(layer, "intermediate_size_per_partition", None)
    activation = getattr(layer, "activation", "silu")
    ours = FusedMoE(
        getattr(layer, "global_num_experts", weight.shape[0]),
        _needed(layer, "top_k"),
        weight.shape[1],
        _needed(layer, "intermediate_size") if local is None else local * tp_size,
        params_dtype,
        quant_config=config,
        tp_size=tp_size,
        tp_rank=getattr(layer, "tp_rank", 0) if tp_size > 1 else None,
        ep_size=ep_size,
        ep_rank=getattr(layer, "ep_rank", 0) if ep_size > 1 else None,
        reduce_results=bool(getattr(layer, "reduce_results", False)),
        activation=getattr(activation, "value", activation),
        is_act_and_mul=getattr(layer, "is_act_and_mul", True),
        has_bias="w2_bias" in leaves,
        device=weight.device,
        **options,
        **{name: getattr(layer, name) for name in _ROUTING if getattr(layer, name, None) is not None},
    )
    weights = ours.config.scheme.weights
    if weights is not None and not weights.actorder:  # vLLM registers them all the same
        leaves = {name: leaf for name, leaf in leaves.items() if not name.endswith("g_idx")}
    try:
        ours.load_state_dict(leaves)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{type(layer).__name__} does not hold scheme {ours.config.scheme.name!r}: {reason}") from None
    ours.process_weights_after_loading()
    return ours


def _config_of(layer: Any, leaves: Mapping[str, torch.Tensor]) -> Any:
    """What a layer's own method says of its parameters. Raises ValueError when it says nothing."""
    method: Any = getattr(layer, "quant_method", None)
    name = type(method).__name__
    if isinstance(method, FusedMoEMethodBase):
        return method.scheme
    if name in _METHODS:
        return _METHODS[name](method.weight_quant, method.input_quant)
    if name == "CompressedTensorsW4A4Nvfp4MoEMethod":
        return CompressedTensorsW4A4Nvfp4MoEMethod(use_a16=bool(getattr(method, "use_a16", False)))
    if name == "Int8OnlineMoEMethod":
        return Int8OnlineMoEMethod()
    if hasattr(method, "weight_quant"):
        group = {"weights": method.weight_quant, "input_activations": method.input_quant}
        return Scheme.parse({key: quantization_arguments(value) for key, value in group.items()})
    is_plain = all(leaf.dtype in _FLOATS for leaf in leaves.values())
    if is_plain and not any("scale" in leaf for leaf in leaves):
        return None
    raise ValueError(
        f"{type(layer).__name__} with method {name} does not say how {', '.join(sorted(leaves))} are quantized; pass "
        "quant_config=, for instance a scheme's name"
    )


def _needed(layer: Any, name: str) -> Any:
    value = getattr(layer, name, None)
    if value is None:
        raise ValueError(f"{type(layer).__name__} has no {name}, which a layer of experts needs")
    return value
