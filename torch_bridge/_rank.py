"""``Rank``: which part of a layer one process holds under tensor or expert parallelism, in vLLM's terms."""

import dataclasses
import functools

import numpy as np
import torch

from moe_jax.loading import Shard
from moe_jax.parallel import determine_expert_map
from torch_bridge._moe_config import FusedMoEParallelConfig


@dataclasses.dataclass(frozen=True)
class Rank:
    """Sizes and ranks of the tensor-parallel and expert-parallel group; one of the two sizes is 1."""

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    num_experts: int = 1
    strategy: str = "linear"

    def __post_init__(self) -> None:
        if self.tp_size > 1 and self.ep_size > 1:
            raise NotImplementedError(
                f"tp_size={self.tp_size} with ep_size={self.ep_size}: a rank holds either whole "
                "experts or parts of all; leave one of them at 1"
            )
        if not 0 <= self.tp_rank < self.tp_size:
            raise ValueError(f"tp_rank={self.tp_rank} is outside tp_size={self.tp_size}")
        if self.ep_size > self.num_experts:
            raise ValueError(f"ep_size={self.ep_size} for {self.num_experts} experts: a rank needs at least one")
        determine_expert_map(self.ep_size, self.ep_rank, self.num_experts, self.strategy)

    @classmethod
    def current(
        cls,
        num_experts: int,
        tp_size: int | None,
        ep_size: int | None,
        tp_rank: int | None,
        ep_rank: int | None,
        strategy: str,
    ) -> "Rank":
        """Missing ranks are those of torch.distributed where it runs, else 0; missing sizes are 1."""
        is_running = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if is_running else 0
        tp_size, ep_size = tp_size or 1, ep_size or 1
        return cls(
            tp_size,
            rank % tp_size if tp_rank is None else tp_rank,
            ep_size,
            rank % ep_size if ep_rank is None else ep_rank,
            num_experts,
            strategy,
        )

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
    def is_whole(self) -> bool:
        """Whether this rank holds the layer as a whole."""
        return self.tp_size == self.ep_size == 1
