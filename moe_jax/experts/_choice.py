"""Which backend runs a call: their order, why one was skipped, and what runs where a gradient is asked for."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from moe_jax._config import MoEConfig
from moe_jax._typing import Array, DTypeLike
from moe_jax.experts._backend import Backend, LayerArguments, Problem
from moe_jax.experts._gradient import NoGradient, with_gradient_of
from moe_jax.experts._reference import Reference
from moe_jax.experts.hopper import Hopper
from moe_jax.experts.portable import Portable
from moe_jax.experts.xla import Xla
from moe_jax.quantization import ExpertWeights
from moe_jax.routing import Routing, RoutingParams, route
from pallas_kernels.combine import RoutedRows
from pallas_kernels.common import WeightLayout
from pallas_kernels.common.implementations import FORMER_NAMES

# In the order of preference.
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Hopper(), Portable(), Xla(), Reference())}


def order_of(config: MoEConfig, platform: str) -> tuple[str, ...]:
    """The names to try, in order. Raises ValueError for an unknown name or an empty list."""
    return names_in_order(config.implementation, platform)


def names_in_order(implementation: tuple[str, ...] | None, platform: str) -> tuple[str, ...]:
    """``order_of`` by what a caller named."""
    if implementation is None:
        return tuple(name for name, backend in BACKENDS.items() if backend.is_default(platform))
    names = tuple(dict.fromkeys(FORMER_NAMES.get(name, name) for name in implementation))
    if not names or not BACKENDS.keys() >= set(names):
        raise ValueError(f"implementation={implementation}, expected one or more of {', '.join(BACKENDS)}")
    return names


def first_choice(config: MoEConfig, platform: str) -> Backend:
    """The backend that is tried first."""
    return BACKENDS[order_of(config, platform)[0]]


def choose(problem: Problem) -> tuple[Backend | None, list[tuple[str, str]]]:
    """The backend that would run, or None, and those skipped before it with their reasons."""
    skipped = []
    for name in order_of(problem.config, problem.platform):
        reason = _refusal(BACKENDS[name], problem)
        if reason is None:
            return BACKENDS[name], skipped
        skipped.append((name, reason))
    return None, skipped


def describe(backend: Backend, problem: Problem) -> list[str]:
    """``Backend.describe``, and what happens to weights that lie otherwise than it reads them."""
    is_read = backend.reads(problem.weights.w13.layout)
    return backend.describe(problem) + ([] if is_read else ["kernel layout of the weights undone in every call"])


def describe_kept(problem: Problem) -> str:
    """What the forward pass of a differentiated call keeps, by the backend whose gradient runs."""
    config = problem.config
    for name in order_of(config, problem.platform):
        backend = BACKENDS[name]
        if _refusal(backend, problem) is None and backend.gradient_refusal(problem) is None:
            size = problem.num_tokens * (config.hidden_size * config.dtype.itemsize + 8 * config.top_k) / 2**20
            arguments = f"the call's arguments ({size:.1f} MiB beside the weights)"
            kept = backend.describe_kept(problem)
            return f"{name} keeps {arguments}" + (
                ", gate and up are computed again" if kept is None else f" and {kept}"
            )
    return "no implementation computes the gradient"


def _refusal(backend: Backend, problem: Problem) -> str | None:
    for name in ("w13", "w2"):
        layout = getattr(problem.weights, name).layout
        if not any(other.reads(layout) for other in BACKENDS.values()):
            return f"{name} is in layout {layout.name!r}, which no backend reads"
    if problem.weights.has_adapters and not backend.takes_adapters:
        return "takes no adapters (LoRA)"
    return backend.refusal(problem)


def nothing_runs(skipped: Sequence[tuple[str, str]]) -> str:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped)
    tried = [name for name, _ in skipped]
    others = ", ".join(repr(name) for name in BACKENDS if name not in tried) or "none"
    return f"no implementation can run this layer ({reasons}); others are {others}"


# -- running ----------------------------------------------------------------------------------------------------------


def run_first(problem: Problem, *args: Array, out_dtype: DTypeLike = jnp.float32) -> Array:
    """Run the first backend that can; where it is differentiated, the first of these with a gradient.

    args: x, topk_weights and topk_ids of ``Backend.run``. out_dtype: as there. Raises NotImplementedError with every
    reason when none can.
    """
    return _run_one_of(order_of(problem.config, problem.platform), (), problem, args, out_dtype)


def _run_one_of(
    names: tuple[str, ...],
    skipped: tuple[tuple[str, str], ...],
    problem: Problem,
    args: tuple[Array, ...],
    out_dtype: DTypeLike,
) -> Array:
    for index, name in enumerate(names):
        reason = _refusal(BACKENDS[name], problem)
        if reason is None:
            try:
                return _run(BACKENDS[name], names[index + 1 :], skipped, problem, args, out_dtype)
            except NoGradient:
                raise
            except NotImplementedError as error:
                reason = str(error)
        skipped = (*skipped, (name, reason))
    raise NotImplementedError(nothing_runs(skipped))


def _run(
    backend: Backend,
    later: tuple[str, ...],
    skipped: tuple[tuple[str, str], ...],
    problem: Problem,
    args: tuple[Array, ...],
    out_dtype: DTypeLike,
) -> Array:
    """Run ``backend``; where it is differentiated without a gradient, one of those ``later``."""
    config, num_tokens, platform = problem.config, problem.num_tokens, problem.platform
    no_gradient = backend.gradient_refusal(problem)

    def run(weights: ExpertWeights, x: Array, topk_weights: Array, topk_ids: Array) -> Array:
        if not backend.reads(weights.w13.layout):
            weights = plain_layout(weights)
        return backend.run(x, topk_weights, topk_ids, weights, config, out_dtype)

    def run_later(weights: ExpertWeights, *args: Array) -> Array:
        reasons = (*skipped, (backend.name, str(no_gradient)))
        try:
            return _run_one_of(later, reasons, Problem(config, weights, num_tokens, platform), args, out_dtype)
        except NotImplementedError as error:
            raise NoGradient(str(error)) from None

    if no_gradient is None:
        return run(problem.weights, *args)
    return with_gradient_of(run, run_later, problem.weights, *args)


def run_layer_first(
    problem: Problem,
    arguments: LayerArguments,
    in_steps: Callable[..., tuple[Array, Array, Array]],
    *,
    is_combined: bool = True,
) -> tuple[Any, Array, Array] | None:
    """The whole layer, by the backend that ``choose`` names; None when that one leaves routing to others.

    in_steps: what it computes, of the same arguments, for whoever differentiates it. is_combined: else ``RoutedRows``
    take the place of their sum, unless the backend has added them up; None too when it leaves none.
    """
    chosen, _ = choose(problem)
    if chosen is None or not (is_combined or chosen.leaves_rows):
        return None
    if chosen.layer_refusal(problem.config, arguments) is not None:
        return None
    if is_combined:
        return with_gradient_of(functools.partial(chosen.run_layer, problem.config), in_steps, *arguments)
    run = functools.partial(chosen.run_layer, problem.config, is_combined=False)
    shapes, _, _ = jax.eval_shape(run, *arguments)
    if not isinstance(shapes, RoutedRows):
        return with_gradient_of(run, in_steps, *arguments)

    def in_steps_as_rows(*arguments):
        """The sum as the row of each token's first expert."""
        y, *others = in_steps(*arguments)
        rows = jnp.zeros(shapes.rows.shape, shapes.rows.dtype).at[: y.shape[0]].set(y.astype(shapes.rows.dtype))
        is_first = jnp.arange(shapes.row_of.shape[1]) == 0
        row_of = jnp.where(is_first, jnp.arange(y.shape[0], dtype=jnp.int32)[:, None], -1)
        shared = None if shapes.shared is None else jnp.zeros_like(shapes.shared)
        return RoutedRows(rows, row_of, jnp.ones_like(shapes.weights), shared), *others

    return with_gradient_of(run, in_steps_as_rows, *arguments)


def route_by(
    backend: Backend,
    x: Array,
    router_logits: Array,
    config: MoEConfig,
    weights: ExpertWeights,
    params: RoutingParams | None,
    token_mask: Array | None,
    token_ids: Array | None,
    replayed_ids: Array | None,
) -> Routing:
    """``moe_jax.routing.route``, by the backend's router where it takes this call and nobody differentiates it."""

    def by_xla(logits: Array, params: RoutingParams | None, token_mask: Array | None) -> Routing:
        return route(logits, config, params=params, token_mask=token_mask)

    has_mask = token_mask is not None
    if replayed_ids is None and backend.routing_refusal(config, weights, params, has_mask=has_mask) is None:
        by_backend = functools.partial(backend.route, config)
        return with_gradient_of(by_backend, by_xla, router_logits, params, token_mask)
    return route(
        router_logits,
        config,
        params=params,
        hidden_states=x,
        token_ids=token_ids,
        token_mask=token_mask,
        replayed_ids=replayed_ids,
    )


# -- layouts ----------------------------------------------------------------------------------------------------------


def plain_layout(weights: ExpertWeights) -> ExpertWeights:
    """The weights in layout "plain", whichever backend's layout they are in. Exact."""
    if weights.w13.layout.is_plain:
        return weights
    return layout_owner(weights.w13.layout).plain_layout(weights)


def layout_owner(layout: WeightLayout) -> Backend:
    """The backend whose own layout this is. Raises ValueError for a layout that nobody knows."""
    for backend in BACKENDS.values():
        if backend.reads(layout) and not layout.is_plain:
            return backend
    raise ValueError(f"weights are in layout {layout.name!r}, which no backend reads")


def preferred_layout(config: MoEConfig, weights: ExpertWeights, platform: str) -> Backend | None:
    """The backend in whose own layout plain weights are best held: that of the first one that runs them in some layout.

    weights: arrays or ShapeDtypeStructs. None: they stay as they are.
    """
    if not weights.w13.layout.is_plain:
        return None
    for name in order_of(config, platform):
        backend = BACKENDS[name]
        if backend.layout_refusal(weights, config) is None:
            held = jax.eval_shape(functools.partial(backend.kernel_layout, config=config), weights)
            if _refusal(backend, Problem(config, held, 1, platform)) is None:
                return backend
        if _refusal(backend, Problem(config, weights, 1, platform)) is None:
            return None
    return None


def in_best_layout(config: MoEConfig, weights: ExpertWeights) -> ExpertWeights:
    """The weights as the backend that a call on this platform would try first reads them best. Exact.

    Abstract and distributed weights are left alone.
    """
    is_here = all(
        isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and len(leaf.sharding.device_set) == 1
        for leaf in jax.tree.leaves(weights)
    )
    backend = preferred_layout(config, weights, jax.default_backend()) if is_here else None
    return weights if backend is None else backend.kernel_layout(weights, config)
