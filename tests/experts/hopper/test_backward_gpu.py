"""Gradients of experts by Hopper kernels, on a GPU, against torch's autograd in float64: each expert, each row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_jax.experts.hopper._backward import Static, differentiable
from tests.experts.hopper.test_backward import (
    PLAIN_SCHEMES,
    ROUTINGS,
    SCHEMES_WITH_KERNELS,
    arguments,
    assert_nan_reaches_its_tokens,
    expected_of,
    frozen_call,
    frozen_gradients,
    gradients,
)
from tests.support.oracles.expert_gradients import assert_gradients_close

pytestmark = pytest.mark.gpu


def by_kernels(layer, **changes):
    config = dataclasses.replace(layer.config, **changes)

    def run(x, topk_weights, ids, weights):
        return moe_jax.fused_experts(x, topk_weights, ids, weights, config)

    return run


def assert_bits_repeat(run, *arguments, calls=5):
    """run: gives arrays by name."""
    first = jax.tree.map(np.asarray, run(*arguments))
    for _ in range(calls - 1):
        for name, again in run(*arguments).items():
            np.testing.assert_array_equal(first[name], np.asarray(again), err_msg=name)


def frozen_by_static(weights, call, *, reads_packed):
    static = Static(call[0].config, jnp.dtype("float32"), reads_packed=reads_packed)
    return frozen_gradients(functools.partial(differentiable, static), weights, call)


@pytest.mark.parametrize("tokens", [3, 45, 700])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings(routing, tokens):
    call = arguments(tokens, routing)
    found = gradients(by_kernels(call[0]), *call)
    assert_gradients_close(found, expected_of(*call))
    if routing == "ragged, one expert empty":
        assert not np.asarray(found["w13"], np.float32)[2].any() and not np.asarray(found["w2"], np.float32)[2].any()


@pytest.mark.parametrize("options", [dict(has_bias=True, activation="swigluoai"), dict(activation="gelu_tanh")])
def test_activations_and_biases(options):
    call = arguments(700, "some tokens nowhere", **options)
    assert_gradients_close(gradients(by_kernels(call[0]), *call), expected_of(*call))


@pytest.mark.parametrize("scheme", SCHEMES_WITH_KERNELS)
def test_quantized_weights(scheme):
    weights, expected, call = frozen_call(scheme, 700)
    assert_gradients_close(frozen_gradients(by_kernels(call[0]), weights, call), expected)


@pytest.mark.parametrize("name", ["w13", "w2"])
@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_channel", "fp8_block"])
def test_a_weight_that_is_nan_reaches_its_tokens(scheme, name):
    assert_nan_reaches_its_tokens(by_kernels, scheme, name, 45)


@pytest.mark.parametrize("tokens", [3, 45, 700])
@pytest.mark.parametrize("scheme", PLAIN_SCHEMES)
def test_routings_with_plain_weights(scheme, tokens):
    """Hostile ones; and that they repeat to the bit."""
    for routing in ROUTINGS:
        weights, expected, call = frozen_call(scheme, tokens, routing)
        found, again = (frozen_gradients(by_kernels(call[0]), weights, call) for _ in range(2))
        assert_gradients_close(found, expected)
        for name, value in found.items():
            np.testing.assert_array_equal(np.asarray(value, np.float32), np.asarray(again[name], np.float32))


@pytest.mark.parametrize("scheme", ["w4a16_g128", "nvfp4_a16", *PLAIN_SCHEMES])
def test_quantized_weights_both_ways(scheme):
    """Read as they are held, to the bit on every call, and dequantized first."""
    weights, expected, call = frozen_call(scheme, 700)
    run = functools.partial(frozen_by_static, weights, call)
    found = {reads_packed: run(reads_packed=reads_packed) for reads_packed in (True, False)}
    for one in found.values():
        assert_gradients_close(one, expected)
    for name, again in run(reads_packed=True).items():
        np.testing.assert_array_equal(np.asarray(found[True][name], np.float32), np.asarray(again, np.float32))


@pytest.mark.parametrize("tokens", [3, 45, 700])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_rows_that_are_kept(routing, tokens):
    """``keep_hidden``: the backward pass starts from gate and up of the forward pass, in the order of its rows."""
    call = arguments(tokens, routing, keep_hidden=True)
    assert "hopper keeps the call's arguments" in call[0].explain(tokens)
    found = gradients(by_kernels(call[0]), *call)
    assert_gradients_close(found, expected_of(*call))
    for _ in range(3 if tokens == 700 else 0):  # another order of rows each time, perhaps
        assert_gradients_close(gradients(by_kernels(call[0]), *call), expected_of(*call))


@pytest.mark.parametrize("options", [dict(has_bias=True, activation="swigluoai"), dict(activation="gelu_tanh")])
def test_rows_that_are_kept_of_other_activations(options):
    call = arguments(700, "some tokens nowhere", keep_hidden=True, **options)
    assert_gradients_close(gradients(by_kernels(call[0]), *call), expected_of(*call))


@pytest.mark.parametrize("scheme", ["w4a16_g128", "w4a16_g128_asym", "w8a16_channel", "nvfp4_a16", "mxfp4_a16"])
def test_rows_that_are_kept_beside_packed_weights(scheme):
    weights, expected, call = frozen_call(scheme, 700)
    run = by_kernels(call[0], keep_hidden=True)
    assert_gradients_close(frozen_gradients(run, weights, call), expected)


@pytest.mark.parametrize("options", [dict(), dict(keep_hidden=True), dict(has_bias=True)], ids=str)
@pytest.mark.parametrize("tokens", [700, 9000])
def test_bits_repeat(tokens, options):
    """Also those of matrices and biases, which sum over the rows of an expert; some by one CTA, and by several."""
    layer, *rest = arguments(tokens, "some tokens nowhere", **options)
    run = jax.jit(functools.partial(gradients, by_kernels(layer), layer))
    assert_bits_repeat(run, *rest)


def test_a_batch_of_calls():
    """``jax.vmap`` over calls has the gradients of each call."""
    layer, x, topk_weights, ids, g = arguments(90, "some tokens nowhere")
    run, weights = by_kernels(layer), layer.weights.get_value()

    def loss(x, g):
        return (run(x, topk_weights, ids, weights).astype(jnp.float32) * g.astype(jnp.float32)).sum()

    xs, gs = jnp.stack([x, -x, 2 * x]), jnp.stack([g, g, -g])
    found = jax.jit(jax.vmap(jax.grad(loss)))(xs, gs)
    one = jax.jit(jax.grad(loss))
    for index in range(3):
        apart = np.asarray(one(xs[index], gs[index]), np.float32)
        np.testing.assert_allclose(np.asarray(found[index], np.float32), apart, rtol=2**-7, atol=2**-8)


def test_under_remat_and_scan():
    layer, x, topk_weights, ids, g = arguments(90, "some tokens nowhere")
    run, weights = by_kernels(layer), layer.weights.get_value()

    def step(h, _):
        return h + jax.checkpoint(functools.partial(run, topk_weights=topk_weights, ids=ids, weights=weights))(h), None

    def scanned(x):
        return (jax.lax.scan(step, x, None, length=2)[0].astype(jnp.float32) * g.astype(jnp.float32)).sum()

    def unrolled(x):
        for _ in range(2):
            x = x + run(x, topk_weights, ids, weights)
        return (x.astype(jnp.float32) * g.astype(jnp.float32)).sum()

    one, other = (np.asarray(jax.jit(jax.grad(f))(x), np.float32) for f in (scanned, unrolled))
    np.testing.assert_allclose(one, other, rtol=2**-6, atol=2**-6)
