"""The exchange in plain jnp and XLA collectives, with the positions of the kernels. Runs on any devices."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.nvlink_dispatch.config import ExchangeDesc, PlaceDesc
from pallas_kernels.quantize_and_permute.config import PermuteDesc
from pallas_kernels.quantize_and_permute.reference import quantize_rows


def dispatch_ref(
    desc: ExchangeDesc, x: jax.Array, slots: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array | None, ...]:
    """What ``dispatch_sm90`` computes, without a mailbox; rows that nobody sent hold NaN, or -128, and scales NaN."""
    kind = PermuteDesc(desc.num_tokens, desc.width, 0, desc.num_tokens, desc.dtype, desc.quantization)
    codes, scales = quantize_rows(kind, x, None)
    if scales is not None and desc.is_grouped:
        scales = scales.T
    gathered = [None if part is None else lax.all_gather(part, desc.axis, tiled=True) for part in (codes, scales)]
    all_slots = lax.all_gather(slots, desc.axis)
    all_weights = None if weights is None else lax.all_gather(weights, desc.axis)
    own = all_slots[:, : desc.num_pairs].reshape(desc.num_rows, desc.top_k)
    owner = jnp.where(own >= 0, own // desc.slots_per_device, -1)
    is_sent = (owner == lax.axis_index(desc.axis)).any(axis=1)

    def only_sent(part):
        if part is None:
            return None
        mask = is_sent.reshape(-1, *[1] * (part.ndim - 1))
        return jnp.where(mask, part, jnp.full_like(part, -128 if part.dtype == jnp.int8 else jnp.nan))

    return only_sent(gathered[0]), only_sent(gathered[1]), all_slots, all_weights, None, None


def combine_ref(
    desc: ExchangeDesc, rows: jax.Array, row_of: jax.Array, slots: jax.Array, weights: jax.Array
) -> jax.Array:
    """What ``combine_sm90`` computes."""
    sent = rows.at[jnp.where(row_of < 0, rows.shape[0], row_of)].get(mode="fill", fill_value=0)
    owner = jnp.where(slots >= 0, slots // desc.slots_per_device, -1).reshape(desc.num_tokens, desc.top_k)
    if desc.sum_dtype is None:
        came = lax.all_to_all(sent.reshape(desc.size, desc.num_pairs, desc.width), desc.axis, 0, 0)
        # Of the devices exactly one has the row of a pair.
        back = jnp.take_along_axis(came, jnp.maximum(owner, 0).reshape(1, -1, 1), axis=0)[0]
        back = back.reshape(desc.num_tokens, desc.top_k, desc.width).astype(jnp.float32)
        terms = back * weights.reshape(desc.num_tokens, desc.top_k, 1)
        is_there = owner >= 0
    else:
        sent = sent.reshape(desc.num_rows, desc.top_k, desc.width).astype(jnp.float32)
        factors = weights[:, : desc.num_pairs].reshape(desc.num_rows, desc.top_k)
        here = row_of.reshape(desc.num_rows, desc.top_k) >= 0
        sums = _sum_in_order(sent * factors[..., None], here).astype(desc.sum_dtype)
        came = lax.all_to_all(sums.reshape(desc.size, desc.num_tokens, desc.width), desc.axis, 0, 0)
        terms = came.astype(jnp.float32).transpose(1, 0, 2)
        is_there = (owner[..., None] == jnp.arange(desc.size)).any(axis=1)
    return _sum_in_order(terms, is_there)


def _sum_in_order(terms: jax.Array, is_there: jax.Array) -> jax.Array:
    """(N, H) float32: the sum over the middle axis of terms (N, k, H), in its order, where is_there (N, k)."""
    total = jnp.zeros((terms.shape[0], terms.shape[2]), jnp.float32)
    for j in range(terms.shape[1]):
        total = total + jnp.where(is_there[:, j, None], terms[:, j], 0.0)
    return total


def place_ref(desc: PlaceDesc, codes: jax.Array, scales: jax.Array, row_of: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What ``place_sm90`` computes; places that no row fills are zero."""
    target = jnp.where(row_of < 0, desc.num_places, row_of).reshape(-1)

    def scatter(values):
        empty = jnp.zeros((desc.num_places, *values.shape[1:]), values.dtype)
        return empty.at[target].set(jnp.repeat(values, desc.top_k, axis=0), mode="drop")

    placed = scatter(scales)
    return scatter(codes), placed.T if desc.num_groups else placed
