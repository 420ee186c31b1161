"""``route``: from router logits to expert ids and weights, by the one router that a configuration selects."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from moe_jax._arguments import check_array
from moe_jax._pytrees import pytree
from moe_jax._typing import AnyArray, Array, Bool, DTypeLike, Float, Int, Leaf, Shaped
from moe_jax.routing._config import RoutingConfig
from moe_jax.routing._presets import ROUTING_PRESETS
from moe_jax.routing._replay import check_replay, replayed_top_k
from moe_jax.routing._select import Selection, biased_top_k, grouped_top_k, hashed_top_k, is_valid_grouping, plain_top_k
from moe_jax.routing._validate import validate_routing
from pallas_kernels.common.numerics import round_to_float


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class RoutingParams:
    """Arrays that routing reads besides the logits; None where the model has none.

    correction_bias: ``e_score_correction_bias``, (E,) or with zero experts (E + Z,), steers the choice only.
    hash_indices_table: (vocab, top_k) integer, expert ids by token id.
    per_expert_scale: (E,), the learned scale of the "gemma4" preset.
    """

    correction_bias: Leaf | None = None
    hash_indices_table: Leaf | None = None
    per_expert_scale: Leaf | None = None


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class Routing:
    """Which experts a token goes to. An id of -1 contributes nothing and has weight 0.

    topk_weights: (T, top_k) float32. topk_ids: (T, top_k) int32, logical experts.
    zero_expert_weight: (T,) float32, what x itself is multiplied with and added to the layer's output for zero experts;
        None without them. Like topk_weights it includes routed_scaling_factor, unless apply_routed_scale_to_output
        leaves the factor to the caller, who then owes it to both.
    """

    topk_weights: Leaf
    topk_ids: Leaf
    zero_expert_weight: Leaf | None = None


def route(
    router_logits: Float[Array, "T logits"],
    config: RoutingConfig,
    *,
    params: RoutingParams | None = None,
    hidden_states: Float[Array, "T H"] | None = None,
    token_ids: Int[Array, "T"] | None = None,
    token_mask: Bool[Array, "T"] | None = None,
    replayed_ids: Shaped[Array, "..."] | None = None,
) -> Routing:
    """Choose ``top_k`` experts per token and weigh them.

    The router is the first that fits: custom function, hash table, grouped top-k, correction bias, plain top-k. Scores
    are computed in float32 from logits that were first rounded to ``router_logits_dtype`` if that is given, so that a
    model whose router emits bfloat16 sees the ties it was trained with. Everywhere: ties go to the lower id, a score
    that is not finite counts as 0, and ``routed_scaling_factor`` multiplies the weights (custom functions' too) unless
    ``apply_routed_scale_to_output``. Groups of unequal size or of one expert are routed without groups.
    Differentiable in the logits through the selected scores; the choice itself is constant.

    router_logits: (T, E) any float dtype; (T, E + Z) with zero experts.
    hidden_states: (T, H), handed to a custom function. token_ids: (T,), for hash routing.
    token_mask: (T,), False for padding: ids -1 and weights 0.
    replayed_ids: (T, top_k) logical experts of an earlier run (``RoutedExperts``), taken instead of choosing; weights
        are computed from these logits. Not for custom functions and zero experts.
    Raises ValueError for contradictory settings or shapes that do not fit, at trace time.
    """
    params = params or RoutingParams()
    num_tokens, num_logits = router_logits.shape
    bias, table = params.correction_bias, params.hash_indices_table
    validate_routing(config, num_logits, has_correction_bias=bias is not None, has_hash_table=table is not None)
    logits = _to_float32(router_logits, config.router_logits_dtype)
    if bias is not None:
        _check_shape("e_score_correction_bias", bias, (num_logits,))
        bias = bias.astype(jnp.float32)

    args = (config.top_k, config.scoring_func, config.renormalize)
    if replayed_ids is not None:
        check_replay(replayed_ids, num_tokens, config)
        is_plain = bias is None and table is None and not groups_of(config)
        weights, ids = replayed_top_k(logits, replayed_ids, config, is_plain=is_plain)
    elif config.custom_routing_function is not None:
        weights, ids = _custom(config.custom_routing_function, logits, config, params, hidden_states)
    elif table is not None:
        if token_ids is None:
            raise ValueError("hash_indices_table is looked up by token; pass token_ids (T,)")
        _check_shape("hash_indices_table", table, (table.shape[0], config.top_k))
        check_array("token_ids", token_ids, jnp.integer, f"({num_tokens},)")
        _check_shape("token_ids", token_ids, (num_tokens,))
        weights, ids = hashed_top_k(logits, table, token_ids, *args[1:])
    elif groups := groups_of(config):
        weights, ids = grouped_top_k(logits, bias, *args, *groups)
    elif bias is not None:
        weights, ids = biased_top_k(logits, bias, *args)
    else:
        weights, ids = plain_top_k(logits, *args)

    if not config.apply_routed_scale_to_output and config.routed_scaling_factor != 1.0:
        weights = weights * config.routed_scaling_factor
    return _drop_what_has_no_expert(weights, ids, config, token_mask)


def _to_float32(logits: Array, dtype: DTypeLike | None) -> Array:
    logits = logits.astype(jnp.float32)
    return logits if dtype is None else round_to_float(logits, dtype)


def _check_shape(name: str, array: AnyArray, expected: tuple[int, ...]) -> None:
    if array.shape != expected:
        raise ValueError(f"{name} has shape {array.shape}, expected {expected}")


def groups_of(config: RoutingConfig) -> tuple[int, int] | None:
    """(groups, groups kept) when the configuration routes by groups and the experts divide into them."""
    groups, kept = config.num_expert_group, config.topk_group
    if not config.use_grouped_topk or groups is None or kept is None:
        return None
    return (groups, kept) if is_valid_grouping(config.num_experts, groups) else None


def _custom(
    function: Callable[..., Any] | str,
    logits: Array,
    config: RoutingConfig,
    params: RoutingParams,
    hidden_states: Array | None,
) -> Selection:
    extra = {}
    if isinstance(function, str):
        if function == "gemma4" and params.per_expert_scale is not None:
            _check_shape("per_expert_scale", params.per_expert_scale, (config.num_experts,))
            extra = {"per_expert_scale": params.per_expert_scale}
        elif function == "interns1_pro":
            extra = {"num_expert_group": config.num_expert_group}
        function = ROUTING_PRESETS[function]
    result = function(
        hidden_states=hidden_states, gating_output=logits, topk=config.top_k, renormalize=config.renormalize, **extra
    )
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(f"custom_routing_function returned {type(result).__name__}, expected the pair (weights, ids)")
    expected = (logits.shape[0], config.top_k)
    for name, array in zip(("weights", "ids"), result, strict=True):
        _check_shape(f"{name} from custom_routing_function", array, expected)
    return result[0].astype(jnp.float32), result[1].astype(jnp.int32)


def _drop_what_has_no_expert(weights: Array, ids: Array, config: RoutingConfig, token_mask: Array | None) -> Routing:
    """Give masked tokens, zero experts and invalid ids the id -1 and weight 0; sum up the zero experts' weights."""
    zero_expert_weight = None
    is_routed = (ids >= 0) & (ids < config.num_experts)
    if token_mask is not None:
        is_routed &= token_mask[:, None]
    if config.zero_expert_type is not None:
        is_zero = ids >= config.num_experts
        if token_mask is not None:
            is_zero &= token_mask[:, None]
        zero_expert_weight = jnp.where(is_zero, weights, 0.0).sum(axis=-1)
    return Routing(jnp.where(is_routed, weights, 0.0), jnp.where(is_routed, ids, -1), zero_expert_weight)
