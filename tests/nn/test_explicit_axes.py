"""Layers whose weights or tokens the caller has split over a mesh with Explicit axes, by the logical names."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import moe_jax

RULES = (("expert", "ep"), ("mlp", "tp"))


def make(scheme):
    options: Any = dict(scheme=scheme, has_bias=True, dtype=jnp.float32, rngs=nnx.Rngs(0))
    return moe_jax.FusedMoE(8, 64, 64, top_k=2, **options)


def split(layer, rules=RULES, kinds=("Explicit", "Explicit")):
    """(the layer with its arrays split by rules, the mesh)."""
    mesh = jax.make_mesh((4, 2), ("ep", "tp"), axis_types=tuple(AxisType[kind] for kind in kinds))
    graphdef, state = nnx.split(layer)
    with nnx.logical_axis_rules(rules):
        shardings = nnx.get_named_sharding(state, mesh)
    return nnx.merge(graphdef, jax.device_put(state, shardings)), mesh


def tokens(*lead):
    return (jax.random.normal(jax.random.key(seed), (*lead, size)) for seed, size in ((0, 64), (1, 8)))


@jax.jit
def call(layer, x, logits):
    return layer(x, logits, return_stats=True)


def check(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, found[1], expected[1])


@pytest.mark.parametrize(
    "scheme", ["w4a16_g32_asym", *(pytest.param(name, marks=pytest.mark.slow) for name in (None, "fp8_channel"))]
)
def test_split_weights(scheme):
    """With the mesh set and not; results are split as the tokens are."""
    alone = make(scheme)
    layer, mesh = split(alone)
    x, logits = tokens(8)
    expected = call(alone, x, logits)
    whole = call(layer, x, logits)
    check(whole, expected)
    assert whole[0].sharding.is_fully_replicated
    parts = [jax.device_put(array, NamedSharding(mesh, P("ep"))) for array in (x, logits)]
    with jax.set_mesh(mesh):
        found = call(layer, *parts)
    check(found, expected)
    assert found[0].sharding.spec == P("ep", None)


def test_outside_of_jit():
    alone = make(None)
    x, logits = tokens(2, 4)
    check(split(alone)[0](x, logits, return_stats=True), call(alone, x, logits))


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("Explicit", "Auto"), ("Auto", "Explicit")])
def test_axes_of_both_kinds(kinds):
    alone = make("fp8_channel")
    x, logits = tokens(8)
    check(call(split(alone, kinds=kinds)[0], x, logits), call(alone, x, logits))


def test_split_tokens_alone():
    """Weights lie where they were made; a mask is split as the tokens are."""
    layer, (x, logits) = make(None), tokens(8, 2)
    _, mesh = split(layer)
    mask = jnp.arange(16).reshape(8, 2) % 3 > 0
    run = jax.jit(lambda layer, x, logits, mask: layer(x, logits, token_mask=mask, return_stats=True))
    parts = [jax.device_put(array, NamedSharding(mesh, P("ep"))) for array in (x, logits, mask)]
    found = run(layer, *parts)
    check(found, run(layer, x, logits, mask))
    assert found[0].sharding.spec[0] == "ep"


def test_gradients():
    """They are split as the weights are."""
    alone = make(None)
    layer, mesh = split(alone)
    x, logits = tokens(8)

    def gradient(layer):
        graphdef, params, rest = nnx.split(layer, nnx.Param, ...)

        def loss(params, rest):
            return jnp.sum(nnx.merge(graphdef, params, rest)(x, logits) ** 2)

        return jax.jit(jax.grad(loss))(params, rest)["weights"]

    with jax.set_mesh(mesh):
        found = gradient(layer)
    assert found["w2"].get_value().sharding.spec == P("ep", None, "tp")
    expected = gradient(alone)
    for name in ("w13", "w2", "w13_bias", "w2_bias"):
        actual, wanted = (np.asarray(tree[name].get_value(), np.float32) for tree in (found, expected))
        np.testing.assert_allclose(actual, wanted, atol=1e-2 * np.abs(wanted).max())
