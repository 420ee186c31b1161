"""add_and_norm in plain jnp."""

import jax
import jax.numpy as jnp

from pallas_kernels.add_and_norm.config import AddNormDesc


def add_and_norm_ref(
    desc: AddNormDesc, x: jax.Array, weight: jax.Array, addend: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """What ``add_and_norm`` computes."""
    wide = x.astype(jnp.float32)
    wide = wide if addend is None else wide + addend.astype(jnp.float32)
    unit = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + desc.eps)
    return wide.astype(x.dtype), (unit * weight.astype(jnp.float32)).astype(x.dtype)
