"""A key-value cache in pages: slot s of row b lies in page page_table[b, s // PAGE_SLOTS], at s % PAGE_SLOTS."""

import jax
import jax.numpy as jnp

PAGE_SLOTS = 64


def rows_of_pages(pool: jax.Array, page_table: jax.Array) -> jax.Array:
    """(P, M, 64, D) -> (B, M, L, D), by the table (B, T)."""
    rows = jnp.moveaxis(jnp.take(pool, page_table, axis=0, mode="clip"), 2, 1)
    return rows.reshape(rows.shape[0], pool.shape[1], -1, pool.shape[3])
