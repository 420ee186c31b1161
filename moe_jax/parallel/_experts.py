"""``fused_moe`` over a mesh: one ``jax.shard_map`` around route -> dispatch -> experts -> combine."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from moe_jax._arguments import boolean, check_array
from moe_jax._config import MoEConfig
from moe_jax._typing import Array, ArrayArg
from moe_jax.experts._backend import Backend, Problem
from moe_jax.experts._choice import BACKENDS, choose, nothing_runs, route_by
from moe_jax.experts._fused_moe import MoEStats, finish, stats_of, weighted_experts
from moe_jax.experts._gradient import NoGradient, with_gradient_of
from moe_jax.experts._low_rank import Choices, choices_of, with_choices, with_rows_chosen
from moe_jax.parallel._choice import by_collectives, choose_dispatch
from moe_jax.parallel._config import ParallelConfig
from moe_jax.parallel._dispatch import WAYS, Exchange, rows_per_round
from moe_jax.parallel._placement import Placement
from moe_jax.parallel._weights import partition_specs, placed_config, share_config
from moe_jax.quantization import ExpertWeights
from moe_jax.routing import RoutingParams
from pallas_kernels.nvlink_dispatch import DispatchedRows

# x, router_logits, token_mask, token_ids, shared_output, replayed_ids, choices; the first axis of each counts tokens
Tokens = tuple[Array, Array, Array | None, Array | None, Array | None, Array | None, Choices]


def fused_moe(
    x: Array,
    router_logits: Array,
    weights: ExpertWeights,
    config: MoEConfig,
    parallel: ParallelConfig,
    *,
    placement: Placement,
    routing: RoutingParams | None = None,
    token_mask: Array | None = None,
    token_ids: Array | None = None,
    shared_output: Array | None = None,
    replayed_ids: Array | None = None,
    return_stats: bool = False,
) -> Any:
    """``moe_jax.fused_moe`` with experts, their columns and tokens spread over a mesh. Safe under ``jax.jit``.

    Arguments that are not listed are those of ``moe_jax.fused_moe``. Arrays of tokens are whole arrays of T tokens with
    any sharding. They are brought into the layout that the dispatch needs, and padded if T does not divide.

    Args:
        weights: placed, see ``place_weights``. What tokens have ``chosen`` among adapters is an array of tokens.
        placement: the experts in their slots. Its arrays may be others in every call.
        shared_output: (T, H), already the whole sum over devices. A shared expert with sharded weights that runs on
            global arrays returns the whole sum.

    Returns:
        (T, H) in x's dtype and sharding. With ``parallel.reduce_results=False`` the partial sums (R, T, H) float32 that
        add up to it, one for each of the R devices of the expert and tensor axes. With ``return_stats`` the pair of
        that and ``MoEStats``, whose load counts rows per slot.

    Raises:
        ValueError: shapes or devices do not fit.
        NotImplementedError: a dispatch that cannot run here.
    """
    return_stats = boolean("return_stats", return_stats)
    _check(x, router_logits, weights, config, placement, parallel)
    num_tokens = x.shape[0]
    name = choose_dispatch(parallel, config, num_tokens)
    choices = {fields: chosen.astype(jnp.int8) for fields, chosen in choices_of(weights).items()}
    weights = with_rows_chosen(weights, None)
    tokens = (x, router_logits, token_mask, token_ids, shared_output, replayed_ids, choices)
    if num_tokens == 0:
        y, stats = _nothing(x, config, placement, parallel)
        return (y, dataclasses.replace(stats, router_logits=router_logits)) if return_stats else y
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((tokens, weights, placement))):
        arguments = (name, parallel, config, tokens, weights, placement, routing)
        try:
            y, stats = _compiled(*arguments)
        except NoBatches:
            if parallel.dispatch is not None:
                raise
            y, stats = _compiled(by_collectives(parallel, config)[0], *arguments[1:])
        y = _as_it_came(y, x, parallel)
    else:
        tokens = jax.tree.map(functools.partial(_on_mesh, parallel=parallel), tokens)
        y, stats = _compiled(name, parallel, config, tokens, weights, placement, routing)
        if x.shape == y.shape and isinstance(x, jax.Array) and x.sharding.device_set == y.sharding.device_set:
            y = jax.device_put(y, x.sharding)
    return (y, dataclasses.replace(stats, router_logits=tokens[1])) if return_stats else y


def _forward(
    name: str,
    parallel: ParallelConfig,
    config: MoEConfig,
    tokens: Tokens,
    weights: ExpertWeights,
    placement: Placement,
    routing: RoutingParams | None,
) -> tuple[Array, MoEStats]:
    token_axes = parallel.token_axes(name)
    num_tokens = tokens[0].shape[0]
    short = -num_tokens % math.prod(map(parallel.size, token_axes))
    if short and tokens[2] is None:
        tokens = (*tokens[:2], jnp.ones(num_tokens, jnp.bool), *tokens[3:])
    by_token = PartitionSpec(token_axes or None)
    whole = PartitionSpec()

    def enter(leaf: Array) -> Array:
        if short:
            leaf = _reshard(leaf, whole, parallel)
            leaf = jnp.pad(leaf, [(0, short)] + [(0, 0)] * (leaf.ndim - 1))
        return _reshard(leaf, by_token, parallel)

    tokens = jax.tree.map(enter, tokens)
    rest = jax.tree.map(functools.partial(_reshard, spec=whole, parallel=parallel), (placement, routing))
    weight_specs = partition_specs(weights, parallel)
    weights = jax.tree.map(lambda leaf, spec: _reshard(leaf, spec, parallel), weights, weight_specs)
    partial_axes = tuple(axis for axis in (parallel.expert_axis, parallel.tensor_axis) if axis is not None)
    out_spec = by_token if parallel.reduce_results else PartitionSpec(partial_axes, token_axes or None)
    body = functools.partial(_body, name, parallel, config)
    y, topk_ids, load = jax.shard_map(
        body,
        mesh=parallel.mesh,
        in_specs=(by_token, weight_specs, whole),
        out_specs=(out_spec, by_token, whole),
        check_vma=False,  # Pallas kernels do not say how their results vary
    )(tokens, weights, rest)
    if short:
        y = _reshard(y, whole, parallel)
        y = y[:num_tokens] if parallel.reduce_results else y[:, :num_tokens]
        topk_ids = _reshard(topk_ids, whole, parallel)[:num_tokens]
    return y, MoEStats(load=load, topk_ids=topk_ids)


# One program outside ``jax.jit``, also under ``jax.grad`` and ``jax.vmap``, which JAX cannot apply to a ``shard_map``
# over a custom gradient that it runs step by step; a part of the caller's program inside.
_compiled = jax.jit(_forward, static_argnums=(0, 1, 2), inline=True)


def _body(
    name: str,
    parallel: ParallelConfig,
    config: MoEConfig,
    tokens: Tokens,
    weights: ExpertWeights,
    rest: tuple[Placement, RoutingParams | None],
) -> tuple[Array, Array, Array]:
    """The work of one device: y, topk_ids of its tokens, and the load of all slots from all tokens."""
    x, router_logits, token_mask, token_ids, shared, replayed_ids, choices = tokens
    placement, routing = rest
    token_axes = parallel.token_axes(name)
    num_tokens = x.shape[0]
    own = dataclasses.replace(
        share_config(config, placement, parallel),
        num_experts=config.num_experts,  # of the whole layer: tiles are chosen by its mean rows per expert
        apply_router_weight_on_input=False,
        split_axes=() if parallel.tensor_axis is None else (parallel.tensor_axis,),
        call_axes=parallel.used_axes,
    )
    weights = _own_share(weights, own, parallel)
    chosen, skipped = choose(Problem(own, weights, num_tokens, jax.default_backend()))
    if name == "nvlink_dispatch" and (chosen is None or not chosen.serves_arrived or weights.has_adapters):
        if parallel.dispatch is not None:
            raise NotImplementedError(_serving_refusal(config, weights, skipped))
        name, _ = by_collectives(parallel, config)
    if chosen is None:
        raise NotImplementedError(nothing_runs(skipped))
    routed = route_by(chosen, x, router_logits, config, weights, routing, token_mask, token_ids, replayed_ids)
    first = lax.axis_index(token_axes) * num_tokens if token_axes else 0
    slots = placement.to_physical(routed.topk_ids, first)
    stats = stats_of(routed.topk_ids, slots, placement.num_slots)
    load = lax.psum(stats.load, token_axes) if token_axes else stats.load

    gathered = (x, routed.topk_weights, slots, choices)
    if parallel.gathers_tokens:
        gathered = jax.tree.map(lambda part: lax.all_gather(part, parallel.tensor_axis, tiled=True), gathered)
    y = _experts(name, parallel, config, own, gathered, weights, placement.slots_per_device, chosen)
    if parallel.gathers_tokens:
        y = lax.psum_scatter(y.astype(parallel.reduce_dtype), parallel.tensor_axis, tiled=True)
    elif parallel.reduce_results and parallel.tensor_axis is not None:
        y = lax.psum(y.astype(parallel.reduce_dtype), parallel.tensor_axis)
    y = y.astype(jnp.float32)
    if parallel.reduce_results:
        return finish(y, x, routed, config, shared), routed.topk_ids, load
    axes = tuple(axis for axis in (parallel.expert_axis, parallel.tensor_axis) if axis is not None)
    whole = finish(y, x.astype(jnp.float32), routed, config, shared)
    bare = finish(y, x.astype(jnp.float32), dataclasses.replace(routed, zero_expert_weight=None), config, None)
    return jnp.where(lax.axis_index(axes) == 0, whole, bare)[None], routed.topk_ids, load


def _serving_refusal(config: MoEConfig, weights: ExpertWeights, skipped: Sequence[tuple[str, str]]) -> str:
    """Why no backend serves tokens that other devices stored here."""
    serving = [name for name, backend in BACKENDS.items() if backend.serves_arrived]
    reasons = [reason for name, reason in skipped if name in serving]
    if weights.has_adapters:
        reasons.append("rows that arrive take no adapters (LoRA)")
    reason = "; ".join(reasons) or f"implementation={config.implementation} leaves it out"
    named = f"dispatch='nvlink_dispatch' needs experts that run in {' or '.join(serving)}"
    return f"{named}: {reason}; use 'all_gather' or 'all_to_all'"


def _experts(
    name: str,
    parallel: ParallelConfig,
    config: MoEConfig,
    own: MoEConfig,
    gathered: tuple[Array, Array, Array, Choices],
    weights: ExpertWeights,
    slots_per_device: int,
    backend: Backend,
) -> Array:
    """The sum over experts of the rows, (T, H) float32: over the expert axis, and not over the tensor axis.

    own, weights: of this device. backend: what runs them.
    """
    x, topk_weights, slots, choices = gathered
    if config.apply_router_weight_on_input:
        x = x.astype(jnp.float32) * topk_weights
        topk_weights = (slots >= 0).astype(jnp.float32)
    num_tokens, top_k = slots.shape
    sharing = num_tokens * (1 if name == "replicate" else parallel.expert_size)
    planned = config.pinned_tokens or sharing
    if backend.plans_for_local_experts:
        planned /= parallel.expert_size

    def plan_for(top_k_here: int) -> MoEConfig:
        pinned = max(1, math.ceil(planned * top_k / top_k_here))
        return dataclasses.replace(own, pinned_tokens=pinned, top_k=top_k_here)

    def run(weights: ExpertWeights, x: Array, topk_weights: Array, ids: Array, choices: Choices) -> Array:
        weights = with_choices(weights, {fields: chosen.astype(jnp.float32) for fields, chosen in choices.items()})
        return weighted_experts(x, topk_weights, ids, weights, plan_for(ids.shape[1]))

    def serve(
        weights: ExpertWeights, arrived: DispatchedRows, first_slot: Array, send_back: Callable[[Array, Array], Array]
    ) -> Array:
        return backend.serve_arrived(plan_for(top_k), arrived, first_slot, weights, send_back)

    def exchange_of(weights: ExpertWeights) -> Exchange:
        return Exchange(
            axis=str(parallel.expert_axis),
            size=parallel.expert_size,
            slots_per_device=slots_per_device,
            round_axes=parallel.used_axes,
            run=functools.partial(run, weights),
            sum_dtype=jnp.dtype(parallel.reduce_dtype),
            row_dtype=jnp.dtype(backend.row_dtype(config)),
            is_one_round=config.has_call_scale,
            serve=functools.partial(serve, weights) if backend.serves_arrived else None,
            quantization=backend.arriving_quantization(weights),
        )

    def way(name: str, x: Array, topk_weights: Array, slots: Array, choices: Choices, weights: ExpertWeights) -> Array:
        if name == "nvlink_dispatch":
            x, topk_weights, slots, weights = _refusing_batches((x, topk_weights, slots, weights))
        return WAYS[name](x, topk_weights, slots, choices, exchange_of(weights))

    def refuse(*arguments: object) -> Array:
        raise NoGradient(
            f"dispatch={name!r} has no gradient here; differentiate a layer with dispatch='all_gather' or 'replicate'"
        )

    if parallel.expert_axis is None:
        return run(weights, x, topk_weights, slots, choices)
    exchange = exchange_of(weights)
    if not parallel.reduce_results:
        return run(weights, x, topk_weights, exchange.local_ids(slots), choices)
    own_way = functools.partial(way, name)
    if name == "nvlink_dispatch" or (name == "all_to_all" and rows_per_round(slots.size, exchange) < slots.size):
        # Loops of as many rounds as it takes, and stores into other memories, have no gradient.
        other = functools.partial(way, "all_gather") if parallel.dispatch is None else refuse
        return with_gradient_of(own_way, other, x, topk_weights, slots, choices, weights)
    return own_way(x, topk_weights, slots, choices, weights)


class NoBatches(NotImplementedError):
    """Somebody maps the kernels of nvlink_dispatch over a batch, which only shows while they are called."""


@jax.custom_batching.custom_vmap
def _refusing_batches(values: Any) -> Any:
    """What nvlink_dispatch is given: one launch of it is one exchange."""
    return values


@_refusing_batches.def_vmap
def _refuse_batches(axis_size: int, in_batched: Any, values: Any) -> Any:
    raise NoBatches(
        "dispatch='nvlink_dispatch' takes no jax.vmap; use jax.lax.map, or a layer with dispatch='all_gather'"
    )


def _own_share(weights: ExpertWeights, own: MoEConfig, parallel: ParallelConfig) -> ExpertWeights:
    """One device's leaves with static metadata and a bias of w2 that is added once among those whose sums are added."""
    if parallel.tensor_axis is None:
        return weights
    if weights.w2.num_columns is not None:
        w2 = dataclasses.replace(weights.w2, num_columns=own.intermediate_size)
        weights = dataclasses.replace(weights, w2=w2)
    if weights.w2_bias is not None:
        is_first = lax.axis_index(parallel.tensor_axis) == 0
        bias = jnp.where(is_first, weights.w2_bias, jnp.zeros_like(weights.w2_bias))
        weights = dataclasses.replace(weights, w2_bias=bias)
    return weights


def _nothing(x: Array, config: MoEConfig, placement: Placement, parallel: ParallelConfig) -> tuple[Array, MoEStats]:
    """The answer to no tokens."""
    parts = parallel.expert_size * parallel.tensor_size
    y = x if parallel.reduce_results else jnp.zeros((parts, *x.shape), jnp.float32)
    stats = MoEStats(jnp.zeros(placement.num_slots, jnp.int32), jnp.zeros((0, config.top_k), jnp.int32))
    return y, stats


def _reshard(leaf: Any, spec: PartitionSpec, parallel: ParallelConfig) -> Any:
    """A traced array in another layout; where axes are Auto, XLA sees to it."""
    if not parallel.is_explicit:
        return leaf
    return jax.sharding.reshard(leaf, NamedSharding(parallel.mesh, spec))


def _as_it_came(y: Array, x: Array, parallel: ParallelConfig) -> Array:
    if not parallel.is_explicit or y.shape != x.shape:
        return y
    sharding = jax.typeof(x).sharding
    return y if sharding.mesh.empty else jax.sharding.reshard(y, sharding)


def _on_mesh(leaf: Any, parallel: ParallelConfig) -> Any:
    """An argument outside ``jax.jit``; one that its owner has put on other devices is an error."""
    if not isinstance(leaf, jax.Array):
        return leaf
    devices = set(parallel.mesh.devices.flat)
    if leaf.sharding.device_set == devices:
        return leaf
    if leaf.committed:
        found = ", ".join(sorted(str(device) for device in leaf.sharding.device_set)[:4])
        raise ValueError(
            f"an array {leaf.dtype}{list(leaf.shape)} of the call is on {found}, expected the {len(devices)} devices "
            "of the layer's mesh; move it with jax.device_put(x, NamedSharding(mesh, PartitionSpec()))"
        )
    return jax.device_put(leaf, NamedSharding(parallel.mesh, PartitionSpec()))


def _check(
    x: ArrayArg,
    router_logits: ArrayArg,
    weights: ExpertWeights,
    config: MoEConfig,
    placement: Placement,
    parallel: ParallelConfig,
) -> None:
    label = f"{config.name}: " if config.name else ""
    check_array(f"{label}x", x, jnp.floating, f"(T, {config.hidden_size})")
    if x.ndim != 2 or x.shape[1] != config.hidden_size:
        raise ValueError(f"{label}x has shape {x.shape}, expected (T, {config.hidden_size})")
    check_array("router_logits", router_logits, jnp.floating, f"({x.shape[0]}, E)")
    if router_logits.ndim != 2 or router_logits.shape[0] != x.shape[0]:
        raise ValueError(f"router_logits has shape {router_logits.shape}, expected ({x.shape[0]}, E) as x {x.shape}")
    if placement.num_experts != config.num_experts or placement.num_devices != parallel.expert_size:
        raise ValueError(
            f"{label}{placement} does not fit {config.num_experts} experts on {parallel.expert_size} devices of the "
            "expert axis"
        )
    placed = placed_config(config, placement, parallel)
    expected = (placed.num_experts, placed.num_projections, placed.intermediate_size, placed.hidden_size)
    if weights.w13.layout.is_plain and weights.w13.shape != expected:
        raise ValueError(f"{label}weights.w13 has shape {weights.w13.shape}, expected placed weights {expected}")
    if weights.scheme != config.scheme:
        raise ValueError(f"{label}weights follow scheme {weights.scheme.name!r}, config says {config.scheme.name!r}")
