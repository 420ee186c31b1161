"""``Placement``: where the copies of each expert lie, as arrays, so that moving them compiles nothing again."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from moe_jax._arguments import integer
from moe_jax._pytrees import pytree
from moe_jax._typing import Array, ArrayArg, Int, Leaf
from moe_jax.parallel._expert_map import local_expert_ids, physical_to_logical

_FIBONACCI = 2654435769  # 2^32 over the golden ratio: multiples of it spread evenly


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class Placement:
    """Logical experts in physical slots. Devices have equally many slots; slot s is on device ``s // (S / D)``.

    Weights of a placed layer have the slots as their first axis, so that a plain split of that axis gives each device
    its experts. If the number of experts is not a multiple of the number of devices, some slots are empty. An empty
    slot holds zeros and gets no token. The leaves are NumPy arrays when made here and JAX arrays inside a layer.

    Args:
        physical_to_logical: (S,) int32, the expert in each slot, -1 in an empty one.
        logical_to_physical: (L, R) int32, slots of each expert in ascending order, padded with -1.
        num_replicas: (L,) int32, slots of each expert, at least 1.
        num_devices: D, static.
    """

    physical_to_logical: ArrayArg
    logical_to_physical: ArrayArg
    num_replicas: ArrayArg
    num_devices: int = dataclasses.field(metadata=dict(static=True))

    @classmethod
    def create(
        cls,
        num_experts: int,
        num_devices: int,
        strategy: str = "linear",
        *,
        num_redundant_experts: int = 0,
    ) -> "Placement":
        """The initial placement: P = num_experts + num_redundant_experts copies, spread by ``strategy``.

        The first P % num_devices devices own one copy more than the others. The others then have an empty slot.

        Args:
            num_experts: logical experts.
            num_devices: devices of the expert axis.
            strategy: "linear" (runs of ids) or "round_robin" (id modulo devices).
            num_redundant_experts: copies beyond the first one of each expert.
        Example:
            >>> Placement.create(10, 4, "round_robin").physical_to_logical
            array([ 0,  4,  8,  1,  5,  9,  2,  6, -1,  3,  7, -1], dtype=int32)

        Raises:
            ValueError: a count below 1 or an unknown strategy.
        """
        num_experts = integer("num_experts", num_experts, minimum=1)
        redundant = integer("num_redundant_experts", num_redundant_experts, minimum=0)
        copies = physical_to_logical(num_experts, redundant)
        owned = [local_expert_ids(copies.size, num_devices, rank, strategy) for rank in range(num_devices)]
        slots = np.full((num_devices, max(ids.size for ids in owned)), -1, np.int32)
        for row, ids in zip(slots, owned, strict=True):
            row[: ids.size] = copies[ids]
        return cls.from_slots(slots.reshape(-1), num_experts, num_devices, max_replicas=redundant + 1)

    @classmethod
    def from_slots(
        cls, experts: ArrayArg | Sequence[int], num_experts: int, num_devices: int, *, max_replicas: int | None = None
    ) -> "Placement":
        """The placement with these experts in its slots.

        Args:
            experts: (S,) expert of each slot, -1 for an empty one; S divides by ``num_devices``.
            num_experts: L, logical experts; each needs a slot.
            num_devices: D.
            max_replicas: R, columns of the replica table; placements that take each other's place need the same. None
                takes what fits any: S - L + 1.

        Raises:
            ValueError: a slot count that does not divide, an id out of range, an expert without a slot or with more
                than ``max_replicas``.
        """
        experts = np.asarray(experts)
        if experts.ndim != 1 or experts.dtype.kind != "i" or experts.size == 0 or experts.size % num_devices:
            raise ValueError(
                f"experts is {experts.dtype} {experts.shape}, expected integers (S,) with S > 0 a multiple of "
                f"{num_devices} devices"
            )
        if ((experts < -1) | (experts >= num_experts)).any():
            bad = int(experts[(experts < -1) | (experts >= num_experts)][0])
            raise ValueError(f"experts holds {bad}, expected ids from 0 to {num_experts - 1}, or -1 for an empty slot")
        count = np.bincount(experts[experts >= 0], minlength=num_experts)
        columns = experts.size - num_experts + 1 if max_replicas is None else max_replicas
        if count.min() < 1 or count.max() > columns:
            expert = int(np.argmin(count) if count.min() < 1 else np.argmax(count))
            raise ValueError(f"expert {expert} has {count[expert]} slots, expected 1 to {columns}")
        table = np.full((num_experts, columns), -1, np.int32)
        filled = np.zeros(num_experts, np.int64)
        for slot, expert in enumerate(experts):
            if expert >= 0:
                table[expert, filled[expert]] = slot
                filled[expert] += 1
        return cls(experts.astype(np.int32), table, count.astype(np.int32), num_devices)

    @property
    def num_experts(self) -> int:
        """L, logical experts."""
        return self.logical_to_physical.shape[0]

    @property
    def num_slots(self) -> int:
        """S, slots of all devices, empty ones included."""
        return self.physical_to_logical.shape[0]

    @property
    def slots_per_device(self) -> int:
        return self.num_slots // self.num_devices

    def to_physical(self, topk_ids: Int[Array, "T top_k"], first_token: Leaf | int = 0) -> Int[Array, "T top_k"]:
        """The slot that serves each (token, slot of top-k) pair; -1 for ids outside [0, L).

        Copies of an expert take turns: a hash of a pair's position chooses the copy. It depends on nothing else.

        Args:
            topk_ids: (T, top_k) int, logical experts.
            first_token: () int, position of row 0, if the rows are a part of a call's tokens.
        """
        is_expert = (topk_ids >= 0) & (topk_ids < self.num_experts)
        expert = jnp.where(is_expert, topk_ids, 0)
        tokens, top_k = topk_ids.shape
        token = jnp.arange(tokens, dtype=jnp.uint32) + jnp.asarray(first_token).astype(jnp.uint32)
        pair = token[:, None] * np.uint32(max(top_k, 1)) + jnp.arange(top_k, dtype=jnp.uint32)
        # The high half of the product, scaled to the number of copies: neighbours differ for every number.
        spread = (pair * np.uint32(_FIBONACCI)) >> 16
        copies = jnp.asarray(self.num_replicas)[expert].astype(jnp.uint32)
        turn = ((spread * copies) >> 16).astype(jnp.int32)
        return jnp.where(is_expert, jnp.asarray(self.logical_to_physical)[expert, turn], -1)

    def experts_of(self, device: int) -> np.ndarray:
        """(slots_per_device,) expert in each slot of one device, -1 in an empty one; host only."""
        return np.asarray(self.physical_to_logical).reshape(self.num_devices, -1)[device]

    def expert_map(self, device: int) -> np.ndarray:
        """(L,) int32: local index of an expert's first copy on one device, -1 where it has none there; host only."""
        experts = self.experts_of(device)
        expert_map = np.full(self.num_experts, -1, np.int32)
        local = np.flatnonzero(experts >= 0)[::-1]
        expert_map[experts[local]] = local
        return expert_map

    def __repr__(self) -> str:
        copies = "" if self.num_slots == self.num_experts else f", {self.num_slots} slots"
        return f"Placement({self.num_experts} experts{copies} on {self.num_devices} devices)"
