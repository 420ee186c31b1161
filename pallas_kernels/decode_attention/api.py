"""``decode_attention``: a few queries a row over a long key-value cache."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.cache_dtypes import check_cache_dtypes
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.common.implementations import first_that_runs
from pallas_kernels.common.pages import PAGE_SLOTS, check_places, rows_of_pages
from pallas_kernels.decode_attention.config import (
    DecodeConfig,
    DecodeDesc,
    choose_config,
    config_error,
    quantizing_error,
)
from pallas_kernels.decode_attention.reference import decode_attention_ref
from pallas_kernels.decode_attention.schedule import make_schedule
from pallas_kernels.quantize_and_permute import quantize_and_permute
from pallas_kernels.quantize_and_permute.config import PermuteDesc

SINK_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    starts: jax.Array,
    lengths: jax.Array,
    first_slots: jax.Array,
    *,
    scale: float,
    value_width: int | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
    scales: tuple[jax.Array, jax.Array] | None = None,
    page_table: jax.Array | None = None,
    quantization: str = "none",
    scale_rows: int | None = None,
    config: DecodeConfig | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Any:
    """Softmax attention of S queries a row, each of which sees the slots up to its own.

    Query s of row b lies at slot ``first_slots[b] + s`` and sees the slots from ``starts[b]`` up to its own, below
    ``lengths[b]``, and of these the last ``window``. A query that sees none gives zeros. The bits of a row do not
    depend on what the other rows hold, nor on how many there are, but for v=None: there 16 rows and more take another
    form of the kernel, and so do 128 to 132 tiles of 64 heads, and 256 and more.

    Args:
        q: (B, S, N, D) bfloat16 or float16.
        k: (B, M, L, D), of q's dtype, or float8_e4m3fn with ``scales``. Slots outside [starts, lengths) may hold
            anything.
        v: (B, M, L, V), of k's dtype; None where values are the first elements of the keys, as those of MLA's latents
            are: then each slot is read once.
        starts, lengths, first_slots: (B,) int32.
        scale: of the scores.
        value_width: V where v is None.
        window: how many slots up to its own a query sees; None for all.
        sinks: (N,) float32, bfloat16 or float16, a logit per query head that takes its part of the softmax and gives
            nothing.
        scales: () float32 each, what the codes of keys and of values are multiplied with; None without codes.
        page_table: (B, T) int32 where k is (P, M, 64, D) and v (P, M, 64, V): slot s of row b lies in page
            page_table[b, s // 64], L is 64 * T. Entries behind a row's last slot may be anything; others name a page.
        quantization: of the outputs, rounded to q's dtype, as rows (B * S, N * V) of ``quantize_and_permute``:
            "e4m3_row", "int8_row", "e4m3_group" or "e4m3_group_ue8m0"; "none" for the outputs themselves.
        scale_rows: rows that the scales have room for, B * S or more.
        config: of the Hopper kernel; None for its own choice.
        implementation: "hopper" or "reference", or several in the order to try; None tries them in this order.

    Returns:
        (B, S, N, V) of q's dtype; or the pair (codes (B * S, N * V), scales).

    Raises:
        ValueError, TypeError: a wrong call. NotImplementedError: no implementation can run it.
    """
    if v is None and (value_width is None or not 0 < value_width <= k.shape[-1]):
        raise ValueError(f"value_width={value_width}, v=None; expected 1 to {k.shape[-1]}, the width of k")
    values = k[..., :value_width] if v is None else v
    desc = _describe(q, k, values, (starts, lengths, first_slots), scale, window, sinks, scales, page_table)
    if v is None:
        desc = dataclasses.replace(desc, is_latent=True)
    rows_out = None if quantization == "none" else rows_of(desc, quantization, scale_rows)

    def hopper():
        sms = hopper_sms()
        chosen = config or choose_config(desc, sms, rows=rows_out)
        if reason := config_error(desc, chosen):
            raise NotImplementedError(reason)
        if rows_out is not None and (reason := quantizing_error(desc, chosen, rows_out)):
            raise NotImplementedError(reason)

        # here: importing them loads Pallas
        from pallas_kernels.decode_attention.combine_quantized_sm90 import combine_quantized_sm90
        from pallas_kernels.decode_attention.combine_sm90 import combine_sm90
        from pallas_kernels.decode_attention.kernel_sm90 import decode_sm90
        from pallas_kernels.decode_attention.latents_sm90 import latents_sm90

        rows = (starts, lengths, first_slots)
        stacked = () if scales is None else (jnp.stack(scales),)
        pages = () if page_table is None else (page_table,)
        of_sinks = () if sinks is None else (sinks,)
        schedule = make_schedule(desc, chosen, *rows) if chosen.runs else ()
        operands = (queries_in_columns(desc, chosen, q), k, *(() if v is None else (v,)), *stacked, *pages, *rows)
        # A row's one scale is of several whole tiles, so that it takes a launch behind them.
        quantized_apart = chosen.whole_tiles and rows_out is not None and not rows_out.is_grouped
        made = None if quantized_apart else rows_out
        if not chosen.swap_ab:
            found = latents_sm90(desc, chosen)(*operands)
        elif chosen.whole_tiles:
            found = decode_sm90(desc, chosen, made)(*operands, *of_sinks)
        else:
            found = decode_sm90(desc, chosen)(*operands, *schedule)
        if not chosen.whole_tiles:
            parts = (array.reshape(-1) for array in found)
            combine = combine_sm90(desc, chosen) if made is None else combine_quantized_sm90(desc, chosen, made)
            found = combine(*parts, *rows, *schedule[:1], *stacked, *of_sinks)
        if made is not None:
            codes, own_scales = found
            return codes.reshape(made.num_tokens, -1), own_scales.reshape(made.scale_shape)
        (y,) = jax.tree.leaves(found)
        y = y.reshape(*q.shape[:3], desc.value_width)
        return quantized(y, "hopper") if quantized_apart else y

    def reference():
        keys, of_keys = (a if page_table is None else rows_of_pages(a, page_table) for a in (k, values))
        y = decode_attention_ref(desc, q, keys, of_keys, starts, lengths, first_slots, sinks, scales)
        return y if rows_out is None else quantized(y, "reference")

    def quantized(y: jax.Array, implementation: str) -> Any:
        rows = y.reshape(desc.batch * desc.num_queries, -1)
        return quantize_and_permute(
            rows, quantization=quantization, scale_rows=scale_rows, implementation=implementation
        )

    return first_that_runs("decode_attention", dict(hopper=hopper, reference=reference), implementation)


def rows_of(desc: DecodeDesc, quantization: str, scale_rows: int | None) -> PermuteDesc:
    """The outputs as rows that are quantized."""
    count = desc.batch * desc.num_queries
    width = desc.num_heads * desc.value_width
    return PermuteDesc(count, width, 0, count, desc.dtype, quantization, scale_rows=scale_rows or 0)


def queries_in_columns(desc: DecodeDesc, config: DecodeConfig, q: jax.Array) -> jax.Array:
    """(B, S, N, D) -> (B, M, T * C, D): the queries of a key head side by side, those of one slot together."""
    q = q.reshape(desc.batch, desc.num_queries, desc.num_kv_heads, desc.group, desc.width).swapaxes(1, 2)
    q = q.reshape(desc.batch, desc.num_kv_heads, desc.num_queries * desc.group, desc.width)
    return jnp.pad(q, ((0, 0), (0, 0), (0, config.num_tiles(desc) * config.columns - desc.columns), (0, 0)))


def _describe(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rows: tuple[jax.Array, ...],
    scale: float,
    window: int | None,
    sinks: jax.Array | None,
    scales: tuple[jax.Array, jax.Array] | None,
    page_table: jax.Array | None,
) -> DecodeDesc:
    """Check the call once."""
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape}; expected (B, S, N, D), (B, M, L, D), (B, M, L, V)")
    batch, queries, heads, width = q.shape
    kv_heads, slots = k.shape[1:3]
    if page_table is not None:
        if page_table.ndim != 2 or page_table.shape[0] != batch or page_table.dtype != jnp.int32:
            raise ValueError(f"page_table is {page_table.dtype}{page_table.shape}, expected int32 of {batch} rows")
        if slots != PAGE_SLOTS or v.shape[:3] != k.shape[:3] or k.shape[3] != width or heads % kv_heads:
            raise ValueError(
                f"q {q.shape}, k {k.shape}, v {v.shape} with a page_table; expected (B, S, N, D), (P, M, {PAGE_SLOTS}, "
                f"D), (P, M, {PAGE_SLOTS}, V), M dividing N"
            )
        slots = PAGE_SLOTS * page_table.shape[1]
    elif k.shape != (batch, kv_heads, slots, width) or v.shape[:3] != k.shape[:3] or heads % kv_heads:
        raise ValueError(
            f"q {q.shape}, k {k.shape}, v {v.shape}; expected (B, S, N, D), (B, M, L, D), (B, M, L, V), M dividing N"
        )
    check_cache_dtypes(q, k, v, scales)
    check_places(batch, *rows)
    if window is not None and window < 1:
        raise ValueError(f"window={window}, expected at least 1, or None for all slots")
    if not scale > 0:
        raise ValueError(f"scale is {scale}, expected a number above 0")
    if sinks is not None and (sinks.shape != (heads,) or sinks.dtype not in SINK_DTYPES):
        names = ", ".join(jnp.dtype(dtype).name for dtype in SINK_DTYPES)
        raise ValueError(f"sinks is {sinks.dtype}{sinks.shape}, expected {names} and {(heads,)}")
    return DecodeDesc(
        batch=batch,
        num_queries=queries,
        num_slots=slots,
        num_heads=heads,
        num_kv_heads=kv_heads,
        width=width,
        value_width=v.shape[3],
        dtype=jnp.dtype(q.dtype).name,
        scale=float(scale),
        window=window,
        has_sinks=sinks is not None,
        is_e4m3=scales is not None,
        num_pages=0 if page_table is None else k.shape[0],
    )
