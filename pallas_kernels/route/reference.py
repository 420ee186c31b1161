"""route in plain jnp."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.route.config import RouteDesc


def route_ref(
    desc: RouteDesc, logits: jax.Array, bias: jax.Array | None = None, token_mask: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """What ``route`` computes."""
    weights, ids = _choose(desc, logits, bias)
    if token_mask is None:
        return weights, ids
    return jnp.where(token_mask[:, None], weights, 0.0), jnp.where(token_mask[:, None], ids, -1)


def _choose(desc: RouteDesc, logits: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    z = logits.astype(jnp.float32)
    if desc.scoring == "softmax":
        largest = jnp.max(jnp.where(jnp.isnan(z), jnp.inf, z), axis=-1, keepdims=True)
        is_valid = jnp.isfinite(largest)
        z = jnp.where(is_valid, z, 0.0)
        score = jnp.where(is_valid, jax.nn.softmax(z, axis=-1), 0.0)
    else:
        is_valid = True
        score = jnp.where(jnp.isnan(z), 0.0, jax.nn.sigmoid(z))
    if desc.chooses_by_logit:
        chosen, ids = _top_k(z, desc.top_k)
        return jnp.where(is_valid, jax.nn.softmax(chosen, axis=-1), 0.0) * desc.scale, ids
    choice = score if bias is None else score + bias.astype(jnp.float32)
    if desc.num_groups:
        choice = _in_best_groups(desc, choice)
    _, ids = _top_k(choice, desc.top_k)
    weights = jnp.take_along_axis(score, ids, axis=-1)
    if desc.renormalize:
        weights = weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), desc.floor)
    return weights * desc.scale, ids


def _top_k(values: jax.Array, k: int):
    # Of -0.0 and 0.0 the lower index wins.
    return lax.top_k(jnp.where(values == 0.0, 0.0, values), k)


def _in_best_groups(desc: RouteDesc, choice: jax.Array) -> jax.Array:
    grouped = choice.reshape(choice.shape[0], desc.num_groups, -1)
    worth = lax.top_k(grouped, 2)[0].sum(axis=-1) if desc.has_bias else grouped.max(-1)
    _, kept = _top_k(worth, desc.groups_kept)
    is_kept = jnp.zeros(worth.shape, bool).at[jnp.arange(worth.shape[0])[:, None], kept].set(True)
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(choice.shape)
