"""The gated delta rule: token by token and in chunks, against the definition in float64 and against each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.models.attention._delta_rule import CHUNK, delta_rule, in_chunks, step_by_step

BATCH, KEYS, RATIO, WIDTH, VALUES = 2, 2, 3, 16, 8


def problem(length, memory, seed=0):
    """q, k, v, g, beta, state. memory: tokens after which 1/e of a state is left."""
    rng = np.random.default_rng(seed)
    lead = (BATCH, length, KEYS)
    q, k = (rng.standard_normal((*lead, WIDTH)) for _ in range(2))
    q, k = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
    v = rng.standard_normal((*lead, RATIO, VALUES))
    g, beta = -rng.uniform(0, 2 / memory, (*lead, RATIO)), rng.uniform(0, 1, (*lead, RATIO))
    state = rng.standard_normal((BATCH, KEYS, RATIO, WIDTH, VALUES))
    return [a.astype(np.float32) for a in (q, k, v, g, beta, state)]


def by_definition(q, k, v, g, beta, state):
    """A matrix per head, in float64."""
    q, k, v, g, beta, state = (np.array(a, np.float64) for a in (q, k, v, g, beta, state))
    y = np.zeros(v.shape)
    for row, head, r in np.ndindex(BATCH, KEYS, RATIO):
        s = state[row, head, r]
        for t in range(q.shape[1]):
            key = k[row, t, head]
            s = s * np.exp(g[row, t, head, r])
            s = s + np.outer(key, beta[row, t, head, r] * (v[row, t, head, r] - s.T @ key))
            y[row, t, head, r] = s.T @ q[row, t, head] / WIDTH**0.5
        state[row, head, r] = s
    return y, state


def assert_close(found, expected):
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.dtype == jnp.float32
        np.testing.assert_allclose(actual, wanted, atol=3e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("length, memory", [(1, 50), (5, 50), (CHUNK, 1), (CHUNK + 1, 500), (3 * CHUNK - 7, 500)])
def test_both_forms_are_the_definition(length, memory):
    arguments = problem(length, memory)
    expected = by_definition(*arguments)
    for form in (step_by_step, in_chunks, delta_rule):
        assert_close(jax.jit(form)(*arguments), expected)


def test_equal_keys_without_forgetting():
    """The system of a chunk is as badly conditioned as it gets: every token corrects the same direction."""
    q, k, v, g, beta, state = problem(2 * CHUNK, 1)
    k[:], g[:], beta[:] = k[:1, :1, :1], 0, 1
    expected = by_definition(q, k, v, g, beta, state)
    assert_close(jax.jit(in_chunks)(q, k, v, g, beta, state), expected)


def test_a_state_that_vanishes_at_once():
    """exp(g) is 0 in float32, and its inverse would be infinite."""
    q, k, v, g, beta, state = problem(CHUNK + 3, 1)
    g[:, ::5] = -500
    assert_close(jax.jit(in_chunks)(q, k, v, g, beta, state), by_definition(q, k, v, g, beta, state))


def test_tokens_without_rate_change_nothing():
    q, k, v, g, beta, state = problem(CHUNK + 9, 100)
    is_padding = np.random.default_rng(3).random(CHUNK + 9) < 0.4
    g[:, is_padding], beta[:, is_padding] = 0, 0
    y, after = by_definition(*(a[:, ~is_padding] for a in (q, k, v, g, beta)), state)
    for form in (step_by_step, in_chunks):
        found, end = jax.jit(form)(q, k, v, g, beta, state)
        assert_close((found[:, ~is_padding], end), (y, after))


def test_gradients_of_both_forms_agree():
    arguments = problem(CHUNK + 9, 100)

    def loss(form, *arguments):
        y, state = form(*arguments)
        return jnp.sum(y**2) + jnp.sum(state**3)

    steps, chunks = (
        jax.grad(lambda *a, form=form: loss(form, *a), argnums=range(6))(*arguments)
        for form in (step_by_step, in_chunks)
    )
    for actual, wanted in zip(chunks, steps, strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-5 * np.abs(wanted).max())
