"""Gradients of layers that the Hopper kernels run and have no gradient for: those of the next implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_jax.experts.hopper._kernel_layout import kernel_format, to_kernel_layout
from tests.support.cases.hopper_layers import K, inputs, make_layer, on_hopper
from tests.support.kernels.case import launches

NO_KERNELS = 96  # intermediate size: kernels run it, and those of the gradient take multiples of 64


def same_gradients(found, expected):
    """Of the same products, which XLA fuses, and adds by scatter on a GPU, in an order of its own."""
    for one, other in zip(found, expected, strict=True):
        one, other = (np.asarray(value, np.float32) for value in (one, other))
        np.testing.assert_allclose(one, other, rtol=2**-7, atol=2**-10 * np.abs(other).max())


ORDERS = {
    "jit of grad": lambda f: jax.jit(jax.grad(f, (0, 1))),
    "grad of jit": lambda f: jax.grad(jax.jit(f), (0, 1)),
    "grad": lambda f: jax.grad(f, (0, 1)),
}
# Each loss and each order once; the slow run has all pairs.
PAIRS = {("whole", "grad of jit"), ("whole", "grad"), ("experts", "jit of grad"), ("batch", "jit of grad")}


@pytest.mark.parametrize("scheme", ["bf16", pytest.param("fp8_channel", marks=pytest.mark.slow)])
@pytest.mark.parametrize("all_pairs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_next_implementation(scheme, all_pairs):
    """In every order of jit and grad, over a batch, with routing in the kernel and before it; no kernel is left."""
    layer = make_layer(scheme, NO_KERNELS, implementation=("hopper", "xla"))
    plain, (x, z) = make_layer(scheme, NO_KERNELS, implementation="xla"), inputs(3)
    if kernel_format(layer.config.scheme, layer.config.dtype) is not None:
        layer.weights.set_value(to_kernel_layout(layer.weights.get_value(), layer.config))
    ids = jax.lax.top_k(z, K)[1].astype(jnp.int32)

    def whole(layer, x, z):
        return jnp.sin(layer(x, z).astype(jnp.float32)).sum()

    def experts(layer, x, z):
        weights = layer.weights.get_value()
        return jnp.sin(moe_jax.fused_experts(x, z[:, :K], ids, weights, layer.config).astype(jnp.float32)).sum()

    def remat(layer, x, z):
        return jax.checkpoint(functools.partial(whole, layer))(x, z)

    def batch(layer, x, z):
        return jax.vmap(functools.partial(whole, layer))(jnp.stack([x, 2 * x]), jnp.stack([z, -z])).sum()

    for loss in (whole, experts, remat, batch) if all_pairs else (whole, experts, batch):
        expected = ORDERS["jit of grad"](functools.partial(loss, plain))(x, z)
        for order, gradient in ORDERS.items():
            if all_pairs or (loss.__name__, order) in PAIRS:
                with on_hopper():
                    found = gradient(functools.partial(loss, layer))(x, z)
                same_gradients(found, expected)
    with on_hopper():
        mine = functools.partial(whole, layer)
        assert launches(mine, x, z) >= 4 and launches(jax.grad(jax.jit(mine), (0, 1)), x, z) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [3, 700])
def test_gradients_on_a_gpu(tokens):
    (x, z), layers = inputs(tokens), [make_layer("fp8_channel", NO_KERNELS, implementation=i) for i in (None, "xla")]
    assert "implementation: hopper" in layers[0].explain(tokens)
    mine, plain = (lambda x, z, l=l: (l(x, z).astype(jnp.float32) ** 2).sum() for l in layers)  # noqa: E741
    expected = jax.jit(jax.grad(plain, (0, 1)))(x, z)
    for gradient in (jax.jit(jax.grad(mine, (0, 1))), jax.grad(jax.jit(mine), (0, 1))):
        same_gradients(gradient(x, z), expected)


def test_gradients_are_refused_where_no_other_implementation_may_run():
    layer, (x, z) = make_layer("bf16", NO_KERNELS, implementation="hopper"), inputs(3)
    for wrap in (lambda f: f, jax.jit):
        with on_hopper(), pytest.raises(NotImplementedError, match="has no gradient.*others are 'portable', 'xla'"):
            jax.grad(wrap(lambda x: layer(x, z).sum()))(x)
