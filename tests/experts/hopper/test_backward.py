"""Gradients of experts by Hopper kernels, their references run here; and which calls take them.

The kernels themselves are compared on a GPU in test_backward_gpu.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import moe_jax
from moe_jax.experts.hopper._backward import Static, differentiable
from tests.support.cases.hopper_layers import K, inputs, make_layer, on_hopper
from tests.support.kernels.case import launches
from tests.support.oracles.expert_gradients import assert_gradients_close, expert_gradients

ROUTINGS = {
    "ragged, one expert empty": lambda ids: jnp.where(ids == 2, 0, ids),
    "all to one": lambda ids: jnp.full_like(ids, -1).at[:, 0].set(4),
    "some tokens nowhere": lambda ids: ids.at[::3].set(-1),
    "nothing routed": lambda ids: jnp.full_like(ids, -1),
}


def arguments(tokens, routing, **options):
    """(layer, x, topk_weights, topk_ids, cotangent)."""
    layer, (x, z) = make_layer("bf16", implementation="hopper", **options), inputs(tokens)
    topk_weights, ids = jax.lax.top_k(jax.nn.softmax(z), K)
    ids = ROUTINGS[routing](ids.astype(jnp.int32))
    topk_weights = jnp.where(ids < 0, 0.0, topk_weights)
    return layer, x, topk_weights, ids, jax.random.normal(jax.random.key(7), x.shape).astype(jnp.bfloat16)


def gradients(function, layer, x, topk_weights, ids, g):
    """Of sum(g * y) by x, topk_weights and weights, and y, by name. function: (x, topk_weights, ids, weights) -> y."""

    def loss(x, topk_weights, weights):
        y = function(x, topk_weights, ids, weights)
        return (y.astype(jnp.float32) * g.astype(jnp.float32)).sum(), y

    found, y = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(x, topk_weights, layer.weights.get_value())
    weights = found[2]
    named = dict(x=found[0], topk_weights=found[1], w13=weights.w13.data, w2=weights.w2.data, y=y)
    biases = dict(w13_bias=weights.w13_bias, w2_bias=weights.w2_bias)
    return named | {name: bias for name, bias in biases.items() if bias is not None}


def expected_of(layer, x, topk_weights, ids, g):
    weights = layer.weights.get_value()
    biases = dict(w13_bias=weights.w13_bias, w2_bias=weights.w2_bias)
    data = (weights.w13.data, weights.w2.data)
    return expert_gradients(g, x, topk_weights, ids, *data, activation=layer.config.activation, **biases)


def by_references(layer):
    return functools.partial(differentiable, Static(layer.config, jnp.dtype("float32"), "reference"))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings(routing):
    call = arguments(45, routing)
    assert_gradients_close(gradients(by_references(call[0]), *call), expected_of(*call))


@pytest.mark.parametrize(
    "options",
    [
        dict(has_bias=True, activation="swigluoai"),
        dict(activation="gelu_tanh"),
        dict(has_bias=True, activation="relu2", is_act_and_mul=False),
    ],
    ids=lambda options: options["activation"],
)
def test_activations_and_biases(options):
    layer, *rest = arguments(45, "ragged, one expert empty", **options)
    if options.get("has_bias"):
        weights = layer.weights.get_value()
        keys = jax.random.split(jax.random.key(3))
        w13_bias, w2_bias = (
            jax.random.normal(key, bias.shape, bias.dtype)
            for key, bias in zip(keys, (weights.w13_bias, weights.w2_bias), strict=True)
        )
        layer.weights.set_value(dataclasses.replace(weights, w13_bias=w13_bias, w2_bias=w2_bias))
    expected = expected_of(layer, *rest)
    assert_gradients_close(gradients(by_references(layer), layer, *rest), expected)


def test_only_what_is_asked_for_is_computed():
    """Kernels of the gradient by x alone, by router weights alone, by the weights alone, and by all. The value of the
    function, which nobody asks for, is not computed.
    """
    layer, x, topk_weights, ids, _ = arguments(300, "ragged, one expert empty")
    weights = layer.weights.get_value()

    def loss(x, topk_weights, weights):
        return moe_jax.fused_experts(x, topk_weights, ids, weights, layer.config).astype(jnp.float32).sum()

    with on_hopper():
        found = [launches(jax.grad(loss, by), x, topk_weights, weights) for by in (0, 1, 2, (0, 1, 2))]
    # align, two moves of rows, gate and up, g W2; then the rows' cotangent and its sum, or both gradients of weights
    assert found == [7, 5, 7, 9]


def test_layers_whose_gradient_has_no_kernels():
    """The next implementation has it, and an error says why the kernels do not."""
    for options, reason in ((dict(scheme="fp8_channel"), "quantized weights"), (dict(intermediate=80), "size=80")):
        options = dict(scheme="bf16") | options
        x, z = inputs(3)
        with on_hopper(), pytest.raises(NotImplementedError, match=f"hopper: has no gradient for .*{reason}"):
            jax.grad(lambda x, layer: layer(x, z).sum())(x, make_layer(**options, implementation="hopper"))  # noqa: B023
