"""Layers packed for the Hopper kernels, on the references of the kernels, against NumPy float64; routing included.

The layout alone is tested in test_packed_weights.py, the kernels in tests/pallas_kernels.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax import fused_moe
from moe_jax.experts import explain
from moe_jax.experts.hopper import _experts as hopper_experts
from moe_jax.experts.hopper._kernel_layout import kernel_format, to_kernel_layout, to_plain_layout
from moe_jax.quantization import SCHEMES, QuantFormat, Scheme, Strategy, method_for
from tests.support.cases import experts as cases
from tests.support.kernels.traces import equations
from tests.support.kernels.unspecified_rows import with_unspecified_rows
from tests.support.oracles.layer_judge import assert_layer_close

PACKED = [name for name, scheme in SCHEMES.items() if kernel_format(scheme, "bfloat16") is not None]
PACKED += ["w4a16_g32_asym_unpacked", "w4a8_int8_g64_packed", "w3a16_channel_asym", "w5a16_g32"]
PACKED += ["w4a16_g32_asym_actorder", "w4a8_int8_g64_actorder", "w4a8_int8_g64_asym", "w3a8_int8_channel_asym"]
USUAL = ("nvfp4_modelopt", "w4a16_g32_asym", "w4a8_int8", "w4a16_g32_asym_actorder", "w4a8_int8_g64_actorder")
PACKED += ["w8a8_int8_channel_asym", "w4a8_fp8_asym", "w6a8_int8_g32_packed", "w4a8_int8_g32_asym_asym_inputs"]
USUAL += ("w4a8_int8_g64_asym", "w4a8_int8_asym_inputs", "w4a8_fp8_asym", "w8a8_int8_channel_asym")
EVERY = [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in PACKED]


BLOCKS_OF_64 = Scheme(
    "",
    QuantFormat("e4m3", Strategy.BLOCK, block_shape=(64, 64)),
    QuantFormat("e4m3", Strategy.GROUP, group_size=64, dynamic=True),
)


@functools.cache
def layer(scheme, **options):
    """(config, weights, packed weights): sizes that fill no block of the layout and no group of the scheme."""
    sizes = dict(hidden_size=88, intermediate_size=72)
    config = cases.make_config(scheme, dtype="bfloat16", **sizes, **options)
    weights = cases.make_stored_weights(config)
    return config, weights, to_kernel_layout(weights, config)


@pytest.mark.parametrize("scheme", EVERY)
@pytest.mark.sample(9)
def test_rows_against_float64(scheme):
    """What the kernels compute of packed weights: biases or none, gated or not, empty experts, ids outside."""
    config, weights, packed = layer(scheme, **options_of(scheme))
    x = cases.make_tokens(23, config, dtype="bfloat16")
    p, ids = cases.make_routing(23)
    is_routed = (ids >= 0) & (ids < cases.E)
    run = jax.jit(lambda x, p, ids, w: hopper_experts.forward(config, x, p, ids, w, kernels="reference"))
    y = run(x, jnp.where(is_routed, p, 0), jnp.where(is_routed, ids, -1), packed)
    assert_layer_close(y, x, p, ids, weights, config)


@pytest.mark.parametrize("tokens", [3, 23])
@pytest.mark.parametrize("scheme", ["w4a16_g32_asym", "nvfp4_modelopt", "w4a8_int8", "w4a8_int8_g64_actorder"])
@pytest.mark.sample(3)
def test_rows_past_those_of_a_tile_take_no_part(scheme, tokens, monkeypatch):
    """What a product leaves unwritten behind a tile's rows reaches no output, moved rows or not."""
    config, weights, packed = layer(scheme, **options_of(scheme))
    x = cases.make_tokens(tokens, config, dtype="bfloat16")
    p, ids = cases.make_routing(tokens)
    is_routed = (ids >= 0) & (ids < cases.E)
    product = with_unspecified_rows(hopper_experts.grouped_gemm_packed)
    monkeypatch.setattr(hopper_experts, "grouped_gemm_packed", product)
    run = jax.jit(lambda x, p, ids, w: hopper_experts.forward(config, x, p, ids, w, kernels="reference"))
    y = run(x, jnp.where(is_routed, p, 0), jnp.where(is_routed, ids, -1), packed)
    assert_layer_close(y, x, p, ids, weights, config)


@pytest.mark.parametrize("scheme", [name for name in PACKED if "e4m3" in str(Scheme.parse(name).activations)])
def test_no_cast_back_from_e4m3(scheme):
    """XLA drops a cast to e4m3 and the one back from GPU programs, and activations would not be quantized there."""
    config, _, packed = layer(scheme)
    run = functools.partial(hopper_experts.forward, config, kernels="reference")
    jaxpr = jax.make_jaxpr(run)(cases.make_tokens(23, config, dtype="bfloat16"), *cases.make_routing(23), packed)
    casts = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "convert_element_type"]
    assert not [e for e in casts if e.invars[0].aval.dtype == jnp.float8_e4m3fn]


def options_of(scheme):
    turn = PACKED.index(scheme)
    return dict(has_bias=turn % 2 == 0, is_act_and_mul=turn % 3 != 0)


def test_routing_in_the_kernels():
    """M213: from router logits on, whatever the weights are packed from, masked tokens included."""
    scheme = "w4a16_g32_asym"
    config, weights, packed = layer(scheme, **options_of(scheme))
    config = dataclasses.replace(config, scoring_func="sigmoid", routed_scaling_factor=1.5)
    x = cases.make_tokens(21, config, dtype="bfloat16")
    logits = jnp.asarray(np.random.default_rng(4).standard_normal((21, cases.E)), jnp.float32)
    mask = jnp.arange(21) % 5 != 2
    xla = dataclasses.replace(config, implementation=("xla",))
    expected, stats = cases.jitted(functools.partial(fused_moe, return_stats=True), xla)(
        x, logits, weights, token_mask=mask
    )
    run = jax.jit(lambda x, z, w, mask: hopper_experts.forward_layer(config, x, z, w, None, mask, kernels="reference"))
    y, ids, load = run(x, logits, packed, mask)
    np.testing.assert_array_equal(ids, stats.topk_ids)
    np.testing.assert_array_equal(load, stats.load)
    y, expected = np.asarray(y, np.float64), np.asarray(expected, np.float64)
    assert not y[~mask].any() and expected[mask].any(1).sum() >= 15
    assert (np.abs(y - expected).max(1) <= 0.02 * np.abs(expected).max(1)).all()


@pytest.mark.parametrize(
    ("scheme", "dtype", "reason"),
    [
        (BLOCKS_OF_64, "bfloat16", "there is no kernel for scheme 'fp8_block_64x64' yet"),
        ("nvfp4_a16", "float16", "the kernel for scheme 'nvfp4_a16' multiplies in bfloat16, the layer in float16"),
        ("mxfp8_a16", "float16", "the kernel for scheme 'mxfp8_a16' multiplies in bfloat16, the layer in float16"),
    ],
)
def test_explain_names_what_no_kernel_serves(scheme, dtype, reason):
    config = cases.make_config(scheme, dtype=dtype)
    text = explain(config, method_for(config.scheme).abstract_weights(config), 64, "gpu")
    assert "implementation: xla" in text and reason in text


def test_what_has_no_packed_layout_is_refused():
    for scheme in ("bf16", "int8_w8a8", "fp8_channel", "fp8_tensor_token", BLOCKS_OF_64):
        config = cases.make_config(scheme, dtype="bfloat16")
        with pytest.raises(
            NotImplementedError, match=f"scheme '{config.scheme.name}' in bfloat16 has no kernel layout"
        ):
            to_kernel_layout(method_for(config.scheme).abstract_weights(config), config)


def test_act_order_is_packed_and_undone():
    """Codes under their groups, rows of w13 and its bias in the order of w2's columns; exactly, and back."""
    config, weights, packed = layer("w4a16_g32_asym_actorder", has_bias=True)
    back = to_plain_layout(packed)
    assert jax.tree.structure(back) == jax.tree.structure(weights)
    jax.tree.map(np.testing.assert_array_equal, back, weights)
    order = np.asarray(packed.w2.g_idx)
    np.testing.assert_array_equal(np.take_along_axis(np.asarray(weights.w2.g_idx), order, 1)[0], np.arange(72) // 32)
    bias = np.asarray(weights.w13_bias)
    np.testing.assert_array_equal(packed.w13_bias, np.take_along_axis(bias, order[:, None], -1))


def test_groups_of_other_sizes_are_left_as_they_are():
    config, weights, _ = layer("w4a16_g32_asym_actorder", has_bias=True)
    g_idx = weights.w2.g_idx.at[1, 5].set((weights.w2.g_idx[1, 5] + 1) % 3)
    uneven = dataclasses.replace(weights, w2=dataclasses.replace(weights.w2, g_idx=g_idx))
    with pytest.raises(NotImplementedError, match="w2.g_idx of expert 1: groups of other sizes than 32"):
        to_kernel_layout(uneven, config)
    assert "hopper: w2.g_idx of expert 1: groups of other sizes" in explain(config, uneven, 8, "gpu")
