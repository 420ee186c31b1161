"""The exchange in plain jnp and XLA collectives, with the positions of the kernels. Runs on any devices."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.push.config import PlaceDesc, PushDesc
from pallas_kernels.quantize_and_permute.config import PermuteDesc
from pallas_kernels.quantize_and_permute.reference import quantize_rows


def dispatch_ref(desc: PushDesc, x: Any, slots: Any) -> tuple[Any, Any, Any]:
    """What ``dispatch_sm90`` computes; rows that nobody sent hold NaN, or -128, and scales NaN."""
    kind = PermuteDesc(desc.num_tokens, desc.width, 0, desc.num_tokens, desc.dtype, desc.quantization)
    codes, scales = quantize_rows(kind, x, None)
    if desc.is_grouped:
        scales = scales.T
    gathered = [None if part is None else lax.all_gather(part, desc.axis, tiled=True) for part in (codes, scales)]
    all_slots = lax.all_gather(slots, desc.axis)
    own = all_slots[:, : desc.num_pairs].reshape(desc.num_rows, desc.top_k)
    owner = jnp.where(own >= 0, own // desc.slots_per_device, -1)
    is_sent = (owner == lax.axis_index(desc.axis)).any(axis=1)

    def only_sent(part):
        if part is None:
            return None
        mask = is_sent.reshape(-1, *[1] * (part.ndim - 1))
        return jnp.where(mask, part, jnp.full_like(part, -128 if part.dtype == jnp.int8 else jnp.nan))

    return only_sent(gathered[0]), only_sent(gathered[1]), all_slots


def combine_ref(desc: PushDesc, rows: Any, row_of: Any, slots: Any, weights: Any) -> Any:
    """What ``combine_sm90`` computes."""
    sent = rows.at[jnp.where(row_of < 0, rows.shape[0], row_of)].get(mode="fill", fill_value=0)
    sent = sent.reshape(desc.size, desc.num_pairs, desc.width)
    came = lax.all_to_all(sent, desc.axis, 0, 0)
    # Of the devices exactly one has the row of a pair.
    owner = jnp.where(slots >= 0, slots // desc.slots_per_device, 0)
    back = jnp.take_along_axis(came, owner[None, :, None], axis=0)[0]
    back = back.reshape(desc.num_tokens, desc.top_k, desc.width)
    total = jnp.zeros((desc.num_tokens, desc.width), jnp.float32)
    for j in range(desc.top_k):
        weight = weights.reshape(desc.num_tokens, desc.top_k)[:, j]
        routed = slots.reshape(desc.num_tokens, desc.top_k)[:, j] >= 0
        total = total + jnp.where(routed[:, None], back[:, j].astype(jnp.float32) * weight[:, None], 0.0)
    return total


def place_ref(desc: PlaceDesc, codes: Any, scales: Any, row_of: Any) -> tuple[Any, Any]:
    """What ``place_sm90`` computes; places that no row fills are zero."""
    target = jnp.where(row_of < 0, desc.num_places, row_of).reshape(-1)

    def scatter(values):
        empty = jnp.zeros((desc.num_places, *values.shape[1:]), values.dtype)
        return empty.at[target].set(jnp.repeat(values, desc.top_k, axis=0), mode="drop")

    placed = scatter(scales)
    return scatter(codes), placed.T if desc.num_groups else placed
