"""Gradients of experts by Hopper kernels, their references run here; and which calls take them.

The kernels themselves are compared on a GPU in test_backward_gpu.py.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_jax.experts.hopper import _backward, _gradient_products
from moe_jax.experts.hopper._backward import Static, describe_gradient, differentiable, gradient_refusal
from moe_jax.experts.hopper._gradient_products import packed_operands, pulls_activation
from moe_jax.experts.hopper._kernel_layout import kernel_format, to_kernel_layout, to_plain_layout
from moe_jax.experts.hopper._plan import tile_of_any_product
from moe_jax.quantization import dequantize_tensor, method_for
from tests.support.cases.experts import make_config, make_stored_weights, with_nan
from tests.support.cases.hopper_layers import E, K, inputs, make_layer, on_hopper
from tests.support.kernels.case import launches
from tests.support.kernels.unspecified_rows import with_unspecified_rows
from tests.support.oracles.expert_gradients import assert_gradients_close, expert_gradients

TOKENS = 420
ROUTINGS = {
    "ragged, one expert empty": lambda ids: jnp.where(ids == 2, 0, ids),
    "all to one": lambda ids: jnp.full_like(ids, -1).at[:, 0].set(4),
    "some tokens nowhere": lambda ids: ids.at[::3].set(-1),
    "nothing routed": lambda ids: jnp.full_like(ids, -1),
}


def arguments(tokens, routing, **options):
    """(layer, x, topk_weights, topk_ids, cotangent)."""
    layer, (x, z) = make_layer(**dict(scheme="bf16", implementation="hopper") | options), inputs(tokens)
    topk_weights, ids = jax.lax.top_k(jax.nn.softmax(z), K)
    ids = ROUTINGS[routing](ids.astype(jnp.int32))
    topk_weights = jnp.where(ids < 0, 0.0, topk_weights)
    return layer, x, topk_weights, ids, jax.random.normal(jax.random.key(7), x.shape).astype(jnp.bfloat16)


def gradients(function, layer, x, topk_weights, ids, g):
    """Of sum(g * y) by x, topk_weights and weights, and y, by name. function: (x, topk_weights, ids, weights) -> y."""

    def loss(x, topk_weights, weights):
        y = function(x, topk_weights, ids, weights)
        return (y.astype(jnp.float32) * g.astype(jnp.float32)).sum(), y

    found, y = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(x, topk_weights, layer.weights.get_value())
    weights = found[2]
    named = dict(x=found[0], topk_weights=found[1], w13=weights.w13.data, w2=weights.w2.data, y=y)
    biases = dict(w13_bias=weights.w13_bias, w2_bias=weights.w2_bias)
    return named | {name: bias for name, bias in biases.items() if bias is not None}


def expected_of(layer, x, topk_weights, ids, g):
    weights = layer.weights.get_value()
    biases = dict(w13_bias=weights.w13_bias, w2_bias=weights.w2_bias)
    data = (weights.w13.data, weights.w2.data)
    return expert_gradients(g, x, topk_weights, ids, *data, activation=layer.config.activation, **biases)


def by_references(layer, **options):
    return functools.partial(differentiable, Static(layer.config, jnp.dtype("float32"), "reference", **options))


def quick(cases, kept):
    """``cases`` as parameters, all but ``kept`` slow."""
    return [case if case in kept else pytest.param(case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize("routing", quick(ROUTINGS, ("ragged, one expert empty",)))
def test_routings(routing):
    call = arguments(45, routing)
    assert_gradients_close(gradients(by_references(call[0]), *call), expected_of(*call))


def over_whole_steps(dy, x, first_row, num_rows, *, out_dtype=jnp.bfloat16, implementation):
    """``grouped_wgrad`` as its kernel sums: up to the next multiple of 64 rows of an expert."""
    end = first_row + -(-num_rows // 64) * 64
    row = jnp.arange(dy.shape[0])
    own = (row >= first_row[:, None]) & (row < end[:, None])
    parts = [[jnp.where(rows[:, None], side, 0).astype(jnp.float32) for side in (dy, x)] for rows in own]
    return jnp.stack([left.T @ right for left, right in parts]).astype(out_dtype)


@pytest.mark.parametrize("options", [dict(), dict(keep_hidden=True), dict(has_bias=True)], ids=str)
@pytest.mark.sample(3)
def test_rows_past_those_of_a_tile_take_no_part(monkeypatch, options):
    """In tiles of 128 rows, some with an empty half."""
    monkeypatch.setattr(_backward, "grouped_wgrad", over_whole_steps)
    for name in ("grouped_gemm", "grouped_gemm_pull"):
        monkeypatch.setattr(_gradient_products, name, with_unspecified_rows(getattr(_gradient_products, name)))
    jax.clear_caches()
    call = arguments(TOKENS, "ragged, one expert empty", **options)
    assert tile_of_any_product(TOKENS * K, E) == 128
    found = gradients(by_references(call[0]), *call)
    jax.clear_caches()
    assert_gradients_close(found, expected_of(*call))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(has_bias=True, activation="swigluoai"),
        dict(activation="gelu_tanh"),
        dict(has_bias=True, activation="relu2", is_act_and_mul=False),
    ],
    ids=lambda options: options["activation"],
)
def test_activations_and_biases(options):
    layer, *rest = arguments(45, "ragged, one expert empty", **options)
    if options.get("has_bias"):
        weights = layer.weights.get_value()
        keys = jax.random.split(jax.random.key(3))
        w13_bias, w2_bias = (
            jax.random.normal(key, bias.shape, bias.dtype)
            for key, bias in zip(keys, (weights.w13_bias, weights.w2_bias), strict=True)
        )
        layer.weights.set_value(dataclasses.replace(weights, w13_bias=w13_bias, w2_bias=w2_bias))
    expected = expected_of(layer, *rest)
    assert_gradients_close(gradients(by_references(layer), layer, *rest), expected)


# One of each format and layout; activations quantized or not.
SCHEMES_WITH_KERNELS = (
    "w4a16_g128",
    "w4a16_g128_asym",
    "w8a16_channel",
    "w4a8_int8",
    "int8_w8a8",
    "fp8_tensor",
    "fp8_channel",
    "fp8_block",
    "nvfp4_a16",
    "nvfp4_dynamic",
    "mxfp4_a16",
    "mxfp4",
    "mxfp8",
)


def frozen_call(scheme, tokens=45, routing="ragged, one expert empty"):
    """(weights as the kernels hold them, expected gradients, ``arguments`` of the call) of a layer without gradients of
    weights. Expected ones are those of the dequantized weights, activations unquantized.
    """
    call = arguments(tokens, routing, scheme=scheme)
    layer, x, topk_weights, ids, g = call
    weights = to_plain_layout(layer.weights.get_value())
    dense = (dequantize_tensor(tensor) for tensor in (weights.w13, weights.w2))
    expected = expert_gradients(g, x, topk_weights, ids, *dense)
    if kernel_format(layer.config.scheme, layer.config.dtype) is not None:
        weights = to_kernel_layout(weights, layer.config)
    return weights, expected, call


def frozen_gradients(function, weights, call):
    """Of sum(g * y) by x and topk_weights, by name."""
    _, x, topk_weights, ids, g = call

    def loss(x, topk_weights):
        return (function(x, topk_weights, ids, weights).astype(jnp.float32) * g.astype(jnp.float32)).sum()

    return dict(zip(("x", "topk_weights"), jax.jit(jax.grad(loss, (0, 1)))(x, topk_weights), strict=True))


@pytest.mark.parametrize("scheme", quick(SCHEMES_WITH_KERNELS, ("fp8_channel", "w4a16_g128")))
@pytest.mark.sample(2)
def test_quantized_weights(scheme):
    weights, expected, call = frozen_call(scheme)
    assert_gradients_close(frozen_gradients(by_references(call[0]), weights, call), expected)


def assert_nan_reaches_its_tokens(function_of, scheme, name, tokens):
    """Of a weight that is NaN, and no others: the derivative knows no scale that rows share. function_of: a layer."""
    weights, _, call = frozen_call(scheme, tokens)
    found = frozen_gradients(function_of(call[0]), with_nan(weights, name), call)
    own = np.asarray(call[3]) == 0
    assert 0 < own.any(axis=1).sum() < tokens
    np.testing.assert_array_equal(np.isnan(np.asarray(found["topk_weights"])), own)
    is_nan = np.isnan(np.asarray(found["x"], np.float32))
    np.testing.assert_array_equal(is_nan.any(axis=1), own.any(axis=1))


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_a_weight_that_is_nan_reaches_its_tokens(name):
    assert_nan_reaches_its_tokens(by_references, "fp8_tensor", name, 13)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a16_g128", "mxfp4_a16", "fp8_block"])
def test_weights_that_are_dequantized_first(scheme):
    weights, expected, call = frozen_call(scheme)
    found = frozen_gradients(by_references(call[0], reads_packed=False), weights, call)
    assert_gradients_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("wants_biases", [False, True])
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_biases_of_packed_weights(activation, wants_biases):
    """Gradients of biases, and a clamp, leave the activation's derivative to XLA."""
    sizes = dict(num_experts=E, hidden_size=256, intermediate_size=192)
    config = make_config("w4a16_g64", dtype="bfloat16", has_bias=True, activation=activation, **sizes)
    plain = make_stored_weights(config)
    weights = to_kernel_layout(plain, config)
    operands = packed_operands(config, weights)
    assert operands is not None and pulls_activation(config, weights, operands[1]) == (activation == "silu")
    x, z = inputs(45)
    x, (topk_weights, ids) = x[:, :256] / 4, jax.lax.top_k(jax.nn.softmax(z), K)  # nothing reaches the clamp
    g = jax.random.normal(jax.random.key(7), x.shape)
    static = Static(config, jnp.dtype("float32"), "reference")

    def loss(x, topk_weights, w13_bias, w2_bias):
        given = dataclasses.replace(weights, w13_bias=w13_bias, w2_bias=w2_bias)
        return (differentiable(static, x, topk_weights, ids.astype(jnp.int32), given) * g).sum()

    names = ("x", "topk_weights", "w13_bias", "w2_bias")[: 4 if wants_biases else 2]
    by = tuple(range(len(names)))
    found = jax.jit(jax.grad(loss, by))(x, topk_weights, weights.w13_bias, weights.w2_bias)
    dense = (dequantize_tensor(tensor) for tensor in (plain.w13, plain.w2))
    biases = dict(w13_bias=plain.w13_bias, w2_bias=plain.w2_bias)
    options = dict(activation=activation) | biases
    expected = expert_gradients(g.astype(jnp.bfloat16), x, topk_weights, ids, *dense, **options)
    assert_gradients_close(dict(zip(names, found, strict=True)), expected)


@pytest.mark.slow
def test_biases_of_act_order():
    """The kernel layout has those of w13 in the order of w2's columns; their gradient is in the same."""
    sizes = dict(num_experts=E, hidden_size=128, intermediate_size=192)
    config = make_config("w4a16_g32_asym_actorder", dtype="bfloat16", has_bias=True, **sizes)
    plain = make_stored_weights(config)
    weights = to_kernel_layout(plain, config)
    x, z = inputs(45)
    x, (topk_weights, ids) = x[:, :128], jax.lax.top_k(jax.nn.softmax(z), K)
    g = jax.random.normal(jax.random.key(7), x.shape)
    static = Static(config, jnp.dtype("float32"), "reference")

    def loss(x, w13_bias, w2_bias):
        given = dataclasses.replace(weights, w13_bias=w13_bias, w2_bias=w2_bias)
        return (differentiable(static, x, topk_weights, ids.astype(jnp.int32), given) * g).sum()

    x_bar, *bars = jax.jit(jax.grad(loss, (0, 1, 2)))(x, weights.w13_bias, weights.w2_bias)
    found = to_plain_layout(dataclasses.replace(weights, w13_bias=bars[0], w2_bias=bars[1]))
    dense = (dequantize_tensor(tensor) for tensor in (plain.w13, plain.w2))
    biases = dict(w13_bias=plain.w13_bias, w2_bias=plain.w2_bias)
    expected = expert_gradients(g.astype(jnp.bfloat16), x, topk_weights, ids, *dense, **biases)
    assert_gradients_close(dict(x=x_bar, w13_bias=found.w13_bias, w2_bias=found.w2_bias), expected)


def test_only_what_is_asked_for_is_computed():
    """Kernels of the gradient by x alone, by router weights alone, by the weights alone, and by all. The value of the
    function, which nobody asks for, is not computed.
    """
    layer, x, topk_weights, ids, _ = arguments(300, "ragged, one expert empty")
    weights = layer.weights.get_value()

    def loss(x, topk_weights, weights):
        return moe_jax.fused_experts(x, topk_weights, ids, weights, layer.config).astype(jnp.float32).sum()

    with on_hopper():
        found = [launches(jax.grad(loss, by), x, topk_weights, weights) for by in (0, 1, 2, (0, 1, 2))]
    # align, two moves of rows, gate and up, g W2; then the rows' cotangent and its sum, or both gradients of weights,
    # whose rows XLA aligns
    assert found == [7, 5, 6, 8]


def test_nothing_is_added_up_by_a_scatter():
    """On a GPU it adds in the order in which threads come. Gradients by all leaves, biases among them."""
    layer, x, topk_weights, ids, _ = arguments(45, "ragged, one expert empty", has_bias=True)
    static = Static(layer.config, jnp.dtype("float32"))

    def loss(*given):
        return differentiable(static, *given[:2], ids, given[2]).sum()

    with on_hopper():
        found = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, topk_weights, layer.weights.get_value()))
    assert "custom_vmap_call" in found and "scatter[" in found and "scatter-add" not in found


@pytest.mark.parametrize(("reads_packed", "expected"), [(True, 7), (False, 9)])
def test_launches_with_weights_in_kernel_layout(reads_packed, expected):
    """As many as an unquantized layer's gradient by x takes; two more where a kernel dequantizes each matrix first.
    Beside packed weights ``combine`` multiplies with router weights: no scatter moves them to rows.
    """
    layer, x, topk_weights, ids, _ = arguments(300, "ragged, one expert empty", scheme="w4a16_g128")
    weights = to_kernel_layout(layer.weights.get_value(), layer.config)
    static = Static(layer.config, jnp.dtype("float32"), reads_packed=reads_packed)

    gradient = jax.grad(lambda x: differentiable(static, x, topk_weights, ids, weights).sum())
    with on_hopper():
        assert launches(gradient, x) == expected
        assert ("scatter[" in str(jax.make_jaxpr(gradient)(x))) != reads_packed


PLAIN_SCHEMES = ("fp8_channel", "fp8_tensor", "fp8_block", "int8_w8a8")


@pytest.mark.parametrize("reads_packed", [True, False])
@pytest.mark.parametrize("scheme", quick(PLAIN_SCHEMES, ("fp8_block",)))
def test_plain_weights_have_no_matrix_of_16_bits(scheme, reads_packed):
    """But where they are dequantized first. As many launches as an unquantized layer's gradient by x."""
    layer, x, topk_weights, ids, _ = arguments(45, "ragged, one expert empty", scheme=scheme)
    weights = layer.weights.get_value()
    static = Static(layer.config, jnp.dtype("float32"), reads_packed=reads_packed)

    def gradient(x):
        return jax.grad(lambda x: differentiable(static, x, topk_weights, ids, weights).sum())(x)

    with on_hopper():
        text = jax.jit(gradient).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    sizes = [math.prod(map(int, shape.split("x"))) for shape in re.findall(r"tensor<([0-9x]+)xbf16>", text)]
    assert (max(sizes) < weights.w2.data.size) == reads_packed
    assert text.count("mosaic_gpu_v2") == 7


@pytest.mark.slow
@pytest.mark.parametrize("wants_biases", [False, True])
def test_biases_of_plain_weights(wants_biases):
    """Gate and up of 192 channels, whose second block of scales they share with nobody."""
    sizes = dict(num_experts=E, hidden_size=256, intermediate_size=192)
    config = make_config("fp8_block", dtype="bfloat16", has_bias=True, **sizes)
    weights = make_stored_weights(config)
    x, z = inputs(45)
    x, (topk_weights, ids) = x[:, :256] / 4, jax.lax.top_k(jax.nn.softmax(z), K)
    g = jax.random.normal(jax.random.key(7), x.shape)
    static = Static(config, jnp.dtype("float32"), "reference")

    def loss(x, topk_weights, w13_bias, w2_bias):
        given = dataclasses.replace(weights, w13_bias=w13_bias, w2_bias=w2_bias)
        return (differentiable(static, x, topk_weights, ids.astype(jnp.int32), given) * g).sum()

    names = ("x", "topk_weights", "w13_bias", "w2_bias")[: 4 if wants_biases else 2]
    found = jax.jit(jax.grad(loss, tuple(range(len(names)))))(x, topk_weights, weights.w13_bias, weights.w2_bias)
    dense = (dequantize_tensor(tensor) for tensor in (weights.w13, weights.w2))
    biases = dict(w13_bias=weights.w13_bias, w2_bias=weights.w2_bias)
    expected = expert_gradients(g.astype(jnp.bfloat16), x, topk_weights, ids, *dense, **biases)
    assert_gradients_close(dict(zip(names, found, strict=True)), expected)


def test_layers_whose_gradient_has_no_kernels():
    """The next implementation has it, and an error says why the kernels do not."""
    x, z = inputs(3)
    for scheme, intermediate, reason in (("fp8_tensor_static", 256, "a static scale"), ("bf16", 80, "size=80")):
        config = make_layer("bf16", intermediate).config
        config = dataclasses.replace(config, scheme=moe_jax.Scheme.parse(scheme), implementation=("hopper",))
        abstract = method_for(config.scheme).abstract_weights(config)
        assert reason in gradient_refusal(config, abstract)
        assert f"gradient: by the next implementation, since the kernel {gradient_refusal(config, abstract)}" == (
            describe_gradient(config, abstract)
        )
    with on_hopper(), pytest.raises(NotImplementedError, match="hopper: has no gradient for .*size=80"):
        jax.grad(lambda x, layer: layer(x, z).sum())(x, make_layer("bf16", 80, implementation="hopper"))


def test_explain_says_what_runs_and_what_memory_it_takes():
    for scheme, text in {
        "bf16": "gradient: by kernels",
        "w4a16_g128": "gradient: by kernels, packed weights dequantized in shared memory",
        "fp8_channel": "plain weights dequantized in shared memory, activations as if they were not quantized",
        "w4a8_int8": "in each backward pass (0.00 GiB), activations as if they were not quantized",
    }.items():
        layer = make_layer(scheme, implementation="hopper")
        if scheme in ("w4a16_g128", "w4a8_int8"):
            layer.weights.set_value(to_kernel_layout(layer.weights.get_value(), layer.config))
        with on_hopper():
            assert text in layer.explain(45)
    # 128 bytes for each 64 channels by 128 columns
    config = moe_jax.MoEConfig(128, 8, 2048, 768, scheme=moe_jax.Scheme.parse("fp8_block"), dtype="bfloat16")
    text = describe_gradient(config, method_for(config.scheme).abstract_weights(config))
    assert "plain weights dequantized in shared memory (9.0 MiB for copies of scales), activations as if" in text
