"""Routing: router logits to expert ids and weights. Everything in float32, ties to the lower id, on device."""

from moe_jax.routing._config import RoutingConfig
from moe_jax.routing._presets import ROUTING_PRESETS, cohere2, gemma4, interns1_pro, llama4, phi_sparsemixer
from moe_jax.routing._replay import RoutedExperts
from moe_jax.routing._route import Routing, RoutingParams, route
from moe_jax.routing._scores import SCORING_FUNCTIONS
from moe_jax.routing._simulate import SIMULATION_STRATEGIES, simulate_routing
from moe_jax.routing._validate import RoutingKind, routing_kind, validate_routing

__all__ = [
    "ROUTING_PRESETS",
    "SCORING_FUNCTIONS",
    "SIMULATION_STRATEGIES",
    "RoutedExperts",
    "Routing",
    "RoutingConfig",
    "RoutingKind",
    "RoutingParams",
    "cohere2",
    "gemma4",
    "interns1_pro",
    "llama4",
    "phi_sparsemixer",
    "route",
    "routing_kind",
    "simulate_routing",
    "validate_routing",
]
