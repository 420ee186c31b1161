"""Routing of one device's tokens: by the Hopper kernel where the experts run on those, else by XLA."""

import functools
from typing import Any

from moe_jax._config import MoEConfig
from moe_jax._typing import Array
from moe_jax.experts._gradient import with_gradient_of
from moe_jax.experts.hopper._experts import router_arguments, why_not_layer
from moe_jax.quantization import ExpertWeights
from moe_jax.routing import Routing, RoutingParams, route
from pallas_kernels.route import route as route_by_kernel


def route_tokens(
    x: Array,
    router_logits: Array,
    config: MoEConfig,
    weights: ExpertWeights,
    params: RoutingParams | None,
    token_mask: Array | None,
    token_ids: Array | None,
    replayed_ids: Array | None,
    *,
    by_kernel: bool,
) -> Routing:
    """``moe_jax.routing.route``. by_kernel: by the kernel, unless ``why_not_layer`` says what it has not, or somebody
    differentiates it.
    """
    has_mask = token_mask is not None
    if by_kernel and replayed_ids is None and why_not_layer(config, weights, params, has_mask) is None:
        ways = (functools.partial(way, config) for way in (_by_kernel, _by_xla))
        return with_gradient_of(*ways, router_logits, params, token_mask)
    arguments: dict[str, Any] = dict(token_ids=token_ids, token_mask=token_mask, replayed_ids=replayed_ids)
    return route(router_logits, config, params=params, hidden_states=x, **arguments)


def _by_kernel(config: MoEConfig, logits: Array, params: RoutingParams | None, token_mask: Array | None) -> Routing:
    if config.router_logits_dtype is not None:
        logits = logits.astype(config.router_logits_dtype)
    options = router_arguments(config, params)
    if config.apply_routed_scale_to_output:  # which ``finish`` multiplies with
        options["scale"] = 1.0
    return Routing(*route_by_kernel(logits, config.top_k, token_mask=token_mask, **options))


def _by_xla(config: MoEConfig, logits: Array, params: RoutingParams | None, token_mask: Array | None) -> Routing:
    return route(logits, config, params=params, token_mask=token_mask)
