"""The distribution of sampled tokens against one written out in NumPy."""

from inspect import unwrap  # the tests' own checks of annotations would speak first

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.models._sampling import Sampler

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.2]))  # by likelihood: 1, 3, 4, 2, 0


def draw(n=20000, **options):
    options = dict(temperature=1.0, top_p=1.0, top_k=0) | options
    sampler = Sampler.create(**options, rng=jax.random.key(0))
    logits = jnp.asarray(np.broadcast_to(LOGITS, (n, 5)), jnp.float32)
    tokens = np.asarray(jax.jit(lambda s, z, k: s(z, k))(sampler, logits, jax.random.key(7)))
    assert tokens.dtype == np.int32
    return np.bincount(tokens, minlength=5) / n


def expected(keep, temperature=1.0):
    p = np.exp(LOGITS / temperature) * np.isin(np.arange(5), keep)
    return p / p.sum()


@pytest.mark.parametrize(
    "options, keep",
    [
        ({}, [0, 1, 2, 3, 4]),
        (dict(temperature=0.5), [0, 1, 2, 3, 4]),
        (dict(top_k=1), [1]),
        (dict(top_k=3), [1, 3, 4]),
        (dict(top_k=50), [0, 1, 2, 3, 4]),
        (dict(top_k=2**40), [0, 1, 2, 3, 4]),
        (dict(top_p=0.5), [1, 3]),
        (dict(top_p=0.66), [1, 3, 4]),
        (dict(top_p=1e-6), [1]),
        # top-k renormalizes before top-p: 0.4 / 0.85 = 0.47, with the next 0.76
        (dict(top_k=3, top_p=0.7), [1, 3]),
        (dict(top_k=3, top_p=0.9), [1, 3, 4]),
        (dict(temperature=2.0, top_p=0.5), [1, 3]),
    ],
)
@pytest.mark.sample(2)
def test_distribution(options, keep):
    found, wanted = draw(**options), expected(keep, options.get("temperature", 1.0))
    assert (found[wanted == 0] == 0).all()
    np.testing.assert_allclose(found, wanted, atol=4 * np.sqrt(0.25 / 20000))


def test_greedy_takes_the_lower_index_on_ties():
    sampler = Sampler.create(0.0, 1.0, 0, None)
    logits = jnp.array([[1.0, 3.0, 3.0], [2.0, 0.0, 2.0]], jnp.float32)
    np.testing.assert_array_equal(sampler(logits, jax.random.key(0)), [1, 0])


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 1e-300])
def test_the_coldest_is_greedy_and_draws_ties(temperature):
    """Also where float32 has no such number, and for logits whose quotient it cannot hold."""
    sampler = Sampler.create(temperature, 0.9, 0, jax.random.key(0))
    plain = Sampler.create(temperature, 1.0, 0, jax.random.key(0))
    logits = jnp.broadcast_to(jnp.array([-1e30, 3e8, 3e8, 2e8, 0.0], jnp.float32), (200, 5))
    for each in (sampler, plain):
        assert set(np.asarray(each(logits, jax.random.key(1))).tolist()) == {1, 2}
    single = jnp.array([[0.1, 0.1000001, 0.0]], jnp.float32)
    assert plain(single, jax.random.key(2)).tolist() == [1]


def test_the_hottest_is_uniform():
    assert (draw(temperature=1e300) > 0.15).all()


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(temperature="1"), "temperature='1'"),
        (dict(temperature=True), "temperature=True"),
        (dict(temperature=[1.0]), r"temperature=\[1.0\]"),
        (dict(top_p=None), "top_p=None"),
        (dict(top_k=1.0), "top_k=1.0"),
        (dict(top_k=True), "top_k=True"),
        (dict(rng=42), "rng has type int"),
        (dict(rng=jnp.zeros(2, jnp.int32)), "rng has dtype int32"),
        (dict(rng=jax.random.split(jax.random.key(0))), r"rng has dtype key<fry> and shape \(2,\)"),
    ],
)
def test_wrong_types(options, words):
    with pytest.raises(TypeError, match=words):
        unwrap(Sampler.create.__func__)(
            Sampler, **(dict(temperature=1.0, top_p=1.0, top_k=0, rng=jax.random.key(0)) | options)
        )


def test_top_k_keeps_exactly_k_on_ties():
    sampler = Sampler.create(1.0, 1.0, 2, jax.random.key(0))
    tokens = np.asarray(sampler(jnp.zeros((500, 6), jnp.float32), jax.random.key(1)))
    assert set(tokens.tolist()) == {0, 1}


def test_values_do_not_recompile():
    traces = []

    @jax.jit
    def run(sampler, logits, key):
        traces.append(1)
        return sampler(logits, key)

    for temperature, top_p, top_k in ((1.0, 0.9, 3), (0.5, 0.8, 2), (0.7, 1.0, 1)):
        run(
            Sampler.create(temperature, top_p, top_k, jax.random.key(0)),
            jnp.zeros((1, 5), jnp.float32),
            jax.random.key(0),
        )
    assert len(traces) == 1


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(temperature=-0.1), "temperature=-0.1"),
        (dict(temperature=float("nan")), "temperature=nan"),
        (dict(top_p=0.0), "top_p=0.0"),
        (dict(top_p=1.5), "top_p=1.5"),
        (dict(top_k=-1), "top_k=-1"),
        (dict(temperature=1.0, rng=None), "needs rng"),
    ],
)
def test_refusals(options, words):
    with pytest.raises(ValueError, match=words):
        Sampler.create(**(dict(temperature=0.0, top_p=1.0, top_k=0, rng=jax.random.key(0)) | options))
