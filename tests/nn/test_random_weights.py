"""Random experts: the memory that it takes to make them, and that their values depend on key and number alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.experts._choice import BACKENDS
from moe_jax.nn import _random_weights
from moe_jax.parallel import _sharding
from moe_jax.parallel._sharding import kernel_shares, lay_out
from moe_jax.quantization import SCHEMES

MADE_ONLINE = [
    name for name, scheme in SCHEMES.items() if not (scheme.activations and scheme.activations.needs_input_scale)
]
PACKED = ["w4a16_g32", "nvfp4_a16", "mxfp4_a16"]


def make(scheme, num_experts=6, *, is_split=False, **options):
    if is_split:
        mesh = jax.make_mesh((4, 2), ("e", "t"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        options |= dict(mesh=mesh, expert_axis="e", tensor_axis="t")
    options = dict(hidden_size=128, intermediate_size=192, top_k=2, rngs=nnx.Rngs(0)) | options
    return moe_jax.FusedMoE(num_experts, scheme=scheme, **options)


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape) and np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("scheme", ["bf16", "fp8_block", "nvfp4_dynamic", "w4a16_g128", "int8_w8a8"])
def test_temporaries_are_those_of_one_expert(scheme, is_split):
    """More experts take the memory of their weights, and on a CPU that of a copy of what is FP8."""

    def program(num_experts):
        build = functools.partial(make, scheme, num_experts, is_split=is_split, intermediate_size=256)
        return jax.jit(lambda: nnx.state(build()).weights).lower().compile().memory_analysis()

    few, many = program(8), program(40)
    copied = many.output_size_in_bytes - few.output_size_in_bytes if scheme.startswith(("fp8", "nvfp4")) else 0
    one_expert = 4 * 3 * 128 * 256
    assert many.temp_size_in_bytes - few.temp_size_in_bytes <= copied + one_expert / 4
    assert few.temp_size_in_bytes <= few.output_size_in_bytes + 5 * one_expert


@pytest.mark.sample(7)
@pytest.mark.parametrize("scheme", MADE_ONLINE)
def test_a_key_gives_the_same_experts_everywhere(scheme):
    """In a trace, outside, and over a mesh with an empty slot and padding, bit for bit."""
    layer, split = make(scheme, has_bias=True), make(scheme, has_bias=True, is_split=True)
    traced = jax.jit(lambda: nnx.split(make(scheme, has_bias=True))[1])()
    assert_same(traced, nnx.split(layer)[1])
    own, placed = layer.weights.get_value(), split.weights.get_value()
    expected = lay_out(own, split.config, split.placement.get_value(), split.parallel)
    assert_same(placed, expected)
    assert jax.tree.map(lambda leaf: leaf.sharding, placed) == jax.tree.map(lambda leaf: leaf.sharding, expected)
    in_trace = jax.jit(lambda: nnx.split(make(scheme, has_bias=True, is_split=True))[1])()
    assert_same(in_trace, nnx.split(split)[1])


@pytest.mark.parametrize("scheme", PACKED)
def test_experts_are_laid_out_in_turn(scheme, monkeypatch):
    """One by one they get the layout that all of them get at once; a device lays out its share."""
    plain, split = make(scheme), make(scheme, is_split=True)
    backend = BACKENDS["hopper"]
    monkeypatch.setattr(_random_weights, "preferred_layout", lambda *_: backend)
    monkeypatch.setattr(_random_weights, "share_layout", lambda *_: backend)
    assert_same(make(scheme).weights.get_value(), backend.kernel_layout(plain.weights.get_value(), plain.config))
    arguments = split.weights.get_value(), split.config, split.placement.get_value(), split.parallel
    assert_same(make(scheme, is_split=True).weights.get_value(), kernel_shares(backend, *arguments))


def test_a_reload_finds_the_shardings_of_random_experts(monkeypatch):
    """As they are spelled: to jax.jit, P("e") and P("e", None) are two programs."""
    mesh = jax.make_mesh((2, 2), ("e", "t"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    plain = make("nvfp4_a16").weights.get_value()
    for module in (_random_weights, _sharding):
        monkeypatch.setattr(module, "share_layout", lambda *_: BACKENDS["hopper"])
    layer = make("nvfp4_a16", mesh=mesh, expert_axis="e")
    reloaded = lay_out(plain, layer.config, layer.placement.get_value(), layer.parallel)
    for a, b in zip(jax.tree.leaves(layer.weights.get_value()), jax.tree.leaves(reloaded), strict=True):
        assert a.sharding == b.sharding


def test_experts_are_normal_and_differ():
    """Variance 1/K, whatever expert and product; no number comes twice."""
    weights = make(None, 5, param_dtype=jnp.float32).weights.get_value()
    w13, w2 = np.asarray(weights.w13.data).reshape(5, -1), np.asarray(weights.w2.data).reshape(5, -1)
    for expert in range(5):
        np.testing.assert_allclose(w13[expert].std() * 128**0.5, 1, atol=0.02)
        np.testing.assert_allclose(w2[expert].std() * 192**0.5, 1, atol=0.02)
    together = np.concatenate([w13 * 128**0.5, w2 * 192**0.5], axis=1)
    assert np.abs(np.corrcoef(together) - np.eye(5)).max() < 0.02
    assert np.abs(np.corrcoef(w13[:, : w2.shape[1]].ravel(), w2.ravel())[0, 1]) < 0.02
    other = make(None, 5, param_dtype=jnp.float32, rngs=nnx.Rngs(1)).weights.get_value()
    assert np.abs(np.corrcoef(np.asarray(other.w13.data).ravel(), w13.ravel())[0, 1]) < 0.02


def test_layers_that_differ_in_names_share_a_program():
    make("fp8_channel", 3, name="layers.0")
    programs = _random_weights._experts._cache_size()
    make("fp8_channel", 3, name="layers.1", activation="gelu", top_k=1)
    assert _random_weights._experts._cache_size() == programs


@pytest.mark.parametrize("place", ["another device", "the mesh", "raw"])
def test_a_key_may_lie_anywhere(place):
    split = make("fp8_channel", is_split=True)
    key = dict(
        raw=jax.random.PRNGKey(0),
        **{"another device": jax.device_put(jax.random.key(0), jax.devices()[3])},
        **{"the mesh": jax.device_put(jax.random.key(0), jax.NamedSharding(split.parallel.mesh, jax.P()))},
    )[place]
    assert_same(
        make("fp8_channel", is_split=True, rngs=nnx.Rngs(params=key)).weights.get_value(), split.weights.get_value()
    )
