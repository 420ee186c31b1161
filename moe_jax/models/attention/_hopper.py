"""Attention by the Hopper kernels, of prefills and of decode steps, and when they can run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax._typing import Array
from pallas_kernels.attention import PrefillDesc, choose_config, config_error, prefill
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.decode_attention import DecodeDesc, decode_attention, quantizing_error, rows_of
from pallas_kernels.decode_attention import choose_config as choose_decode_config
from pallas_kernels.decode_attention import config_error as decode_config_error

OLDEST_JAX = (0, 11)
# Fewer queries fill less than half of a tile; all scores of so few are small.
LEAST_QUERIES = 64
# More queries a row are no decode step.
MOST_DECODED = 8


def refusal(
    q: Any,
    k: Any,
    v: Any | None,
    *,
    scale: float,
    window: int | None,
    value_width: int | None = None,
    has_sinks: bool = False,
    has_sequences: bool = False,
    num_pages: int = 0,
) -> str | None:
    """Why no kernel can attend, or None when one can: that of decode steps up to MOST_DECODED queries, or of prefills.

    q (B, S, M, G, D), k (B, M, L, D), v (B, M, L, V): arrays, or their shapes and dtypes. v is None where values are
    the first ``value_width`` elements of the keys. has_sinks: whether heads have one more logit. has_sequences: whether
    a row holds several sequences. num_pages: in which k and v lie, whose shapes are those of gathered rows.
    """
    num_queries = q.shape[1]
    if jax.__version_info__ < OLDEST_JAX:
        return f"needs jax 0.11, found jax {jax.__version__}"
    if MOST_DECODED < num_queries < LEAST_QUERIES:
        return f"{num_queries} queries; up to {MOST_DECODED}, or from {LEAST_QUERIES} on"
    if has_sequences and num_queries <= MOST_DECODED:
        return f"{num_queries} queries of several sequences; from {LEAST_QUERIES} on"
    values = k if v is None else v
    is_e4m3 = _holds_codes(k, values)
    if not is_e4m3 and not q.dtype == k.dtype == values.dtype:
        return f"q is {q.dtype}, k {k.dtype}, v {values.dtype}; one dtype, or k and v in e4m3"
    if not scale > 0:
        return f"scale={scale}; above 0"
    sizes: Any = dict(_sizes(q, k, v, value_width), scale=scale, window=window, has_sinks=has_sinks)
    try:
        sms = hopper_sms()
        if num_queries > MOST_DECODED:
            kind: Any = dict(num_pages=0 if is_e4m3 else num_pages, has_scales=is_e4m3)
            desc = PrefillDesc(**sizes, has_sequences=has_sequences, **kind)
            return config_error(desc, choose_config(desc, sms))
        step = DecodeDesc(is_latent=v is None, is_e4m3=is_e4m3, num_pages=num_pages, **sizes)
        return decode_config_error(step, choose_decode_config(step, sms))
    except NotImplementedError as error:
        return str(error)


def attend(
    scale: float,
    window: int | None,
    value_width: int | None,
    q: Array,
    k: Array,
    v: Array | None,
    places: dict[str, Array | None],
    sinks: Array | None,
    scales: tuple[Array, Array] | None,
) -> Array:
    """(B, S, N, V) of one device, where ``refusal`` is None. q (B, S, N, D). places: as of ``attend_by``. scales: of k
    and v in e4m3."""
    settings: Any = dict(places, scale=scale, window=window, sinks=sinks, implementation="hopper")
    if q.shape[1] <= MOST_DECODED:
        del settings["first_keys"], settings["shared"]
        return decode_attention(q, k, v, value_width=value_width, scales=scales, **settings)
    return prefill(q, k, k[..., :value_width] if v is None else v, scales=scales, **settings)


def quantizes(rows: tuple[str, int], q: Any, k: Any, v: Any) -> bool:
    """Whether a decode step that ``refusal`` takes can quantize its outputs in its last launch.

    rows: kind of ``quantize_and_permute``, and rows that scales have room for. q, k, v: as of ``refusal``.
    """
    desc = DecodeDesc(**_sizes(q, k, v), scale=1.0, is_e4m3=_holds_codes(k, v))
    own = rows_of(desc, *rows)
    return quantizing_error(desc, choose_decode_config(desc, hopper_sms(), rows=own), own) is None


def _sizes(q: Any, k: Any, v: Any | None, value_width: int | None = None) -> dict[str, Any]:
    """What descriptions of prefills and of decode steps say of these shapes. Arguments as of ``refusal``."""
    batch, num_queries, kv_heads, group, width = q.shape
    return dict(
        batch=batch,
        num_queries=num_queries,
        num_slots=k.shape[2],
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        width=width,
        value_width=value_width or (k if v is None else v).shape[-1],
        dtype=jnp.dtype(q.dtype).name,
    )


def _holds_codes(k: Any, v: Any) -> bool:
    return k.dtype == v.dtype == jnp.float8_e4m3fn


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def attend_and_quantize(
    scale: float,
    window: int | None,
    rows: tuple[str, int],
    q: Array,
    k: Array,
    v: Array,
    places: dict[str, Array],
    sinks: Array | None,
    scales: tuple[Array, Array] | None,
) -> tuple[Array, Array]:
    """(codes (B, N * V), scales) of a decode step of one query a row, where ``quantizes`` says so."""
    kind, room = rows
    settings: Any = dict(places, scale=scale, window=window, sinks=sinks, scales=scales, implementation="hopper")
    return decode_attention(q, k, v, quantization=kind, scale_rows=room, **settings)
