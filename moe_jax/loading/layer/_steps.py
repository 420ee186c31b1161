"""``Step``: one checked copy into a leaf, and ``Decision``: what was found out once for all tensors of a kind."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_jax.loading.layer._names import ExpertTensor
from moe_jax.loading.layer._weight_loader import Placement


@dataclasses.dataclass(frozen=True)
class Step:
    """One checked copy that is ready to be made."""

    placement: Placement
    shard: str
    array: np.ndarray


@dataclasses.dataclass(frozen=True)
class Decision:
    """Where a tensor of one expert goes; holds for tensors of the same kind, shape and dtype of all experts."""

    placement: Placement
    shard: str
    dtype: np.dtype

    def step(self, expert: int, array: np.ndarray) -> Step:
        index = (slice(expert, expert + 1), *self.placement.index[1:])
        return Step(dataclasses.replace(self.placement, index=index), self.shard, array.view(self.dtype))


def kind_of(tensors: Sequence[ExpertTensor], array: np.ndarray) -> tuple[Any, ...] | None:
    """All that decides where a tensor goes but its expert; None where there is more to it: stacked, or replicated."""
    first = tensors[0]
    is_simple = first.expert is not None and len(first.shards) == len(tensors) == 1
    return (first.suffix, first.shards, array.shape, array.dtype) if is_simple else None
