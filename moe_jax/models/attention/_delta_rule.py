"""The gated delta rule (arXiv 2412.06464): a state S (Dk, Dv) per head that forgets, and corrects what it predicts.

For a token with query q, key k, value v, log decay g <= 0 and rate beta in (0, 1):

    S <- exp(g) S
    S <- S + k (beta (v - S^T k))^T
    o  = S^T q

``step_by_step`` is that, token by token. ``in_chunks`` takes CHUNK tokens at a time: with u_i the correction of token
i, u solves a unit lower triangular system within the chunk (the WY form), so that all else is products of matrices, and
only the state goes from chunk to chunk. Both are equal but for rounding, and float32 throughout. A token with g = 0 and
beta = 0 changes nothing.

A key head serves R value heads. q, k: (B, S, N, Dk), of length 1 before q is scaled. v: (B, S, N, R, Dv). g, beta:
(B, S, N, R). state: (B, N, R, Dk, Dv). All float32. Results: outputs (B, S, N, R, Dv), and the state behind them.
"""

import functools

import jax
import jax.numpy as jnp

from moe_jax._typing import Array, Float

CHUNK = 64
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def delta_rule(
    q: Float[Array, "B S N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N R V"],
    g: Float[Array, "B S N R"],
    beta: Float[Array, "B S N R"],
    state: Float[Array, "B N R K V"],
) -> tuple[Float[Array, "B S N R V"], Float[Array, "B N R K V"]]:
    """One token by a step, more of them in chunks."""
    return (step_by_step if q.shape[1] == 1 else in_chunks)(q, k, v, g, beta, state)


def step_by_step(
    q: Float[Array, "B S N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N R V"],
    g: Float[Array, "B S N R"],
    beta: Float[Array, "B S N R"],
    state: Float[Array, "B N R K V"],
) -> tuple[Float[Array, "B S N R V"], Float[Array, "B N R K V"]]:
    """See the top of this file."""

    def step(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, g, beta = token
        state = state * jnp.exp(g)[..., None, None]
        correction = (v - _einsum("bnrkv,bnk->bnrv", state, k)) * beta[..., None]
        state = state + k[:, :, None, :, None] * correction[..., None, :]
        return state, _einsum("bnrkv,bnk->bnrv", state, q)

    tokens = (q * q.shape[-1] ** -0.5, k, v, g, beta)
    if q.shape[1] == 1:
        state, outputs = step(state, tuple(a[:, 0] for a in tokens))
        return outputs[:, None], state
    state, outputs = jax.lax.scan(step, state, tuple(jnp.moveaxis(a, 1, 0) for a in tokens))
    return jnp.moveaxis(outputs, 0, 1), state


def in_chunks(
    q: Float[Array, "B S N K"],
    k: Float[Array, "B S N K"],
    v: Float[Array, "B S N R V"],
    g: Float[Array, "B S N R"],
    beta: Float[Array, "B S N R"],
    state: Float[Array, "B N R K V"],
) -> tuple[Float[Array, "B S N R V"], Float[Array, "B N R K V"]]:
    """See the top of this file."""
    length = q.shape[1]
    size = min(CHUNK, length)
    count = -(-length // size)

    def chunks(a: Array) -> Array:
        """(B, S, heads..., width) -> (count, B, heads..., size, width); tokens that fill the last chunk are zero."""
        padded = jnp.pad(a, [(0, count * size - length if axis == 1 else 0) for axis in range(a.ndim)])
        return jnp.moveaxis(padded.reshape(a.shape[0], count, size, *a.shape[2:]), (1, 2), (0, -2))

    q, k, v = chunks(q * q.shape[-1] ** -0.5), chunks(k), chunks(v)
    g, beta = chunks(g[..., None])[..., 0], chunks(beta[..., None])[..., 0]
    # Log decay behind token j up to token i. Sums of these tokens alone: a difference of two sums from the start of the
    # chunk loses what is small beside them.
    segments = jnp.cumsum(jnp.where(jnp.tri(size, k=-1, dtype=jnp.bool), g[..., None], 0), axis=-2)
    between = jnp.exp(jnp.where(jnp.tri(size, dtype=jnp.bool), segments, -jnp.inf))
    # Of each pair of tokens: what the later one finds in the state of the earlier one's correction.
    by_key = _einsum("cbnik,cbnjk->cbnij", k, k)[:, :, :, None] * between * beta[..., None]
    by_query = _einsum("cbnik,cbnjk->cbnij", q, k)[:, :, :, None] * between
    since_start = jnp.exp(jnp.cumsum(g, axis=-1))[..., None]
    # u = corrections - projected @ (state before the chunk), for every state.
    right = jnp.concatenate([v, k[:, :, :, None] * since_start], axis=-1) * beta[..., None]
    solved = jax.lax.linalg.triangular_solve(by_key, right, left_side=True, lower=True, unit_diagonal=True)
    corrections, projected = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    queries = q[:, :, :, None] * since_start
    keys = k[:, :, :, None] * between[..., -1, :, None]
    kept = since_start[..., -1:, :]

    def chunk(state: Array, parts: tuple[Array, ...]) -> tuple[Array, Array]:
        corrections, projected, queries, by_query, keys, kept = parts
        u = corrections - _einsum("bnrik,bnrkv->bnriv", projected, state)
        y = _einsum("bnrik,bnrkv->bnriv", queries, state) + _einsum("bnrij,bnrjv->bnriv", by_query, u)
        return state * kept + _einsum("bnrik,bnriv->bnrkv", keys, u), y

    parts = (corrections, projected, queries, by_query, keys, kept)
    state, y = jax.lax.scan(chunk, state, parts)
    y = jnp.moveaxis(y, (0, -2), (1, 2))  # (B, count, size, N, R, Dv)
    return y.reshape(y.shape[0], count * size, *y.shape[3:])[:, :length], state
