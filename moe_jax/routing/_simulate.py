"""Random routing for load tests: expert ids and weights that no model computed."""

import jax
import jax.numpy as jnp

from moe_jax._typing import Array, Shaped
from moe_jax.routing._route import Routing

SIMULATION_STRATEGIES = ("uniform", "normal")


def simulate_routing(
    strategy: str, key: Shaped[Array, "..."], num_tokens: int, num_experts: int, top_k: int
) -> Routing:
    """Draw a ``Routing`` of (num_tokens, top_k) from ``key``; an expert may repeat inside a token.

    "uniform": ids independent and uniform, weights all 1. "normal": ids floor(sigmoid(n) * num_experts) with n standard
    normal, which crowds the middle experts; weights are |n'| of a second draw, summing to 1 per token.
    """
    if strategy not in SIMULATION_STRATEGIES:
        raise ValueError(f"strategy={strategy!r}, expected one of {', '.join(SIMULATION_STRATEGIES)}")
    shape = (num_tokens, top_k)
    if strategy == "uniform":
        return Routing(jnp.ones(shape, jnp.float32), jax.random.randint(key, shape, 0, num_experts, jnp.int32))
    id_key, weight_key = jax.random.split(key)
    position = jax.nn.sigmoid(jax.random.normal(id_key, shape, jnp.float32)) * num_experts
    weights = jnp.abs(jax.random.normal(weight_key, shape, jnp.float32))
    return Routing(
        weights / weights.sum(axis=-1, keepdims=True), jnp.clip(position.astype(jnp.int32), 0, num_experts - 1)
    )
