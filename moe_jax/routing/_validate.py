"""What a routing configuration may say, and which routing kind it amounts to."""

import enum
import math

import jax.numpy as jnp
import numpy as np

from moe_jax._arguments import shown
from moe_jax.routing._config import RoutingConfig
from moe_jax.routing._presets import ROUTING_PRESETS, check_interns1_pro, check_phi_sparsemixer, llama4
from moe_jax.routing._scores import SCORING_FUNCTIONS
from moe_jax.routing._select import is_valid_grouping

ZERO_EXPERT_TYPES = ("identity",)
_LOGITS_DTYPES = ("float32", "bfloat16", "float16")


class RoutingKind(enum.IntEnum):
    """Routing methods as kernels with built-in routing know them. The numbers are vLLM's."""

    SOFTMAX_TOPK = 0
    TOPK_SOFTMAX = 1
    DEEPSEEK_V3 = 2
    LLAMA4 = 3
    SOFTMAX_TOPK_RENORMALIZE = 4
    RAW_TOPK = 5
    SIGMOID_RENORMALIZE = 6
    MINIMAX_M2 = 7
    SIGMOID = 8
    UNSPECIFIED = 9
    DEEPSEEK_V4 = 100
    CUSTOM = 101
    SIMULATED = 102


def routing_kind(config: RoutingConfig, *, has_correction_bias: bool = False) -> RoutingKind:
    """The kind that a configuration amounts to; UNSPECIFIED when no kernel with built-in routing would reproduce it."""
    if config.custom_routing_function is not None:
        return RoutingKind.LLAMA4 if config.custom_routing_function in ("llama4", llama4) else RoutingKind.CUSTOM
    renormalize = config.renormalize
    if config.scoring_func == "sqrtsoftplus":
        return RoutingKind.DEEPSEEK_V4 if renormalize else RoutingKind.UNSPECIFIED
    if has_correction_bias:
        if config.scoring_func == "softmax" or not renormalize:
            return RoutingKind.UNSPECIFIED
        if config.use_grouped_topk and (config.num_expert_group or 0) > 0:
            return RoutingKind.DEEPSEEK_V3
        return RoutingKind.MINIMAX_M2 if config.routed_scaling_factor == 1.0 else RoutingKind.UNSPECIFIED
    if config.scoring_func == "sigmoid":
        return RoutingKind.SIGMOID_RENORMALIZE if renormalize else RoutingKind.SIGMOID
    return RoutingKind.SOFTMAX_TOPK_RENORMALIZE if renormalize else RoutingKind.SOFTMAX_TOPK


def validate_routing(
    config: RoutingConfig,
    num_logits: int | None = None,
    *,
    has_correction_bias: bool | None = None,
    has_hash_table: bool | None = None,
) -> None:
    """Raise ValueError for a routing configuration that cannot be carried out, naming arguments and the way out.

    num_logits: width of the router logits, E or with zero experts E + Z. What is None is not known yet and not checked;
    ``route`` repeats the check with everything known, at trace time.
    """
    c = config
    candidates = c.num_experts if num_logits is None else num_logits
    if c.num_experts < 1 or c.top_k < 1:
        raise ValueError(f"num_experts={c.num_experts} and top_k={c.top_k} must both be at least 1")
    if c.scoring_func not in SCORING_FUNCTIONS:
        raise ValueError(f"scoring_func={c.scoring_func!r}, expected one of {', '.join(SCORING_FUNCTIONS)}")
    if not math.isfinite(c.routed_scaling_factor):
        raise ValueError(f"routed_scaling_factor={c.routed_scaling_factor} must be finite")
    for name, count in (("num_expert_group", c.num_expert_group), ("topk_group", c.topk_group)):
        if count is not None and (isinstance(count, bool) or not isinstance(count, int | np.integer)):
            raise ValueError(f"{name}={shown(count)}, expected an integer")
    if c.apply_router_weight_on_input and c.top_k != 1:
        raise ValueError(
            f"apply_router_weight_on_input=True scales x once per token and needs top_k=1, found top_k={c.top_k}; "
            "leave it False to weigh the outputs instead"
        )
    logits_dtype = None if c.router_logits_dtype is None else jnp.dtype(c.router_logits_dtype).name
    if logits_dtype not in (None, *_LOGITS_DTYPES):
        raise ValueError(f"router_logits_dtype={logits_dtype}, expected None or one of {', '.join(_LOGITS_DTYPES)}")
    if c.zero_expert_type is not None:
        _validate_zero_experts(c, num_logits, has_correction_bias)
    elif not callable(c.custom_routing_function) and candidates != c.num_experts:
        raise ValueError(
            f"router_logits have {candidates} columns, expected num_experts={c.num_experts}; extra columns for zero "
            "experts need zero_expert_type='identity'"
        )
    if c.top_k > candidates and (c.zero_expert_type is None or num_logits is not None):
        raise ValueError(f"top_k={c.top_k} exceeds the {candidates} experts to choose from")
    if has_correction_bias and has_hash_table:
        raise ValueError(
            "hash_indices_table chooses the experts by token and e_score_correction_bias steers a choice by scores, so "
            "it would have no effect; drop one"
        )
    if c.use_grouped_topk:
        _validate_groups(c, has_correction_bias, has_hash_table)
    if c.custom_routing_function is not None:
        _validate_custom(c, has_correction_bias, has_hash_table)


def _validate_zero_experts(c: RoutingConfig, num_logits: int | None, has_correction_bias: bool | None) -> None:
    if c.zero_expert_type not in ZERO_EXPERT_TYPES:
        raise ValueError(
            f"zero_expert_type={c.zero_expert_type!r}, expected None or one of {', '.join(ZERO_EXPERT_TYPES)}"
        )
    if c.use_grouped_topk or c.custom_routing_function is not None:
        other = "use_grouped_topk" if c.use_grouped_topk else "custom_routing_function"
        raise ValueError(f"zero_expert_type routes by corrected scores and cannot be combined with {other}; drop one")
    if num_logits is not None and num_logits <= c.num_experts:
        raise ValueError(
            f"router_logits have {num_logits} columns, expected more than num_experts={c.num_experts}: "
            f"zero_expert_type={c.zero_expert_type!r} reads the columns after the experts'"
        )
    if has_correction_bias is False:
        raise ValueError("zero_expert_type needs e_score_correction_bias, one value per router logit")


def _validate_groups(c: RoutingConfig, has_correction_bias: bool | None, has_hash_table: bool | None) -> None:
    groups, kept = c.num_expert_group, c.topk_group
    if groups is None or kept is None:
        raise ValueError(f"use_grouped_topk=True needs num_expert_group and topk_group, found {groups} and {kept}")
    if c.custom_routing_function is not None or has_hash_table:
        other = "custom_routing_function" if c.custom_routing_function is not None else "hash_indices_table"
        raise ValueError(f"use_grouped_topk=True and {other} both choose the experts; drop one")
    if c.scoring_func == "sqrtsoftplus":
        raise ValueError("use_grouped_topk=True takes scoring_func 'softmax' or 'sigmoid', found 'sqrtsoftplus'")
    if not 1 <= kept <= groups:
        raise ValueError(f"topk_group={kept}, expected between 1 and num_expert_group={groups}")
    if has_correction_bias and c.num_experts < 2 * groups:
        raise ValueError(
            f"e_score_correction_bias ranks groups by their two best experts, but num_experts={c.num_experts} in "
            f"num_expert_group={groups} leaves fewer than two; use fewer groups"
        )
    if is_valid_grouping(c.num_experts, groups) and c.top_k > kept * (c.num_experts // groups):
        raise ValueError(
            f"top_k={c.top_k} exceeds the {kept * (c.num_experts // groups)} experts of topk_group={kept} groups of "
            f"{c.num_experts // groups}; keep more groups"
        )


def _validate_custom(c: RoutingConfig, has_correction_bias: bool | None, has_hash_table: bool | None) -> None:
    function = c.custom_routing_function
    if not callable(function) and (not isinstance(function, str) or function not in ROUTING_PRESETS):
        raise ValueError(
            f"custom_routing_function={shown(function)}, expected a callable or one of {', '.join(ROUTING_PRESETS)}"
        )
    if has_correction_bias or has_hash_table:
        other = "e_score_correction_bias" if has_correction_bias else "hash_indices_table"
        raise ValueError(f"custom_routing_function does not see {other}; drop one, or close over it in the function")
    if function == "phi_sparsemixer":
        check_phi_sparsemixer(c.top_k, c.renormalize)
    elif function == "interns1_pro":
        check_interns1_pro(c.num_experts, c.top_k, c.num_expert_group or 1)
