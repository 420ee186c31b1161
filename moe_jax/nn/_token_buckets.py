"""Any number of tokens through few compiled programs: calls padded to the next of a list of sizes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from moe_jax._typing import Array, ArrayArg

TOKEN_BUCKETS = tuple(2**i for i in range(15))  # 1 to 16384


def token_bucket(num_tokens: int, buckets: Sequence[int] = TOKEN_BUCKETS) -> int:
    """The smallest of ``buckets`` that holds num_tokens; above the largest, the next multiple of it."""
    if num_tokens < 0 or not buckets or min(buckets) < 1:
        raise ValueError(f"num_tokens={num_tokens}, buckets={tuple(buckets)}: expected >= 0 and sizes of at least 1")
    largest = max(buckets)
    return min((b for b in buckets if b >= num_tokens), default=-(-num_tokens // largest) * largest)


def in_token_buckets(layer: Callable[..., Any], buckets: Sequence[int] = TOKEN_BUCKETS) -> Callable[..., Any]:
    """A jitted ``run(weights, x, router_logits) -> y`` that compiles once for each bucket, whatever T comes along.

    layer: ``(weights, x (B, H), router_logits (B, E), token_mask (B,)) -> (B, H)``; weights is any pytree, such as a
    layer's state: passed on as an argument, never closed over. run pads x (T, H) and router_logits (T, E) to the bucket
    B of T on their way in, masks the padding, which then costs no expert any work, and cuts y to (T, H). Padding arrays
    of the device, and the cut, are copies that JAX compiles for each T, in milliseconds; NumPy arrays need no padding
    program. Call run outside of jit, where T would be fixed. ``run.num_programs()`` counts the layer's programs so far.

    Example:
        >>> import jax.numpy as jnp
        >>> run = in_token_buckets(lambda w, x, z, token_mask: jnp.where(token_mask[:, None], x * w, 0))
        >>> [run(2.0, jnp.ones((t, 4)), jnp.ones((t, 2))).shape for t in (3, 4, 5)], run.num_programs()
        ([(3, 4), (4, 4), (5, 4)], 2)
    """
    buckets = tuple(sorted(buckets))
    token_bucket(0, buckets)
    program = jax.jit(lambda weights, x, z, count: layer(weights, x, z, jnp.arange(x.shape[0]) < count))

    @functools.wraps(layer)
    def run(weights: Any, x: ArrayArg, router_logits: ArrayArg) -> Array:
        num_tokens = x.shape[0]
        if x.ndim != 2 or router_logits.ndim != 2 or router_logits.shape[0] != num_tokens:
            raise ValueError(f"x has shape {x.shape}, router_logits {router_logits.shape}, expected (T, H) and (T, E)")
        if isinstance(x, Tracer):
            raise ValueError(
                "in_token_buckets is called under jit, where T is fixed; call it outside, or jit the layer"
            )
        bucket = token_bucket(num_tokens, buckets)
        y = program(weights, _padded(x, bucket), _padded(router_logits, bucket), np.int32(num_tokens))
        return y[:num_tokens]

    run.num_programs = program._cache_size  # type: ignore[attr-defined]
    return run


def _padded(values: ArrayArg, rows: int) -> ArrayArg:
    if values.shape[0] == rows:
        return values
    if isinstance(values, np.ndarray):
        return np.pad(values, ((0, rows - values.shape[0]), (0, 0)))
    return jnp.pad(values, ((0, rows - values.shape[0]), (0, 0)))
