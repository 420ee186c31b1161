"""Decode attention in plain jnp."""

import jax
import jax.numpy as jnp

from pallas_kernels.common.numerics import widen
from pallas_kernels.decode_attention.config import DecodeDesc


def visible_slots(desc: DecodeDesc, starts: jax.Array, lengths: jax.Array, first_slots: jax.Array) -> jax.Array:
    """(B, S, L) bool: True where a query sees a slot."""
    own = (first_slots[:, None] + jnp.arange(desc.num_queries))[:, :, None]
    slots = jnp.arange(desc.num_slots)
    visible = (slots >= starts[:, None, None]) & (slots < lengths[:, None, None]) & (slots <= own)
    return visible if desc.window is None else visible & (slots > own - desc.window)


def decode_attention_ref(
    desc: DecodeDesc,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    first_slots: jax.Array,
    sinks: jax.Array | None = None,
    scales: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """What ``decode_attention`` computes, in float32, rounded once."""
    batch, queries, heads, _ = q.shape
    visible = visible_slots(desc, starts, lengths, first_slots)[:, None, None]
    q, k, v = (widen(a, jnp.float32) for a in (q, k, v))
    if scales is not None:
        k, v = k * scales[0], v * scales[1]
    q = q.reshape(batch, queries, desc.num_kv_heads, desc.group, -1)
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("bsmgd,bmld->bmgsl", q, k, precision=highest) * desc.scale
    scores = jnp.where(visible, scores, -jnp.inf)
    top = jnp.maximum(scores.max(-1, keepdims=True), jnp.finfo(jnp.float32).min)
    extra = 0.0
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(1, desc.num_kv_heads, desc.group, 1, 1)
        top = jnp.maximum(top, sinks)
        extra = jnp.exp(sinks - top)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True) + extra
    weights = jnp.where(total == 0, 0.0, weights / total)
    is_used = (jnp.arange(desc.num_slots) >= starts[:, None]) & (jnp.arange(desc.num_slots) < lengths[:, None])
    y = jnp.einsum("bmgsl,bmlv->bsmgv", weights, jnp.where(is_used[:, None, :, None], v, 0.0), precision=highest)
    return y.reshape(batch, queries, heads, -1).astype(desc.dtype)
