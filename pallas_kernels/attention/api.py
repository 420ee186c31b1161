"""``prefill``: attention of several queries a row over the slots of a key-value cache."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.config import BLOCK_Q, PrefillConfig, PrefillDesc, choose_config, config_error
from pallas_kernels.attention.reference import prefill_ref
from pallas_kernels.common.cache_dtypes import check_cache_dtypes
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.common.implementations import first_that_runs
from pallas_kernels.common.numerics import widen
from pallas_kernels.common.pages import PAGE_SLOTS, check_places, rows_of_pages

TILED = 8  # rows of a tile in shared memory: a TMA copy wants arrays of a multiple of them


def prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    starts: jax.Array,
    lengths: jax.Array,
    first_slots: jax.Array,
    scale: float,
    window: int | None = None,
    is_causal: bool = True,
    sinks: jax.Array | None = None,
    first_keys: jax.Array | None = None,
    shared: jax.Array | None = None,
    page_table: jax.Array | None = None,
    scales: tuple[jax.Array, jax.Array] | None = None,
    config: PrefillConfig | None = None,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array:
    """Softmax attention; query head n uses key head n // (N / M). Returns (B, S, N, V) in the dtype of q.

    Row b keeps its keys in the slots [starts[b], lengths[b]); what other slots hold does not matter. Its queries sit at
    first_slots[b] + 0 to S - 1. The query at slot s sees the slots from max(starts[b], s - window + 1) to
    min(s + 1, lengths[b]), that one excluded. A query that sees none gives zeros.

    Args:
        q: (B, S, N, D) bfloat16 or float16.
        k, v: (B, M, L, D) and (B, M, L, V) of the same dtype, or float8_e4m3fn with ``scales``. Codes are read
            out of a copy in q's dtype, those of pages too. Where S or L is no multiple of 8, the Hopper kernel runs on
            padded copies.
        starts, lengths, first_slots: (B,) int32, at least 0; lengths at most L.
        scale: of the scores, above 0.
        window: None to see all earlier slots.
        is_causal: False lets a query see the slots behind its own, too.
        sinks: (N,) logits, one more in the softmax of each query head, with a value of zero.
        first_keys: (B, S) int32, for rows of several sequences: a query sees no slot before this one, but for those
            that are shared. Along a row it never decreases. None where a row is one sequence.
        shared: (B,) int32, with first_keys and without a window: slots before this one belong to all sequences of the
            row. None for none.
        page_table: (B, T) int32 where k is (P, M, 64, D) and v (P, M, 64, V): slot s of row b lies in page
            page_table[b, s // 64], L is 64 * T. Entries behind a row's last slot may be anything; others name a page.
            The Hopper kernel takes pages without first_keys.
        scales: () float32 each, what the codes of keys and of values are multiplied with; None without codes.
        config: of the Hopper kernel; None for its own choice.
        implementation: "hopper" or "reference", or several in the order to try; None tries them in this order.

    Raises:
        ValueError, TypeError: a wrong call. NotImplementedError: no implementation can run it.
    """
    kind: Any = dict(scale=scale, window=window, is_causal=is_causal, sinks=sinks, has_sequences=first_keys is not None)
    kind |= dict(page_table=page_table, scales=scales)
    desc = _describe(q, k, v, **kind)
    if scales is not None:
        # One copy for all query heads and tiles: by counting cheaper than to widen codes wherever they are read.
        k, v = (widen(a if page_table is None else rows_of_pages(a, page_table), q.dtype) for a in (k, v))
        page_table = None
    check_places(desc.batch, starts, lengths, first_slots)
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    if first_keys is not None:
        if first_keys.shape != q.shape[:2] or first_keys.dtype != jnp.int32:
            raise ValueError(f"first_keys is {first_keys.dtype} {first_keys.shape}, expected int32 {q.shape[:2]}")
        if not is_causal:
            raise ValueError("first_keys needs is_causal")
    if shared is not None:
        if first_keys is None or window is not None:
            raise ValueError("shared needs first_keys and no window")
        if shared.shape != (desc.batch,) or shared.dtype != jnp.int32:
            raise ValueError(f"shared is {shared.dtype} {shared.shape}, expected int32 ({desc.batch},)")
    elif first_keys is not None and window is None:
        shared = jnp.zeros_like(starts)

    def hopper():
        chosen = config or choose_config(desc, hopper_sms())
        if reason := config_error(desc, chosen):
            raise NotImplementedError(reason)

        from pallas_kernels.attention.kernel_sm90 import prefill_sm90  # here: importing it loads Pallas

        padded = [_padded(array, axis) for array, axis in ((q, 1), (k, 2), (v, 2))]  # pages are whole
        slots = desc.num_slots if desc.num_pages else padded[1].shape[2]
        whole = dataclasses.replace(desc, num_queries=padded[0].shape[1], num_slots=slots)
        keys = first_keys
        if keys is not None:
            keys = jnp.pad(keys, ((0, 0), (0, whole.query_tiles * BLOCK_Q - desc.num_queries)), mode="edge")
        last = [array for array in (page_table, keys, shared, sinks) if array is not None]
        last += [] if scales is None else [scale.reshape(1) for scale in scales]  # apart: to join them is a launch
        out = prefill_sm90(whole, chosen)(*padded, starts, lengths, first_slots, *last)
        return out[:, : desc.num_queries]

    def reference():
        keys, values = (a if page_table is None else rows_of_pages(a, page_table) for a in (k, v))
        return prefill_ref(desc, q, keys, values, starts, lengths, first_slots, sinks, first_keys, shared, scales)

    return first_that_runs("prefill", dict(hopper=hopper, reference=reference), implementation)


def _describe(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    window: int | None,
    is_causal: bool,
    sinks: jax.Array | None,
    has_sequences: bool,
    page_table: jax.Array | None,
    scales: tuple[jax.Array, jax.Array] | None,
) -> PrefillDesc:
    shapes, expected = f"q {q.shape}, k {k.shape}, v {v.shape}", "expected (B, S, N, D), (B, M, L, D), (B, M, L, V)"
    if page_table is not None:
        shapes += " with a page_table"
        expected = f"expected (B, S, N, D), (P, M, {PAGE_SLOTS}, D), (P, M, {PAGE_SLOTS}, V)"
    if any(array.ndim != 4 for array in (q, k, v)):
        raise ValueError(f"{shapes}; {expected}")
    batch, num_queries, num_heads, width = q.shape
    lead, num_kv_heads, num_slots = k.shape[:3]
    is_wrong = lead != batch if page_table is None else num_slots != PAGE_SLOTS
    if is_wrong or k.shape[3] != width or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"{shapes}; {expected}")
    if page_table is not None:
        if page_table.ndim != 2 or page_table.shape[0] != batch or page_table.dtype != jnp.int32:
            raise ValueError(f"page_table is {page_table.dtype}{page_table.shape}, expected int32 of {batch} rows")
        num_slots *= page_table.shape[1]
    if not num_queries or not num_slots or num_heads % num_kv_heads:
        raise ValueError(f"{shapes}; expected S and L of at least 1, and N to be a multiple of M")
    check_cache_dtypes(q, k, v, scales)
    if not scale > 0:
        raise ValueError(f"scale is {scale}, expected a number above 0")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, expected at least 1, or None")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks has shape {sinks.shape}, expected {(num_heads,)}, one for each query head")
    return PrefillDesc(
        batch=batch,
        num_queries=num_queries,
        num_slots=num_slots,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        width=width,
        value_width=v.shape[-1],
        dtype=jnp.dtype(q.dtype).name,
        scale=float(scale),
        window=window,
        is_causal=is_causal,
        has_sinks=sinks is not None,
        has_sequences=has_sequences,
        num_pages=0 if page_table is None or scales is not None else lead,
        has_scales=scales is not None,
    )


def _padded(array: jax.Array, axis: int) -> jax.Array:
    """With zeros behind, in whole tiles of rows along ``axis``."""
    missing = -array.shape[axis] % TILED
    return array if not missing else jnp.pad(array, [(0, missing if i == axis else 0) for i in range(array.ndim)])
