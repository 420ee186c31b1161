"""store_latents in plain jnp."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.pages import slots_of
from pallas_kernels.quantize_and_permute import quantize_and_permute
from pallas_kernels.store_latents.config import LatentsDesc


def store_latents_ref(
    desc: LatentsDesc,
    projected: jax.Array,
    norms: tuple[jax.Array, ...],
    cos: jax.Array,
    sin: jax.Array,
    cache: jax.Array,
    places: tuple[jax.Array, jax.Array, jax.Array],
    page_table: jax.Array | None = None,
) -> tuple[Any, jax.Array]:
    """What ``store_latents`` computes. norms: weights of what queries are made of, where it is asked for, and of the
    latent."""
    tokens = projected[: desc.batch * desc.num_tokens].astype(jnp.float32)
    of_queries, latent, key = jnp.split(tokens, (desc.queries, desc.queries + desc.rank), axis=-1)

    def normed(x: jax.Array, weight: jax.Array) -> jax.Array:
        inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + desc.eps)
        return (x * inverse * weight.astype(jnp.float32)).astype(projected.dtype)

    queries: Any = normed(of_queries, norms[0]) if desc.has_queries else None
    if desc.has_queries and desc.quantization != "none":
        options: Any = dict(quantization=desc.quantization, scale_rows=desc.scale_rows or None)
        queries = quantize_and_permute(queries, **options, implementation="reference")
    first, second = (key[:, ::2], key[:, 1::2]) if desc.is_interleaved else jnp.split(key, 2, axis=-1)
    cos, sin = (a.reshape(-1, desc.rope // 2) for a in (cos, sin))
    rotated = [(first * cos - second * sin).astype(cache.dtype), (second * cos + first * sin).astype(cache.dtype)]
    new = jnp.concatenate([normed(latent, norms[-1]), *rotated], axis=-1)
    new = new.reshape(desc.batch, desc.num_tokens, 1, desc.rank + desc.rope)
    rows, slots = slots_of(desc.num_tokens, desc.num_slots, desc.num_pages, *places, page_table)
    return queries, cache.at[rows, :, slots].set(new, mode="drop")
