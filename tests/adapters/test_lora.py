"""``moe_jax.lora`` on layers and models: what starts, what trains, what stays, and what is refused."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import moe_jax
from tests.support.cases.layers import E, H, I, abstract_layer, call, checkpoint_pairs, inputs, make_layer
from tests.support.refusals import refuses

RANK = 4
ADAPTERS = nnx.DiffState(0, moe_jax.LoRAParam)


def adapted(layer, **options) -> Any:
    return moe_jax.lora(layer, **(dict(rank=RANK, alpha=8, rngs=nnx.Rngs(7)) | options))


def filled(layer, seed=9) -> Any:
    """The same with B that is not zero."""
    rng = np.random.default_rng(seed)
    for name in ("w13_b", "w2_b"):
        variable = getattr(layer.lora, name)
        if variable is not None:
            variable.set_value(jnp.asarray(rng.standard_normal(variable.shape) * 0.3, variable.dtype))
    return layer


def values_of(module, kind: Any = ...):
    return {path: np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(module, kind))}


def train(model, run, steps=20):
    """The losses of fitting a constant with the adapters alone."""
    optimizer = nnx.Optimizer(model, optax.adam(2e-2), wrt=moe_jax.LoRAParam)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((run(model) - 1) ** 2), argnums=ADAPTERS)(model)
        optimizer.update(model, grads)
        return loss

    with jax.numpy_dtype_promotion("standard"):  # for Adam, which divides floats by integers
        return [float(step(model, optimizer)) for _ in range(steps)]


@pytest.mark.parametrize("scheme", ["w4a16_g8", "bf16", "fp8_block", "nvfp4_a16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.sample(4)
def test_adapters_train_and_nothing_else(scheme, dtype):
    rngs = nnx.Rngs(0)
    model = moe_jax.MoEBlock(make_layer(scheme, has_bias=True), nnx.Linear(H, E, rngs=rngs))
    x, _ = inputs(16)
    before, y = values_of(model), model(x)
    adapted(model, dtype=dtype)
    np.testing.assert_array_equal(model(x), y)  # B is zero
    start = values_of(model, moe_jax.LoRAParam)
    assert len(start) == 4 and {leaf.dtype.name for leaf in start.values()} == {dtype}
    losses = train(model, lambda model: model(x))
    assert losses[-1] < 0.3 * losses[0]
    after = values_of(model)
    for path, leaf in before.items():
        np.testing.assert_array_equal(leaf, after[path])
    for path, leaf in start.items():
        assert (leaf != after[path]).mean() > 0.5, path


def test_shapes_start_and_scale():
    layer = adapted(make_layer("int8_w8a16"), rank=6, alpha=3)
    lora = layer.lora
    shapes = dict(w13_a=(E, 1, 6, H), w13_b=(E, 2, I, 6), w2_a=(E, 6, I), w2_b=(E, H, 6))
    assert {name: getattr(lora, name).shape for name in shapes} == shapes
    for name, width in (("w13_a", H), ("w2_a", I)):
        a = np.asarray(getattr(lora, name)[...])
        assert 0.9 * width**-0.5 < np.abs(a).max() <= width**-0.5
        assert np.unique(a).size > 0.9 * a.size
    assert not lora.w13_b[...].any() and not lora.w2_b[...].any()
    weights = lora.added_to(layer.weights.get_value())
    assert (weights.w13_lora.scale == 0.5).all() and (weights.w2_lora.scale == 0.5).all()


@pytest.mark.parametrize("share_a", [False, True])
def test_an_adapter_is_its_sum_with_the_weights(share_a):
    """A layer whose unquantized weights have ``alpha / rank * B A`` added gives the same."""
    layer = filled(adapted(make_layer("bf16", param_dtype=jnp.float32), share_a=share_a))
    x, z = inputs(9)
    lora = layer.lora
    assert lora.w13_a.shape[0] == lora.w2_a.shape[0] == (1 if share_a else E)
    y = call(layer, x, z)
    a13, b13, a2, b2 = (
        np.broadcast_to(a, (E, *a.shape[1:])).astype(np.float64)
        for a in (lora.w13_a[...], lora.w13_b[...], lora.w2_a[...], lora.w2_b[...])
    )
    weights, scale = layer.weights, 8 / RANK
    w13 = np.asarray(weights.w13[...]) + scale * np.einsum("egir,ezrh->egih", b13, a13)
    w2 = np.asarray(weights.w2[...]) + scale * np.einsum("ehr,eri->ehi", b2, a2)
    merged: Any = make_layer("bf16", param_dtype=jnp.float32)
    merged.weights.w13.set_value(jnp.asarray(w13, jnp.float32))
    merged.weights.w2.set_value(jnp.asarray(w2, jnp.float32))
    np.testing.assert_allclose(y, call(merged, x, z), rtol=0, atol=3e-5 * np.abs(y).max())


def test_gradients_of_a_shared_a_are_summed_over_experts():
    layer = filled(adapted(make_layer("w4a16_g8"), share_a=True))
    own = filled(adapted(make_layer("w4a16_g8")))
    x, z = inputs(9)
    for name in ("w13_a", "w2_a"):
        shared = getattr(layer.lora, name)[...]
        getattr(own.lora, name).set_value(jnp.broadcast_to(shared, (E, *shared.shape[1:])))
    loss = nnx.jit(nnx.grad(lambda layer: jnp.sum(jnp.sin(layer(x, z))), argnums=ADAPTERS))
    found, wanted = loss(layer)["lora"], loss(own)["lora"]
    for name in ("w13_a", "w2_a"):
        want = wanted[name][...].sum(0, keepdims=True)
        np.testing.assert_allclose(found[name][...], want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("target", ["w13", "w2"])
def test_one_target(target):
    layer = filled(adapted(make_layer("int8_w8a16"), targets=target))
    held = {name for name in ("w13_a", "w13_b", "w2_a", "w2_b") if getattr(layer.lora, name) is not None}
    assert held == {f"{target}_a", f"{target}_b"}
    x, z = inputs(9)
    y = call(layer, x, z)
    layer.set_lora(None)
    assert np.abs(y - call(layer, x, z)).max() > 1e-2


def test_remat():
    layer = filled(adapted(make_layer("fp8_block")))
    x, z = inputs(9)

    def loss(layer, run):
        return jnp.sum(jnp.sin(run(layer)))

    plain, again = (
        nnx.jit(nnx.grad(lambda layer, run=run: loss(layer, run), argnums=ADAPTERS))(layer)
        for run in (lambda layer: layer(x, z), nnx.remat(lambda layer: layer(x, z)))
    )
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        assert np.abs(one).max() > 0
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * np.abs(one).max())


def test_reloads_keep_the_adapter_and_compile_nothing():
    layer = adapted(abstract_layer("fp8_channel"))
    layer.load_weights(checkpoint_pairs())
    layer.process_weights_after_loading()
    filled(layer)
    x, z = inputs(9)
    run: Any = jax.jit(lambda layer, x, z: layer(x, z))
    y = run(layer, x, z)
    layer.reload_weights(checkpoint_pairs(1))
    other = run(layer, x, z)
    assert run._cache_size() == 1 and np.abs(y - other).max() > 1e-2
    fresh = abstract_layer("fp8_channel")
    fresh.load_weights(checkpoint_pairs(1))
    fresh.process_weights_after_loading()
    np.testing.assert_array_equal(other, run(filled(adapted(fresh)), x, z))


def test_optimizers_do_not_warn_of_experts_that_have_adapters():
    """``wrt=nnx.Param`` takes adapters too."""
    layer = adapted(make_layer("fp8_block"))
    nnx.Optimizer(layer, optax.sgd(1.0), wrt=nnx.Param)  # FrozenExpertsWarning would be an error


def test_explain_says_it():
    text = adapted(make_layer("fp8_block"), targets="w2").explain(8)
    assert "adapters: rank 4 on w2, added in the same call" in text


def test_a_backend_without_adapters_is_refused_by_name():
    layer = make_layer("fp8_channel", dtype=jnp.bfloat16, implementation="portable")
    adapted(layer)
    x, z = inputs(9)
    with pytest.raises(NotImplementedError, match=r"portable: takes no adapters \(LoRA\)"):
        layer(x.astype(jnp.bfloat16), z)


def test_quantized_weights_have_no_gradient_beside_adapters():
    layer = filled(adapted(make_layer("fp8_channel")))
    x, z = inputs(9)
    loss = nnx.grad(
        lambda layer: jnp.sum(layer(x, z)), argnums=nnx.DiffState(0, moe_jax.QuantizedParam), allow_int=True
    )
    refuses(TypeError, r"gradient requested for weights\.w13\.data \(float8_e4m3fn\)", loss, layer)


WRONG = {
    "rank 0": (dict(rank=0), ValueError, "rank=0, expected an integer >= 1"),
    "rank of another type": (dict(rank=2.0), TypeError, "rank=2.0, expected an integer >= 1"),
    "alpha 0": (dict(alpha=0), ValueError, "alpha=0.0, expected a number above 0"),
    "alpha of another type": (dict(alpha="2"), TypeError, "alpha='2', expected a number above 0"),
    "alpha NaN": (dict(alpha=float("nan")), ValueError, "alpha=nan, expected a number above 0"),
    "a target that does not exist": (dict(targets=("w13", "w3")), ValueError, "targets has 'w3', expected some of"),
    "no target": (dict(targets=()), ValueError, "targets has (), expected some of"),
    "targets of another type": (dict(targets=3), ValueError, "targets has 3, expected some of"),
    "dtype": (dict(dtype=jnp.int8), ValueError, "dtype=int8, expected bfloat16 or float32"),
    "rngs": (dict(rngs=None), TypeError, "rngs has type NoneType, expected flax.nnx.Rngs"),
    "share_a": (dict(share_a=1), TypeError, "share_a=1, expected True or False"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    options, error, text = WRONG[case]
    layer = make_layer("int8_w8a16")
    refuses(error, re.escape(text), adapted, layer, **options)
    assert layer.lora is None


def test_wrong_modules():
    refuses(TypeError, "module has type int, expected a FusedMoE", adapted, 3)
    linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    refuses(ValueError, "a Linear without FusedMoE and attention has nothing to adapt", adapted, linear)
    layer = adapted(make_layer("int8_w8a16", name="mine"))
    refuses(ValueError, "FusedMoE 'mine' has an adapter already", adapted, layer)
    traced = jax.jit(lambda layer: call(adapted(layer), *inputs(3)))
    refuses(TypeError, "lora inside jax.jit", traced, make_layer("int8_w8a16"))
