"""route under jit, grad and vmap."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax import routing
from moe_jax.routing import RoutingParams, route
from tests.support.cases.routing import (
    BIAS,
    MATRIX,
    ROUTERS,
    TOKEN_IDS,
    E,
    K,
    config,
    config_of,
    expected_of,
    jit_route,
    logits,
)
from tests.support.oracles import routing as ref

PRESETS = list(routing.ROUTING_PRESETS)


@jax.jit
def gradient(z, coefficients, config, params):
    def loss(z):
        return (route(z, config, params=params, token_ids=TOKEN_IDS).topk_weights * coefficients).sum()

    return jax.grad(loss)(z)


def preset_config(name):
    return config(E, 2, renormalize=False, custom_routing_function=name)


def numeric_gradient(weights_of_row, z, coefficients):
    """Central differences in float64 of sum(weights * coefficients), row by row."""
    result, step = np.zeros_like(z), 1e-6
    for row, at in np.ndindex(*z.shape):
        shift = np.where(np.arange(z.shape[1]) == at, step, 0.0)
        up, down = (np.asarray(weights_of_row(row, z[row] + sign * shift)) for sign in (1, -1))
        result[row, at] = ((up - down) * coefficients[row]).sum() / (2 * step)
    return result


def check_gradient(weights_of_row, z, top_k, c, params=None):
    coefficients = np.random.default_rng(6).normal(size=(len(z), top_k))
    numeric = numeric_gradient(weights_of_row, z, coefficients)
    analytic = gradient(jnp.asarray(z, jnp.float32), jnp.asarray(coefficients, jnp.float32), c, params)
    np.testing.assert_allclose(analytic, numeric, rtol=2e-3, atol=5e-5)
    assert (np.abs(numeric).max(axis=1) > 1e-3).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_logits_pass_gradients_of_any_size(dtype):
    """As of the rounded logits themselves: zeros and float16's subnormals have one, and small ones are not lost."""
    rng = np.random.default_rng(5)
    z = jnp.asarray(rng.normal(size=(6, E)), jnp.float32).at[1].set(0.0).at[2].multiply(1e-5)
    coefficients = jnp.asarray(rng.normal(size=(6, K)) * 1e-7, jnp.float32)
    found = gradient(z, coefficients, config(router_logits_dtype=dtype), None)
    expected = gradient(z.astype(dtype).astype(jnp.float32), coefficients, config(), None)
    np.testing.assert_array_equal(found, expected)
    assert (np.abs(expected).max(axis=1) > 0).all()


@pytest.mark.parametrize(("router", "scoring", "renormalize"), MATRIX)
@pytest.mark.sample(9)
def test_gradient(router, scoring, renormalize):
    def weights_of_row(row, values):
        # The hash table is looked up by token, so the row stays in its place.
        return expected_of(np.tile(values, (row + 1, 1)), router, scoring, renormalize)[0][row]

    z = np.random.default_rng(5).normal(size=(6, E))
    c, params = config_of(router, scoring, renormalize), ROUTERS[router][1]
    check_gradient(weights_of_row, z, K, c, params)

    # The same program on hostile logits: finite everywhere, unharmed in the rows that are not hostile. At -60 all
    # scores are small enough for the square of their sum to vanish in float32.
    coefficients = jnp.tile(jnp.arange(float(K)), (6, 1))
    z = logits()
    clean = gradient(jnp.asarray(z), coefficients, c, params)
    z[1, 3], z[2, 5], z[3, :], z[4, :] = np.nan, np.inf, np.nan, -60.0
    hostile = gradient(jnp.asarray(z), coefficients, c, params)
    assert np.isfinite(hostile).all()
    np.testing.assert_array_equal(hostile[jnp.array([0, 5])], clean[jnp.array([0, 5])])


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.sample(2)
def test_gradient_of_presets(name):
    # Close logits let the sparsemixer keep several experts.
    z = np.random.default_rng(5).normal(size=(6, E)) / 16 + 3
    row_function = getattr(ref, f"{name}_row")
    check_gradient(lambda row, values: row_function(values, 2, False)[0], z, 2, preset_config(name))


@pytest.mark.parametrize("case", [*ROUTERS, *PRESETS])
@pytest.mark.sample(5)
def test_vmap(case):
    c, params = (config(**ROUTERS[case][0]), ROUTERS[case][1]) if case in ROUTERS else (preset_config(case), None)
    z = jnp.asarray(np.stack([logits(seed=1), logits(seed=2)]))
    stacked = jax.jit(jax.vmap(lambda z: route(z, c, params=params, token_ids=TOKEN_IDS)))(z)
    for n in range(2):
        single = jit_route(z[n], c, params=params, token_ids=TOKEN_IDS)
        np.testing.assert_array_equal(stacked.topk_ids[n], single.topk_ids)
        np.testing.assert_allclose(stacked.topk_weights[n], single.topk_weights, rtol=1e-6)


def test_a_config_needs_no_static_argnames_and_params_are_a_pytree():
    params = RoutingParams(jnp.asarray(BIAS))
    doubled = dataclasses.replace(params, correction_bias=params.correction_bias + 1)
    before = jit_route._cache_size()
    jit_route(jnp.asarray(logits()), config(name="cache"), params=params)
    jit_route(jnp.asarray(logits()), config(name="cache"), params=doubled)
    assert jit_route._cache_size() == before + 1
