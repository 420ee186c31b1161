"""What a key-value cache may hold, for prefills and decode steps alike."""

import jax
import jax.numpy as jnp


def check_cache_dtypes(q: jax.Array, k: jax.Array, v: jax.Array, scales: tuple[jax.Array, jax.Array] | None) -> None:
    """Raise TypeError unless q, k and v have one dtype, or k and v are float8_e4m3fn and have ``scales``; ValueError
    for scales that are not two float32 of shape ().
    """
    is_e4m3 = k.dtype == v.dtype == jnp.float8_e4m3fn
    if not is_e4m3 and not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; expected one dtype, or k and v in float8_e4m3fn")
    if is_e4m3 != (scales is not None):
        given = "no scales" if scales is None else "scales"
        raise TypeError(f"k is {k.dtype} with {given}; scales belong to k and v in float8_e4m3fn")
    if scales is not None and any(a.shape != () or a.dtype != jnp.float32 for a in scales):
        raise ValueError(f"scales are {[f'{a.dtype}{a.shape}' for a in scales]}, expected two float32 of shape ()")
