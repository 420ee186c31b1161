"""Attention of prefills by cuDNN, through ``jax.nn.dot_product_attention``, and when it can run.

cuDNN's causal mask lets query j see the keys up to j. That is right where every row begins in an empty cache, without
padding on its left, which only the device knows, and holds one sequence. All other calls state what each query sees in
a bias, which reads more and skips nothing. A row's bits so depend on the rows beside it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import dot_product_attention

from moe_jax._typing import Array
from moe_jax.models._kv_cache_dtype import times, widened
from pallas_kernels.common.device import cuda_capability

# Fewer are faster by XLA: 64 rows of one query took cuDNN 55 us and XLA 65, one row 36 and 21 (H200).
LEAST_QUERIES = 64
DTYPES = ("bfloat16", "float16")
_OLDEST, _HOPPER = (8, 0), (9, 0)


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
    """Why cuDNN cannot attend, or None when it can. Arguments as of ``_hopper.refusal``."""
    num_queries, width = q.shape[1], q.shape[-1]
    values = k if v is None else v
    try:
        capability = cuda_capability()
    except NotImplementedError as error:
        return str(error)
    if capability < _OLDEST:
        return "needs compute capability 8.0, found {}.{}".format(*capability)
    if num_queries < LEAST_QUERIES:
        return f"{num_queries} queries; from {LEAST_QUERIES} on"
    if has_sinks:
        return "attention sinks"
    if num_pages:
        return "a cache in pages; their rows are gathered"
    is_one = q.dtype == k.dtype == values.dtype or k.dtype == values.dtype == jnp.float8_e4m3fn
    if not is_one or jnp.dtype(q.dtype).name not in DTYPES:
        return f"q is {q.dtype}, k {k.dtype}, v {values.dtype}; bfloat16 or float16, all of one, or k and v in e4m3"
    widest = 256 if capability == _HOPPER else 128
    if width > widest or width % 8 or (value_width or values.shape[-1]) > width:
        return f"width={width} of keys, {value_width or values.shape[-1]} of values; multiples of 8 up to {widest}"
    return None


def attend(
    scale: float,
    window: int | None,
    value_width: int | None,
    q: Array,
    k: Array,
    v: Array | None,
    places: dict[str, Any],
    sinks: Array | None,
    scales: tuple[Array, Array] | None,
) -> Array:
    """As ``_hopper.attend``. A query that sees nothing gets a finite, meaningless row."""
    assert sinks is None, "refusal has said so"
    if v is not None and scales is not None:
        y = attend(scale, window, value_width, *widened(q, k, v, scales), places, sinks, None)
        return times(y, scales[1])
    values = k[..., :value_width] if v is None else v
    width, num_queries, num_slots = values.shape[-1], q.shape[1], k.shape[2]
    values = jnp.pad(values, ((0, 0),) * 3 + ((0, k.shape[-1] - width),))  # cuDNN by way of JAX takes one width
    first_keys, shared = places["first_keys"], places["shared"]
    starts, lengths, first_slots = (places[name][:, None] for name in ("starts", "lengths", "first_slots"))

    def causal():
        keys, of_keys = (a[:, :, :num_queries].swapaxes(1, 2) for a in (k, values))
        reach = None if window is None else (window - 1, 0)
        options: Any = dict(scale=scale, is_causal=True, local_window_size=reach, implementation="cudnn")
        return dot_product_attention(q, keys, of_keys, **options)

    def masked():
        slots = jnp.arange(num_slots, dtype=jnp.int32)
        own = (first_slots + jnp.arange(num_queries, dtype=jnp.int32))[:, :, None]
        seen = (slots <= own) & (slots >= starts[:, :, None]) & (slots < lengths[:, :, None])
        if window is not None:
            seen = seen & (slots > own - window)
        if first_keys is not None:
            is_own = slots >= first_keys[:, :, None]
            seen = seen & (is_own if shared is None else is_own | (slots < shared[:, None, None]))
        keys, of_keys = (a.swapaxes(1, 2) for a in (k, values))
        return dot_product_attention(q, keys, of_keys, mask=seen[:, None], scale=scale, implementation="cudnn")

    if first_keys is not None:
        return masked()[..., :width]
    is_causal = jnp.all((starts == 0) & (first_slots == 0))
    return jax.lax.cond(is_causal, causal, masked)[..., :width]
