"""Spec 8.14, method by method: zeros, numbers of very different size, and what is not a number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax import MoEConfig, Scheme, fused_experts
from moe_jax.quantization import Strategy, dequantize_tensor, method_for

E, H, INTER = 3, 64, 32
# Largest error of the greatest weight of a scale's extent.
METHODS = {
    "bf16": 0.0,
    "fp8_tensor": 1 / 16,
    "fp8_channel": 1 / 16,
    "fp8_block": 1 / 16,
    "int8_w8a8": 1 / 127,
    "int8_w8a16": 1 / 127,
    "w3a16_g32": 1 / 7,
    "w4a16_channel_asym": 1 / 15,
    "w4a8_int8": 1 / 15,
    "w4a8_fp8_channel": 1 / 15,
    "nvfp4_dynamic": 1 / 6,
    "mxfp4": 1 / 3,
    "mxfp8": 1 / 16,
}
# One of each way to scale; the others take longer than they tell.
USUAL = ("fp8_tensor", "fp8_channel", "fp8_block", "int8_w8a8", "w4a16_channel_asym", "nvfp4_dynamic", "mxfp8")
EACH = [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
ZERO, LARGE, SMALL = range(E)


@functools.cache
def make(name):
    """A layer whose experts are all zeros, of about 1e6, and of about 1e-6."""
    config = MoEConfig(
        E, 1, H, INTER, scheme=Scheme.parse(name), dtype="float32", param_dtype="float32", implementation=("reference",)
    )
    rng = np.random.default_rng(0)
    size = np.float32([0, 1e6, 1e-6])
    w13 = rng.standard_normal((E, 2, INTER, H)).astype(np.float32) * size[:, None, None, None]
    w2 = rng.standard_normal((E, H, INTER)).astype(np.float32) * size[:, None, None]
    method = method_for(config.scheme)
    leaves = method.quantize_leaves(w13, w2, None, config)
    return config, method, leaves, (w13, w2)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.sample(6)
def test_zeros_and_extremes(name):
    config, method, leaves, full = make(name)
    weights = method.process_weights_after_loading(leaves, config)
    for tensor, expected in zip((weights.w13, weights.w2), full, strict=True):
        found = np.asarray(dequantize_tensor(tensor))
        assert not found[ZERO].any() and np.isfinite(found).all()
        for scale in (tensor.scale, tensor.global_scale):
            if scale is not None and scale.dtype == jnp.float32:
                assert np.isfinite(scale).all()
        for expert in (LARGE, SMALL):
            largest = np.abs(expected[expert]).max()
            if name == "fp8_block" and expert == SMALL:  # vLLM's floor: 1e-4 is the least amax of a block
                largest = 1e-4
            assert np.abs(found[expert] - expected[expert]).max() <= METHODS[name] * largest * 1.001, expert


@pytest.mark.parametrize("name", [name for name in EACH if "bf16" not in str(name)])
def test_scales_of_a_checkpoint(name):
    """Scale 0 means weights of 0; NaN and infinity are refused with leaf, expert and projection."""
    config, method, leaves, _ = make(name)
    leaves = {key: np.array(leaf) for key, leaf in leaves.items()}
    scale = leaves["w2_weight_scale"]
    nan = np.array(255, np.uint8) if scale.dtype == np.uint8 else np.array(np.nan).astype(scale.dtype)
    kept = scale[SMALL].copy()
    scale[SMALL] = nan
    with pytest.raises(ValueError, match=rf"w2_weight_scale: expert {SMALL} \(w2\) has scale"):
        method.process_weights_after_loading(leaves, config)
    if scale.dtype == np.uint8:
        return  # e8m0 has no zero
    scale[SMALL] = np.zeros_like(kept)
    weights = method.process_weights_after_loading(leaves, config)
    assert not np.asarray(dequantize_tensor(weights.w2))[SMALL].any()
    if scale.dtype == np.float32:
        scale[SMALL] = np.inf
        with pytest.raises(ValueError, match=rf"w2_weight_scale: expert {SMALL} \(w2\) has scale inf"):
            method.process_weights_after_loading(leaves, config)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.sample(3)
def test_activations_that_are_no_numbers(name):
    """NaN and infinity stay in their token; only a scale per tensor, which is one for the call, carries them on."""
    config, method, leaves, _ = make(name)
    weights = method.process_weights_after_loading(leaves, config)
    x = np.random.default_rng(2).standard_normal((4, H)).astype(np.float32)
    run = jax.jit(lambda x: fused_experts(x, jnp.ones((4, 1)), jnp.full((4, 1), LARGE, jnp.int32), weights, config))
    clean = np.asarray(run(x))
    assert np.isfinite(clean).all() and np.abs(clean).max() > 1e10
    for poison in (np.nan, np.inf):
        bad = x.copy()
        bad[1, 5] = poison
        y = np.asarray(run(bad))
        assert not np.isfinite(y[1]).all()
        others = [0, 2, 3]
        fmt = config.scheme.activations
        if fmt is not None and fmt.strategy is Strategy.TENSOR:
            assert np.isnan(y[others]).all()
        else:
            np.testing.assert_array_equal(y[others], clean[others])
