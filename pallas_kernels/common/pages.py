"""A key-value cache in pages: slot s of row b lies in page page_table[b, s // PAGE_SLOTS], at s % PAGE_SLOTS."""

import jax
import jax.numpy as jnp

PAGE_SLOTS = 64


def check_places(batch: int, starts: jax.Array, lengths: jax.Array, first_slots: jax.Array) -> None:
    """Raise ValueError unless each is (batch,) int32: a kernel would read past a shorter one."""
    for name, array in zip(("starts", "lengths", "first_slots"), (starts, lengths, first_slots), strict=True):
        if array.shape != (batch,) or array.dtype != jnp.int32:
            raise ValueError(f"{name} is {array.dtype}{array.shape}, expected int32{(batch,)}")


def rows_of_pages(pool: jax.Array, page_table: jax.Array) -> jax.Array:
    """(P, M, 64, D) -> (B, M, L, D), by the table (B, T)."""
    rows = jnp.moveaxis(jnp.take(pool, page_table, axis=0, mode="clip"), 2, 1)
    return rows.reshape(rows.shape[0], pool.shape[1], -1, pool.shape[3])


def slots_of(
    num_tokens: int,
    num_slots: int,
    num_pages: int,
    starts: jax.Array,
    lengths: jax.Array,
    first_slots: jax.Array,
    page_table: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """(rows or pages, slots in them) (B, S) of a call's tokens; one that is not kept lies outside of the cache."""
    slots = first_slots[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)
    is_kept = (slots >= starts[:, None]) & (slots < lengths[:, None])
    if page_table is None:
        rows = jnp.broadcast_to(jnp.arange(len(slots))[:, None], slots.shape)
        return rows, jnp.where(is_kept, slots, num_slots)
    columns = jnp.clip(slots // PAGE_SLOTS, 0, page_table.shape[1] - 1)
    rows = jnp.take_along_axis(page_table, columns, axis=1)
    return jnp.where(is_kept & (rows >= 0), rows, num_pages), slots % PAGE_SLOTS
