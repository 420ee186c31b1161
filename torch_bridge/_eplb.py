"""``EplbLayerState``: expert load balancing of one layer as vLLM drives it: which copy of an expert serves a token.

Experts of the router are *logical*, their copies *physical*: physical expert p is a row of the rank p // (P / ep_size).
The maps and the counts are tensors of the caller, who changes them while the layer serves.
"""

import dataclasses

import numpy as np
import torch

from moe_jax.parallel import physical_to_logical

_KNUTH = 2654435769  # vLLM's hash of a token's position: floor(2^32 / golden ratio)


@dataclasses.dataclass
class EplbLayerState:
    """Maps and counts of one layer, under vLLM's names; they are views, which calls read and count into.

    Args:
        expert_load_view: (P,) integers, tokens that each physical expert was chosen for. Calls add to it.
        logical_to_physical_map: (L, R) integers, copies of each expert, padded with -1.
        logical_replica_count: (L,) integers, number of copies of each expert.
        should_record_tensor: () bool, whether calls count; None: they do.
    """

    expert_load_view: torch.Tensor | None = None
    logical_to_physical_map: torch.Tensor | None = None
    logical_replica_count: torch.Tensor | None = None
    should_record_tensor: torch.Tensor | None = None

    def set_layer_state(
        self,
        moe_layer_idx: int,
        expert_load_view: torch.Tensor,
        logical_to_physical_map: torch.Tensor,
        logical_replica_count: torch.Tensor,
    ) -> None:
        """Take one layer's views: of (layers, P), (layers, L, R) and (layers, L)."""
        self.expert_load_view = expert_load_view[moe_layer_idx]
        self.logical_to_physical_map = logical_to_physical_map[moe_layer_idx]
        self.logical_replica_count = logical_replica_count[moe_layer_idx]

    def to_physical(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """(T, k) logical ids -> the copies that serve them, -1 for ids outside [0, L); the copies' load is counted.

        All choices of a token take the copy of the same turn: a hash of its row, modulo the number of copies, as in
        vLLM. Raises ValueError before ``set_layer_state``.
        """
        load, copies, counts = self.expert_load_view, self.logical_to_physical_map, self.logical_replica_count
        if load is None or copies is None or counts is None:
            raise ValueError(
                "enable_eplb needs the load and the maps of experts before a call: pass them to set_eplb_state"
            )
        is_expert = (topk_ids >= 0) & (topk_ids < len(counts))
        expert = torch.where(is_expert, topk_ids, 0).long()
        row = torch.arange(len(topk_ids), device=topk_ids.device)[:, None]
        turn = (row * _KNUTH & 0xFFFFFFFF) % counts[expert].clamp(min=1)
        physical = torch.where(is_expert, copies[expert, turn].long(), -1)
        is_counted = (physical >= 0) & (physical < len(load))
        if self.should_record_tensor is not None:
            is_counted = is_counted & self.should_record_tensor
        load.scatter_add_(0, physical.clamp(0, len(load) - 1).flatten(), is_counted.flatten().to(load.dtype))
        return physical.to(topk_ids.dtype)

    def physical_to_logical(self, num_logical: int, num_physical: int) -> np.ndarray:
        """(P,) expert of each copy: by the map, or as copies lie initially, before there is one."""
        if self.logical_to_physical_map is None:
            return physical_to_logical(num_logical, num_physical - num_logical)
        copies, found = self.logical_to_physical_map.cpu().numpy(), np.full(num_physical, -1)
        expert, turn = np.nonzero(copies >= 0)
        found[copies[expert, turn]] = expert
        return found
