"""int4 weights with int8 or e4m3 activations: storage bit by bit, and layers with all that vLLM's kernels leave out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax import fused_experts, fused_moe
from moe_jax.quantization import QuantFormat, QuantizedTensor, Strategy, dequantize_tensor, method_for
from moe_jax.routing import RoutingParams, route
from pallas_kernels.common import packing
from tests.support.cases import experts as cases
from tests.support.oracles.layer_judge import assert_layer_close
from tests.support.refusals import refuses

SIZES = dict(hidden_size=40, intermediate_size=24)


def test_worked_example_of_nibbles():
    """Spec 8.6.1: [7, -8, 3, 1] plus 8 are the nibbles 15, 0, 11, 9, the even column in the low one."""
    words = packing.pack_words(np.array([[15, 0, 11, 9]], np.uint8), 4)
    assert np.asarray(words).view(np.uint8)[0, :2].tolist() == [0x0F, 0x9B]
    method = method_for("w4a8_int8_channel_packed")
    tensor = QuantizedTensor(
        jnp.asarray(words), jnp.asarray([0.1], jnp.float32), fmt=method.weight_format, num_columns=4
    )
    np.testing.assert_array_equal(dequantize_tensor(tensor), np.float32([[7, -8, 3, 1]]) * np.float32(0.1))


def test_worked_example_of_scales_in_e4m3():
    """Spec 8.6.4: vLLM folds group scales into e4m3 operands, which rounds them; ours multiply in float32, exactly."""
    scales = jnp.asarray([[0.01, 0.02, 0.04]], jnp.bfloat16).astype(jnp.float32)
    channel = np.float32(scales.max() / 448)
    s8 = np.asarray((scales / channel).astype(jnp.float8_e4m3fn).astype(jnp.float32))
    np.testing.assert_array_equal(s8, [[112, 224, 448]])
    np.testing.assert_allclose([channel, 8 * channel], [8.93729e-5, 7.14983e-4], rtol=1e-5)
    folded = np.asarray(jnp.asarray(s8 / 8).astype(jnp.float8_e4m3fn).astype(jnp.float32))
    np.testing.assert_array_equal(folded, [[14, 28, 56]])
    codes = np.tile(np.arange(-8, 8, dtype=np.int8), 3)[None]
    fmt = QuantFormat("int4", Strategy.GROUP, 16)
    ours = np.asarray(dequantize_tensor(QuantizedTensor(jnp.asarray(codes), scales, fmt=fmt)))
    exact = codes.astype(np.float64) * np.repeat(np.asarray(scales, np.float64), 16, axis=1)
    np.testing.assert_array_equal(ours, exact.astype(np.float32))
    operand = jnp.asarray(codes * np.repeat(folded, 16, axis=1), jnp.float32).astype(jnp.float8_e4m3fn)
    theirs = np.asarray(operand.astype(jnp.float32)) * 8 * channel
    assert 0.01 < np.abs(theirs - exact).max() / np.abs(exact).max() < 1 / 16


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("w4a8_int8_asym_inputs", dict(activation="silu", apply_router_weight_on_input=True, top_k=1)),
        ("w4a8_int8_channel", dict(activation="swigluoai")),
        ("w4a8_int8_asym_inputs", dict(activation="swiglustep")),
        ("w4a8_int8_channel", dict(activation="relu2", is_act_and_mul=False)),
    ],
)
@pytest.mark.sample(3)
def test_every_activation_and_the_weight_on_the_input(scheme, options):
    """M168, M169, M171, M172: activations by name and with the field's formulas, the router's weight on x, no gate."""
    config = cases.make_config(scheme, has_bias=True, implementation=("xla",), **SIZES, **options)
    x, p, ids, weights = cases.make_call(config, 12)
    found = np.asarray(jax.jit(lambda x: fused_experts(x, p, ids, weights, config))(x))
    assert_layer_close(found, x, p, ids, weights, config, kernels=False)


@pytest.mark.parametrize("scheme", ["w4a8_int8_channel", "w4a8_int8"])
@pytest.mark.parametrize("code", [8, -9, 100, -128])
def test_codes_of_more_bits_are_named(scheme, code):
    """Packing would cut them off, other backends would not."""
    config = cases.make_config(scheme, num_experts=3, hidden_size=128, intermediate_size=128)
    method = method_for(config.scheme)
    leaves = {name: np.ones(spec.shape, spec.dtype) for name, spec in method.create_weights(config).items()}
    for leaf in ("w13_weight", "w2_weight"):
        leaves[leaf][0, 0, :2] = -8, 7
    method.process_weights_after_loading(leaves, config)
    leaves["w13_weight"][2, -1, 1] = code
    text = rf"w13_weight: expert 2 \(w3\) has code {code} at \(2, 255, 1\), expected -8 to 7 of int4 \(1 of"
    refuses(ValueError, text, method.process_weights_after_loading, leaves, config)
    refuses(ValueError, text, method.process_weights_after_loading, jax.tree.map(jnp.asarray, leaves), config)


def test_the_full_router():
    """M170: groups, sigmoid scores, correction bias and scaling reach a W4A8 layer like any other."""
    config = cases.make_config(
        "w4a8_int8_asym_inputs",
        num_experts=6,
        **SIZES,
        scoring_func="sigmoid",
        use_grouped_topk=True,
        num_expert_group=3,
        topk_group=2,
        routed_scaling_factor=2.5,
    )
    weights, x = cases.make_weights(config), cases.make_tokens(10, config)
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((10, 6)), jnp.float32)
    params = RoutingParams(correction_bias=jnp.asarray(rng.standard_normal(6), jnp.float32))
    routed = jax.jit(lambda z: route(z, config, params=params))(logits)
    found = np.asarray(jax.jit(lambda x, z: fused_moe(x, z, weights, config, routing=params))(x, logits))
    assert_layer_close(found, x, routed.topk_weights, routed.topk_ids, weights, config, kernels=False)
