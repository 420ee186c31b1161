"""What flax's filters and optimizers see of a layer: experts that train, and experts that stay."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import moe_jax
from moe_jax import checkpointing
from moe_jax.nn import FrozenExpertsWarning
from tests.support.cases.layers import E, H, I, inputs, make_layer


def block(scheme, seed=0):
    """Router and shared experts of flax around experts; called as ``model(x)``."""
    rngs = nnx.Rngs(seed)
    shared = nnx.Sequential(nnx.Linear(H, I, rngs=rngs), nnx.silu, nnx.Linear(I, H, rngs=rngs))
    return moe_jax.MoEBlock(make_layer(scheme, has_bias=True), nnx.Linear(H, E, rngs=rngs), shared)


def train(model, steps=25, optimizer=None):
    """The losses of fitting a constant."""
    x, _ = inputs(16)
    optimizer = nnx.Optimizer(model, optimizer or optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    with jax.numpy_dtype_promotion("standard"):  # for Adam, which divides floats by integers
        return [float(step(model, optimizer)) for _ in range(steps)]


def leaves_of(layer):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(layer.weights.get_value())]


def test_unquantized_experts_train():
    """With an optimizer that keeps state for each of them, biases too."""
    model = block("bf16")
    before = leaves_of(model.experts)
    losses = train(model)
    assert losses[-1] < 0.2 * losses[0]
    assert len(before) == 4
    for old, new in zip(before, leaves_of(model.experts), strict=True):
        assert old.dtype == new.dtype and (old != new).mean() > 0.5


@pytest.mark.filterwarnings("ignore::moe_jax.nn.FrozenExpertsWarning")
@pytest.mark.parametrize("scheme", ["fp8_block", "w4a16_g8", "int8_w8a8"])
def test_what_is_around_frozen_experts_trains(scheme):
    model = block(scheme)
    before, router = leaves_of(model.experts), np.asarray(model.router.kernel[...])
    losses = train(model)
    assert losses[-1] < 0.2 * losses[0]
    assert (np.asarray(model.router.kernel[...]) != router).any()
    for old, new in zip(before, leaves_of(model.experts), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("graph", [True, False])
def test_an_optimizer_says_once_that_experts_stay(graph):
    """One line for two layers, also of an optimizer without state; another for the next optimizer."""
    models = nnx.List([make_layer("fp8_block", name="first"), make_layer("int8_w8a16", name="second")])
    for transformation in (optax.sgd(1.0), optax.adam(1.0)):
        with pytest.warns(FrozenExpertsWarning, match="experts of FusedMoE 'first' are quantized .fp8_block.") as said:
            nnx.Optimizer(models, transformation, wrt=nnx.Param, graph=graph)
        assert len(said) == 1 and said[0].filename == __file__


@pytest.mark.parametrize("graph", [True, False])
def test_an_optimizer_for_adapters_says_that_there_are_none(graph):
    models = nnx.List([make_layer("fp8_block"), make_layer("int8_w8a16")])
    with pytest.warns(FrozenExpertsWarning, match=r"the model has none, so nothing trains; moe_jax\.lora") as said:
        nnx.Optimizer(models, optax.adam(1.0), wrt=moe_jax.LoRAParam, graph=graph)
    assert len(said) == 1 and said[0].filename == __file__
    moe_jax.lora(models[1], rank=2, rngs=nnx.Rngs(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nnx.Optimizer(models, optax.adam(1.0), wrt=moe_jax.LoRAParam, graph=graph)


def test_an_optimizer_is_silent_where_nothing_stays_unasked():
    """Unquantized experts move. A filter that takes no experts leaves them on purpose. Reading state is no training."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nnx.Optimizer(block("bf16"), optax.adam(1.0), wrt=nnx.Param)
        nnx.Optimizer(block("fp8_block"), optax.adam(1.0), wrt=nnx.PathContains("router"))
        nnx.state(block("fp8_block"), nnx.Param)


@pytest.mark.parametrize("scheme", ["fp8_block", "w4a16_g8"])
def test_a_gradient_of_quantized_experts_is_one_error(scheme):
    """However an optimizer of optax alone would get one: nothing moves scales, or stays, in silence."""
    layer = make_layer(scheme)
    x, logits = inputs(4)
    structure, experts, rest = nnx.split(layer, moe_jax.QuantizedParam, ...)
    whole = nnx.split(layer)[1]

    def loss(layer):
        return jnp.mean(layer(x, logits) ** 2)

    ways = (
        lambda: nnx.grad(loss, argnums=nnx.DiffState(0, moe_jax.QuantizedParam))(layer),
        lambda: jax.grad(lambda experts: loss(nnx.merge(structure, experts, rest)))(experts),
        lambda: jax.grad(lambda experts: loss(nnx.merge(structure, experts, rest)), allow_int=True)(experts),
        lambda: jax.grad(lambda state: loss(nnx.merge(nnx.graphdef(layer), state)), allow_int=True)(whole),
    )
    for way in ways:
        with pytest.raises(TypeError, match="gradient requested for weights.w13.*quantized|but got int32"):
            way()
    assert not jax.tree.leaves(nnx.split(layer, nnx.Param, ...)[1])


def test_variables_by_type():
    """Biases are parts of the experts: of quantized ones they stay as well."""

    def paths(layer, kind):
        return {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(layer, kind))}

    unquantized, quantized = make_layer("bf16", has_bias=True), make_layer("fp8_block", has_bias=True)
    assert paths(unquantized, nnx.Param) == {f"weights.{name}" for name in ("w13", "w2", "w13_bias", "w2_bias")}
    assert paths(quantized, moe_jax.QuantizedParam) == {"weights"}
    assert not paths(unquantized, moe_jax.QuantizedParam) and not paths(quantized, nnx.Param)


def test_saves_of_unquantized_layers_have_the_leaves_that_they_had_before(tmp_path):
    """In the record and in Orbax's own files: otherwise saves that exist would not restore."""
    checkpointing.save(make_layer("bf16", has_bias=True), tmp_path)
    names = ["version", "weights.w13.data", "weights.w13_bias", "weights.w2.data", "weights.w2_bias"]
    record = json.loads((tmp_path / checkpointing.RECORD_NAME).read_text())
    assert sorted(key.replace("['", "").replace("']", "") for key in record["leaves"]) == names
    stored = json.loads((tmp_path / "state" / "_METADATA").read_text())["tree_metadata"].values()
    named = {".".join(part["key"] for part in entry["key_metadata"][:2]) for entry in stored}
    assert named == {"version", "weights.w13", "weights.w2", "weights.w13_bias", "weights.w2_bias"}
    kept = [entry for entry in stored if entry["value_metadata"]["value_type"] != "None"]
    assert sorted(".".join(part["key"] for part in entry["key_metadata"]) for entry in kept) == names
