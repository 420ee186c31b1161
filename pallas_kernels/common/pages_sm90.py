"""Where a token of a call lies in the cache, on the device."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.pages import PAGE_SLOTS
from pallas_kernels.common.types import Ref, Scalar


def slot_of(
    token: Scalar,
    num_tokens: int,
    num_pages: int,
    starts: Ref,
    lengths: Ref,
    first_slots: Ref,
    pages: Ref | None = None,
) -> tuple[Scalar, Scalar, Scalar]:
    """(row or page, slot in it, whether the token is kept) of a token counted over all rows.

    num_tokens: of each row. pages: the table, with which the cache has ``num_pages``; an entry that names none keeps
    nothing.
    """
    row, column = lax.div(token, jnp.int32(num_tokens)), lax.rem(token, jnp.int32(num_tokens))
    slot = first_slots[row] + column
    is_kept = (slot >= starts[row]) & (slot < lengths[row])
    if pages is None:
        return row, slot, is_kept
    column = lax.clamp(jnp.int32(0), lax.div(slot, jnp.int32(PAGE_SLOTS)), jnp.int32(pages.shape[1] - 1))
    row, slot = pages[row, column], lax.rem(slot, jnp.int32(PAGE_SLOTS))
    return row, slot, is_kept & (row >= 0) & (row < num_pages)
