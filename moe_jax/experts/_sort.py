"""A stable sort of few ids, which groups rows by expert, or by the device of their expert."""

import jax.numpy as jnp
from jax import lax

from moe_jax._typing import Array


def sort_by_expert(expert: Array, num_experts: int) -> tuple[Array, Array]:
    """Stable sort of ids in [0, num_experts]. Returns (sorted ids, their former positions), both int32.

    Packing id and position in one word makes the keys distinct, so that a plain one-operand sort is stable: 26 us
    against 300 us for a stable argsort of 2048 ids (XLA CPU, jax 0.10.2). A one-hot cumsum takes 280 us and more.
    """
    position = lax.iota(jnp.uint32, expert.size)
    is_known = isinstance(expert.size, int)  # not where a program is exported for any number of rows
    rows = max(expert.size, 1) if is_known else 0
    if not is_known or (num_experts + 1) * rows > 2**32:
        expert, position = lax.sort((expert, position.astype(jnp.int32)), num_keys=1, is_stable=True)
        return expert, position
    packed = lax.sort(expert.astype(jnp.uint32) * rows + position, is_stable=False)
    return (packed // rows).astype(jnp.int32), (packed % rows).astype(jnp.int32)
