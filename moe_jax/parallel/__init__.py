"""Layers of experts over a device mesh: where experts lie, and how tokens get to them and back."""

from moe_jax.parallel._eplb import EplbPlan, is_rebalance_due, rebalance
from moe_jax.parallel._eplb_policy import rebalance_experts
from moe_jax.parallel._eplb_state import EplbState, balancedness
from moe_jax.parallel._eplb_weights import move_experts, place_experts
from moe_jax.parallel._expert_map import (
    RoutingTables,
    determine_expert_map,
    expert_map_text,
    local_expert_ids,
    physical_to_logical,
    routing_tables,
)
from moe_jax.parallel._placement import Placement

__all__ = [
    "EplbPlan",
    "EplbState",
    "Placement",
    "RoutingTables",
    "balancedness",
    "determine_expert_map",
    "expert_map_text",
    "is_rebalance_due",
    "local_expert_ids",
    "move_experts",
    "physical_to_logical",
    "place_experts",
    "rebalance",
    "rebalance_experts",
    "routing_tables",
]
