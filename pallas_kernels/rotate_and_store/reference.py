"""rotate_and_store in plain jnp."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common.numerics import cast_e4m3, divide
from pallas_kernels.common.pages import slots_of
from pallas_kernels.rotate_and_store.config import RotateDesc


def rotate_and_store_ref(
    desc: RotateDesc,
    projected: tuple[jax.Array, ...],
    norms: tuple[jax.Array, ...],
    cos: jax.Array,
    sin: jax.Array,
    caches: tuple[jax.Array, jax.Array],
    places: tuple[jax.Array, jax.Array, jax.Array],
    scales: tuple[jax.Array, jax.Array] | None = None,
    page_table: jax.Array | None = None,
    biases: tuple[jax.Array, ...] = (),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What ``rotate_and_store`` computes."""
    ends = (desc.num_heads * desc.width, (desc.num_heads + desc.num_kv_heads) * desc.width)
    tokens = desc.batch * desc.num_tokens

    def summed(a):
        parts = a.reshape(desc.num_parts, -1, a.shape[-1])[:, :tokens].astype(jnp.float32)
        return functools.reduce(jnp.add, parts)

    projected = tuple(map(summed, projected))
    q, k, v = jnp.split(projected[0], ends, axis=-1) if desc.is_packed else projected
    if desc.has_bias:
        q, k, v = (part + bias.astype(jnp.float32) for part, bias in zip((q, k, v), biases, strict=True))
    q, k, v = (part.reshape(desc.batch, desc.num_tokens, -1, desc.width) for part in (q, k, v))
    if desc.has_norm:
        q, k = (_normed(part, weight, desc.eps) for part, weight in zip((q, k), norms, strict=True))
    dtype = jnp.dtype(desc.dtype)
    q, k, v = (part.astype(dtype) for part in (_rotated(q, cos, sin), _rotated(k, cos, sin), v))
    if scales is not None:
        k, v = (cast_e4m3(divide(x.astype(jnp.float32), scale)) for x, scale in zip((k, v), scales, strict=True))
    rows, slots = slots_of(desc.num_tokens, desc.num_slots, desc.num_pages, *places, page_table)
    keys, values = (cache.at[rows, :, slots].set(new, mode="drop") for cache, new in zip(caches, (k, v), strict=True))
    return q, keys, values


def _normed(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight.astype(jnp.float32)


def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
