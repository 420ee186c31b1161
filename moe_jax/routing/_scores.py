"""Building blocks of every router: scores in float32, top-k with ties to the lower index, guarded renormalization."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_jax._typing import Array, Float, Int

SCORING_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")

# What a sum of weights is taken as at least when dividing by it: plain routers only avoid 0 / 0.
PLAIN_FLOOR = float(np.finfo(np.float32).tiny)
BIASED_FLOOR = 1e-20


def is_finite_row(logits: Float[Array, "*lead E"]) -> Array:
    """(*lead, 1) bool: the softmax of the row exists, that is no NaN, no +inf and not only -inf."""
    # NaN goes in as infinity: XLA's maximum on the CPU (jax 0.10.2) loses NaN once an array has some thousand elements.
    return jnp.isfinite(jnp.max(jnp.where(jnp.isnan(logits), jnp.inf, logits), axis=-1, keepdims=True))


def scores(logits: Float[Array, "*lead E"], scoring_func: str) -> Float[Array, "*lead E"]:
    """Router scores of float32 logits; what is not finite becomes 0.

    softmax: over all of the last axis, so one NaN or +inf makes the scores of its whole row 0. sigmoid.
    sqrtsoftplus: sqrt(log(1 + exp(z))). Values that would be NaN are kept out of the formulas rather than only out of
    the result, since the derivative of ``where`` would carry them back into the other logits' gradients.
    """
    match scoring_func:
        case "softmax":
            is_valid = is_finite_row(logits)
            return jnp.where(is_valid, jax.nn.softmax(jnp.where(is_valid, logits, 0.0), axis=-1), 0.0)
        case "sigmoid":
            is_nan = jnp.isnan(logits)
            return jnp.where(is_nan, 0.0, jax.nn.sigmoid(jnp.where(is_nan, 0.0, logits)))
        case "sqrtsoftplus":
            is_valid = logits < jnp.inf  # false for NaN too
            return jnp.where(is_valid, _sqrt_softplus(jnp.where(is_valid, logits, 0.0)), 0.0)
    raise ValueError(f"scoring_func={scoring_func!r}, expected one of {', '.join(SCORING_FUNCTIONS)}")


def _sqrt_softplus(z: Array) -> Array:
    # Below -17 log1p(exp(z)) is exp(z) in float32; its root in closed form keeps the derivative finite at underflow.
    is_small = z < -17.0
    root = jnp.sqrt(jnp.logaddexp(jnp.where(is_small, 0.0, z), 0.0))
    return jnp.where(is_small, jnp.exp(0.5 * jnp.where(is_small, z, 0.0)), root)


def top_k(values: Float[Array, "*lead E"], k: int) -> tuple[Float[Array, "*lead k"], Int[Array, "*lead k"]]:
    """The k largest of the last axis, descending, and their int32 indices; equal values go to the lower index."""
    chosen, ids = lax.top_k(_with_one_zero(values), k)
    return chosen, ids


@jax.custom_jvp
def _with_one_zero(values: Array) -> Array:
    """lax.top_k orders -0.0 below 0.0; equal they are, so they have to tie. Zeros keep their derivative."""
    return jnp.where(values == 0.0, 0.0, values)


_with_one_zero.defjvps(lambda tangent, _, values: tangent)


def divide_by_sum(weights: Float[Array, "*lead k"], floor: float) -> Float[Array, "*lead k"]:
    """weights / max(sum, floor) over the last axis.

    Measured in units of the largest weight, so that the derivative does not square a sum near 1e-20 into nothing.
    """
    unit = lax.stop_gradient(jnp.maximum(weights.max(axis=-1, keepdims=True), floor))
    shares, least = weights / unit, floor / unit
    total = shares.sum(axis=-1, keepdims=True)
    return shares / jnp.where(total > least, total, least)
