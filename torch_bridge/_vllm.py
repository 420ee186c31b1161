"""Layers of vLLM's kind to ours: an object with ``w13_...`` and ``w2_...`` parameters and what its constructor kept."""

import copy
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
from torch_bridge._vllm_layer import experts_of, read_arguments

_PREFIXES = ("w13_", "w2_")
# What vLLM keeps beside the leaves of a scheme, and what is told by the config already.
_NOT_LEAVES = ("weight_shape", "g_idx_sort_indices")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# vLLM's names of methods -> ours that reads the same arguments.
_METHODS = {
    "CompressedTensorsW8A8Fp8MoEMethod": CompressedTensorsW8A8Fp8MoEMethod,
    "CompressedTensorsW4A8Int8MoEMethod": CompressedTensorsW4A8Int8MoEMethod,
    "CompressedTensorsWNA16MarlinMoEMethod": CompressedTensorsWNA16MarlinMoEMethod,
    "CompressedTensorsWNA16MoEMethod": CompressedTensorsWNA16MarlinMoEMethod,
}


def is_vllm_style(module: Any) -> bool:
    """Whether a module, or the experts that it runs, keeps them in parameters of vLLM's names."""
    names = _parameters(experts_of(module))
    return any({f"w13_{kind}", f"w2_{kind}"} <= names.keys() for kind in ("weight", "weight_packed"))


def convert_vllm(layer: Any, quant_config: Any, *, process_group: Any = None, **options: Any) -> FusedMoE:
    """A processed ``FusedMoE`` with the parameters of a layer of vLLM's kind, and what its attributes say.

    layer: loaded, not processed, or processed under a scheme whose layout that keeps (see ``_views``); a runner of
    vLLM, its ``routed_experts``, or a layer that is both. quant_config: what the parameters are; None asks the layer's
    quant_method. process_group: see ``read_arguments``. options: more arguments of ``FusedMoE``.
    """
    experts = experts_of(layer)
    arguments = read_arguments(layer, process_group)
    leaves = {n: p for n, p in _parameters(experts).items() if n.startswith(_PREFIXES) and isinstance(p, torch.Tensor)}
    refuse_foreign(leaves)
    for name, leaf in leaves.items():
        if leaf.is_meta:
            raise ValueError(f"{type(experts).__name__}.{name} is on the meta device; load its weights first")
    leaves = {name: leaf.detach() for name, leaf in leaves.items() if not name.endswith(_NOT_LEAVES) and leaf.numel()}
    config = quant_config if quant_config is not None else _config_of(experts, leaves)
    weight = leaves["w2_weight" if "w2_weight" in leaves else "w2_weight_packed"]
    params_dtype = getattr(experts, "params_dtype", None)
    if params_dtype is None and weight.dtype in _FLOATS:
        params_dtype = weight.dtype
    if arguments["num_experts"] is None:
        arguments["num_experts"] = weight.shape[0]
    ours = FusedMoE(
        hidden_size=weight.shape[1],
        params_dtype=params_dtype,
        quant_config=config,
        has_bias="w2_bias" in leaves,
        device=weight.device,
        **(arguments | options),
    )
    weights = ours.config.scheme.weights
    if weights is not None and not weights.actorder:  # vLLM registers them all the same
        leaves = {name: leaf for name, leaf in leaves.items() if not name.endswith("g_idx")}
    missing, unexpected, wrong = [], [], []
    ours._load_from_state_dict(leaves, "", {}, True, missing, unexpected, wrong)  # of the experts, not of other modules
    lists = {"missing": missing, "unexpected": unexpected, "wrong": wrong}
    problems = [f"{label}: {', '.join(sorted(names))}" for label, names in lists.items() if names]
    if problems:
        reason = " ".join("; ".join(problems).split())
        raise ValueError(f"{type(layer).__name__} does not hold scheme {ours.config.scheme.name!r}: {reason}")
    ours.process_weights_after_loading()
    return ours


def _parameters(experts: Any) -> Mapping[str, Any]:
    return dict(experts.named_parameters(recurse=False)) if isinstance(experts, torch.nn.Module) else vars(experts)


def _config_of(layer: Any, leaves: Mapping[str, torch.Tensor]) -> Any:
    """What a layer's own method says of its parameters. Raises ValueError when it says nothing."""
    method: Any = getattr(layer, "quant_method", None)
    name = type(method).__name__
    if isinstance(method, FusedMoEMethodBase):
        method = copy.copy(method)  # which knows how its parameters lie
        method.moe = None
        return method
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
