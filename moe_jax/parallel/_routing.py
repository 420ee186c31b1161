"""Routing of one device's tokens: by the Hopper kernel where the experts run on those, else by XLA."""

from typing import Any

import jax.numpy as jnp

from moe_jax._config import MoEConfig
from moe_jax._experts_mosaic import why_not_layer
from moe_jax._typing import Array
from moe_jax.quantization import ExpertWeights
from moe_jax.routing import Routing, RoutingParams, route
from moe_jax.routing._route import groups_of
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
    """``moe_jax.routing.route``. by_kernel: try the kernel first, which has no hash tables, zero experts and so on."""
    has_mask = token_mask is not None
    if by_kernel and replayed_ids is None and why_not_layer(config, weights, params, has_mask) is None:
        bias = None if params is None else params.correction_bias
        groups, kept = groups_of(config) or (0, 0)
        logits = router_logits
        if config.router_logits_dtype is not None:
            logits = logits.astype(config.router_logits_dtype)
        try:
            topk_weights, topk_ids = route_by_kernel(
                logits,
                config.top_k,
                scoring=config.scoring_func,
                renormalize=config.renormalize,
                scale=1.0 if config.apply_routed_scale_to_output else config.routed_scaling_factor,
                bias=None if bias is None else bias.astype(jnp.float32),
                num_groups=groups,
                groups_kept=kept,
                token_mask=token_mask,
            )
            return Routing(topk_weights, topk_ids)
        except NotImplementedError:
            pass
    arguments: dict[str, Any] = dict(token_ids=token_ids, token_mask=token_mask, replayed_ids=replayed_ids)
    return route(router_logits, config, params=params, hidden_states=x, **arguments)
