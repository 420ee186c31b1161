"""Packed expert weights: exact and back for every scheme that has them, the layer on kernel references, its lowering
for CUDA, and what explain says. The packed kernel itself: tests/pallas_kernels/test_grouped_gemm_packed*.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_jax.experts import explain, fused_experts
from moe_jax.experts._choice import in_best_layout
from moe_jax.experts.hopper import Hopper
from moe_jax.experts.hopper import _experts as hopper_experts
from moe_jax.experts.hopper import _plan as hopper_plan
from moe_jax.experts.hopper._kernel_layout import (
    in_kernel_layout,
    is_kernel_layout,
    kernel_format,
    to_kernel_layout,
    to_plain_layout,
)
from moe_jax.quantization import SCHEMES, Scheme, method_for
from pallas_kernels.tuning import FORMATS, PACKED_FORMATS, LayerKey, PackedLayerKey
from tests.support.cases.hopper_layers import on_hopper
from tests.support.kernels.case import launches

E, H, I, K = 3, 160, 128, 2  # noqa: E741
PACKED = (
    *("w4a16_g32", "w4a16_g64", "w4a16_g128", "w4a16_channel"),
    *("w4a16_g32_asym", "w4a16_g64_asym", "w4a16_g128_asym", "w4a16_channel_asym"),
    *("w8a16_channel", "w8a16_g128", "w2a16_g128", "w3a16_g128", "int8_w8a16"),
    *("fp8_tensor_a16", "fp8_channel_a16", "fp8_block_a16"),
    *("nvfp4_a16", "nvfp4_a16_modelopt", "nvfp4_dynamic", "mxfp4", "mxfp4_a16", "mxfp8", "mxfp8_a16"),
    *("w4a8_int8", "w4a8_int8_channel", "w4a8_int8_asym_inputs", "w4a8_fp8"),
)


def make_weights(name, implementation=("hopper", "xla"), **options):
    config = moe_jax.MoEConfig(
        E, K, H, I, scheme=Scheme.parse(name), dtype="bfloat16", implementation=implementation, **options
    )
    method = method_for(config.scheme)
    if config.scheme.is_quantized and config.scheme.weights.actorder:  # comes from calibration
        return config, method.abstract_weights(config)
    k13, k2, kb = jax.random.split(jax.random.key(0), 3)
    w13 = np.asarray(jax.random.normal(k13, (E, config.num_projections, I, H))) * np.float32(H**-0.5)
    w2 = np.asarray(jax.random.normal(k2, (E, H, I))) * np.float32(I**-0.5)
    biases = None
    if config.has_bias:
        biases = (jax.random.normal(kb, (E, config.num_projections, I), jnp.bfloat16), jnp.ones((E, H), jnp.bfloat16))
    leaves = method.quantize_leaves(w13, w2, biases, config)
    return config, method.process_weights_after_loading(leaves, config)


# Eight bits where both sides and the groups allow them, else codes in bfloat16.
OPERANDS = {
    "w4a8_int8_asym": "int8",
    "w4a8_int8_g32": "bfloat16",
    "w4a8_int8_asym_inputs": "bfloat16",
    "w4a8_fp8_asym": "bfloat16",
    "w8a8_int8": "bfloat16",
    "w8a8_int8_channel_asym": "bfloat16",
}


def test_which_schemes_are_packed():
    found = {name for name, scheme in SCHEMES.items() if kernel_format(scheme, "bfloat16")}
    assert found == {*PACKED, "nvfp4", "nvfp4_modelopt"}
    in_float16 = {name for name, scheme in SCHEMES.items() if kernel_format(scheme, "float16")}
    assert in_float16 == found - {name for name in found if "fp4_a16" in name or name == "mxfp8_a16"}
    ordered, by_position = (Scheme.parse(f"w4a16_g128{order}") for order in ("_actorder", ""))
    assert kernel_format(ordered, "bfloat16") == kernel_format(by_position, "bfloat16")
    assert kernel_format(SCHEMES["w4a16_g128"], "float32") is None
    operands = {name: kernel_format(Scheme.parse(name), "bfloat16").operand for name in OPERANDS}
    assert operands == OPERANDS


# One of every element; the other schemes are marked slow.
QUICK = {"w4a16_g32_asym", "int8_w8a16", "fp8_block_a16", "mxfp4", "w4a8_int8_channel"}


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in PACKED])
@pytest.mark.sample(5)
def test_packing_is_exact_and_undone(name):
    config, weights = make_weights(name)
    packed = to_kernel_layout(weights, config)
    assert in_kernel_layout(packed) and to_kernel_layout(packed, config) is packed
    assert (packed.num_experts, packed.hidden_size, packed.intermediate_size) == (E, H, I) and packed.is_gated
    back = to_plain_layout(packed)
    assert jax.tree.structure(back) == jax.tree.structure(weights)
    for leaf, expected in zip(jax.tree.leaves(back), jax.tree.leaves(weights), strict=True):
        assert leaf.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(leaf).view(np.uint8), np.asarray(expected).view(np.uint8))


def test_layout_does_not_depend_on_values():
    """A reload may bring scales that 16 bits hold, or such that they do not: programs take float32 either way."""
    config, weights = make_weights("w4a16_g32")
    rounded = dataclasses.replace(weights.w13, scale=weights.w13.scale.astype(jnp.bfloat16).astype(jnp.float32))
    assert not bool((rounded.scale == weights.w13.scale).all())
    expected = jax.eval_shape(lambda w: to_kernel_layout(w, config), weights)
    for some in (weights, dataclasses.replace(weights, w13=rounded)):
        packed = to_kernel_layout(some, config)
        assert jax.tree.structure(packed) == jax.tree.structure(expected)
        for leaf, abstract in zip(jax.tree.leaves(packed), jax.tree.leaves(expected), strict=True):
            assert (leaf.shape, leaf.dtype) == (abstract.shape, abstract.dtype)
        assert packed.w13.scale.dtype == jnp.float32


@pytest.mark.parametrize(
    ("name", "stored", "held"),
    [
        ("w4a16_g32", "bfloat16", "bfloat16"),
        ("w4a16_g32", "float16", "float16"),
        ("w4a8_int8", "bfloat16", "bfloat16"),
        ("w4a8_int8", "float16", "float32"),  # as the tuning table knows such layers
    ],
)
def test_group_scales_stay_in_the_dtype_of_the_scheme(name, stored, held):
    """Exactly; weights that it would round are refused, and both kinds of a scheme are one to whoever compares."""
    plain = Scheme.parse(name)
    scheme = Scheme.parse(
        dataclasses.replace(plain, weights=dataclasses.replace(plain.weights, group_scale_dtype=stored))
    )
    assert scheme == plain and scheme.weights.group_scale_dtype == stored
    config = moe_jax.MoEConfig(E, K, H, I, scheme=scheme, dtype="bfloat16", implementation=("hopper", "xla"))
    method = method_for(scheme)
    rng = np.random.default_rng(0)
    w13, w2 = (rng.standard_normal(s).astype(np.float32) for s in ((E, 2, I, H), (E, H, I)))
    leaves = {n: np.asarray(leaf) for n, leaf in method_for(plain).quantize_leaves(w13, w2, None, config).items()}
    for make in (np.asarray, jnp.asarray):
        with pytest.raises(ValueError, match=f"w13_weight_scale: scale .* at .* is not exact in {stored}"):
            method.process_weights_after_loading({n: make(leaf) for n, leaf in leaves.items()}, config)
    for n in ("w13_weight_scale", "w2_weight_scale"):
        leaves[n] = leaves[n].astype(stored).astype(np.float32)
    weights = method.process_weights_after_loading(leaves, config)
    packed = to_kernel_layout(weights, config)
    assert packed.w13.scale.dtype == packed.w2.scale.dtype == held
    for leaf, expected in zip(jax.tree.leaves(to_plain_layout(packed)), jax.tree.leaves(weights), strict=True):
        assert leaf.dtype == expected.dtype
        np.testing.assert_array_equal(leaf, expected)


# e4m3: a step is 1/16 of the value. e2m1: hidden values near a border fall to neighbouring codes, 1/4 of the value.
TOLERANCE = {"w4a8_int8": 0.03, "mxfp8": 0.09, "nvfp4_dynamic": 0.25}


@pytest.mark.parametrize("name", ["w4a16_g32_asym", "w4a8_int8", "mxfp8", "nvfp4_dynamic"])
@pytest.mark.sample(4)
def test_layer_on_kernel_references(name):
    config, weights = make_weights(name, has_bias=True)
    packed = to_kernel_layout(weights, config)
    x = jax.random.normal(jax.random.key(1), (21, H), jnp.bfloat16)
    p, ids = jax.lax.top_k(jax.nn.softmax(jax.random.normal(jax.random.key(2), (21, E))), K)
    ids = ids.astype(jnp.int32).at[3].set(-1)
    p = jnp.where(ids < 0, 0.0, p)
    expected = np.asarray(fused_experts(x, p, ids, weights, config), np.float64)
    run = jax.jit(lambda x, p, ids, w: hopper_experts.forward(config, x, p, ids, w, kernels="reference"))
    actual = np.asarray(run(x, p, ids, packed), np.float64)
    np.testing.assert_array_equal(actual[3], 0.0)
    keep = np.arange(21) != 3
    norm = np.sqrt((expected[keep] ** 2).mean(1))
    error = np.sqrt(((actual - expected)[keep] ** 2).mean(1)) / norm
    assert error.max() < TOLERANCE.get(name, 0.02), f"row {error.argmax()}: {error.max():.3f} of its norm"


def test_other_implementations_unpack():
    config, weights = make_weights("mxfp4_a16", implementation=("xla",))
    packed = to_kernel_layout(weights, config)
    x = jax.random.normal(jax.random.key(1), (5, H), jnp.bfloat16)
    p, ids = jnp.ones((5, K), jnp.float32), jnp.zeros((5, K), jnp.int32).at[:, 1].set(2)
    np.testing.assert_array_equal(fused_experts(x, p, ids, packed, config), fused_experts(x, p, ids, weights, config))
    assert "kernel layout of the weights undone in every call" in explain(config, packed, 5, platform="cpu")


@pytest.mark.parametrize("name", ["w4a8_int8", "nvfp4_dynamic", "w4a16_g64_actorder"])
@pytest.mark.sample(3)
def test_lowers_for_hopper_and_says_how(name):
    config, weights = make_weights(name)
    packed = jax.eval_shape(lambda w: to_kernel_layout(w, config), weights)
    x = jax.ShapeDtypeStruct((7, H), jnp.bfloat16)
    slots = [jax.ShapeDtypeStruct((7, K), dtype) for dtype in (jnp.float32, jnp.int32)]
    with on_hopper():
        found = launches(lambda x, p, ids, w: Hopper().run(x, p, ids, w, config), x, *slots, packed)
        text = explain(config, packed, 7, platform="gpu")
        plain = explain(config, weights, 7, platform="gpu")
    # align, permute, two products, combine; for W4A8 also the requantization between the products. NVFP4 rows of
    # 160 columns are too short for the row kernel: XLA rounds and moves them.
    assert found == {"w4a8_int8": 6, "nvfp4_dynamic": 4}.get(name, 5)
    assert "implementation: hopper" in text and "weights unpacked to" in text
    assert ("rounded to their format's grid" in text) == (name == "nvfp4_dynamic")
    assert ("act-order: columns of each row gathered" in text) == (name == "w4a16_g64_actorder")
    assert "are in layout 'plain'" in plain and "implementation: xla" in plain


@pytest.mark.parametrize("name", ["w4a16_g32_asym", "nvfp4_dynamic", "w4a8_int8_g64_actorder"])
def test_few_rows_an_expert_have_low_tiles(name):
    """Layers that no table has: the heuristic's height, not a taller one, whatever the format."""
    config, weights = make_weights(name, has_bias=True)
    packed = jax.eval_shape(lambda w: to_kernel_layout(w, config), weights)
    with on_hopper():
        for tokens, height in ((2, 4), (6, 8), (13, 16)):
            text = explain(config, packed, tokens, platform="gpu")
            assert text.count(f"; {height} rows") == text.count("by the heuristic") == 2, text


def test_the_best_layout_depends_on_the_device_and_the_layer(monkeypatch):
    config, weights = make_weights("w4a16_g64", implementation=None)
    assert in_best_layout(config, weights) is weights  # on a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with on_hopper():
        assert is_kernel_layout(in_best_layout(config, weights).w2.layout)
        assert in_best_layout(dataclasses.replace(config, implementation=("xla",)), weights) is weights
        exact = dataclasses.replace(config, activation="gelu")
        assert in_best_layout(exact, weights) is weights  # no kernel has the error function
        plain, unquantized = make_weights("bf16", implementation=None)
        assert in_best_layout(plain, unquantized) is unquantized


def test_pinned_configurations_do_not_follow_the_call():
    config, weights = make_weights("w4a16_g64", pinned_tokens=64)
    packed = jax.eval_shape(lambda w: to_kernel_layout(w, config), weights)
    with on_hopper():
        plans = {
            tuple(line for line in explain(config, packed, tokens, "gpu").splitlines() if "GEMM" in line[:8])
            for tokens in (1, 64, 4096)
        }
        free = dataclasses.replace(config, pinned_tokens=None)
        assert explain(free, packed, 1, "gpu") != explain(free, packed, 4096, "gpu").replace("4096 tokens", "1 tokens")
    assert len(plans) == 1 and str(plans).count("pinned to 64 tokens") == 2


@pytest.mark.parametrize(
    ("sizes", "fmt", "tokens", "expected"),
    [
        ((128, 8, 2048, 768), "int4_g128", (0, 1, 2, 4, 8, 9), (False, False, True, True, True, False)),
        ((128, 4, 2880, 2880), "int4_g128", (2, 4, 5), (True, True, False)),  # too large
        ((8, 2, 2048, 2048), "nvfp4", (4, 5), (True, False)),  # 1.7 rows of an expert that is hit
        ((128, 8, 2048, 768), "mxfp4_fp8", (4, 8), (True, False)),
        ((8, 2, 4096, 14336), "int4_int8", (4, 8, 9), (True, True, False)),
        ((8, 8, 4096, 14336), "int4_int8", (4, 5), (True, False)),  # every expert has all tokens
        ((128, 4, 2880, 2880), "int4_int8", (16, 17), (True, False)),
        ((128, 8, 2048, 768), "fp8_channel", (0, 1, 2, 4, 12, 13), (False, False, True, True, True, False)),
        ((128, 8, 2048, 768), "fp8_block", (4, 5), (True, False)),
        ((128, 4, 2880, 2880), "bf16", (16, 17), (True, False)),
        ((8, 2, 4096, 14336), "int8", (4, 5), (True, False)),  # 1.6 rows of an expert that is hit
    ],
)
def test_which_layers_have_tiles_of_four_rows(sizes, fmt, tokens, expected):
    key = LayerKey(*sizes, **FORMATS[fmt]) if fmt in FORMATS else PackedLayerKey(*sizes, **PACKED_FORMATS[fmt])
    assert tuple(hopper_plan._are_few(key, count) for count in tokens) == expected


def test_pinned_layers_have_no_tiles_of_four_rows():
    for pinned, height in ((None, 4), (3, 8)):
        config, weights = make_weights("w4a16_g64", pinned_tokens=pinned)
        packed = jax.eval_shape(functools.partial(to_kernel_layout, config=config), weights)
        assert hopper_plan.make_plan(config, packed, 3, "reference").block_m == height
        assert hopper_plan.make_plan(config, packed, 3, "reference", are_quantized=True).block_m == 8
