"""References of grouped GEMMs whose rows that a kernel may leave unwritten are not numbers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def with_unspecified_rows(product: Callable[..., Any]) -> Callable[..., Any]:
    """``product``, whose rows past ``tile_rows`` are not numbers."""

    def run(*arguments: Any, tile_rows: Any = None, **options: Any) -> Any:
        found = product(*arguments, tile_rows=tile_rows, **options)
        if tile_rows is None:
            return found
        rows = jax.tree.leaves(found)[0].shape[0]
        block_m = rows // len(tile_rows)
        own = jnp.arange(rows) % block_m < jnp.repeat(tile_rows, block_m)
        return jax.tree.map(lambda leaf: jnp.where(own.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, jnp.nan), found)

    return run
