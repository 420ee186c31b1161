"""add_and_norm in plain jnp."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.add_and_norm.config import AddNormDesc


def add_and_norm_ref(
    desc: AddNormDesc, x: jax.Array, weight: jax.Array, parts: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """What ``add_and_norm`` computes."""
    wide = x.astype(jnp.float32)
    if parts is not None:
        wide = wide + functools.reduce(jnp.add, parts[:, : desc.num_tokens].astype(jnp.float32))
    unit = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + desc.eps)
    return wide.astype(x.dtype), (unit * weight.astype(jnp.float32)).astype(x.dtype)
