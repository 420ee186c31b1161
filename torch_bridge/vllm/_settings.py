# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""A layer of vLLM as a ``MoEConfig``, and what is in the way of it. Layers are ``RoutedExperts`` of vLLM 0.24."""

from collections.abc import Sequence
from typing import Any

import torch

from moe_jax import MoEConfig, Scheme
from torch_bridge._tensors import numpy_dtype
from torch_bridge.vllm._formats import Format


def config_of(layer: Any, scheme: Scheme) -> MoEConfig:
    """Of the experts of this rank. Raises ValueError for settings that no layer of moe_jax can have."""
    moe = layer.moe_config
    return MoEConfig(
        num_experts=layer.local_num_experts,
        top_k=layer.top_k,
        hidden_size=moe.hidden_dim,
        intermediate_size=moe.intermediate_size_per_partition,
        scheme=scheme,
        activation=getattr(layer.activation, "value", layer.activation),
        is_act_and_mul=moe.is_act_and_mul,
        renormalize=bool(layer.renormalize),  # models pass what config.json has, None too
        scoring_func=layer.scoring_func,
        use_grouped_topk=bool(layer.use_grouped_topk),
        num_expert_group=layer.num_expert_group,
        topk_group=layer.topk_group,
        routed_scaling_factor=layer.routed_scaling_factor,
        apply_router_weight_on_input=bool(layer.apply_router_weight_on_input),
        swiglu_limit=layer.swiglu_limit,
        swiglu_alpha=layer.swiglu_alpha,
        swiglu_beta=layer.swiglu_beta,
        has_bias=bool(moe.has_bias),
        dtype=numpy_dtype(moe.in_dtype),
        param_dtype=numpy_dtype(moe.in_dtype),
        name=layer.layer_name,
    )


def is_interleaved(layer: Any) -> bool:
    """Whether rows of gate and up alternate in w13: vLLM's "swigluoai" reads them so."""
    return getattr(layer.activation, "value", layer.activation) == "swigluoai"


def obstacle(layer: Any, form: Format) -> str | None:
    """What of vLLM's own the plugin does not serve, or None. Shapes and schemes are the kernels' business."""
    from vllm import envs

    moe, parallel = layer.moe_config, layer.moe_config.moe_parallel_config
    weights = form.scheme.weights
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT, since tiles are chosen by the tokens of a call"
    if parallel.enable_eplb:
        return "EPLB"
    if moe.is_lora_enabled:
        return "LoRA"
    if parallel.dp_size > 1 or parallel.pcp_size > 1 or parallel.sp_size > 1:
        return "data, context or sequence parallelism"
    if weights is not None and weights.actorder and parallel.tp_size > 1:
        return "act-order with tensor parallelism"
    if is_interleaved(layer) and weights is not None and (weights.block_shape or not weights.symmetric):
        return "interleaved projections in blocks or with zero points"
    return None


def routing_obstacle(layer: Any) -> str | None:
    """Why vLLM has to route for a layer whose router the kernels have; or None."""
    from vllm import envs
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.fused_moe.config import RoutingMethodType

    if layer.custom_routing_function is not None:
        return "a custom routing function"
    if envs.VLLM_MOE_ROUTING_SIMULATION_STRATEGY:
        return "simulated routing"
    # Zero experts and tables of ids are told by nothing else: their routers have a correction bias of another length.
    bias = layer.e_score_correction_bias
    if bias is not None and bias.numel() != layer.global_num_experts:
        return "zero experts"
    kinds = RoutingMethodType
    known = (kinds.Default, kinds.Renormalize, kinds.RenormalizeNaive, kinds.DeepSeekV3, kinds.SigmoidRenorm)
    if layer.moe_config.routing_method not in (*known, kinds.MiniMax2, kinds.Sigmoid, kinds.Unspecified):
        return f"routing of kind {layer.moe_config.routing_method}"
    scales = layer.use_grouped_topk or bias is not None  # vLLM's plain router does not know the factor
    if layer.routed_scaling_factor != 1.0 and not scales:
        return "a factor that vLLM's router leaves out"
    model = get_current_vllm_config().model_config
    if model is not None and getattr(model, "enable_return_routed_experts", False):
        return "the experts' ids are asked for"
    return None


def token_counts(vllm_config: Any) -> tuple[list[int], list[int]]:
    """(those that graphs capture, those that others are padded to) of a vLLM engine."""
    compilation = vllm_config.compilation_config
    mode = getattr(compilation, "cudagraph_mode", None)
    captures = mode is None or getattr(mode, "name", "") != "NONE"
    exact: Sequence[int] = (compilation.cudagraph_capture_sizes or ()) if captures else ()
    most = vllm_config.scheduler_config.max_num_batched_tokens
    doubling = [1 << n for n in range(4, 11) if (1 << n) < 2 * most]
    return sorted(set(exact)), doubling + list(range(2048, most + 1024, 1024))


def logits_dtype(layer: Any) -> torch.dtype:
    return layer.moe_config.router_logits_dtype or layer.moe_config.in_dtype
