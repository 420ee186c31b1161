"""Layers of experts over a device mesh: where experts lie, and how tokens get to them and back."""

from moe_jax.parallel._config import ParallelConfig
from moe_jax.parallel._expert_map import (
    RoutingTables,
    determine_expert_map,
    expert_map_text,
    local_expert_ids,
    physical_to_logical,
    routing_tables,
)
from moe_jax.parallel._experts import fused_moe
from moe_jax.parallel._mesh import parse_mesh
from moe_jax.parallel._placement import Placement
from moe_jax.parallel._weights import place_weights
from moe_jax.parallel.eplb._mesh import logical_weights, transfer_experts
from moe_jax.parallel.eplb._policy import rebalance_experts
from moe_jax.parallel.eplb._rebalance import EplbPlan, is_rebalance_due, rearrange_expert_weights, rebalance
from moe_jax.parallel.eplb._state import EplbState, balancedness
from moe_jax.parallel.eplb._weights import move_experts, place_experts

__all__ = [
    "EplbPlan",
    "EplbState",
    "ParallelConfig",
    "Placement",
    "RoutingTables",
    "balancedness",
    "determine_expert_map",
    "expert_map_text",
    "fused_moe",
    "is_rebalance_due",
    "local_expert_ids",
    "logical_weights",
    "move_experts",
    "parse_mesh",
    "physical_to_logical",
    "place_experts",
    "place_weights",
    "rearrange_expert_weights",
    "rebalance",
    "rebalance_experts",
    "routing_tables",
    "transfer_experts",
]
