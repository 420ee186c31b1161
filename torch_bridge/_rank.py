"""``Rank``: which part of a layer one process holds under tensor and expert parallelism, in vLLM's terms."""

import dataclasses
import functools
from typing import Any

import numpy as np
import torch

from moe_jax._arguments import integer
from moe_jax.loading import Shard
from moe_jax.parallel import determine_expert_map
from torch_bridge._group import is_running, place_in, summed
from torch_bridge._moe_config import FusedMoEParallelConfig


@dataclasses.dataclass(frozen=True)
class Rank:
    """Sizes of the tensor-parallel and expert-parallel groups, and the place of this process in both.

    The layer is shared by ``tp_size * ep_size`` ranks: each holds ``1 / tp_size`` of I of its experts. num_experts: of
    the whole layer, copies of experts included. group: the ranks that share the layer, see ``place_in``.
    """

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    num_experts: int = 1
    strategy: str = "linear"
    group: Any = None

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size:
            raise ValueError(f"tp_rank={self.tp_rank} is outside tp_size={self.tp_size}")
        if self.ep_size > self.num_experts:
            raise ValueError(f"ep_size={self.ep_size} for {self.num_experts} experts: a rank needs at least one")
        determine_expert_map(self.ep_size, self.ep_rank, self.num_experts, self.strategy)
        if self.group is not None and place_in(self.group)[0] != self.size:
            raise ValueError(
                f"process_group has {place_in(self.group)[0]} ranks, expected tp_size * ep_size = {self.size}; pass "
                "the group of the ranks that share the layer"
            )

    def __deepcopy__(self, memo: Any) -> "Rank":
        """A copy of a layer is on the same rank, and groups cannot be copied."""
        return self

    @classmethod
    def current(
        cls,
        num_experts: int,
        tp_size: Any,
        ep_size: Any,
        tp_rank: Any,
        ep_rank: Any,
        strategy: str,
        group: Any,
    ) -> "Rank":
        """Missing sizes are 1. Missing ranks follow from the rank in the group, tensor-parallel neighbours first.

        Raises TypeError for a size or rank that is no integer, ValueError for one that is too small.
        """
        given = dict(tp_size=tp_size, ep_size=ep_size, tp_rank=tp_rank, ep_rank=ep_rank)
        for name, value in given.items():
            if value is not None:
                integer(name, value, minimum=int(name.endswith("size")))
        tp_size, ep_size, rank = tp_size or 1, ep_size or 1, place_in(group)[1]
        return cls(
            tp_size,
            rank % tp_size if tp_rank is None else tp_rank,
            ep_size,
            rank // tp_size % ep_size if ep_rank is None else ep_rank,
            num_experts,
            strategy,
            group,
        )

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the ranks that share the layer. Raises RuntimeError where they are not known."""
        if self.size == 1:
            return part
        if self.group is None and (not is_running() or place_in(None)[0] != self.size):
            found = f"a world of {place_in(None)[0]}" if is_running() else "no torch.distributed"
            raise RuntimeError(
                f"the sum over {self.size} ranks (tp_size={self.tp_size}, ep_size={self.ep_size}) needs "
                f"torch.distributed and the group of those ranks, found {found}; pass process_group=, or pass "
                "reduce_results=False and sum the parts yourself"
            )
        return summed(part, self.group)

    @functools.cached_property
    def expert_map(self) -> np.ndarray | None:
        return determine_expert_map(self.ep_size, self.ep_rank, self.num_experts, self.strategy)[1]

    @functools.cached_property
    def shard(self) -> Shard:
        """The part of the layer, as loaders take it."""
        table = self.expert_map
        return Shard(self.tp_rank, self.tp_size, None if table is None else tuple(table.tolist()))

    @property
    def num_local_experts(self) -> int:
        return determine_expert_map(self.ep_size, self.ep_rank, self.num_experts, self.strategy)[0]

    @property
    def moe_parallel_config(self) -> FusedMoEParallelConfig:
        """The same as vLLM says it."""
        return FusedMoEParallelConfig.of_rank(self.tp_size, self.tp_rank, self.ep_size, self.ep_rank)

    @property
    def size(self) -> int:
        """How many ranks share the layer."""
        return self.tp_size * self.ep_size

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds the layer as a whole."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """Whether this rank adds what is added once: one of those that share the layer has to."""
        return self.tp_rank == self.ep_rank == 0
