"""What the attributes of a layer of vLLM's kind say: the arguments of ``FusedMoE``, or a refusal by name.

vLLM 0.24 has three objects: a runner, its router, and the experts with their parameters. Earlier versions keep all in
one layer. An attribute is in a table below, or has a value that says nothing, or is refused.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch

from torch_bridge._rank import Rank

# Attributes with the name and the meaning of an argument; None says nothing.
_ROUTING = (
    "renormalize",
    "use_grouped_topk",
    "num_expert_group",
    "topk_group",
    "scoring_func",
    "routed_scaling_factor",
    "e_score_correction_bias",
    "custom_routing_function",
    "zero_expert_type",
    "hash_indices_table",
)
_OTHERS = (
    "apply_router_weight_on_input",
    "swiglu_limit",
    "swiglu_alpha",
    "swiglu_beta",
    "apply_routed_scale_to_output",
    "reduce_results",
    "shared_experts",
    "shared_expert_gate",
    "gate",
    "routed_input_transform",
    "routed_output_transform",
)
# Arguments of vLLM's constructor whose default is not None.
_DEFAULTS = dict(
    renormalize=True,
    use_grouped_topk=False,
    scoring_func="softmax",
    routed_scaling_factor=1.0,
    apply_router_weight_on_input=False,
    apply_routed_scale_to_output=False,
    reduce_results=False,
)
# What each router of vLLM reads; what it does not read has no effect there.
_ROUTERS = {
    "FusedTopKRouter": ("scoring_func", "renormalize"),
    "GroupedTopKRouter": _ROUTING[:7],
    "FusedTopKBiasRouter": ("scoring_func", "renormalize", "routed_scaling_factor", "e_score_correction_bias"),
    "CustomRoutingRouter": ("custom_routing_function", "renormalize"),
    "ZeroExpertRouter": (
        "scoring_func",
        "renormalize",
        "routed_scaling_factor",
        "e_score_correction_bias",
        "zero_expert_type",
    ),
}
_SIZES = frozenset(
    "top_k experts_per_token hidden_size hidden_dim intermediate_size intermediate_size_per_partition num_experts "
    "global_num_experts logical_num_experts num_logical_experts local_num_experts num_local_experts params_dtype "
    "activation is_act_and_mul has_bias tp_size tp_rank ep_size ep_rank use_ep dp_rank pcp_rank moe_config "
    "moe_parallel_config expert_placement_strategy expert_map expert_map_manager _expert_map expert_mask "
    "expert_global_to_physical expert_physical_to_global expert_local_to_global hidden_dim_unpadded "
    "intermediate_size_per_partition_unpadded".split()
)
# They say where, how fast or under which name a layer runs, not what it computes; or a method keeps them for itself.
_SILENT = frozenset(
    "layer_name prefix quant_config quant_method base_quant_method expert_mapping in_dtype device routing_method "
    "router_logits_dtype moe_backend max_num_tokens max_capture_size all2all_backend enable_dbo "
    "rocm_aiter_fmoe_enabled aiter_fmoe_shared_expert_enabled vllm_config layer_id workspace orig_dtype "
    "weight_block_size num_groups_w13 num_groups_w2 group_size group_size_div_factor is_k_full "
    "_already_called_process_weights_after_loading _forward_entry _combined_gate_weight _fse_fuse_gate "
    "_shared_experts router routed_experts routing_method_type quant_dtype _zero_expert_output".split()
)
# One value only: with another the layer needs what is not built here.
_ONLY = dict(dp_size=1, pcp_size=1, sp_size=1, enable_eplb=False, is_sequence_parallel=False, is_lora_enabled=False)
_NEUTRAL = (None, False, 0, "")
_OF_TORCH = frozenset(vars(torch.nn.Module()))


def experts_of(layer: Any) -> Any:
    """The object that holds the parameters: a runner's ``routed_experts``, or the layer itself."""
    return getattr(layer, "routed_experts", None) or layer


def read_arguments(layer: Any, process_group: Any) -> dict[str, Any]:
    """The arguments of ``FusedMoE`` that a layer of vLLM's kind stands for, without its scheme, dtype and device.

    process_group: the ranks that share the layer; None takes vLLM's tensor-parallel group, over which it sums, too.

    Raises NotImplementedError for an attribute that says what is not built or not known, ValueError for one that is
    missing or contradicts another.
    """
    experts, name = experts_of(layer), type(layer).__name__
    config = getattr(experts, "moe_config", None)
    parallel = getattr(config, "moe_parallel_config", None) or getattr(experts, "moe_parallel_config", None)
    router = getattr(layer, "router", None) if experts is not layer else None
    for part in (layer, experts, config, parallel, router):
        _check(name, part)
    arguments = {key: value for key in _ROUTING + _OTHERS if (value := getattr(experts, key, None)) is not None}
    arguments |= _parallelism(name, experts, config, parallel, process_group)
    activation = getattr(experts, "activation", "silu")
    activation = getattr(activation, "value", activation)
    num_experts = _first(experts, config, ("num_logical_experts", "logical_num_experts", "global_num_experts"))
    if num_experts is None:
        num_experts = getattr(experts, "num_experts", None)
    size = _first(experts, config, ("intermediate_size_per_partition",))
    arguments |= dict(
        num_experts=num_experts,
        top_k=_needed(name, experts, config, "top_k", "experts_per_token"),
        activation=activation,
        is_act_and_mul=not activation.endswith("_no_mul") and getattr(experts, "is_act_and_mul", True),
        intermediate_size=_needed(name, experts, config, "intermediate_size")
        if size is None
        else size * arguments["tp_size"],
    )
    if experts is not layer:
        arguments |= _of_runner(name, layer, router, arguments)
    return arguments


def _check(name: str, part: Any) -> None:
    """Refuse attributes that are in no table and say something."""
    if part is None:
        return
    found = {key: value for key, value in _attributes(part).items() if key not in _SIZES | _SILENT}
    only = {key: value for key in _ONLY if (value := getattr(part, key, None)) is not None}
    refused = [f"{key}={value!r}" for key, value in only.items() if value != _ONLY[key]]
    for key, value in found.items():
        is_known = key in _ROUTING + _OTHERS or key in _ONLY or key.removeprefix("_") == "hash_indices_table"
        if not is_known and not _says_nothing(value):
            refused.append(f"{key}={value if isinstance(value, bool | int | float | str) else type(value).__name__}")
    padded = [
        key
        for key, whole in (("hidden_dim_unpadded", "hidden_dim"),)
        if getattr(part, key, None) not in (None, getattr(part, whole, None))
    ]
    refused += [f"{key}={getattr(part, key)}" for key in padded]
    if refused:
        raise NotImplementedError(
            f"{name}: {type(part).__name__} has {', '.join(refused)}, which has no counterpart here; convert a layer "
            "without it, or build torch_bridge.FusedMoE and load its weights"
        )


def _attributes(part: Any) -> Mapping[str, Any]:
    """Fields, parameters, buffers and modules; not the leaves of experts, nor what every torch module has."""
    found = {key: value for key, value in vars(part).items() if key not in _OF_TORCH}
    if isinstance(part, torch.nn.Module):
        found |= part._parameters | part._buffers | part._modules
    return {key: value for key, value in found.items() if not key.startswith(("w13_", "w2_", "__"))}


def _says_nothing(value: Any) -> bool:
    if value is None or isinstance(value, bool | int | float | str):
        return value in _NEUTRAL
    return isinstance(value, list | tuple | dict | set) and not value


def _parallelism(name: str, experts: Any, config: Any, parallel: Any, process_group: Any) -> dict[str, Any]:
    """Sizes, ranks, placement and group."""
    sizes = {key: _first(parallel, experts, (key,)) for key in ("tp_size", "tp_rank", "ep_size", "ep_rank")}
    tp_size, ep_size = sizes["tp_size"] or 1, sizes["ep_size"] or 1
    strategy = getattr(experts, "expert_placement_strategy", None) or "linear"
    found = dict(
        tp_size=tp_size,
        tp_rank=(sizes["tp_rank"] or 0) if tp_size > 1 else None,
        ep_size=ep_size,
        ep_rank=(sizes["ep_rank"] or 0) if ep_size > 1 else None,
        expert_placement_strategy=strategy,
    )
    if tp_size * ep_size > 1:
        found["process_group"] = process_group if process_group is not None else _tensor_parallel_group(experts)
    expert_map = getattr(experts, "_expert_map", None)
    expert_map = getattr(experts, "expert_map", None) if expert_map is None else expert_map
    if isinstance(expert_map, torch.Tensor):
        count = expert_map.numel()
        expected = Rank(tp_size, found["tp_rank"] or 0, ep_size, found["ep_rank"] or 0, count, strategy).expert_map
        if expected is None or expert_map.tolist() != expected.tolist():
            raise NotImplementedError(
                f"{name}: its expert map {expert_map.tolist()} is not that of rank {found['ep_rank'] or 0} of "
                f"{ep_size} with expert_placement_strategy={strategy!r}; experts that were moved do not convert"
            )
    return found


def _tensor_parallel_group(experts: Any) -> Any:
    """vLLM's group of ranks that share a layer, where the layer is vLLM's own and the group exists."""
    state: Any = sys.modules.get("vllm.distributed.parallel_state")
    if state is None or not type(experts).__module__.startswith("vllm."):
        return None
    return getattr(state, "_TP", None)


def _of_runner(name: str, runner: Any, router: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a runner does around its experts. It always sums over the ranks."""
    kind = next((cls.__name__ for cls in type(router).__mro__ if cls.__name__ in _ROUTERS), None)
    if kind is None:
        raise NotImplementedError(
            f"{name} routes by a {type(router).__name__}, expected one of {', '.join(_ROUTERS)}; route by yourself and "
            "convert its routed_experts"
        )
    stated = dict.fromkeys(_ROUTING) | _DEFAULTS
    found = {key: stated[key] for key in _ROUTING} | {key: getattr(router, key) for key in _ROUTERS[kind]}
    found["renormalize"] = bool(found["renormalize"])  # models pass what their config.json has, None too
    found["use_grouped_topk"] = kind == "GroupedTopKRouter"
    found["hash_indices_table"] = getattr(router, "_hash_indices_table", None)
    shared = getattr(runner, "_shared_experts", None)
    shared = getattr(shared, "_layer", shared)
    scale = getattr(runner, "routed_scaling_factor", 1.0)
    if scale != 1.0:
        refused = {
            "a router that scales too": found["routed_scaling_factor"] != 1.0,
            "zero experts, which vLLM leaves unscaled": found["zero_expert_type"] is not None,
            "shared experts in float16, which vLLM scales down instead": shared is not None
            and getattr(runner.moe_config, "in_dtype", None) == torch.float16,
        }
        for other in (text for text, is_there in refused.items() if is_there):
            raise NotImplementedError(f"{name}: routed_scaling_factor={scale} on the output, and {other}")
        found |= dict(routed_scaling_factor=scale, apply_routed_scale_to_output=True)
    gates = {key: getattr(runner, key, None) for key in ("gate", "shared_expert_gate")}
    transforms = {key: getattr(runner, key, None) for key in ("routed_input_transform", "routed_output_transform")}
    if gates["shared_expert_gate"] is not None:
        raise NotImplementedError(f"{name}: shared_expert_gate with experts that are shared and fused is not built")
    if gates["gate"] is not None and transforms["routed_input_transform"] is not None:
        raise NotImplementedError(
            f"{name}: gate with routed_input_transform: vLLM routes transformed tokens, which is not built; call the "
            "gate yourself and leave it out"
        )
    is_split = arguments["tp_size"] * arguments["ep_size"] > 1
    return (
        found
        | transforms
        | dict(
            gate=gates["gate"],
            shared_experts=shared,
            has_partial_shared_experts=shared is not None and is_split,
            reduce_results=is_split,
        )
    )


def _first(one: Any, other: Any, names: tuple[str, ...]) -> Any:
    """The first of the names that one of two objects states."""
    for key in names:
        for part in (one, other):
            if getattr(part, key, None) is not None:
                return getattr(part, key)
    return None


def _needed(name: str, experts: Any, config: Any, *keys: str) -> Any:
    value = _first(experts, config, keys)
    if value is None:
        raise ValueError(f"{name} has no {keys[0]}, which a layer of experts needs")
    return value
