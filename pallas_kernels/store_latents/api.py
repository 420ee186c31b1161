"""``store_latents``: from MLA's first projections to rows that queries are made of, and latents in the cache."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.add_and_norm.config import QUANTIZATIONS
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.common.implementations import first_that_runs
from pallas_kernels.common.pages import PAGE_SLOTS, check_places
from pallas_kernels.store_latents.config import (
    LatentsConfig,
    LatentsDesc,
    choose_config,
    config_error,
)
from pallas_kernels.store_latents.reference import store_latents_ref


def store_latents(
    projected: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    cache: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    first_slots: jax.Array,
    *,
    kv_norm: jax.Array,
    q_norm: jax.Array | None = None,
    eps: float,
    is_interleaved: bool,
    quantization: str = "none",
    scale_rows: int | None = None,
    page_table: jax.Array | None = None,
    config: LatentsConfig | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Any, jax.Array]:
    """Normalise what queries are made of and the latent, rotate the key all heads share, and write both to their slot.

    A row of ``projected`` ends with a latent of R columns and a key of D; in front lie the Q columns that queries are
    made of. Everything is computed in float32; each norm is rounded once. Token s of row b goes to slot first_slots[b]
    + s if that lies in [starts[b], lengths[b]), else nowhere. Other slots keep what they hold; a donated cache is not
    copied.

    Args:
        projected: (B * S or more, Q + R + D) bfloat16 or float16; rows past B * S are not read.
        cos, sin: (B, S, D/2) float32.
        cache: (B, 1, L, R + D) of projected's dtype.
        starts, lengths, first_slots: (B,) int32; lengths at most L.
        kv_norm: (R,) weight of the latent's RMSNorm, of the same dtype.
        q_norm: (Q,) of the other one; None where the first columns are no business of this call.
        eps: of both norms.
        is_interleaved: column pairs (2i, 2i + 1) of the key are rotated, and leave as (i, i + D/2); else these are.
        quantization: of the rows that queries are made of: "e4m3_row", "int8_row", "e4m3_group", "e4m3_group_ue8m0" as
            of ``quantize_and_permute``, or "none".
        scale_rows: rows that the scales have room for, B * S or more.
        page_table: (B, T) int32 where cache is pages, (P, 1, 64, R + D): slot s of row b lies in page
            page_table[b, s // 64]. What goes to an entry that names no page is dropped.
        config: of the Hopper kernel; None for its own choice.
        implementation: "hopper" or "reference", or several in the order to try; None tries them in this order.

    Returns:
        (rows (B * S, Q) or the pair (codes (B * S, Q), scales), None without q_norm; the cache).

    Raises:
        ValueError, TypeError: a wrong call. NotImplementedError: no implementation can run it.
    """
    kind: Any = dict(eps=eps, is_interleaved=is_interleaved, quantization=quantization, scale_rows=scale_rows)
    desc = describe(projected, cos, cache, kv_norm, q_norm, page_table, **kind)
    if sin.shape != cos.shape or {a.dtype for a in (cos, sin)} != {jnp.dtype(jnp.float32)}:
        raise ValueError(f"cos {cos.dtype}{cos.shape}, sin {sin.dtype}{sin.shape}; expected float32 of one shape")
    norms = (*(() if q_norm is None else (q_norm,)), kv_norm)
    places = (starts, lengths, first_slots)
    check_places(desc.batch, *places)

    def hopper():
        chosen = config or choose_config(desc, hopper_sms())
        if reason := config_error(desc, chosen):
            raise NotImplementedError(reason)

        from pallas_kernels.store_latents.kernel_sm90 import store_latents_sm90  # here: it loads Pallas

        pages = () if page_table is None else (page_table,)
        return store_latents_sm90(desc, chosen)(cache, projected, *norms, cos, sin, *places, *pages)

    def reference():
        return store_latents_ref(desc, projected, norms, cos, sin, cache, places, page_table)

    return first_that_runs("store_latents", dict(hopper=hopper, reference=reference), implementation)


def describe(
    projected: jax.Array,
    cos: jax.Array,
    cache: jax.Array,
    kv_norm: jax.Array,
    q_norm: jax.Array | None,
    page_table: jax.Array | None,
    *,
    eps: float,
    is_interleaved: bool,
    quantization: str = "none",
    scale_rows: int | None = None,
) -> LatentsDesc:
    """The description of a call; raises ValueError or TypeError for a wrong one."""
    norms = [kv_norm] if q_norm is None else [q_norm, kv_norm]
    found = f"projected {projected.shape}, cos {cos.shape}, cache {cache.shape}, norms {[a.shape for a in norms]}"
    if projected.ndim != 2 or cos.ndim != 3 or cache.ndim != 4 or any(a.ndim != 1 for a in norms):
        raise ValueError(f"{found}; expected (B * S, Q + R + D), (B, S, D/2), (B, 1, L, R + D), (Q,) and (R,)")
    (batch, num_tokens, half), (rank,) = cos.shape, kv_norm.shape
    rows, heads, num_slots, width = cache.shape
    num_pages = 0
    if page_table is not None:
        if page_table.ndim != 2 or page_table.dtype != jnp.int32 or num_slots != PAGE_SLOTS:
            raise ValueError(
                f"page_table is {page_table.dtype}{page_table.shape}, cache {cache.shape}; expected int32 (B, T) and "
                f"pages (P, 1, {PAGE_SLOTS}, R + D)"
            )
        num_pages, rows, num_slots = rows, page_table.shape[0], PAGE_SLOTS * page_table.shape[1]
    queries = projected.shape[1] - width
    is_wrong = (rows, heads, width) != (batch, 1, rank + 2 * half) or projected.shape[0] < batch * num_tokens
    if is_wrong or queries < 0 or (q_norm is not None and q_norm.shape != (queries,)):
        raise ValueError(f"{found}; expected (B * S, Q + R + D), (B, S, D/2), (B, 1, L, R + D), (Q,) and (R,)")
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization {quantization!r}, expected one of {', '.join(QUANTIZATIONS)}")
    if scale_rows is not None and scale_rows < batch * num_tokens:
        raise ValueError(f"scale_rows={scale_rows}, expected {batch * num_tokens} tokens or more")
    dtypes = {jnp.dtype(a.dtype).name for a in (projected, cache, *norms)}
    if len(dtypes) != 1 or not jnp.issubdtype(projected.dtype, jnp.floating):
        raise TypeError(f"operands are {', '.join(sorted(dtypes))}; expected one floating dtype")
    return LatentsDesc(
        batch=batch,
        num_tokens=num_tokens,
        queries=queries,
        rank=rank,
        rope=2 * half,
        num_slots=num_slots,
        dtype=dtypes.pop(),
        eps=float(eps),
        is_interleaved=is_interleaved,
        has_queries=q_norm is not None,
        quantization=quantization,
        scale_rows=scale_rows or 0,
        num_pages=num_pages,
    )
