"""Which experts a device owns: pure functions of counts, on the host, with the words and numbers of vLLM.

A *physical* expert is one copy of a logical expert; there are P = L + redundant of them, and a strategy spreads them
over ``ep_size`` devices. The first ``P % ep_size`` devices own one more than the others.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from moe_jax._arguments import integer

STRATEGIES = ("linear", "round_robin")


class RoutingTables(NamedTuple):
    """Tables for transports that expect every rank to own a contiguous run of physical ids; all int64.

    Args:
        global_to_physical: (P,) the place of each id in the order in which every rank's ids are contiguous.
        physical_to_global: (P,) the inverse.
        local_global: (E_local,) expert ids of one rank, in its own order.
    """

    global_to_physical: np.ndarray
    physical_to_global: np.ndarray
    local_global: np.ndarray


def local_expert_ids(num_experts: int, ep_size: int, ep_rank: int, strategy: str = "linear") -> np.ndarray:
    """(E_local,) int32: ids that ``ep_rank`` owns, in its local order. Raises ValueError for a rank or strategy."""
    _check(num_experts, ep_size, ep_rank, strategy)
    if strategy == "round_robin":
        return np.arange(ep_rank, num_experts, ep_size, dtype=np.int32)
    base, surplus = divmod(num_experts, ep_size)
    start = ep_rank * base + min(ep_rank, surplus)
    return np.arange(start, start + base + (ep_rank < surplus), dtype=np.int32)


def determine_expert_map(
    ep_size: int, ep_rank: int, global_num_experts: int, expert_placement_strategy: str = "linear"
) -> tuple[int, np.ndarray | None]:
    """(experts of this rank, map (P,) int32 from id to local index, -1 where not local); the map is None for one rank.

    Example:
        >>> determine_expert_map(4, 3, 10, "round_robin")
        (2, array([-1, -1, -1,  0, -1, -1, -1,  1, -1, -1], dtype=int32))
    """
    owned = local_expert_ids(global_num_experts, ep_size, ep_rank, expert_placement_strategy)
    if ep_size == 1:
        return global_num_experts, None
    expert_map = np.full(global_num_experts, -1, np.int32)
    expert_map[owned] = np.arange(owned.size, dtype=np.int32)
    return owned.size, expert_map


def expert_map_text(expert_map: Sequence[int] | np.ndarray) -> str:
    """ "local->global" pairs of a map in local order, comma separated, for logs."""
    pairs = sorted((int(local), int(expert)) for expert, local in enumerate(expert_map) if local >= 0)
    return ", ".join(f"{local}->{expert}" for local, expert in pairs)


def routing_tables(num_experts: int, ep_size: int, ep_rank: int, strategy: str = "round_robin") -> RoutingTables:
    """The permutation that makes every rank's experts contiguous, whatever the strategy."""
    owned = [local_expert_ids(num_experts, ep_size, rank, strategy) for rank in range(ep_size)]
    _check(num_experts, ep_size, ep_rank, strategy)
    physical_to_global = np.concatenate(owned).astype(np.int64)
    return RoutingTables(np.argsort(physical_to_global), physical_to_global, owned[ep_rank].astype(np.int64))


def physical_to_logical(num_experts: int, num_redundant: int = 0) -> np.ndarray:
    """(L + redundant,) int32: the initial copies, the surplus ones again experts 0, 1, 2 and so on."""
    physical = np.arange(num_experts + num_redundant, dtype=np.int32)
    return np.where(physical < num_experts, physical, (physical - num_experts) % num_experts).astype(np.int32)


def _check(num_experts: Any, ep_size: Any, ep_rank: Any, strategy: str) -> None:
    integer("num_experts", num_experts, minimum=1)
    integer("ep_size", ep_size, minimum=1)
    integer("ep_rank", ep_rank, minimum=0, maximum=ep_size - 1)
    if strategy not in STRATEGIES:
        raise ValueError(f"placement={strategy!r}, expected one of {', '.join(map(repr, STRATEGIES))}")
