"""add_and_norm in plain jnp."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.add_and_norm.config import AddNormDesc
from pallas_kernels.combine import RoutedRows
from pallas_kernels.quantize_and_permute import quantize_and_permute_ref


def add_and_norm_ref(
    desc: AddNormDesc,
    x: jax.Array,
    weight: jax.Array,
    parts: jax.Array | RoutedRows | None,
    bias: jax.Array | None = None,
    router: jax.Array | None = None,
    router_bias: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """What ``add_and_norm`` computes."""
    wide = x.astype(jnp.float32)
    if isinstance(parts, RoutedRows):
        wide = wide + parts.whole(jnp.float32, "reference")
    elif parts is not None:
        added = functools.reduce(jnp.add, parts[:, : desc.num_tokens].astype(jnp.float32))
        wide = wide + (added if bias is None else added + bias.astype(jnp.float32))
    unit = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + desc.eps)
    normal = (unit * weight.astype(jnp.float32)).astype(x.dtype)
    logits = () if router is None else (_logits(normal, router, router_bias),)
    if desc.quantization == "none":
        return wide.astype(x.dtype), normal, *logits
    codes, scales = quantize_and_permute_ref(desc.rows, normal, None)
    assert scales is not None, "config_error refuses given scales"
    return wide.astype(x.dtype), codes, scales, *logits


def _logits(normal: jax.Array, router: jax.Array, router_bias: jax.Array | None) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if normal.dtype == jnp.float32 else None
    contract = (((1,), (1,)), ((), ()))
    logits = jax.lax.dot_general(normal, router, contract, precision=precision, preferred_element_type=jnp.float32)
    return logits if router_bias is None else logits + router_bias.astype(jnp.float32)
