"""multiply_heads in plain jnp."""

import jax
import jax.numpy as jnp

from pallas_kernels.multiply_heads.config import HeadsDesc


def multiply_heads_ref(desc: HeadsDesc, x: jax.Array, w: jax.Array) -> jax.Array:
    """What ``multiply_heads`` computes."""
    x, part = x[..., : desc.depth], w[:, desc.first_row : desc.first_row + desc.num_rows]
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("tnc,nrc->tnr" if desc.transposes_w else "tnr,nrc->tnc", x, part, precision=precision)
