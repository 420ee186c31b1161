"""grouped_wgrad in plain jnp."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_gemm.wgrad.config import WgradDesc


def grouped_wgrad_ref(
    desc: WgradDesc, dy: jax.Array, x: jax.Array, first_row: jax.Array, num_rows: jax.Array
) -> jax.Array:
    """What ``grouped_wgrad`` computes, one expert after another; rows of no expert may hold anything."""
    row = jnp.arange(desc.rows, dtype=jnp.int32)[:, None]

    def one_expert(bounds):
        first, count = bounds
        is_own = (row >= first) & (row < first + count)
        own_dy, own_x = (jnp.where(is_own, a, 0).astype(jnp.float32) for a in (dy, x))
        return jnp.einsum("mn,mk->nk", own_dy, own_x, precision=lax.Precision.HIGHEST).astype(desc.out_dtype)

    return lax.map(one_expert, (first_row, num_rows))
