"""combine in plain jnp."""

import jax
import jax.numpy as jnp

from pallas_kernels.combine.config import CombineDesc


def combine_ref(
    desc: CombineDesc, rows: jax.Array, row_of: jax.Array, weights: jax.Array, shared: jax.Array | None = None
) -> jax.Array:
    """What ``combine`` computes."""
    total = jnp.zeros((desc.num_tokens, desc.width), jnp.float32)
    for j in range(desc.top_k):
        row, weight = row_of[:, j], weights[:, j].astype(jnp.float32)
        values = rows[jnp.maximum(row, 0)].astype(jnp.float32) * weight[:, None]
        total = total + jnp.where((row >= 0)[:, None], values, 0.0)
    if shared is not None:
        total = total + shared.astype(jnp.float32)
    return total.astype(desc.out_dtype)
