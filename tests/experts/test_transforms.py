"""The experts under jit, vmap, scan, shard_map, export and donation; what a trace costs in size and memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moe_jax.experts import MoEStats, fused_experts, fused_moe
from moe_jax.quantization import method_for
from tests.support.cases import experts as cases
from tests.support.oracles.tolerances import assert_rows_close, tolerance

NUM_TOKENS = 16
SCHEMES = ["fp8_tensor", "int8_w8a8"]


def make_inputs(config, num_tokens=NUM_TOKENS, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((num_tokens, config.hidden_size)), config.dtype)
    return x, jnp.asarray(rng.standard_normal((num_tokens, config.num_experts)), jnp.float32)


def assert_same(actual, expected):
    """Same arithmetic in another order of operations: float32 rounding only."""
    assert_rows_close(actual, expected, tolerance("bf16", "float32"), row_scale=float(np.abs(expected).max()))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.sample(2)
def test_config_and_weights_are_pytrees_for_jit(implementation):
    config = cases.make_config("fp8_channel", implementation=(implementation,))
    weights = cases.make_weights(config)
    x, logits = make_inputs(config)
    step = jax.jit(lambda *args: fused_moe(*args))  # no static_argnames: the config is a static node
    assert_same(step(x, logits, weights, config), fused_moe(x, logits, weights, config))
    other = jax.tree.map(lambda leaf: leaf, weights)
    step(x, logits, other, dataclasses.replace(config))
    assert step._cache_size() == 1


@pytest.mark.parametrize("scheme", [pytest.param("fp8_tensor", marks=pytest.mark.slow), "int8_w8a8"])
def test_vmap_over_batches(scheme):
    config = cases.make_config(scheme, implementation=("xla",))
    weights = cases.make_weights(config)
    pairs = [make_inputs(config, 7, seed) for seed in range(3)]
    x, logits = (jnp.stack(parts) for parts in zip(*pairs, strict=True))
    # One batch has almost no work: its loop must stop while the others go on.
    mask = jnp.ones((3, 7), bool).at[1, 1:].set(False)
    one = functools.partial(fused_moe, config=config)
    y = jax.jit(jax.vmap(lambda x, z, m: one(x, z, weights, token_mask=m)))(x, logits, mask)
    for b in range(3):
        assert_same(y[b], one(x[b], logits[b], weights, token_mask=mask[b]))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.sample(2)
def test_vmap_over_layers_and_its_gradient(implementation):
    config = cases.make_config("bf16", implementation=(implementation,))
    layers = [cases.make_weights(config, seed) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    x, logits = make_inputs(config, 5)

    def step(x, w):
        return jnp.sum(fused_moe(x, logits, w, config) ** 2)

    dx, dw = jax.jit(jax.vmap(jax.grad(step, (0, 1)), in_axes=(None, 0)))(x, stacked)
    for n, layer in enumerate(layers):
        want_x, want_w = jax.jit(jax.grad(step, (0, 1)))(x, layer)
        assert_same(dx[n], want_x)
        assert_same(dw.w13.data[n], want_w.w13.data)


def test_scan_over_layers_with_stats():
    config = cases.make_config("int8_w8a16")
    layers = [cases.make_weights(config, seed) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    x, logits = make_inputs(config)

    @jax.jit
    def through(x):
        return jax.lax.scan(lambda x, w: fused_moe(x, logits, w, config, return_stats=True), x, stacked)

    y, stats = through(x)
    expected = x
    for layer in layers:
        expected = fused_moe(expected, logits, layer, config)
    assert_same(y, expected)
    assert isinstance(stats, MoEStats) and stats.load.shape == (2, cases.E)
    assert int(stats.load.sum()) == 2 * NUM_TOKENS * cases.K


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.sample(2)
def test_shard_map_over_tokens_with_gradients(mesh, implementation):
    config = cases.make_config("bf16", has_bias=True, implementation=(implementation,))
    weights = cases.make_weights(config)
    x, logits = make_inputs(config)

    def total(x, z, w):
        return jnp.sum(jnp.sin(fused_moe(x, z, w, config)))

    sharded = jax.shard_map(
        lambda x, z, w: jax.lax.psum(total(x, z, w), "d"), mesh=mesh, in_specs=(P("d"), P("d"), P()), out_specs=P()
    )
    expected = jax.jit(jax.grad(total, (0, 1, 2)))(x, logits, weights)
    found = jax.jit(jax.grad(sharded, (0, 1, 2)))(x, logits, weights)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_same(got, want)


@pytest.mark.parametrize(("scheme", "implementation"), [("fp8_channel", "reference"), ("int8_w8a8", "xla")])
@pytest.mark.sample(2)
def test_shard_map_over_experts(mesh, scheme, implementation):
    # What expert parallelism does on one device: local experts, ids made local, a sum over the mesh outside.
    config = cases.make_config(scheme, num_experts=8, implementation=(implementation,))
    local = dataclasses.replace(config, num_experts=2)
    weights = cases.make_weights(config)
    x, _ = make_inputs(config)
    p, ids = cases.make_routing(NUM_TOKENS, 2, 8)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P(), P("d")), out_specs=P())
    def distributed(x, p, ids, w):
        ids = ids - 2 * jax.lax.axis_index("d")
        return jax.lax.psum(fused_experts(x, p, ids, w, local), "d")

    assert_same(jax.jit(distributed)(x, p, ids, weights), fused_experts(x, p, ids, weights, config))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.sample(2)
def test_export_round_trip(scheme):
    config = cases.make_config(scheme)
    weights = cases.make_weights(config)
    x, logits = make_inputs(config)
    leaves, treedef = jax.tree.flatten(weights)

    @jax.jit
    def step(x, logits, leaves):
        return fused_moe(x, logits, treedef.unflatten(leaves), config)

    blob = jax.export.export(step)(x, logits, leaves).serialize()
    restored = jax.export.deserialize(blob)
    np.testing.assert_array_equal(restored.call(x, logits, leaves), step(x, logits, leaves))


def test_donated_input():
    config = cases.make_config()
    weights = cases.make_weights(config)
    x, logits = make_inputs(config)
    expected = fused_moe(x, logits, weights, config)
    step = jax.jit(lambda x, z, w: fused_moe(x, z, w, config), donate_argnums=0)
    assert_same(step(x + 0.0, logits, weights), expected)


# -- size of the trace, memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_trace_does_not_grow_with_experts(implementation):
    def size(num_experts):
        config = cases.make_config("fp8_block", num_experts=num_experts, implementation=(implementation,))
        x, logits = make_inputs(config)
        weights = method_for(config.scheme).abstract_weights(config)
        return str(jax.make_jaxpr(lambda x, z, w: fused_moe(x, z, w, config))(x, logits, weights)).count(" = ")

    assert size(64) < 1.1 * size(4)  # the same equations; how helpers of equal shapes print differs


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ("bf16", "bfloat16"),
        ("bf16", "float16"),
        ("fp8_channel", "bfloat16"),
        ("fp8_block", "float32"),
        ("int8_w8a8", "bfloat16"),
    ],
)
@pytest.mark.sample(4)
def test_memory_goes_with_rows_not_with_experts(scheme, dtype):
    # XLA CPU would convert all experts to float32 in front of the loop if it were allowed to.
    config = cases.make_config(
        scheme, dtype=dtype, param_dtype=dtype, num_experts=64, hidden_size=256, intermediate_size=128
    )
    x, logits = make_inputs(config, 8)
    weights = method_for(config.scheme).abstract_weights(config)
    compiled = jax.jit(lambda x, z, w: fused_moe(x, z, w, config)).lower(x, logits, weights).compile()
    rows = 8 * config.top_k * config.hidden_size * 4
    one_expert = 3 * config.hidden_size * config.intermediate_size * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * rows + 4 * one_expert < weights.nbytes()
