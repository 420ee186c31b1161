"""NVFP4 and MX: which configs say them, which leaves they have, what processing accepts, makes and refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moe_jax import MoEConfig, Scheme
from moe_jax.quantization import (
    SCHEMES,
    dequantize_tensor,
    fake_quantize,
    method_for,
    online_scheme,
    quantize_activations,
)

E, H, I = 3, 96, 64  # noqa: E741
F = np.float32
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], F)
NAMES = [name for name, scheme in SCHEMES.items() if name.startswith(("nvfp4", "mxfp"))]
DYNAMIC = [name for name in NAMES if not (a := SCHEMES[name].activations) or not a.needs_input_scale]


def config_for(name, gated=True, **changes):
    settings = dict(num_experts=E, top_k=2, hidden_size=H, intermediate_size=I, is_act_and_mul=gated)
    return MoEConfig(scheme=SCHEMES[name], **{**settings, **changes})


def random_leaves(method, config, seed=0):
    """Every code, and global scales that all differ."""
    rng = np.random.default_rng(seed)
    leaves = {}
    for name, spec in method.create_weights(config).items():
        if spec.kind == "group" and spec.dtype == np.uint8:
            leaves[name] = rng.integers(110, 140, spec.shape).astype(np.uint8)
        elif spec.dtype == np.uint8:
            leaves[name] = rng.integers(0, 256, spec.shape).astype(np.uint8)
        elif spec.dtype == E4M3:
            leaves[name] = np.abs(rng.standard_normal(spec.shape) * 50).astype(E4M3)
        else:
            leaves[name] = (rng.uniform(100, 9000, spec.shape)).astype(F)
    return leaves


def values_of(leaves, prefix, fmt, projections):
    """The formulas of formats.md 4.3, 4.4 and 6 in NumPy float32: (E, projections, N, K)."""
    data = leaves.get(f"{prefix}_weight_packed", leaves.get(f"{prefix}_weight"))
    if fmt.element == "e2m1":
        elements = E2M1[np.stack([data & 15, data >> 4], -1).reshape(*data.shape[:-1], -1)]
    else:
        elements = data.astype(F)
    scale = leaves[f"{prefix}_weight_scale"]
    if scale.dtype == np.uint8:
        scale = np.ldexp(F(1), scale.astype(int) - 127).astype(F)
    else:
        names = {"divides": "weight_global_scale", "multiplies": "weight_scale_2"}
        stored = leaves[f"{prefix}_{names[fmt.global_scale]}"].reshape(E, projections)
        per_row = np.repeat(stored, scale.shape[1] // projections, axis=1)[..., None]
        scale = scale.astype(F) / per_row if fmt.global_scale == "divides" else scale.astype(F) * per_row
    values = elements * np.repeat(scale, fmt.group_size, axis=-1)[..., : elements.shape[-1]]
    return values.reshape(E, projections, -1, values.shape[-1])


# -- schemes -----------------------------------------------------------------------------------------------------------


def test_hand_written_configs_may_leave_out_scale_dtypes():
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    group = {"weights": weights, "input_activations": {**weights, "dynamic": "local"}, "format": "nvfp4-pack-quantized"}
    assert Scheme.parse(group).name == "nvfp4"
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    assert Scheme.parse({"weights": weights, "input_activations": None}).name == "mxfp4_a16"


@pytest.mark.parametrize(
    ("format", "activations", "reason"),
    [
        ("pack-quantized", None, "format 'pack-quantized'"),
        ("nvfp4-pack-quantized", dict(strategy="tensor_group", group_size=16, dynamic=True), "dynamic=True"),
        ("nvfp4-pack-quantized", dict(strategy="group", group_size=32, dynamic=True), "with activations e2m1"),
        ("nvfp4-pack-quantized", dict(strategy="token", dynamic=True), "strategy 'token'"),
    ],
)
def test_what_only_looks_like_nvfp4_is_refused(format, activations, reason):
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    inputs = activations and {"num_bits": 4, "type": "float", **activations}
    with pytest.raises(NotImplementedError, match=reason):
        Scheme.parse({"weights": weights, "input_activations": inputs, "format": format})


def test_calibrated_activations_become_dynamic_online():
    assert online_scheme(Scheme.parse("nvfp4")).name == "nvfp4_dynamic"
    assert online_scheme(Scheme.parse("mxfp4")) == Scheme.parse("mxfp4")
    with pytest.raises(ValueError, match="nvfp4_dynamic"):
        config = config_for("nvfp4")
        method_for("nvfp4").quantize_leaves(np.zeros((E, 2, I, H), F), np.zeros((E, H, I), F), None, config)


# -- leaves and processing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", [True, False])
def test_leaves_are_those_of_the_parameter_inventory(gated):
    n1, g = (2 * I, 2) if gated else (I, 1)
    packed = {"w13_weight_packed": (E, n1, H // 2), "w2_weight_packed": (E, H, I // 2)}
    expected = {
        "nvfp4": packed
        | {"w13_weight_scale": (E, n1, H // 16), "w2_weight_scale": (E, H, I // 16)}
        | {"w13_weight_global_scale": (E, g), "w2_weight_global_scale": (E,)}
        | {"w13_input_global_scale": (E, g), "w2_input_global_scale": (E,)},
        "nvfp4_modelopt": {"w13_weight": (E, n1, H // 2), "w2_weight": (E, H, I // 2)}
        | {"w13_weight_scale": (E, n1, H // 16), "w2_weight_scale": (E, H, I // 16)}
        | {"w13_weight_scale_2": (E, g), "w2_weight_scale_2": (E,)}
        | {"w13_input_scale": (E, g), "w2_input_scale": (E,)},
        "mxfp4": packed | {"w13_weight_scale": (E, n1, H // 32), "w2_weight_scale": (E, H, I // 32)},
        "mxfp8": {"w13_weight": (E, n1, H), "w2_weight": (E, H, I)}
        | {"w13_weight_scale": (E, n1, H // 32), "w2_weight_scale": (E, H, I // 32)},
    }
    for name, shapes in expected.items():
        specs = method_for(name).create_weights(config_for(name, gated))
        assert {leaf: spec.shape for leaf, spec in specs.items()} == shapes, name
        dtype = E4M3 if name.startswith("nvfp4") else np.dtype(np.uint8)
        assert specs["w2_weight_scale"].dtype == dtype and specs["w2_weight_scale"].kind == "group"


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sample(2)
def test_processed_weights_mean_what_the_format_says(name, gated, wrap):
    """Bit for bit in float32, every half with its own global scale; data stays as stored."""
    config = config_for(name, gated)
    method = method_for(name)
    leaves = random_leaves(method, config)
    weights = method.process_weights_after_loading(leaves, config)
    projections = 2 if gated else 1
    w13, w2 = wrap(lambda w: (dequantize_tensor(w.w13), dequantize_tensor(w.w2)))(jax.tree.map(jnp.asarray, weights))
    assert np.asarray(w13).tobytes() == values_of(leaves, "w13", weights.w13.fmt, projections).tobytes()
    assert np.asarray(w2).tobytes() == values_of(leaves, "w2", weights.w2.fmt, 1).tobytes()
    assert weights.w13.shape == (E, projections, I, H) and weights.w2.shape == (E, H, I)
    if weights.w13.fmt.element == "e2m1":
        assert weights.w13.data.dtype == np.uint8 and weights.w13.data.shape == (E, projections, I, H // 2)
    abstract = method.abstract_weights(config)
    assert jax.tree.structure(abstract) == jax.tree.structure(weights)
    for expected, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(weights), strict=True):
        assert expected.shape == leaf.shape and expected.dtype == leaf.dtype


@pytest.mark.parametrize("name", DYNAMIC)
def test_online_quantization_is_close_and_of_the_same_structure(name):
    rng = np.random.default_rng(3)
    config = config_for(name)
    method = method_for(name)
    w13 = (rng.standard_normal((E, 2, I, H)) * rng.uniform(0.1, 10, (E, 2, 1, 1))).astype(ml_dtypes.bfloat16)
    w2 = rng.standard_normal((E, H, I)).astype(ml_dtypes.bfloat16)
    leaves = method.quantize_leaves(w13, w2, None, config)
    weights = method.process_weights_after_loading(leaves, config)
    assert jax.tree.structure(weights) == jax.tree.structure(method.abstract_weights(config))
    bound = {"nvfp4": 0.11, "mxfp4": 0.15, "mxfp8": 0.03}[name.split("_")[0]]
    for stored, original in ((weights.w13, w13), (weights.w2, w2)):
        original = original.astype(F)
        error = np.linalg.norm(np.asarray(dequantize_tensor(stored)) - original) / np.linalg.norm(original)
        assert bound / 3 < error < bound


def test_zero_experts_are_exact_and_finite():
    for name in DYNAMIC:
        config = config_for(name)
        method = method_for(name)
        leaves = method.quantize_leaves(np.zeros((E, 2, I, H), F), np.zeros((E, H, I), F), None, config)
        weights = method.process_weights_after_loading(leaves, config)
        assert not np.asarray(dequantize_tensor(weights.w13)).any(), name


# -- global scales -----------------------------------------------------------------------------------------------------


def processed_with(name, **changed):
    config = config_for(name)
    method = method_for(name)
    leaves = random_leaves(method, config)
    for leaf, (index, value) in changed.items():
        leaves[leaf][index] = value
    return method.process_weights_after_loading(leaves, config), leaves


def test_the_widest_input_range_of_all_experts_counts():
    weights, leaves = processed_with("nvfp4")
    assert float(weights.w13.input_scale) == leaves["w13_input_global_scale"].min()
    assert float(weights.w2.input_scale) == leaves["w2_input_global_scale"].min()
    weights, leaves = processed_with("nvfp4_modelopt")
    assert float(weights.w13.input_scale) == leaves["w13_input_scale"].max()


def test_experts_without_calibration_do_not_count():
    """compressed-tensors writes 1.0 for an expert that saw no token; older files have infinity."""
    weights, leaves = processed_with("nvfp4", w13_input_global_scale=((1, slice(None)), 1.0))
    assert float(weights.w13.input_scale) == np.delete(leaves["w13_input_global_scale"], 1, axis=0).min() > 1
    with pytest.warns(UserWarning, match="2 of 6 scales are infinite"):
        weights, leaves = processed_with("nvfp4", w13_input_global_scale=((1, slice(None)), np.inf))
    assert float(weights.w13.input_scale) == leaves["w13_input_global_scale"].min()
    weights, _ = processed_with("nvfp4", w13_input_global_scale=(slice(None), 1.0))
    assert float(weights.w13.input_scale) == 1.0
    weights, leaves = processed_with("nvfp4_modelopt", w2_input_scale=(0, 0.0))
    assert float(weights.w2.input_scale) == leaves["w2_input_scale"].max()


@pytest.mark.parametrize(
    ("name", "leaf", "index", "value", "message"),
    [
        ("nvfp4", "w13_weight_global_scale", (2, 1), 0.0, r"w13_weight_global_scale: expert 2 \(w3\).*positive"),
        ("nvfp4", "w13_weight_global_scale", (2, 0), np.nan, r"expert 2 \(w1\) has scale nan"),
        ("nvfp4", "w2_weight_global_scale", (1,), np.inf, r"w2_weight_global_scale: expert 1 \(w2\) has scale inf"),
        ("nvfp4", "w2_weight_global_scale", (1,), -3.0, r"expert 1 \(w2\) has scale -3"),
        ("nvfp4", "w13_input_global_scale", (0, 1), 0.0, r"w13_input_global_scale: expert 0 \(w3\)"),
        ("nvfp4", "w2_input_global_scale", (0,), np.nan, r"w2_input_global_scale: expert 0 \(w2\)"),
        ("nvfp4", "w13_weight_scale", (2, I + 1, 3), np.nan, r"w13_weight_scale: expert 2 \(w3\)"),
        ("nvfp4", "w13_weight_scale", (2, 1, 3), -1.0, r"w13_weight_scale: expert 2 \(w1\)"),
        ("mxfp4", "w2_weight_scale", (0, 1, 1), 255, r"w2_weight_scale: expert 0 \(w2\) has scale 255"),
        ("nvfp4_modelopt", "w13_weight_scale_2", (1, 1), np.inf, r"w13_weight_scale_2: expert 1 \(w3\)"),
        ("nvfp4_modelopt", "w2_input_scale", slice(None), 0.0, "w2_input_scale: all input scales are 0"),
    ],
)
def test_bad_scales_are_named(name, leaf, index, value, message):
    with pytest.raises(ValueError, match=message):
        processed_with(name, **{leaf: (index, value)})


def test_zero_block_scales_and_zero_direct_scales_mean_zero():
    weights, _ = processed_with("nvfp4", w2_weight_scale=(0, 0.0))
    assert not np.asarray(dequantize_tensor(weights.w2))[0].any()
    weights, _ = processed_with("nvfp4_modelopt", w2_weight_scale_2=(0, 0.0))
    assert not np.asarray(dequantize_tensor(weights.w2))[0].any()


def test_another_scale_dtype_is_refused():
    config = config_for("nvfp4_a16")
    leaves = random_leaves(method_for("nvfp4_a16"), config)
    leaves["w2_weight_scale"] = leaves["w2_weight_scale"].astype(F)
    with pytest.raises(ValueError, match="w2_weight_scale has dtype float32, expected float8_e4m3fn"):
        method_for("nvfp4_a16").process_weights_after_loading(leaves, config)
    config = config_for("mxfp8")
    leaves = random_leaves(method_for("mxfp8"), config)
    same = {name: v.view(ml_dtypes.float8_e8m0fnu) if name.endswith("scale") else v for name, v in leaves.items()}
    weights = method_for("mxfp8").process_weights_after_loading(same, config)
    assert weights.w2.scale.dtype == np.uint8 and weights.w2.scale.tobytes() == leaves["w2_weight_scale"].tobytes()


def test_an_odd_number_of_columns_is_refused():
    with pytest.raises(ValueError, match="even number of them, found 97"):
        method_for("mxfp4").create_weights(config_for("mxfp4", hidden_size=97))


# -- activations -------------------------------------------------------------------------------------------------------


def activation_format(name):
    return SCHEMES[name].activations


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_dynamic", "nvfp4_modelopt", "mxfp4", "mxfp8"])
def test_rounded_activations_lie_on_the_grid_of_their_groups(name):
    """float64 emulation row by row; ragged last groups too; under jit."""
    fmt = activation_format(name)
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((7, 40)) * 10.0 ** rng.uniform(-2, 2, (7, 1))).astype(F)
    x[3] = 0
    stored = None
    if fmt.needs_input_scale:
        stored = jnp.asarray({"divides": 2688 / 90.0, "multiplies": 90.0 / 2688}[fmt.global_scale], jnp.float32)
    actual = np.asarray(jax.jit(lambda x: fake_quantize(x, fmt, stored))(jnp.asarray(x)))
    for row, out in zip(x.astype(np.float64), actual, strict=True):
        for start in range(0, 40, fmt.group_size):
            group = row[start : start + fmt.group_size]
            np.testing.assert_allclose(
                out[start : start + fmt.group_size], emulate(group, row, fmt, stored), rtol=3e-7, atol=0
            )


def emulate(group, row, fmt, stored):
    """One group in float64; bit-exact inputs avoid ties, so that rounding agrees with float32."""
    amax = np.abs(group).max()
    if fmt.scale == "e8m0":
        if amax == 0:
            return np.zeros_like(group)
        mantissa, exponent = np.frexp(amax)  # amax = mantissa * 2**exponent, mantissa in [0.5, 1)
        power = exponent if mantissa >= 0.875 else exponent - 1
        scale = 2.0 ** (power - (2 if fmt.element == "e2m1" else 8))
    else:
        large = {"divides": lambda: float(stored), "multiplies": lambda: float(F(1) / F(stored))}.get(
            fmt.global_scale, lambda: 2688 / np.abs(row).max() if row.any() else 1.0
        )()
        scale = float(np.clip(large * amax / 6, 0, 448).astype(E4M3)) / large
        if scale == 0:
            return np.zeros_like(group)
    if fmt.element == "e2m1":
        return np.clip(group / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * scale
    return np.clip(group / scale, -448, 448).astype(E4M3).astype(np.float64) * scale


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_value_spoils_its_group_alone(name, bad):
    fmt = activation_format(name)
    x = np.ones((2, 64), F)
    x[1, 5] = bad
    stored = jnp.asarray(500.0, jnp.float32) if fmt.needs_input_scale else None
    out = np.asarray(fake_quantize(jnp.asarray(x), fmt, stored))
    spoilt = np.isnan(out)
    assert spoilt[1, : fmt.group_size].all() and not spoilt[1, fmt.group_size :].any() and not spoilt[0].any()


def test_nvfp4_activations_need_their_global_scale():
    with pytest.raises(ValueError, match="exactly when static"):
        quantize_activations(jnp.ones((1, 16)), activation_format("nvfp4"))
    with pytest.raises(ValueError, match="exactly when static"):
        quantize_activations(jnp.ones((1, 16)), activation_format("nvfp4_dynamic"), jnp.float32(1))


def test_power_of_two_scales_of_blocks():
    fmt = dataclasses.replace(SCHEMES["fp8_block"].activations, scale="ue8m0")
    x = np.random.default_rng(0).standard_normal((4, 256)).astype(F)
    codes, scale = quantize_activations(jnp.asarray(x), fmt)
    exact = np.abs(x.reshape(4, 2, 128)).max(-1) / 448
    assert (np.asarray(scale) == 2.0 ** np.ceil(np.log2(exact))).all()
    expected = (x.reshape(4, 2, 128) / np.asarray(scale)[..., None]).astype(E4M3).reshape(4, 256)
    assert np.asarray(codes).tobytes() == expected.tobytes()
