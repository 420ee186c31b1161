"""Checks of what a model is called with. Shapes and dtypes are always known; values only outside ``jax.jit``."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from moe_jax._arguments import check_array
from moe_jax.models._cache import KVCache
from moe_jax.models._layer_cache import PAGE_SLOTS


def check_mask(attention_mask: Any, shape: tuple[int, ...]) -> None:
    """attention_mask: (B, S) bool or integers 0 and 1. Raises ValueError, or TypeError for another dtype.

    Floats are refused: masks that are added to scores hold 0 where a token is real.
    """
    check_array("attention_mask", attention_mask, np.generic, f"{shape}")  # its dtype is looked at below
    if attention_mask.shape != shape:
        raise ValueError(f"attention_mask has shape {attention_mask.shape}, expected {shape} as input_ids")
    if attention_mask.dtype == jnp.bool_:
        return
    check_array("attention_mask", attention_mask, jnp.integer, f"{shape}, or bool: 1 for real tokens, 0 for padding")
    if not isinstance(attention_mask, Tracer):
        values = np.asarray(attention_mask)
        if ((values != 0) & (values != 1)).any():
            wrong = values[(values != 0) & (values != 1)][0]
            raise ValueError(f"attention_mask holds {wrong}, expected 1 for real tokens and 0 for padding")


def check_positions(positions: Any, attention_mask: Any, shape: tuple[int, ...]) -> None:
    """positions: (B, S) integers, those of real tokens from 0 to 2**31 - 1; checked as far as values are known."""
    check_array("positions", positions, jnp.integer, f"{shape} as input_ids")
    if positions.shape != shape:
        raise ValueError(f"positions has shape {positions.shape}, expected {shape} as input_ids")
    if isinstance(positions, Tracer) or isinstance(attention_mask, Tracer):
        return
    values = np.asarray(positions)
    outside = (values < 0) | (values >= 2**31)
    if attention_mask is not None:
        outside &= np.asarray(attention_mask) != 0
    if outside.any():
        raise ValueError(f"positions holds {values[outside][0]}, expected 0 to {2**31 - 1} for real tokens")


def check_segments(segment_ids: Any, shape: tuple[int, ...]) -> None:
    """segment_ids: (B, S) integers of at least 0; checked as far as values are known."""
    check_array("segment_ids", segment_ids, jnp.integer, f"{shape} as input_ids")
    if segment_ids.shape != shape:
        raise ValueError(f"segment_ids has shape {segment_ids.shape}, expected {shape} as input_ids")
    if isinstance(segment_ids, Tracer):
        return
    values = np.asarray(segment_ids)
    if (values < 0).any():
        raise ValueError(f"segment_ids holds {values[values < 0][0]}, expected 0 for padding and ids from 1 on")


def check_ids(input_ids: Any, attention_mask: Any, vocab_size: int, segment_ids: Any = None) -> None:
    """input_ids: (B, S) integers, those of real tokens in [0, vocab_size); checked as far as values are known."""
    is_empty = 0 in getattr(input_ids, "shape", ())  # np.asarray([]) holds no integers
    if not is_empty:
        check_array("input_ids", input_ids, jnp.integer, "(B, S)")
    if is_empty or input_ids.ndim != 2:
        raise ValueError(f"input_ids has shape {input_ids.shape}, expected (B, S) with at least one token")
    if attention_mask is not None:
        check_mask(attention_mask, input_ids.shape)
    if segment_ids is not None:
        check_segments(segment_ids, input_ids.shape)
    if any(isinstance(array, Tracer) for array in (input_ids, attention_mask, segment_ids)):
        return
    ids = np.asarray(input_ids)
    outside = (ids < 0) | (ids >= vocab_size)
    for mask in (attention_mask, segment_ids):
        outside &= True if mask is None else np.asarray(mask) != 0
    if outside.any():
        row, column = np.argwhere(outside)[0]
        raise ValueError(f"input_ids[{row}, {column}] is {ids[row, column]}, expected 0 to {vocab_size - 1}")


def check_page_table(page_table: Any, shape: tuple[int, int], num_pages: int | None) -> None:
    """page_table: integers of this shape, from 0 to num_pages - 1; checked as far as values are known."""
    check_array("page_table", page_table, jnp.integer, f"{shape}")
    if page_table.shape != shape:
        raise ValueError(
            f"page_table has shape {page_table.shape}, expected {shape}: a page for each 64 slots of a row"
        )
    if isinstance(page_table, Tracer):
        return
    values = np.asarray(page_table)
    outside = (values < 0) | (values >= (2**31 if num_pages is None else num_pages))
    if outside.any():
        row, column = np.argwhere(outside)[0]
        last = "at least 0" if num_pages is None else f"0 to {num_pages - 1}"
        raise ValueError(f"page_table[{row}, {column}] is {values[row, column]}, expected {last}, the cache's pages")


def check_cache(
    cache: Any,
    expected: KVCache,
    num_tokens: int,
    attention_mask: Any = None,
    *,
    max_seq_len: int,
    is_left_kept: bool = True,
) -> None:
    """expected: shapes and dtypes of an empty cache of the model, with this batch and the cache's number of slots.
    num_tokens: in a row of this call, padding included. attention_mask: (B, num_tokens), None where all are real.
    max_seq_len: of the model; whole pages may have more slots. is_left_kept: as of ``slot_order``.
    """
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache has type {type(cache).__name__}, expected what model.init_cache returned")
    if cache.lengths.shape[0] != expected.lengths.shape[0]:
        raise ValueError(f"cache has {cache.lengths.shape[0]} rows, input_ids {expected.lengths.shape[0]}")
    found, wanted = ([(a.shape, jnp.dtype(a.dtype)) for a in jax.tree.leaves(c.layers)] for c in (cache, expected))
    if found != wanted:
        pairs = [*zip(found, wanted, strict=False)]
        both = next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
        counts = (len(cache.layers), len(expected.layers))
        layers = [f"{n} layers of {dtype} {shape}" for n, (shape, dtype) in zip(counts, both, strict=True)]
        raise ValueError(f"cache was made for another model: {layers[0]}, expected {layers[1]}")
    rows, num_slots = cache.lengths.shape[0], cache.num_slots
    if cache.page_table is not None:
        check_page_table(cache.page_table, (rows, num_slots // PAGE_SLOTS), cache.num_pages)
        num_slots = min(num_slots, max_seq_len)
    used, new = np.zeros(1, np.int32), np.asarray(num_tokens)
    if not isinstance(cache.lengths, Tracer):
        used = np.asarray(cache.lengths)
        if attention_mask is not None and not isinstance(attention_mask, Tracer):
            new = np.asarray(attention_mask).astype(bool).sum(axis=1)
    row = int(np.argmax(used + new))
    most_used, most_new = (int(a[row]) for a in np.broadcast_arrays(used, new))
    if max(most_used + most_new, num_tokens) > num_slots:
        count = max(most_new, num_tokens)
        raise ValueError(f"cache has {num_slots} slots, {most_used} used; {count} more tokens do not fit")
    arrays = (cache.page_table, cache.lengths, cache.starts, attention_mask)
    if cache.page_table is not None and not any(isinstance(array, Tracer) for array in arrays):
        mask = np.ones((rows, num_tokens), bool) if attention_mask is None else np.asarray(attention_mask).astype(bool)
        _check_writes(cache, mask, mask.argmax(axis=1) if is_left_kept else np.zeros(rows, np.int32))


def _check_writes(cache: KVCache, mask: np.ndarray, first: np.ndarray) -> None:
    """No page that a call writes to holds tokens of another place of the table. mask: (B, S) bool. first: (B,), the
    slot where an empty row begins."""
    table, lengths = np.asarray(cache.page_table), np.asarray(cache.lengths)
    begins = np.where(lengths == 0, first, lengths)[:, None]
    starts = np.where(lengths == 0, begins[:, 0], np.asarray(cache.starts))[:, None]
    ends = begins + mask.sum(axis=1)[:, None]
    slots = np.arange(table.shape[1]) * PAGE_SLOTS
    holds_tokens = (slots < ends) & (slots + PAGE_SLOTS > starts) & (ends > starts)
    is_written = holds_tokens & (slots + PAGE_SLOTS > begins) & (ends > begins)
    holders = np.bincount(table[holds_tokens], minlength=cache.num_pages)
    places = np.argwhere(is_written & (holders[table] > 1))
    if len(places):
        row, column = places[0]
        raise ValueError(
            f"page_table[{row}, {column}] is {table[row, column]}, which holds tokens of another place of the table; "
            "this call would write over them: give the place a page of its own"
        )
