"""The functional core: route, then experts, then combine; and ``explain``, which says what would run and why."""

from moe_jax.experts._explain import explain
from moe_jax.experts._fused_moe import MoEStats, fused_experts, fused_moe
from moe_jax.experts._losses import load_balancing_loss, router_z_loss, sequence_balance_loss

__all__ = [
    "MoEStats",
    "explain",
    "fused_experts",
    "fused_moe",
    "load_balancing_loss",
    "router_z_loss",
    "sequence_balance_loss",
]
