"""The functional core: route, then experts, then combine; and ``explain``, which says what would run and why.

Everything here is a pure function of arrays, safe under jit, grad, vmap, scan and shard_map (on the local experts).
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import jax.numpy as jnp

from moe_jax._arguments import boolean, check_array, check_is_kept
from moe_jax._config import MoEConfig
from moe_jax._pytrees import pytree
from moe_jax._typing import Array, ArrayArg, Bool, DTypeLike, Float, Int, Leaf, Shaped
from moe_jax.experts._backend import Problem, whole_logits
from moe_jax.experts._choice import run_first, run_layer_first
from moe_jax.experts._explain import explain
from moe_jax.experts._gradient import constant
from moe_jax.quantization import ExpertWeights
from moe_jax.routing import Routing, RoutingParams, route
from pallas_kernels.combine import RoutedRows

__all__ = ["MoEStats", "explain", "fused_experts", "fused_moe"]


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class MoEStats:
    """Where the tokens of one call went.

    Args:
        load: (E,) int32, rows per expert; with a placement (S,) int32, rows per slot.
        topk_ids: (T, top_k) int32, logical experts, -1 for none.
        router_logits: (T, E) as the call had them, (T, E + Z) with zero experts. ``load_balancing_loss`` and
            ``router_z_loss`` differentiate them.
    """

    load: Leaf
    topk_ids: Leaf
    router_logits: Leaf | None = None


if TYPE_CHECKING:
    from typing import TypedDict, Unpack

    class _Options(TypedDict, total=False):
        routing: RoutingParams | None
        placement: Any
        token_mask: Array | None
        token_ids: Array | None
        shared_output: Array | None
        replayed_ids: Array | None


@overload
def fused_moe(
    x: Float[Array, "T H"],
    router_logits: Float[Array, "..."],
    weights: ExpertWeights,
    config: MoEConfig,
    *,
    return_stats: Literal[False] = False,
    **options: "Unpack[_Options]",
) -> Array: ...


@overload
def fused_moe(
    x: Float[Array, "T H"],
    router_logits: Float[Array, "..."],
    weights: ExpertWeights,
    config: MoEConfig,
    *,
    return_stats: Literal[True],
    **options: "Unpack[_Options]",
) -> tuple[Array, MoEStats]: ...


@overload
def fused_moe(
    x: Float[Array, "T H"],
    router_logits: Float[Array, "..."],
    weights: ExpertWeights,
    config: MoEConfig,
    *,
    return_stats: bool,
    **options: "Unpack[_Options]",
) -> Array | tuple[Array, MoEStats]: ...


def fused_moe(
    x: Float[Array, "T H"],
    router_logits: Float[Array, "..."],
    weights: ExpertWeights,
    config: MoEConfig,
    *,
    routing: RoutingParams | None = None,
    placement: Any = None,
    token_mask: Bool[Array, "..."] | None = None,
    token_ids: Int[Array, "..."] | None = None,
    shared_output: Float[Array, "..."] | None = None,
    replayed_ids: Shaped[Array, "..."] | None = None,
    router_parts: Float[Array, "..."] | None = None,
    return_stats: bool = False,
) -> Array | tuple[Array, MoEStats]:
    """Route every token to its experts and return the weighted sum of their outputs.

    Computation follows ``config.dtype``. Sums over experts are float32, and the result is rounded once to x's dtype.

    Args:
        x: (T, H), floats of 16 or 32 bits.
        router_logits: (T, E) floats; (T, E + Z) with Z zero experts, which return their input.
        weights: of all experts.
        config: of the layer.
        routing: arrays of the router, see ``RoutingParams``.
        placement: a ``moe_jax.parallel.Placement`` if the weights' first axis counts its slots; None if that axis
            counts experts. For a layer over a mesh see ``moe_jax.parallel.fused_moe``.
        token_mask: (T,) bool, False for padding. Such a token returns exact zeros, counts for no expert and costs no
            work.
        token_ids: (T,) int, for routers that look tokens up.
        shared_output: (T, H), the output of shared experts. It is added to the sum before the one rounding.
        replayed_ids: (T, top_k) logical experts to take instead of choosing, see ``moe_jax.routing.RoutedExperts``.
        router_parts: (P, T, E) float32 whose sum over P is ``router_logits``, for a kernel that routes to add up.
        return_stats: return ``MoEStats`` as well.

    Returns:
        (T, H) in x's dtype; with ``return_stats`` the pair of that and ``MoEStats``.

    Raises:
        ValueError: shapes, weights and config contradict each other.
        NotImplementedError: no backend can run the layer; each is named with its reason.
        TypeError: a gradient for a quantized leaf is asked for.
    """
    return_stats = boolean("return_stats", return_stats)
    _check_call(x, weights, config, placement, token_mask)
    check_array("router_logits", router_logits, jnp.floating, f"({x.shape[0]}, E)")
    if router_logits.ndim != 2 or router_logits.shape[0] != x.shape[0]:
        raise ValueError(f"router_logits has shape {router_logits.shape}, expected ({x.shape[0]}, E) as x {x.shape}")
    if routing is not None and not isinstance(routing, RoutingParams):
        raise TypeError(f"routing has type {type(routing).__name__}, expected moe_jax.routing.RoutingParams")
    if token_ids is not None:
        check_array("token_ids", token_ids, jnp.integer, f"({x.shape[0]},)")
    if shared_output is not None:
        check_array("shared_output", shared_output, jnp.floating, f"{x.shape} as x")
    if shared_output is not None and shared_output.shape != x.shape:
        raise ValueError(f"shared_output has shape {shared_output.shape}, expected {x.shape} as x")
    if router_parts is not None and router_parts.shape[1:] != router_logits.shape:
        raise ValueError(f"router_parts has shape {router_parts.shape}, expected (P, {router_logits.shape})")
    if x.shape[0] > 0 and placement is None and replayed_ids is None:
        logits = router_logits if router_parts is None else router_parts
        problem = _problem(x, weights, config)
        in_steps = functools.partial(_in_steps, config)
        whole = run_layer_first(problem, (x, logits, problem.weights, routing, token_mask, shared_output), in_steps)
        if whole is not None:
            y, topk_ids, load = whole
            return (y, MoEStats(load, topk_ids, router_logits)) if return_stats else y
    routed = route(
        router_logits,
        config,
        params=routing,
        hidden_states=x,
        token_ids=token_ids,
        token_mask=token_mask,
        replayed_ids=replayed_ids,
    )
    slots = routed.topk_ids if placement is None else placement.to_physical(routed.topk_ids)
    y = weighted_experts(x, routed.topk_weights, slots, weights, config, sum_dtype(x, routed, config, shared_output))
    y = finish(y, x, routed, config, shared_output)
    stats = stats_of(routed.topk_ids, slots, weights.num_experts)
    return (y, dataclasses.replace(stats, router_logits=router_logits)) if return_stats else y


def routed_rows(
    x: Float[Array, "T H"],
    router_logits: Float[Array, "T E"],
    weights: ExpertWeights,
    config: MoEConfig,
    routing: RoutingParams | None,
    token_mask: Bool[Array, "T"] | None,
    shared_output: Float[Array, "T H"] | None,
    *,
    router_parts: Float[Array, "P T E"] | None = None,
    is_combined: bool = False,
) -> tuple[RoutedRows | Array, MoEStats] | None:
    """``fused_moe`` before the sum over experts, for a caller who adds it to more in one launch, or the sum (T, H)
    where the last product makes it or is_combined; None where no backend runs the layer so. Masked tokens of x may be
    anything."""
    problem = _problem(x, weights, config)

    def in_steps(x, logits, weights, routing, token_mask, shared):
        tokens = x if token_mask is None else jnp.where(token_mask[:, None], x, jnp.zeros_like(x))
        return _in_steps(config, tokens, logits, weights, routing, token_mask, shared)

    logits = router_logits if router_parts is None else router_parts
    arguments = (x, logits, problem.weights, routing, token_mask, shared_output)
    found = run_layer_first(problem, arguments, in_steps, is_combined=is_combined)
    return None if found is None else (found[0], MoEStats(found[2], found[1], router_logits))


def _problem(x: Array, weights: ExpertWeights, config: MoEConfig) -> Problem:
    return Problem(config, _without_gradient(weights), x.shape[0], jax.default_backend())


def _in_steps(
    config: MoEConfig,
    x: Array,
    router_logits: Array,
    weights: ExpertWeights,
    routing: RoutingParams | None,
    token_mask: Array | None,
    shared_output: Array | None,
) -> tuple[Array, Array, Array]:
    """What an implementation's ``run_layer`` computes, with a gradient: routing, then experts, then the sum."""
    routed = route(whole_logits(router_logits), config, params=routing, hidden_states=x, token_mask=token_mask)
    dtype = sum_dtype(x, routed, config, shared_output)
    y = weighted_experts(x, routed.topk_weights, routed.topk_ids, weights, config, dtype)
    load = stats_of(routed.topk_ids, routed.topk_ids, weights.num_experts).load
    return finish(y, x, routed, config, shared_output), routed.topk_ids, load


def sum_dtype(x: Array, routed: Routing, config: MoEConfig, shared_output: Array | None) -> jnp.dtype:
    """Of the sum over experts: that of the output where nothing else follows (``finish``), else float32."""
    follows = routed.zero_expert_weight is not None or config.apply_routed_scale_to_output or shared_output is not None
    return jnp.dtype(jnp.float32 if follows else x.dtype)


def finish(y: Array, x: Array, routed: Routing, config: MoEConfig, shared_output: Array | None) -> Float[Array, "T H"]:
    """What follows the sum over experts y, (T, H) of ``sum_dtype``: zero experts, output scale, shared output, and one
    rounding.
    """
    if routed.zero_expert_weight is not None:
        is_zero_expert = routed.zero_expert_weight[:, None] != 0
        identity = routed.zero_expert_weight[:, None] * x.astype(jnp.float32)
        y = y + jnp.where(is_zero_expert, identity, 0.0)
    if config.apply_routed_scale_to_output:
        y = y * config.routed_scaling_factor
    if shared_output is not None:
        y = y + shared_output.astype(jnp.float32)
    return y.astype(x.dtype)


def fused_experts(
    x: Float[Array, "T H"],
    topk_weights: Shaped[Array, "..."],
    topk_ids: Shaped[Array, "..."],
    weights: ExpertWeights,
    config: MoEConfig,
    *,
    placement: Any = None,
    token_mask: Bool[Array, "..."] | None = None,
) -> Float[Array, "T H"]:
    """``fused_moe`` after routing: experts and weights of each token are given.

    The other arguments are those of ``fused_moe``. ``routed_scaling_factor`` is not applied: the caller's topk_weights
    have to contain it.

    Args:
        topk_weights: (T, k) float, multiplied as they are.
        topk_ids: (T, k) integer; an id outside [0, E) contributes exactly zero whatever its weight.

    Raises:
        TypeError: ids are no integers or weights are no floats. Otherwise as ``fused_moe``.
    """
    _check_call(x, weights, config, placement, token_mask)
    check_array("topk_weights", topk_weights, jnp.floating, "(T, k)")
    check_array("topk_ids", topk_ids, jnp.integer, "(T, k)")
    if topk_weights.shape != topk_ids.shape or topk_ids.ndim != 2 or topk_ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"topk_weights has shape {topk_weights.shape}, topk_ids {topk_ids.shape}, expected both ({x.shape[0]}, k)"
        )
    if token_mask is not None:
        topk_ids = jnp.where(token_mask[:, None], topk_ids, -1)
    if placement is not None:
        topk_ids = placement.to_physical(topk_ids)
    return weighted_experts(x, topk_weights, topk_ids, weights, config, x.dtype)


def weighted_experts(
    x: Array,
    topk_weights: Array,
    topk_ids: Array,
    weights: ExpertWeights,
    config: MoEConfig,
    out_dtype: DTypeLike = jnp.float32,
) -> Array:
    """Sum over k of weight times expert output, (T, H): ids cleaned, weights placed, an implementation run.

    The sum is of float32 and rounded once to out_dtype.
    topk_ids: indices into the first axis of the weights, others are not routed.
    """
    num_tokens, top_k = topk_ids.shape
    if num_tokens == 0 or top_k == 0:
        return jnp.zeros_like(x, out_dtype)
    is_routed = (topk_ids >= 0) & (topk_ids < weights.num_experts)
    topk_ids = jnp.where(is_routed, topk_ids, -1).astype(jnp.int32)
    topk_weights = jnp.where(is_routed, topk_weights.astype(jnp.float32), 0.0)
    # Rows of padding must not raise a per-tensor activation scale, whatever is in them.
    x = jnp.where(is_routed.any(axis=1, keepdims=True), x, jnp.zeros_like(x))
    if config.apply_router_weight_on_input:
        if top_k != 1:
            raise ValueError(f"apply_router_weight_on_input needs one expert per token, topk_ids has {top_k} per token")
        x = x.astype(jnp.float32) * topk_weights
        topk_weights = is_routed.astype(jnp.float32)
    problem = Problem(config, _without_gradient(weights), num_tokens, jax.default_backend())
    return run_first(problem, x, topk_weights, topk_ids, out_dtype=out_dtype)


def stats_of(topk_ids: Array, slots: Array, num_slots: int) -> MoEStats:
    """Statistics of a call whose (token, slot) pairs were served by these slots, -1 for none."""
    index = jnp.where(slots < 0, num_slots, slots).reshape(-1)
    return MoEStats(load=jnp.zeros(num_slots, jnp.int32).at[index].add(1, mode="drop"), topk_ids=topk_ids)


def _without_gradient(weights: ExpertWeights) -> ExpertWeights:
    """The same weights; asking for the gradient of a quantized leaf, of its scales or of an input scale is an error."""
    return dataclasses.replace(weights, w13=constant("w13", weights.w13), w2=constant("w2", weights.w2))


def _check_call(
    x: Array, weights: ExpertWeights, config: MoEConfig, placement: Any, token_mask: ArrayArg | None
) -> None:
    if not isinstance(config, MoEConfig):
        raise TypeError(f"config has type {type(config).__name__}, expected moe_jax.MoEConfig")
    label = f"{config.name}: " if config.name else ""
    if not isinstance(weights, ExpertWeights):
        found = type(weights).__name__
        raise TypeError(f"{label}weights is a {found}, expected ExpertWeights, which a loaded layer has")
    if placement is not None and not hasattr(placement, "to_physical"):
        raise TypeError(f"{label}placement has type {type(placement).__name__}, expected moe_jax.parallel.Placement")
    check_array(f"{label}x", x, jnp.floating, f"(T, {config.hidden_size})")
    check_is_kept(f"{label}x", x)
    if x.dtype.itemsize < 2:
        raise TypeError(
            f"{label}x has dtype {x.dtype}, expected floats of 16 or 32 bits, since the output has x's dtype; cast x"
        )
    if x.ndim != 2 or x.shape[1] != config.hidden_size:
        raise ValueError(f"{label}x has shape {x.shape}, expected (T, {config.hidden_size})")
    if token_mask is not None:
        check_array(f"{label}token_mask", token_mask, jnp.bool, f"{x.shape[:1]}")
        if token_mask.shape != x.shape[:1]:
            raise ValueError(f"{label}token_mask has shape {token_mask.shape}, expected {x.shape[:1]}")
    if placement is not None and placement.num_experts != config.num_experts:
        raise ValueError(f"{label}placement is of {placement.num_experts} experts, expected {config.num_experts}")
    num_slots = config.num_experts if placement is None else placement.num_slots
    expected = (num_slots, config.num_projections, config.intermediate_size, config.hidden_size)
    if weights.w13.shape != expected:
        raise ValueError(f"{label}weights.w13 has shape {weights.w13.shape}, expected (E, G, I, H) = {expected}")
    if weights.scheme != config.scheme:
        raise ValueError(f"{label}weights follow scheme {weights.scheme.name!r}, config says {config.scheme.name!r}")
    if (weights.w2_bias is not None) != config.has_bias:
        found = "no" if weights.w2_bias is None else "a"
        raise ValueError(f"{label}config has has_bias={config.has_bias}, weights hold {found} bias")
