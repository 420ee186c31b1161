"""``moe_jax.merge_lora``: weights that are the sum, what quantizing again loses, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.quantization import method_for
from tests.adapters.test_lora import adapted, filled
from tests.adapters.test_lora_of_models import adapted as adapted_model
from tests.adapters.test_lora_of_models import filled as filled_model
from tests.adapters.test_lora_of_models import load
from tests.adapters.test_lora_over_a_mesh import make_layer as layer_over_mesh
from tests.support.cases.experts import make_config, make_stored_weights
from tests.support.cases.layers import E, H, I, call, inputs, make_layer
from tests.support.cases.meshes import make_parallel
from tests.support.cases.models import assert_logits_close
from tests.support.oracles.experts import addend_numpy, matrix_numpy
from tests.support.oracles.tolerances import assert_rows_close, tolerance
from tests.support.refusals import refuses


def sums_of(layer) -> Any:
    """{w13, w2}: the real sums (E, ...) in float64, by the oracles."""
    weights = layer.lora.added_to(layer.weights.get_value())
    return {
        name: np.stack(
            [matrix_numpy(tensor, e) + np.asarray(0 if lora is None else addend_numpy(lora, e)) for e in range(E)]
        )
        for name, tensor, lora in (("w13", weights.w13, weights.w13_lora), ("w2", weights.w2, weights.w2_lora))
    }


def stored_of(layer):
    weights = layer.weights.get_value()
    return {name: np.stack([matrix_numpy(getattr(weights, name), e) for e in range(E)]) for name in ("w13", "w2")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unquantized_weights_are_the_sum_rounded_once(dtype):
    layer = filled(adapted(make_layer("bf16", param_dtype=dtype, has_bias=True)))
    want, x = sums_of(layer), inputs(9)
    y = call(layer, *x)
    found = moe_jax.merge_lora(layer)
    assert layer.lora is None and [one.name for one in found] == ["FusedMoE w13", "FusedMoE w2"]
    for name, stored in stored_of(layer).items():
        np.testing.assert_allclose(stored, want[name], rtol=2.0**-24 if dtype == "float32" else 2.0**-8, atol=1e-6)
    assert all(one.error < (1e-7 if dtype == "float32" else 2**-9) < 0.05 < one.addend for one in found)
    assert_rows_close(call(layer, *x), y, tolerance("bf16", dtype if dtype == "float32" else "bfloat16"))


SCHEMES = ("w4a16_g8", "fp8_block", "fp8_channel", "int8_w8a8", "nvfp4_a16", "mxfp4", "fp8_tensor", "w8a16_channel")
SCHEMES += ("w4a16_g8_asym", "nvfp4_a16_modelopt", "mxfp8_a16")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.sample(5)
def test_quantized_weights_are_the_sum_quantized_again(scheme):
    """As the scheme's writer quantizes the sums; its error is what is said."""
    layer = filled(adapted(make_layer(scheme, has_bias=True)))
    want = sums_of(layer)
    bias = np.asarray(layer.weights.get_value().w13_bias)
    found = moe_jax.merge_lora(layer)
    method, config = method_for(scheme), layer.config
    w13, w2 = (jnp.asarray(want[name], jnp.float32) for name in ("w13", "w2"))
    biases = (jnp.zeros((E, 2, I), config.param_dtype), jnp.zeros((E, H), config.param_dtype))
    leaves = method.quantize_leaves(w13, w2, biases, config)
    expected = method.process_weights_after_loading(leaves, config)
    assert jax.tree.map(jnp.shape, expected) == jax.tree.map(jnp.shape, layer.weights.get_value())
    np.testing.assert_array_equal(layer.weights.get_value().w13_bias, bias)
    for one, (name, stored) in zip(found, stored_of(layer).items(), strict=True):
        size = np.linalg.norm(want[name])
        np.testing.assert_allclose(one.error, np.linalg.norm(stored - want[name]) / size, rtol=1e-3)
        assert 1e-3 < one.error < 0.2 < one.addend
        quantized = np.stack([matrix_numpy(getattr(expected, name), e) for e in range(E)])
        assert np.linalg.norm(stored - quantized) < 0.2 * one.error * size  # values on a tie of float32 may differ
    assert "adapters" not in layer.explain(4)


def test_a_weight_without_adapter_keeps_its_bits():
    layer = filled(adapted(make_layer("w4a16_g8"), targets="w13"))
    before = layer.weights.get_value().w2
    moe_jax.merge_lora(layer)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(layer.weights.get_value().w2), strict=True):
        np.testing.assert_array_equal(old, new)


def test_static_input_scales_stay():
    config = make_config("fp8_tensor_static", num_experts=E, hidden_size=H, intermediate_size=I)
    layer: Any = moe_jax.FusedMoE(
        E, H, I, top_k=2, scheme="fp8_tensor_static", dtype=jnp.float32, param_dtype=jnp.float32
    )
    layer.set_weights(make_stored_weights(config))
    filled(adapted(layer))
    before, want = layer.weights.get_value(), sums_of(layer)
    moe_jax.merge_lora(layer)
    after = layer.weights.get_value()
    for name in ("w13", "w2"):
        old, new = getattr(before, name), getattr(after, name)
        assert (old.input_scale == new.input_scale).all() and (old.data != new.data).any()
        assert np.linalg.norm(stored_of(layer)[name] - want[name]) < 0.05 * np.linalg.norm(want[name])


@pytest.mark.parametrize("scheme", ["w4a16_g8", "bf16"])
@pytest.mark.parametrize(
    "options", [{}, dict(share_a=True), dict(placement="round_robin")], ids=["linear", "shared", "turns"]
)
@pytest.mark.sample(2)
def test_over_a_mesh_as_on_one_device(scheme, options):
    one = layer_over_mesh(scheme, share_a=options.get("share_a", False))
    many = layer_over_mesh(scheme, make_parallel("ep4-tp2"), **options)
    shardings = [leaf.sharding for leaf in jax.tree.leaves(many.weights.get_value())]
    assert moe_jax.merge_lora(one) == moe_jax.merge_lora(many)
    assert [leaf.sharding for leaf in jax.tree.leaves(many.weights.get_value())] == shardings
    x, z = inputs(16)
    assert_rows_close(many(x, z), one(x, z), tolerance(moe_jax.Scheme.parse(scheme), "float32"))


@pytest.mark.parametrize("mesh", [False, True])
@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "fp8_channel"])
def test_models(case, prompt, mesh, quantize):
    mesh = jax.make_mesh((2, 2), ("expert", "tensor")) if mesh else None
    model = filled_model(adapted_model(load(case("qwen3").directory, mesh=mesh, quantize=quantize)))
    ids = prompt(2, 40)
    y = np.asarray(model.score(ids))
    found = moe_jax.merge_lora(model)
    assert len(found) == 2 * (2 + 4) and found[-1].name == "layers.1.self_attn.o_proj"
    assert not nnx.state(model, moe_jax.LoRAParam)
    if quantize is None:
        assert_logits_close(model.score(ids), y, 3e-5)
    assert np.abs(model.score(ids) - y).mean() < 0.02 * np.ptp(y)


def test_refusals():
    layer = make_layer("int8_w8a16")
    refuses(ValueError, "a FusedMoE without adapters has nothing to merge", moe_jax.merge_lora, layer)
    config = make_config("w4a16_g8_actorder", num_experts=E, hidden_size=H, intermediate_size=I)
    layer = moe_jax.FusedMoE(E, H, I, top_k=2, scheme="w4a16_g8_actorder", dtype=jnp.float32, param_dtype=jnp.float32)
    adapted(layer)
    refuses(ValueError, "has no weights yet; load them before merging", moe_jax.merge_lora, layer)
    layer.set_weights(make_stored_weights(config))
    refuses(NotImplementedError, "act-order.*keep the adapter", moe_jax.merge_lora, layer)
    assert layer.lora is not None
