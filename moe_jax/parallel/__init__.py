"""Layers of experts over a device mesh: where experts lie, and how tokens get to them and back."""

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
    "Placement",
    "RoutingTables",
    "determine_expert_map",
    "expert_map_text",
    "local_expert_ids",
    "physical_to_logical",
    "routing_tables",
]
