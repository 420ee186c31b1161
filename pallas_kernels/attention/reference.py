"""Attention over a cache in plain jnp: which slots a query sees, and the weighted sum of their values."""

import jax
import jax.numpy as jnp

from pallas_kernels.attention.config import PrefillDesc


def visible(
    desc: PrefillDesc,
    starts: jax.Array,
    lengths: jax.Array,
    first_slots: jax.Array,
    first_keys: jax.Array | None = None,
    shared: jax.Array | None = None,
) -> jax.Array:
    """True where a query of a row sees a slot, (B, S, L)."""
    slots = jnp.arange(desc.num_slots)[None, None, :]
    own = (first_slots[:, None] + jnp.arange(desc.num_queries))[:, :, None]
    seen = (slots >= starts[:, None, None]) & (slots < lengths[:, None, None])
    if desc.is_causal:
        seen &= slots <= own
    if desc.window is not None:
        seen &= slots > own - desc.window
    if first_keys is not None:
        is_own = slots >= first_keys[:, :, None]
        seen &= is_own if shared is None else is_own | (slots < shared[:, None, None])
    return seen


def prefill_ref(
    desc: PrefillDesc,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    first_slots: jax.Array,
    sinks: jax.Array | None = None,
    first_keys: jax.Array | None = None,
    shared: jax.Array | None = None,
    scales: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """What ``prefill`` computes, in float32 and rounded once. Holds all scores, (B, N, S, L)."""
    precision = jax.lax.Precision.HIGHEST
    grouped = q.astype(jnp.float32).reshape(*q.shape[:2], desc.num_kv_heads, desc.group, desc.width)
    seen = visible(desc, starts, lengths, first_slots, first_keys, shared)[:, None, None]
    scores = jnp.einsum("bsmgd,bmld->bmgsl", grouped, k.astype(jnp.float32), precision=precision) * desc.scale
    scores = scores if scales is None else scores * scales[0]
    scores = jnp.where(seen, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    sink = None
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, desc.num_kv_heads, desc.group, 1, 1)
        top = jnp.maximum(top, sink)
    top = jnp.where(jnp.isneginf(top), 0, top)
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True) + (0 if sink is None else jnp.exp(sink - top))
    weights = weights / jnp.where(total == 0, 1, total)
    # Slots outside [start, length) may hold anything, and 0 * NaN is NaN.
    slots = jnp.arange(desc.num_slots)[None]
    held = (slots >= starts[:, None]) & (slots < lengths[:, None])
    values = jnp.where(held[:, None, :, None], v.astype(jnp.float32), 0)
    out = jnp.einsum("bmgsl,bmlv->bsmgv", weights, values, precision=precision)
    out = out if scales is None else out * scales[1]
    return out.reshape(*q.shape[:3], desc.value_width).astype(desc.dtype)
