"""Integers of 2 to 8 bits: worked examples of the rules, NumPy in float64, and layers in both implementations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax import MoEConfig, Scheme, fused_experts
from moe_jax.quantization import (
    Packing,
    QuantFormat,
    QuantizedTensor,
    Strategy,
    dequantize,
    dequantize_tensor,
    method_for,
    quantize_activations,
    quantize_weight,
)
from tests.support.cases import experts as cases
from tests.support.oracles.layer_judge import assert_layer_close

F = np.float32
ASYMMETRIC = QuantFormat("int8", Strategy.TOKEN, dynamic=True, symmetric=False)


def bits_of(x):
    return np.asarray(x, F).view(np.uint32)


@pytest.mark.parametrize(
    "bits, symmetric, scale, zero_point",
    [
        (2, True, 1.3333334, None),
        (3, True, 0.5714286, None),
        (4, True, 0.26666668, None),
        (8, True, 0.015686275, None),
        (2, False, 1.0, -1),
        (3, False, 0.42857143, -2),
        (4, False, 0.2, -3),
        (8, False, 0.011764706, -43),
    ],
)
@pytest.mark.sample(2)
def test_scales_of_minus_one_to_two(bits, symmetric, scale, zero_point):
    """The specification's example of compressed-tensors' min-max rule (8.10)."""
    fmt = QuantFormat(f"int{bits}", Strategy.CHANNEL, symmetric=symmetric)
    w = jnp.asarray([[-1.0, 2.0, 0.0, 0.3]], jnp.float32)
    parts = quantize_weight(w, fmt) if bits < 8 or not symmetric else quantize_weight(w, packed(fmt))
    np.testing.assert_array_equal(bits_of(parts[1]), bits_of([scale]))
    if zero_point is not None:
        np.testing.assert_array_equal(parts[2], [[zero_point]])


def packed(fmt):
    return dataclasses.replace(fmt, packing=Packing.WORDS)


def test_worked_example_of_zero_points():
    """Codes 0, 5, 10, 15 with zero point 7 and scale 0.5; and zero points packed along the rows."""
    fmt = packed(QuantFormat("int4", Strategy.CHANNEL, symmetric=False))
    tensor = QuantizedTensor(
        jnp.asarray([[0xFA50]] * 2, jnp.int32),
        jnp.asarray([0.5, -0.25]),
        zero_point=jnp.asarray([[0x97]], jnp.int32),
        fmt=fmt,
        num_columns=4,
    )
    np.testing.assert_array_equal(dequantize_tensor(tensor), [[-3.5, -1, 1.5, 4], [2.25, 1, -0.25, -1.5]])


def test_worked_example_of_asymmetric_tokens():
    """Section 8.6.2: s = 63.75, z = -64; and 8.6.3, the product with [7, -8, 3, 1] in scale 0.1."""
    x = jnp.asarray([[-1.0, 0.5, 2.0, 3.0]])
    codes, scale = quantize_activations(x, ASYMMETRIC)
    assert codes.dtype == jnp.int16
    np.testing.assert_array_equal(codes - 64, [[-128, -32, 64, 127]])
    np.testing.assert_allclose(dequantize(codes, scale, ASYMMETRIC)[0], [-1.0039, 0.50196, 2.00784, 2.99608], rtol=3e-5)
    total = int(np.asarray(codes, np.int32)[0] @ np.array([7, -8, 3, 1]))
    assert total == -129
    np.testing.assert_allclose(total * 0.1 * float(scale[0]), -0.202353, rtol=1e-5)


def test_asymmetric_tokens_against_float64():
    """Rows of one sign, of zeros, with a NaN: only its own row is lost."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 40)).astype(F)
    x[1], x[2], x[3], x[4, 7] = np.abs(x[1]) + 5, -np.abs(x[2]), 0, np.nan
    values = np.asarray(dequantize(*quantize_activations(jnp.asarray(x), ASYMMETRIC), ASYMMETRIC))
    assert np.isnan(values[4]).all() and np.isfinite(np.delete(values, 4, 0)).all()
    span = np.maximum(x.max(1), 0) - np.minimum(x.min(1), 0)
    error = np.abs(values - x)[[0, 1, 2, 3, 5]]
    # Rounding value and zero point: at most a step each way.
    assert (error.max(1) <= span[[0, 1, 2, 3, 5]] / 255 * 1.0001).all() and (values[3] == 0).all()


FORMATS = [
    (4, 32, True),
    (4, 32, False),
    (3, 24, False),
    (3, None, True),
    (2, 16, True),
    (2, None, False),
    (8, 32, False),
    (5, None, False),
]


@pytest.mark.parametrize("bits, size, symmetric", FORMATS)
@pytest.mark.parametrize("packing", [Packing.WORDS, None])
@pytest.mark.sample(6)
def test_quantized_values_against_numpy(bits, size, symmetric, packing):
    """Ragged last groups, tails of words on both axes, and rows of zeros, element by element."""
    n, k = 21, 70
    strategy = Strategy.CHANNEL if size is None else Strategy.GROUP
    fmt = QuantFormat(f"int{bits}", strategy, size, packing=packing, symmetric=symmetric)
    w = np.random.default_rng(bits).standard_normal((2, n, k)).astype(F)
    w[1, 3] = 0
    data, scale, *zero_point = jax.jit(lambda w: quantize_weight(w, fmt))(jnp.asarray(w))
    assert data.shape == (2, n, fmt.stored_length(k)) and data.dtype == fmt.storage
    assert [z.shape for z in zero_point] == ([] if symmetric else [(2, *fmt.zero_point_shape(n, k))])
    tensor = QuantizedTensor(
        data, scale, zero_point=zero_point[0] if zero_point else None, fmt=fmt, num_columns=k if packing else None
    )
    assert tensor.shape == w.shape
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    expected = np.empty_like(w)
    for e, row in np.ndindex(2, n):
        for start in range(0, k, size or k):
            x = w[e, row, start : start + (size or k)]
            if symmetric:
                s, z = F(np.abs(x).max()) / F((2**bits - 1) / 2), F(0)
            else:
                lo, hi = F(min(x.min(), 0)), F(max(x.max(), 0))
                s = F(hi - lo) / F(2**bits - 1)
                z = np.round(np.clip(F(low) - lo / s, low, high)) if s else F(low)
            s = s or np.finfo(F).eps
            expected[e, row, start : start + len(x)] = (np.round(np.clip(x / s + z, low, high)) - z) * s
    if bits == 8 and strategy is Strategy.CHANNEL and packing is None and symmetric:
        return
    np.testing.assert_array_equal(np.asarray(dequantize_tensor(tensor)), expected)


SCHEMES = [
    "w4a16_g32",
    "w4a16_channel_asym",
    "w3a16_g32_asym",
    "w2a16_channel",
    "w8a16_g128",
    "w4a8_int8",
    "w4a8_int8_channel",
    "w4a8_int8_channel_asym_inputs",
    "w4a8_fp8_channel",
]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.sample(9)
def test_layers_against_float64(scheme):
    """Per row, both implementations, with bias and ragged groups (H = 152, I = 136)."""
    config = cases.make_config(scheme, has_bias=True)
    x, p, ids, weights = cases.make_call(config, 23)
    run = lambda name: np.asarray(  # noqa: E731
        fused_experts(x, p, ids, weights, dataclasses.replace(config, implementation=(name,)))
    )
    for name in ("reference", "xla"):
        assert_layer_close(run(name), x, p, ids, weights, config, kernels=False)


@pytest.mark.parametrize("scheme", ["w4a16_g32_asym", "w4a8_int8_channel", "w4a8_fp8"])
@pytest.mark.parametrize("gated", [True, False])
def test_leaves_have_the_shapes_of_the_parameter_inventory(scheme, gated):
    """M160-M162, M192, M193, M201: halves are stacked by rows, words along columns, zero points along rows."""
    config = MoEConfig(3, 2, 256, 128, scheme=Scheme.parse(scheme), is_act_and_mul=gated)
    shapes = {name: spec.shape for name, spec in method_for(scheme).create_weights(config).items()}
    rows = 256 if gated else 128
    assert (
        shapes
        == {
            "w4a16_g32_asym": {
                "w13_weight_packed": (3, rows, 32),
                "w13_weight_scale": (3, rows, 8),
                "w13_weight_zero_point": (3, rows // 8, 8),
                "w2_weight_packed": (3, 256, 16),
                "w2_weight_scale": (3, 256, 4),
                "w2_weight_zero_point": (3, 32, 4),
            },
            "w4a8_int8_channel": {
                "w13_weight": (3, rows, 256),
                "w13_weight_scale": (3, rows, 1),
                "w2_weight": (3, 256, 128),
                "w2_weight_scale": (3, 256, 1),
            },
            "w4a8_fp8": {
                "w13_weight_packed": (3, rows, 32),
                "w13_weight_scale": (3, rows, 2),
                "w2_weight_packed": (3, 256, 16),
                "w2_weight_scale": (3, 256, 1),
            },
        }[scheme]
    )
    method = method_for(scheme)
    leaves = {name: np.ones(spec.shape, spec.dtype) for name, spec in method.create_weights(config).items()}
    abstract, weights = method.abstract_weights(config), method.process_weights_after_loading(leaves, config)
    assert jax.tree.structure(abstract) == jax.tree.structure(weights)
    assert weights.is_gated == gated and weights.w13.shape == (3, 1 + gated, 128, 256)


def test_scales_that_are_not_finite_are_named():
    config = cases.make_config("w4a16_g32")
    method = method_for(config.scheme)
    leaves = {k: np.ones(s.shape, s.dtype) for k, s in method.create_weights(config).items()}
    leaves["w13_weight_scale"][2, -1, 1] = np.nan
    with pytest.raises(ValueError, match=r"w13_weight_scale: expert 2 \(w3\) has scale nan"):
        method.process_weights_after_loading(leaves, config)
    leaves["w13_weight_scale"][2, -1, 1] = -1.0
    method.process_weights_after_loading(leaves, config)


def test_actorder_is_not_made_online():
    config = cases.make_config("w4a16_g32_actorder")
    with pytest.raises(NotImplementedError, match="act-order columns are found by calibration"):
        cases.make_weights(config)


@pytest.mark.slow
def test_gradients_stop_at_integers():
    config = cases.make_config("w4a16_g32_asym", implementation=("xla",))
    x, p, ids, weights = cases.make_call(config, 9)
    run = lambda c: jax.grad(lambda x: fused_experts(x, p, ids, weights, c).sum())(x)  # noqa: E731
    ours, judge = run(config), run(dataclasses.replace(config, implementation=("reference",)))
    np.testing.assert_allclose(ours, judge, rtol=1e-4, atol=1e-4 * float(jnp.abs(judge).max()))
