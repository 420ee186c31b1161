"""``rotate_and_store``: from projections to rotated queries, and keys and values in the cache."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.common.device import hopper_sms
from pallas_kernels.common.implementations import first_that_runs
from pallas_kernels.common.pages import PAGE_SLOTS, check_places
from pallas_kernels.rotate_and_store.config import RotateConfig, RotateDesc, choose_config, config_error
from pallas_kernels.rotate_and_store.reference import rotate_and_store_ref


def rotate_and_store(
    projected: tuple[jax.Array, ...],
    cos: jax.Array,
    sin: jax.Array,
    caches: tuple[jax.Array, jax.Array],
    starts: jax.Array,
    lengths: jax.Array,
    first_slots: jax.Array,
    *,
    biases: tuple[jax.Array, ...] = (),
    norms: tuple[jax.Array, ...] = (),
    eps: float = 0.0,
    scales: tuple[jax.Array, jax.Array] | None = None,
    page_table: jax.Array | None = None,
    has_parts: bool = False,
    config: RotateConfig | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalise and rotate the heads of queries and keys, and write keys and values to their slots.

    Column pairs (i, i + D/2) of a head are rotated. Everything is computed in float32 and rounded
    once. Token s of row b goes to slot first_slots[b] + s if that lies in [starts[b], lengths[b]), else
    nowhere. Other slots keep what they hold; a donated cache is not copied.

    Args:
        projected: (B, S, N * D), (B, S, M * D) and (B, S, M * D): queries, keys and values. Or one array with these
            side by side. With has_parts each is the partial sums of a product, (P, R, columns) in the dtype of the
            caches or float32, which are added in their order. Of their R >= B * S rows those past B * S are not read.
        cos, sin: (B, S, D/2) float32.
        caches: keys and values, (B, M, L, D) each, in the dtype of ``projected``, which is that of the queries, or
            float8_e4m3fn with ``scales``.
        starts, lengths, first_slots: (B,) int32; lengths at most L.
        biases: (N * D,), (M * D,) and (M * D,) float, added to queries, keys and values first; () for none.
        norms: weights (D,) of the RMSNorms of query and key heads, in the dtype of the caches; () for none.
        eps: of the norms.
        scales: () float32 each, of the keys and of the values in the caches: number / scale is rounded to e4m3, from
            ``projected``'s dtype, and saturates at +-448. None where caches hold the numbers themselves.
        page_table: (B, T) int32 where caches are pages, (P, M, 64, D) each: slot s of row b lies in page
            page_table[b, s // 64], L is 64 * T. What goes to an entry that names no page is dropped. No page may get
            tokens of two rows. None where rows have slots of their own.
        config: of the Hopper kernel; None for its own choice.
        implementation: "hopper" or "reference", or several in the order to try; None tries them in this order.

    Returns:
        Queries (B, S, N, D), and the caches.

    Raises:
        ValueError, TypeError: a wrong call. NotImplementedError: no implementation can run it.
    """
    num_tokens = cos.shape[1] if has_parts else None
    desc = describe(projected, caches, norms, eps, scales, page_table, num_tokens=num_tokens, biases=biases)
    places = (starts, lengths, first_slots)
    check_places(desc.batch, *places)

    def hopper():
        chosen = config or choose_config(desc, hopper_sms())
        if reason := config_error(desc, chosen):
            raise NotImplementedError(reason)

        from pallas_kernels.rotate_and_store.kernel_sm90 import rotate_and_store_sm90  # here: it loads Pallas

        stacked = () if scales is None else (jnp.stack(scales),)
        pages = () if page_table is None else (page_table,)
        operands = (*projected, *biases, cos, sin, *norms, *stacked, *places, *pages)
        return rotate_and_store_sm90(desc, chosen)(*caches, *operands)

    def reference():
        return rotate_and_store_ref(desc, projected, norms, cos, sin, caches, places, scales, page_table, biases)

    return first_that_runs("rotate_and_store", dict(hopper=hopper, reference=reference), implementation)


def describe(
    projected: tuple[jax.Array, ...],
    caches: tuple[jax.Array, jax.Array],
    norms: tuple[jax.Array, ...],
    eps: float,
    scales: tuple[jax.Array, jax.Array] | None = None,
    page_table: jax.Array | None = None,
    *,
    num_tokens: int | None = None,
    biases: tuple[jax.Array, ...] = (),
) -> RotateDesc:
    """The description of a call; raises ValueError or TypeError for a wrong one. num_tokens: S of partial sums."""
    k, v = caches
    shapes = f"projected {[a.shape for a in projected]}, caches {k.shape}, {v.shape}, norms {[a.shape for a in norms]}"
    rows = "B, S" if num_tokens is None else "P, R"
    expected = f"expected ({rows}, N * D) and two ({rows}, M * D), or one array of them; two (B, M, L, D); two (D,) or "
    expected += "none" if num_tokens is None else f"none; P alike, R >= B * S with S={num_tokens}"
    if len(projected) not in (1, 3) or any(a.ndim != 3 for a in projected) or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(f"{shapes}; {expected}")
    batch, num_kv_heads, num_slots, width = k.shape
    num_pages = 0
    if page_table is not None:
        if page_table.ndim != 2 or page_table.dtype != jnp.int32 or num_slots != PAGE_SLOTS:
            found = f"page_table is {page_table.dtype}{page_table.shape}, caches {k.shape}"
            raise ValueError(f"{found}; expected int32 (B, T) and pages (P, M, {PAGE_SLOTS}, D)")
        num_pages, (batch, columns) = batch, page_table.shape
        num_slots = PAGE_SLOTS * columns
    lead, keys = projected[0].shape[:2], num_kv_heads * width
    columns = projected[0].shape[2] - (2 * keys if len(projected) == 1 else 0)
    others = [a.shape for a in projected[1:]]
    is_wrong = lead[0] != batch if num_tokens is None else not lead[0] or lead[1] < batch * num_tokens
    if (
        is_wrong
        or columns <= 0
        or columns % width
        or width % 2
        or any(shape != (*lead, keys) for shape in others)
        or [a.shape for a in norms] not in ([], [(width,)] * 2)
    ):
        raise ValueError(f"{shapes}; {expected}")
    widths = [(columns,), (keys,), (keys,)]
    are_floats = all(jnp.issubdtype(a.dtype, jnp.floating) for a in biases)
    if biases and ([a.shape for a in biases] != widths or not are_floats):
        found = ", ".join(f"{a.dtype}{a.shape}" for a in biases)
        raise ValueError(f"biases are {found}; expected float dtypes and shapes {widths}, or none")
    stored = [jnp.dtype(a.dtype).name for a in caches]
    if (scales is not None) != (stored == ["float8_e4m3fn"] * 2):
        given = "no scales" if scales is None else "scales"
        raise TypeError(f"caches are {' and '.join(stored)} with {given}; scales belong to caches in float8_e4m3fn")
    if scales is not None and any(a.shape != () or a.dtype != jnp.float32 for a in scales):
        raise ValueError(f"scales are {[f'{a.dtype}{a.shape}' for a in scales]}, expected two float32 of shape ()")
    part_dtypes = {jnp.dtype(a.dtype).name for a in projected}
    dtypes = {jnp.dtype(a.dtype).name for a in norms} | (set() if scales is not None else set(stored))
    dtypes = dtypes or set(part_dtypes)  # codes, and no norms
    may_differ = num_tokens is not None and part_dtypes == {"float32"}
    if len(dtypes) != 1 or (part_dtypes != dtypes and not may_differ):
        names = ", ".join(sorted(dtypes | part_dtypes))
        raise TypeError(f"operands are {names}; expected one dtype{', or partial sums in float32' * bool(num_tokens)}")
    return RotateDesc(
        batch=batch,
        num_tokens=lead[1] if num_tokens is None else num_tokens,
        num_heads=columns // width,
        num_kv_heads=num_kv_heads,
        width=width,
        num_slots=num_slots,
        dtype=dtypes.pop(),
        is_packed=len(projected) == 1,
        is_e4m3=scales is not None,
        has_norm=bool(norms),
        eps=float(eps),
        num_parts=1 if num_tokens is None else lead[0],
        part_dtype=part_dtypes.pop(),
        num_pages=num_pages,
        has_bias=bool(biases),
    )
