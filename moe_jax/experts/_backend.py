"""The implementations of a layer of experts: names, the order in which they are tried, and why one was skipped."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from moe_jax._config import MoEConfig
from moe_jax._typing import Array
from moe_jax.experts import _reference as _experts_reference
from moe_jax.experts._gradient import NoGradient, with_gradient_of
from moe_jax.experts.hopper import _experts as _experts_mosaic
from moe_jax.experts.hopper._kernel_layout import is_packed, pack_experts, packed_format, uneven_groups, unpack_experts
from moe_jax.experts.xla import _experts as _experts_xla
from moe_jax.quantization import ExpertWeights


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the choice depends on. weights: arrays or ShapeDtypeStructs. platform: "cpu" or "gpu"."""

    config: MoEConfig
    weights: ExpertWeights
    num_tokens: int
    platform: str


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to run the experts.

    why_not: the reason for which it cannot run a problem, or None. describe: how it would run it, one line each.
    run: ``(x (T, H) float, topk_weights (T, k) f32, topk_ids (T, k) i32, weights, config) -> (T, H) float32``, before
        any rounding. Ids are in [0, E) or -1; where an id is -1 its weight is 0, and a token without any expert has
        x = 0. May raise NotImplementedError, which means the same as a reason from why_not.
    has_gradient: whether run can be differentiated.
    run_layer: None, or ``(config, x, router_logits, weights, params, token_mask, shared) -> (y in x's dtype, topk_ids,
        rows per expert)``: routing, experts, shared output and the one rounding in one. It has no gradient.
    why_not_layer: the reason for which run_layer cannot run these arguments, or None.
    """

    name: str
    why_not: Callable[[Problem], str | None]
    describe: Callable[[Problem], list[str]]
    run: Callable[..., Array]
    has_gradient: bool = True
    run_layer: Callable[..., tuple[Array, Array, Array]] | None = None
    why_not_layer: Callable[..., str | None] | None = None


def _needs_known_layout(problem: Problem) -> str | None:
    for name in ("w13", "w2"):
        tensor = getattr(problem.weights, name)
        if not (tensor.layout.is_plain or is_packed(tensor)):
            return f"{name} is packed in layout {tensor.layout.name!r}, this implementation reads 'plain'"
    return None


def _unpacking(run: Callable[..., Array]) -> Callable[..., Array]:
    """``run`` of an implementation that reads plain weights."""

    def unpack_and_run(x, topk_weights, topk_ids, weights, config):
        return run(x, topk_weights, topk_ids, unpack_experts(weights), config)

    return unpack_and_run


def _unpacking_note(problem: Problem) -> list[str]:
    return ["packed weights unpacked in every call"] if is_packed(problem.weights.w13) else []


def _describe_reference(problem: Problem) -> list[str]:
    text = "every expert dequantized to float32 and applied to every row; meant for judging, not for speed"
    return [text, *_unpacking_note(problem)]


def _describe_xla(problem: Problem) -> list[str]:
    config, weights = problem.config, problem.weights
    plan = _experts_xla.make_plan(config, weights.scheme, problem.num_tokens, config.top_k, config.num_experts)
    passes = "two passes over the rows" if plan.has_shared_scale else "one pass over the rows"
    return [f"tiles of {plan.tile} rows, {passes}", f"products: {plan.product}", *_unpacking_note(problem)]


def _mosaic_why_not(problem: Problem) -> str | None:
    return _needs_known_layout(problem) or _experts_mosaic.why_not(problem.config, problem.weights, problem.num_tokens)


def _describe_mosaic(problem: Problem) -> list[str]:
    return _experts_mosaic.describe(problem.config, problem.weights, problem.num_tokens)


# In the order of preference; a platform's default order leaves out what never pays there.
IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation(
            "mosaic",
            _mosaic_why_not,
            _describe_mosaic,
            _experts_mosaic.run,
            False,
            _experts_mosaic.run_layer,
            _experts_mosaic.why_not_call,
        ),
        Implementation("xla", _needs_known_layout, _describe_xla, _unpacking(_experts_xla.run)),
        Implementation("reference", _needs_known_layout, _describe_reference, _unpacking(_experts_reference.run)),
    )
}
_DEFAULT_ORDER = {"gpu": ("mosaic", "xla")}


def order_of(config: MoEConfig, platform: str) -> tuple[str, ...]:
    """The names to try, in order. Raises ValueError for an unknown name or an empty list."""
    if config.implementation is None:
        return _DEFAULT_ORDER.get(platform, ("xla",))
    names = tuple(config.implementation)
    unknown = [name for name in names if name not in IMPLEMENTATIONS]
    if unknown or not names:
        raise ValueError(f"implementation={names}, expected one or more of {', '.join(IMPLEMENTATIONS)}")
    return names


def choose(problem: Problem) -> tuple[Implementation | None, list[tuple[str, str]]]:
    """The implementation that would run, or None, and those skipped before it with their reasons."""
    skipped = []
    for name in order_of(problem.config, problem.platform):
        reason = IMPLEMENTATIONS[name].why_not(problem)
        if reason is None:
            return IMPLEMENTATIONS[name], skipped
        skipped.append((name, reason))
    return None, skipped


def run_first(problem: Problem, *args: Any) -> Array:
    """Run the first implementation that can; where it is differentiated, the first of these with a gradient. Raises
    NotImplementedError with every reason when none can.
    """
    return _run_one_of(order_of(problem.config, problem.platform), (), problem, args)


def _run_one_of(
    names: tuple[str, ...], skipped: tuple[tuple[str, str], ...], problem: Problem, args: tuple[Any, ...]
) -> Array:
    for index, name in enumerate(names):
        reason = IMPLEMENTATIONS[name].why_not(problem)
        if reason is None:
            try:
                return _run(IMPLEMENTATIONS[name], names[index + 1 :], skipped, problem, args)
            except NoGradient:
                raise
            except NotImplementedError as error:
                reason = str(error)
        skipped = (*skipped, (name, reason))
    raise NotImplementedError(nothing_runs(skipped))


def _run(
    implementation: Implementation,
    later: tuple[str, ...],
    skipped: tuple[tuple[str, str], ...],
    problem: Problem,
    args: tuple[Any, ...],
) -> Array:
    """Run ``implementation``; where it is differentiated without a gradient, one of those ``later``."""
    config, num_tokens, platform = problem.config, problem.num_tokens, problem.platform
    if implementation.has_gradient:
        return implementation.run(*args, problem.weights, config)

    def run(weights: ExpertWeights, *args: Array) -> Array:
        return implementation.run(*args, weights, config)

    def run_later(weights: ExpertWeights, *args: Array) -> Array:
        reasons = (*skipped, (implementation.name, "has no gradient"))
        try:
            return _run_one_of(later, reasons, Problem(config, weights, num_tokens, platform), args)
        except NotImplementedError as error:
            raise NoGradient(str(error)) from None

    return with_gradient_of(run, run_later, problem.weights, *args)


def run_layer_first(
    problem: Problem,
    x: Array,
    router_logits: Array,
    params: Any,
    token_mask: Array | None,
    shared: Array | None,
    in_steps: Callable[..., tuple[Array, Array, Array]],
) -> tuple[Array, Array, Array] | None:
    """The whole layer, by the implementation that ``choose`` names; None when that one leaves routing to others.
    in_steps: what it computes, of the same arguments, for whoever differentiates it.
    """
    chosen, _ = choose(problem)
    if chosen is None or chosen.run_layer is None or chosen.why_not_layer is None:
        return None
    arguments = (x, router_logits, problem.weights, params, token_mask, shared)
    if chosen.why_not_layer(problem.config, *arguments) is not None:
        return None
    return with_gradient_of(functools.partial(chosen.run_layer, problem.config), in_steps, *arguments)


def in_best_layout(config: MoEConfig, weights: ExpertWeights) -> ExpertWeights:
    """The weights as the implementation that a call on this backend would try first reads them: packed for the Hopper
    kernels where those take the layer, else as they are. Exact; abstract and distributed weights are left alone.
    """
    platform = jax.default_backend()
    leaves = jax.tree.leaves(weights)
    is_here = all(
        isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and len(leaf.sharding.device_set) == 1
        for leaf in leaves
    )
    if not is_here or order_of(config, platform)[0] != "mosaic" or not weights.w13.layout.is_plain:
        return weights
    if packed_format(weights.scheme, config.dtype) is None or uneven_groups(weights) is not None:
        return weights
    abstract = jax.eval_shape(lambda weights: pack_experts(weights, config), weights)
    if _experts_mosaic.why_not(config, abstract, 1) is not None:
        return weights
    return pack_experts(weights, config)


def nothing_runs(skipped: Sequence[tuple[str, str]]) -> str:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped)
    return f"no implementation can run this layer ({reasons}); others are {_others(skipped)}"


def _others(skipped: Sequence[tuple[str, str]]) -> str:
    tried = [name for name, _ in skipped]
    return ", ".join(repr(name) for name in IMPLEMENTATIONS if name not in tried) or "none"
