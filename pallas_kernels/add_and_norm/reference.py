"""add_and_norm in plain jnp."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.add_and_norm.config import AddNormDesc
from pallas_kernels.quantize_and_permute import quantize_and_permute_ref


def add_and_norm_ref(
    desc: AddNormDesc, x: jax.Array, weight: jax.Array, parts: jax.Array | None, bias: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """What ``add_and_norm`` computes."""
    wide = x.astype(jnp.float32)
    if parts is not None:
        added = functools.reduce(jnp.add, parts[:, : desc.num_tokens].astype(jnp.float32))
        wide = wide + (added if bias is None else added + bias.astype(jnp.float32))
    unit = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + desc.eps)
    normal = (unit * weight.astype(jnp.float32)).astype(x.dtype)
    if desc.quantization == "none":
        return wide.astype(x.dtype), normal
    codes, scales = quantize_and_permute_ref(desc.rows, normal, None)
    assert scales is not None, "config_error refuses given scales"
    return wide.astype(x.dtype), codes, scales
