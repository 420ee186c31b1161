"""create / quantize / process of every method.

Layout contract: loader-facing w13 leaves stack gate rows over up rows, (E, G * n, ...); processed ones are
(E, G, n, ...).
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from moe_jax import FusedMoE, MoEConfig, Scheme
from moe_jax.quantization import SCHEMES as ALL_SCHEMES
from moe_jax.quantization import ExpertWeights, _numerics, dequantize_tensor, method_for, quantize_weight

E, H, I = 3, 200, 130  # noqa: E741 - ragged 128 x 128 blocks in both directions
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
F = np.float32
# One number per element and a float32 scale; packed integers and microscaling have tests of their own.
SCHEMES = {name: scheme for name, scheme in ALL_SCHEMES.items() if name.startswith(("bf16", "fp8_", "int8_"))}
ONLINE = [name for name in SCHEMES if name != "fp8_tensor_static"]


def config_for(name, gated=True, bias=False, **changes):
    settings = dict(num_experts=E, top_k=2, hidden_size=H, intermediate_size=I, is_act_and_mul=gated, has_bias=bias)
    return MoEConfig(scheme=SCHEMES[name], **{**settings, **changes})


def random_leaves(method, config, seed=0):
    """Leaves of a checkpoint: random codes, positive scales that all differ."""
    rng = np.random.default_rng(seed)
    leaves = {}
    for name, spec in method.create_weights(config).items():
        values = rng.standard_normal(spec.shape).astype(F)
        if spec.dtype == np.int8:
            leaves[name] = rng.integers(-128, 128, spec.shape).astype(np.int8)
        elif spec.kind in ("weight", "bias"):
            leaves[name] = (values * 50 if spec.dtype == E4M3 else values).astype(spec.dtype)
        else:
            leaves[name] = np.abs(values) + F(0.01)
    return leaves


def shapes(tree):
    return jax.tree.structure(tree), [(leaf.shape, np.dtype(leaf.dtype)) for leaf in jax.tree.leaves(tree)]


# -- create ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", [True, False])
def test_leaves_are_those_of_the_parameter_inventory(gated):
    n1, g = (2 * I, 2) if gated else (I, 1)
    weights = {"w13_weight": (E, n1, H), "w2_weight": (E, H, I)}
    tensor = {"w13_weight_scale": (E, g), "w2_weight_scale": (E,)}
    channel = {"w13_weight_scale": (E, n1, 1), "w2_weight_scale": (E, H, 1)}
    block = {"w13_weight_scale": (E, g * 2, 2), "w2_weight_scale": (E, 2, 2)}
    inputs = {"w13_input_scale": (E, g), "w2_input_scale": (E,)}
    biases = {"w13_bias": (E, n1), "w2_bias": (E, H)}
    kinds = {"tensor": tensor, "channel": channel, "block": block}
    for name, scheme in SCHEMES.items():
        config = config_for(name, gated, bias=True)
        specs = method_for(scheme).create_weights(config)
        expected = weights | biases
        if scheme.weights is not None:
            expected |= kinds[scheme.weights.strategy.value]
        if name == "fp8_tensor_static":
            expected |= inputs
        assert {leaf: spec.shape for leaf, spec in specs.items()} == expected, name
        for leaf, spec in specs.items():
            kind = {"weight": "weight", "bias": "bias", "input_scale": "input_scale"}.get(leaf.split("_", 1)[1])
            assert spec.kind == (kind or scheme.weights.strategy.value)
            is_data = leaf.endswith("_weight") and scheme.weights is not None
            wide = jnp.bfloat16 if kind in ("weight", "bias") else F
            assert spec.dtype == (scheme.weights.element_type.storage if is_data else np.dtype(wide))
            assert spec.init == {"weight": None, "bias": 0.0}.get(spec.kind, 1.0)
            assert spec.nbytes == np.zeros(spec.shape, spec.dtype).nbytes
        without = method_for(scheme).create_weights(config_for(name, gated))
        assert without.keys() == expected.keys() - biases.keys()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_param_dtype_is_that_of_unquantized_leaves(dtype):
    specs = method_for("bf16").create_weights(config_for("bf16", bias=True, param_dtype=dtype))
    assert {spec.dtype for spec in specs.values()} == {np.dtype(dtype)}
    specs = method_for("fp8_channel").create_weights(config_for("fp8_channel", bias=True, param_dtype=dtype))
    assert specs["w2_bias"].dtype == dtype and specs["w2_weight"].dtype == E4M3


# -- process -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", SCHEMES)
def test_abstract_weights_describe_what_processing_returns(name, gated):
    """On NumPy arrays, on JAX arrays, under jit, and for other stored values, the tree is the same."""
    config = config_for(name, gated, bias=True)
    method = method_for(config.scheme)
    abstract = method.abstract_weights(config)
    assert isinstance(abstract, ExpertWeights) and abstract.scheme == config.scheme
    leaves = random_leaves(method, config)
    equal_scales = {k: np.ones_like(v) if k.endswith("scale") else v for k, v in leaves.items()}
    on_device = {k: jnp.asarray(v) for k, v in leaves.items()}
    processed = method.process_weights_after_loading(leaves, config)
    for other in (
        processed,
        method.process_weights_after_loading(equal_scales, config),
        method.process_weights_after_loading(on_device, config),
        jax.jit(method.process_weights_after_loading)(on_device, config),
    ):
        assert shapes(other) == shapes(abstract)
    for ours, again in zip(jax.tree.leaves(processed), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(ours, again)
    assert processed.num_experts == E and processed.hidden_size == H and processed.intermediate_size == I
    assert processed.is_gated == gated and processed.scheme == config.scheme
    assert processed.w13.fmt == processed.w2.fmt == config.scheme.weights
    assert processed.nbytes() == sum(leaf.nbytes for leaf in jax.tree.leaves(processed))


def plain_values(strategy, codes, scale, block_row):
    """codes (N, K) of one matrix times its scale, looked up element by element; block_row: its first row of blocks."""
    rows, columns = np.indices(codes.shape)
    if strategy is None:
        return codes.astype(F)
    if strategy == "tensor":
        return codes.astype(F) * scale
    if strategy == "channel":
        return codes.astype(F) * scale[rows, 0]
    return codes.astype(F) * scale[block_row + rows // 128, columns // 128]


@pytest.mark.parametrize("name", SCHEMES)
def test_values_land_in_their_half_and_block(name):
    """Element by element: row n of the up half, column k takes the scale that its own half, row and block has."""
    config = config_for(name, param_dtype=jnp.float32)
    method = method_for(config.scheme)
    leaves = random_leaves(method, config)
    weights = method.process_weights_after_loading(leaves, config)
    strategy = config.scheme.weights and config.scheme.weights.strategy.value
    s13, s2 = leaves.get("w13_weight_scale", [None] * E), leaves.get("w2_weight_scale", [None] * E)
    for e in range(E):
        for half, rows in enumerate((slice(0, I), slice(I, 2 * I))):
            scale = s13[e]
            if strategy in ("tensor", "channel"):
                scale = scale[half if strategy == "tensor" else rows]
            expected = plain_values(strategy, leaves["w13_weight"][e, rows], scale, 2 * half)
            np.testing.assert_array_equal(dequantize_tensor(weights.w13)[e, half], expected)
        expected = plain_values(strategy, leaves["w2_weight"][e], s2[e], 0)
        np.testing.assert_array_equal(dequantize_tensor(weights.w2)[e], expected)


@pytest.mark.parametrize("name", SCHEMES)
def test_processing_is_pure_and_does_not_copy_the_weights(name):
    config = config_for(name, bias=True)
    method = method_for(config.scheme)
    leaves = random_leaves(method, config)
    before = {k: v.copy() for k, v in leaves.items()}
    first = method.process_weights_after_loading(leaves, config)
    second = method.process_weights_after_loading(leaves, config)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)
    for k, v in leaves.items():
        np.testing.assert_array_equal(v, before[k])
    assert np.shares_memory(first.w13.data, leaves["w13_weight"]) and np.shares_memory(
        first.w2.data, leaves["w2_weight"]
    )
    assert first.w13.data.dtype == leaves["w13_weight"].dtype, "never upcast"


@pytest.mark.parametrize("gated", [True, False])
def test_static_input_scale_is_the_maximum_over_experts_and_halves(gated):
    config = config_for("fp8_tensor_static", gated)
    method = method_for(config.scheme)
    leaves = random_leaves(method, config)
    leaves["w13_input_scale"][1, -1] = 7.25
    leaves["w2_input_scale"] = np.asarray([0.5, 0.25, 3.5], ml_dtypes.bfloat16)
    weights = method.process_weights_after_loading(leaves, config)
    assert weights.w13.input_scale.shape == () and weights.w13.input_scale == 7.25
    assert weights.w2.input_scale == 3.5 and weights.w2.input_scale.dtype == F
    assert method_for("fp8_tensor").abstract_weights(config_for("fp8_tensor")).w13.input_scale is None


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e8m0fnu])
@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_channel", "fp8_block", "int8_w8a8"])
def test_scales_of_every_dtype_widen_exactly(name, dtype):
    config = config_for(name)
    method = method_for(config.scheme)
    leaves = random_leaves(method, config)
    narrow = {k: v.astype(dtype) if k.endswith("scale") else v for k, v in leaves.items()}
    wide = {k: v.astype(F) if k.endswith("scale") else v for k, v in narrow.items()}
    a, b = (method.process_weights_after_loading(x, config) for x in (narrow, wide))
    assert a.w13.scale.dtype == F
    np.testing.assert_array_equal(a.w13.scale, b.w13.scale)
    np.testing.assert_array_equal(a.w2.scale, b.w2.scale)


def test_trailing_axes_of_one_do_not_matter():
    for name, cut in (("fp8_channel", lambda s: s[..., 0]), ("fp8_tensor", lambda s: s[..., None])):
        config = config_for(name)
        method = method_for(config.scheme)
        leaves = random_leaves(method, config)
        cut_leaves = {k: cut(v) if k.endswith("scale") else v for k, v in leaves.items()}
        a, b = (method.process_weights_after_loading(x, config) for x in (leaves, cut_leaves))
        np.testing.assert_array_equal(a.w13.scale, b.w13.scale)
        np.testing.assert_array_equal(a.w2.scale, b.w2.scale)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -0.5])
@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_tensor_static", "fp8_channel", "fp8_block", "int8_w8a8"])
def test_damaged_scales_are_named(name, value):
    config = dataclasses.replace(config_for(name), name="model.layers.7.mlp.experts")
    method = method_for(config.scheme)
    rows = {"fp8_tensor": 1, "fp8_tensor_static": 1, "fp8_channel": I, "fp8_block": 2, "int8_w8a8": I}[name]
    for leaf, index, projection in (
        ("w13_weight_scale", (2, rows - 1), "w1"),
        ("w13_weight_scale", (1, rows), "w3"),
        ("w2_weight_scale", (2,), "w2"),
        ("w13_input_scale", (0, 1), "w3"),
        ("w2_input_scale", (1,), "w2"),
    ):
        leaves = random_leaves(method, config)
        if leaf not in leaves:
            continue
        full = index + (0,) * (leaves[leaf].ndim - len(index))
        leaves[leaf][full] = value
        if value == -0.5 and name == "int8_w8a8":  # AutoRound writes such scales
            weights = method.process_weights_after_loading(leaves, config)
            assert (weights.w13.scale < 0).any() or (weights.w2.scale < 0).any()
            continue
        for array in (np.asarray, jnp.asarray):
            with pytest.raises(ValueError) as caught:
                method.process_weights_after_loading({k: array(v) for k, v in leaves.items()}, config)
            message = str(caught.value)
            assert f"model.layers.7.mlp.experts: {leaf}: expert {index[0]} ({projection})" in message
            assert str(F(value)) in message and "1 of" in message and "\n" not in message


@pytest.mark.parametrize("scale", [0.0, 1e-23])
@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_channel", "fp8_block", "int8_w8a8"])
def test_dead_experts_are_legal(name, scale):
    config = config_for(name)
    method = method_for(config.scheme)
    leaves = random_leaves(method, config)
    leaves["w13_weight_scale"][1] = scale
    real = np.asarray(dequantize_tensor(method.process_weights_after_loading(leaves, config).w13))
    assert np.isfinite(real).all() and np.abs(real[1]).max() <= 448 * F(scale)
    assert np.abs(real[[0, 2]]).max() > 0.1


def test_wrong_leaves_are_refused():
    config = config_for("fp8_block")
    method = method_for(config.scheme)
    good = random_leaves(method, config)
    e5m2 = good["w2_weight"].astype(F).astype(ml_dtypes.float8_e5m2)
    short = good["w13_weight_scale"][:, :3]  # ceil(2I / 128): one ceil for both halves
    for change, reason in (
        ({"w2_weight": None}, r"leaves missing: \['w2_weight'\]"),
        ({"w2_g_idx": good["w2_weight"]}, r"not part of the scheme: \['w2_g_idx'\]"),
        ({"w2_weight": good["w2_weight"][:, :-1]}, r"w2_weight has shape \(3, 199, 130\), expected \(3, 200, 130\)"),
        ({"w2_weight": e5m2}, "w2_weight has dtype float8_e5m2, expected float8_e4m3fn"),
        ({"w2_weight": good["w2_weight"].astype(F)}, "w2_weight has dtype float32, expected float8_e4m3fn"),
        ({"w13_weight_scale": short}, r"w13_weight_scale has shape \(3, 3, 2\), expected \(3, 4, 2\)"),
        ({"w13_weight_scale": good["w13_weight_scale"].astype(np.uint8)}, "w13_weight_scale has dtype uint8"),
    ):
        leaves = {k: v for k, v in {**good, **change}.items() if v is not None}
        with pytest.raises(ValueError, match=reason) as caught:
            method.process_weights_after_loading(leaves, config)
        assert "\n" not in str(caught.value)


# -- quantize ----------------------------------------------------------------------------------------------------------


def full_precision(gated=True, seed=1):
    rng = np.random.default_rng(seed)
    w13 = rng.standard_normal((E, 2 if gated else 1, I, H)).astype(F)
    w13[:, -1] *= 0.01  # gate and up of different size
    w13[1, 0, 5], w13[2] = 0, w13[2] * F(1e3)
    return w13, rng.standard_normal((E, H, I)).astype(F)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", ONLINE)
def test_online_quantization_equals_matrix_by_matrix(name, gated):
    """Every matrix of every expert has scales of its own, gate and up too."""
    config = config_for(name, gated, bias=True)
    method = method_for(config.scheme)
    w13, w2 = full_precision(gated)
    biases = (np.full((E, w13.shape[1], I), 0.5, F), np.full((E, H), 0.25, F))
    leaves = method.quantize_leaves(w13, jnp.asarray(w2), biases, config)
    assert {k: (v.shape, v.dtype) for k, v in leaves.items()} == {
        k: (spec.shape, spec.dtype) for k, spec in method.create_weights(config).items()
    }
    weights = method.process_weights_after_loading(leaves, config)
    assert (weights.w13_bias == 0.5).all() and (weights.w2_bias == 0.25).all()
    for tensor, full in ((weights.w13, w13), (weights.w2, w2)):
        for index in np.ndindex(full.shape[:-2]):
            if config.scheme.weights is None:
                np.testing.assert_array_equal(tensor.data[index], full[index].astype(ml_dtypes.bfloat16))
                continue
            data, scale = quantize_weight(jnp.asarray(full[index]), config.scheme.weights)
            np.testing.assert_array_equal(np.asarray(tensor.data[index]), np.asarray(data))
            np.testing.assert_array_equal(tensor.scale[index], scale)


@pytest.mark.parametrize(
    ("name", "bound"), [("fp8_tensor", 1 / 16), ("fp8_channel", 1 / 16), ("fp8_block", 1 / 16), ("int8_w8a8", 1 / 254)]
)
def test_online_error_is_half_a_step(name, bound):
    """e4m3 rounds to 4 significant bits (or half a subnormal step of the scale); int8 to half a step of its row."""
    config = config_for(name)
    method = method_for(config.scheme)
    w13, w2 = full_precision()
    weights = method.process_weights_after_loading(method.quantize_leaves(w13, w2, None, config), config)
    for tensor, full in ((weights.w13, w13), (weights.w2, w2)):
        error = np.abs(np.asarray(dequantize_tensor(tensor)) - full)
        if name == "int8_w8a8":
            allowed = bound * np.abs(full).max(axis=-1, keepdims=True)
        else:
            step = np.abs(np.asarray(tensor.scale)).max() if name == "fp8_block" else None
            scale = step or np.asarray(tensor.scale).reshape(
                *tensor.scale.shape, *(1,) * (full.ndim - tensor.scale.ndim)
            )
            allowed = np.maximum(bound * np.abs(full), 2.0**-10 * scale)
        assert (error <= allowed * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_int8_arithmetic_dtype_is_an_option_of_the_method(dtype):
    config = config_for("int8_w8a16")
    default = method_for("int8_w8a16")
    legacy = dataclasses.replace(default, arithmetic_dtype=dtype)
    w13, w2 = (jnp.asarray(w).astype(dtype) for w in full_precision())
    a, b = (method.quantize_leaves(w13, w2, None, config) for method in (default, legacy))
    scale = np.asarray(b["w2_weight_scale"])
    np.testing.assert_array_equal(scale, scale.astype(dtype).astype(F))
    assert (np.asarray(a["w2_weight_scale"]) != scale).any() and (a["w2_weight"] != b["w2_weight"]).any()


def test_online_quantization_reads_one_expert_at_a_time(monkeypatch):
    """Only one expert's matrices of a stack are widened at once; a traced stack gives the same values."""
    seen = []
    quantize = _numerics._quantize_expert
    monkeypatch.setattr(_numerics, "_quantize_expert", lambda w, *rest: seen.append(w.shape) or quantize(w, *rest))
    config = config_for("fp8_block")
    method = method_for(config.scheme)
    w13, w2 = full_precision()
    leaves = method.quantize_leaves(w13, w2, None, config)
    assert seen == [(2, I, H)] * E + [(H, I)] * E
    traced = jax.jit(lambda *w: method.quantize_leaves(*w, None, config))(w13, w2)
    assert len(seen) == 2 * E
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(traced[name]))


@pytest.mark.parametrize("name", ["fp8_block", "w4a16_g128"])
@pytest.mark.parametrize("held", ["bfloat16", "float16"])
def test_online_scales_are_held_exactly(name, held):
    """A scheme as a checkpoint of 16-bit scales gives it also makes layers of random weights."""
    plain = Scheme.parse(name)
    scheme = dataclasses.replace(plain, weights=dataclasses.replace(plain.weights, group_scale_dtype=held))
    w = jax.random.normal(jax.random.key(0), (E, 256, 128), jnp.float32)
    (found, wide) = (method_for(one).quantize_stack(w, F) for one in (scheme, plain))
    np.testing.assert_array_equal(found["weight_scale"], wide["weight_scale"].astype(held).astype(F))
    assert (found["weight_scale"] != wide["weight_scale"]).any()
    layer = FusedMoE(4, 256, 128, top_k=2, scheme=scheme, rngs=nnx.Rngs(0))
    same = FusedMoE(4, 256, 128, top_k=2, scheme=plain, rngs=nnx.Rngs(0))
    x, logits = jax.random.normal(jax.random.key(1), (5, 256)), jax.random.normal(jax.random.key(2), (5, 4))
    y, expected = (np.asarray(one(x, logits)) for one in (layer, same))
    np.testing.assert_allclose(y, expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["fp8_block", "w4a16_g128", "w8a16_g128"])
def test_scales_that_float16_does_not_hold_are_refused(name):
    """Of weights as checkpoints have them it holds all, and those of a few dead groups may vanish."""
    plain = Scheme.parse(name)
    held = {}
    for dtype in ("bfloat16", "float16"):
        weights = dataclasses.replace(plain.weights, group_scale_dtype=dtype)
        held[dtype] = method_for(dataclasses.replace(plain, weights=weights))
    w = jax.random.normal(jax.random.key(0), (E, 256, 128), jnp.float32) * 0.01
    for factor in (0, 1, 1e-8, 1e9):
        held["bfloat16"].quantize_stack(w * factor, F)
    held["float16"].quantize_stack(w, F)
    held["float16"].quantize_stack(w.at[1, :128].multiply(1e-8).at[2].set(0), F)
    for factor in (1e-8, 1e9):
        for stack in (w * factor, w.at[1].multiply(factor)):
            with pytest.raises(ValueError, match="matrix [01] has scales of groups up to .* float16 rounds by "):
                held["float16"].quantize_stack(stack, F)


def test_online_quantization_refuses():
    w13, w2 = full_precision()
    config = config_for("fp8_tensor_static")
    with pytest.raises(ValueError, match="needs calibrated input scales"):
        method_for(config.scheme).quantize_leaves(w13, w2, None, config)
    config = config_for("fp8_channel")
    method = method_for(config.scheme)
    with pytest.raises(ValueError, match=r"w13 has shape \(3, 260, 200\), expected \(3, 2, 130, 200\)"):
        method.quantize_leaves(w13.reshape(E, 2 * I, H), w2, None, config)
    with pytest.raises(ValueError, match="has_bias=False, but biases are given"):
        method.quantize_leaves(w13, w2, (w13[..., 0], w2[..., 0]), config)
    with pytest.raises(ValueError, match="has_bias=True, but biases are missing"):
        method.quantize_leaves(w13, w2, None, config_for("fp8_channel", bias=True))
    w13[2, 1, 7, 3] = np.nan
    with pytest.raises(ValueError, match=r"w13_weight_scale: expert 2 \(w3\) has scale inf at \(2, 137, 0\)"):
        method.process_weights_after_loading(method.quantize_leaves(w13, w2, None, config), config)


def test_example_legacy_requantization():
    """Spec 8.3.8: codes 448, 96, -3.5 with scale 0.01 beside a half with scale 0.02 become 224, 48, -1.75."""
    config = MoEConfig(1, 1, 3, 1, scheme=Scheme.parse("fp8_tensor"))
    codes = np.array([[[448, 96, -3.5], [1, -2, 3]]], ml_dtypes.float8_e4m3fn)
    leaves = {
        "w13_weight": codes,
        "w13_weight_scale": np.float32([[0.01, 0.02]]),
        "w2_weight": np.ones((1, 3, 1), ml_dtypes.float8_e4m3fn),
        "w2_weight_scale": np.float32([1]),
    }
    exact = method_for("fp8_tensor")
    legacy = dataclasses.replace(exact, legacy_fp16_requant=True)
    found, kept = (method.process_weights_after_loading(leaves, config) for method in (legacy, exact))
    np.testing.assert_array_equal(found.w13.scale, np.float32([[0.02, 0.02]]))
    np.testing.assert_array_equal(np.asarray(found.w13.data, np.float32)[0, :, 0], [[224, 48, -1.75], [1, -2, 3]])
    np.testing.assert_array_equal(np.asarray(kept.w13.data), codes.reshape(1, 2, 1, 3))
    assert jax.tree.structure(found) == jax.tree.structure(kept)
