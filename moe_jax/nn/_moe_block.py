"""``MoEBlock``: router, routed experts and shared experts as one module."""

from collections.abc import Callable
from typing import Any, Literal, Protocol, overload, runtime_checkable

import jax.numpy as jnp

from moe_jax._arguments import boolean, check_array, check_callables, check_is_kept
from moe_jax._typing import Array, ArrayArg
from moe_jax._versions import Versioned, one_version
from moe_jax.experts import MoEStats
from moe_jax.experts._gradient import with_gradient_of
from moe_jax.parallel._explicit import in_auto_axes, lies_on_explicit_axes


class MoEBlock(Versioned):
    """Router, routed experts and optional shared experts: x (..., H) -> (..., H).

    Router logits are computed and kept in float32 unless ``experts.config.router_logits_dtype`` says otherwise.
    """

    def __init__(self, experts: Any, router: Callable[..., Any], shared_experts: Callable[..., Any] | None = None):
        """Make a block of modules.

        Args:
            experts: the routed experts, a ``FusedMoE``.
            router: maps x (..., H) to logits (..., E).
            shared_experts: maps x (..., H) to (..., H), which is added to the routed output.
        """
        check_callables(experts=experts, router=router, shared_experts=shared_experts)
        self.experts = experts
        self.router = router
        self.shared_experts = shared_experts

    @overload
    def __call__(
        self,
        x: ArrayArg,
        *,
        token_mask: ArrayArg | None = None,
        token_ids: ArrayArg | None = None,
        replayed_ids: ArrayArg | None = None,
        router_logits: ArrayArg | None = None,
        return_stats: Literal[False] = False,
    ) -> Array: ...

    @overload
    def __call__(
        self,
        x: ArrayArg,
        *,
        token_mask: ArrayArg | None = None,
        token_ids: ArrayArg | None = None,
        replayed_ids: ArrayArg | None = None,
        router_logits: ArrayArg | None = None,
        return_stats: Literal[True],
    ) -> tuple[Array, MoEStats]: ...

    @overload
    def __call__(
        self,
        x: ArrayArg,
        *,
        token_mask: ArrayArg | None = None,
        token_ids: ArrayArg | None = None,
        replayed_ids: ArrayArg | None = None,
        router_logits: ArrayArg | None = None,
        return_stats: bool,
    ) -> Array | tuple[Array, MoEStats]: ...

    def __call__(
        self,
        x: ArrayArg,
        *,
        token_mask: ArrayArg | None = None,
        token_ids: ArrayArg | None = None,
        replayed_ids: ArrayArg | None = None,
        router_logits: ArrayArg | None = None,
        return_stats: bool = False,
    ) -> Array | tuple[Array, MoEStats]:
        """x (..., H) -> (..., H) in x's dtype, with ``MoEStats`` when asked for; the rest as in ``FusedMoE``.

        router_logits: (..., E), what the router gives for x with zeros for masked tokens, where the caller has it: the
        router is not called then.
        """
        return_stats = boolean("return_stats", return_stats)
        check_array("x", x, jnp.floating, f"(..., {self.experts.config.hidden_size})")
        check_is_kept("x", x)
        self = one_version(self)
        per_token: dict[str, Any] = dict(token_mask=token_mask, token_ids=token_ids, replayed_ids=replayed_ids)
        if getattr(self.experts, "parallel", None) is None and lies_on_explicit_axes((self, x)):
            y, stats = in_auto_axes(_with_stats, x, dict(block=self, router_logits=router_logits, **per_token))
            return (y, stats) if return_stats else y
        x = without_padding(x, token_mask)
        logits, parts = self.logits_and_parts(x) if router_logits is None else (router_logits, None)
        per_token |= {} if parts is None else dict(router_parts=parts)
        y, stats = self.experts(x, logits, **per_token, return_stats=True)
        if self.shared_experts is not None:
            shared = self.shared_experts(x)
            check_output("shared_experts", shared, y.shape)
            if token_mask is not None:
                shared = jnp.where(token_mask[..., None], shared, jnp.zeros_like(shared))
            y = (y.astype(jnp.float32) + shared.astype(jnp.float32)).astype(y.dtype)
        return (y, stats) if return_stats else y

    def logits_and_parts(self, x: Any) -> tuple[Any, Any]:
        """Router logits, and the partial sums (P, T, E) that they are the sum of, where the router has some."""
        experts, router = self.experts, self.router
        takes_parts = getattr(experts, "takes_router_parts", False) and isinstance(router, HasPartialSums)
        parts = router.partial_sums(x) if takes_parts and x.size else None
        if parts is None:
            return router(x), None
        return parts.sum(0).reshape(*x.shape[:-1], -1), parts


@runtime_checkable
class HasPartialSums(Protocol):
    """A router whose product may come in parts."""

    def __call__(self, x: Array) -> Array: ...

    def partial_sums(self, x: Array) -> Array | None:
        """(P, T, E) float32 of the T tokens of x, whose sum over P are the logits; None where it is not in parts."""


def _with_stats(x: Any, block: MoEBlock, **per_token: Any) -> Any:
    return block(x, **per_token, return_stats=True)


def check_output(name: str, output: Any, shape: tuple[int, ...]) -> None:
    """Raises for what a module around the experts returned: TypeError for no array, ValueError for another shape, which
    a sum or product would spread over the rows."""
    check_array(f"output of {name}", output, jnp.floating, str(shape))
    if output.shape != shape:
        raise ValueError(f"output of {name} has shape {output.shape}, expected {shape}")


def without_padding(x: ArrayArg, token_mask: ArrayArg | None) -> ArrayArg:
    """x with masked tokens set to zero: a NaN there would reach gradients of routers and shared experts as 0 * NaN."""
    if token_mask is None:
        return x
    check_array("token_mask", token_mask, jnp.bool, f"{x.shape[:-1]} to match x")
    if token_mask.shape != x.shape[:-1]:
        raise ValueError(
            f"token_mask is {token_mask.dtype} {token_mask.shape}, expected bool {x.shape[:-1]} to match x {x.shape}"
        )
    return _zeroed(x, token_mask)


def without_padding_in_gradients(x: Array, token_mask: Array) -> Array:
    """``without_padding`` where that is differentiated, value and all; else x, for kernels that pass over masked
    tokens."""
    return with_gradient_of(_as_it_is, _zeroed, x, token_mask)


def _as_it_is(x: Array, token_mask: Array) -> Array:
    del token_mask
    return x


def _zeroed(x: Any, token_mask: Any) -> Array:
    return jnp.where(token_mask[..., None], x, jnp.zeros_like(x))
