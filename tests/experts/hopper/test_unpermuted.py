"""Few tokens stay where they are: every tile has all of them as its rows, quantized where the layer quantizes them; on
the references of the kernels against float64 and against the layer that moves them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.experts import explain
from moe_jax.experts.hopper import _experts as hopper_experts
from moe_jax.experts.hopper import _plan as hopper_plan
from moe_jax.experts.hopper._kernel_layout import kernel_format, to_kernel_layout
from moe_jax.quantization import Scheme, method_for
from tests.support.cases import experts as cases
from tests.support.cases.hopper_layers import on_hopper
from tests.support.kernels.case import launches
from tests.support.oracles.layer_judge import assert_layer_close


@functools.cache
def layer(scheme, **options):
    """(config, weights, weights as the kernels read them)."""
    stored = "float32" if Scheme.parse(scheme).is_quantized else options.get("dtype", "bfloat16")
    # No kernel quantizes rows that are shorter: then they are moved.
    hidden = 96 if Scheme.parse(scheme).activations is None else 512
    sizes = dict(hidden_size=hidden, intermediate_size=64, param_dtype=stored)
    config = cases.make_config(scheme, **({"dtype": "bfloat16"} | sizes | options))
    weights = cases.make_stored_weights(config)
    is_packed = kernel_format(config.scheme, config.dtype) is not None
    return config, weights, to_kernel_layout(weights, config) if is_packed else weights


def plan_of(config, weights, tokens, kernels, unpermuted):
    """A plan that leaves tokens where they are, or moves them."""
    plan = hopper_plan.make_plan(config, weights, tokens, kernels, may_stay=unpermuted)
    assert plan.unpermuted == unpermuted
    return plan


def compiled(config, arguments, unpermuted, kernels="reference"):
    """The layer on kernels by name."""
    x, *_, weights = arguments
    plan = plan_of(config, weights, len(x), kernels, unpermuted)
    call = jax.jit(lambda *arrays: hopper_experts.forward(config, *arrays, kernels=kernels, plan=plan))
    return call.lower(*arguments).compile()


@pytest.mark.parametrize(
    ("scheme", "tokens", "options"),
    [
        ("bf16", 1, {}),
        ("bf16", 16, dict(has_bias=True)),
        ("bf16", 6, dict(dtype="float16", is_act_and_mul=False, activation="relu2")),
        ("w4a16_g32_asym", 8, dict(has_bias=True)),
        ("w4a16_g32_asym", 3, dict(has_bias=True)),  # in tiles of four rows
        ("nvfp4_a16", 5, {}),
        ("fp8_channel", 5, dict(has_bias=True)),
        ("fp8_tensor_static", 8, {}),
        ("int8_w8a8", 1, {}),
        ("fp8_block", 3, {}),
        ("w4a8_int8", 6, {}),
        ("w4a8_int8", 4, {}),
    ],
)
@pytest.mark.sample(3)
def test_bits_are_those_of_moved_rows(scheme, tokens, options):
    check_bits(layer(scheme, **options), tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 5, 8, 16])
@pytest.mark.parametrize("scheme", ["bf16", "w4a16_g128", "w4a16_g32_asym", "nvfp4_a16", "mxfp4_a16", "w8a16_g64_asym"])
def test_bits_on_gpu(scheme, tokens):
    for intermediate in (288, 1024):
        found = layer(scheme, hidden_size=544, intermediate_size=intermediate, has_bias=tokens == 5)
        check_bits(found, tokens, "hopper")


QUANTIZED = ("fp8_channel", "fp8_tensor_static", "int8_w8a8", "fp8_block", "fp8_block_ue8m0", "w4a8_int8", "w4a8_fp8")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 6, 8, 16])
@pytest.mark.parametrize("scheme", QUANTIZED)
def test_quantized_bits_on_gpu(scheme, tokens):
    found = layer(scheme, hidden_size=640, intermediate_size=288, has_bias=tokens == 6)
    check_bits(found, tokens, "hopper")
    check_bits_from_logits(found, tokens, "hopper")


@pytest.mark.parametrize(("scheme", "tokens"), [("int8_w8a8", 5), ("fp8_block", 3), ("w4a8_int8", 4)])
def test_quantized_bits_from_logits(scheme, tokens):
    check_bits_from_logits(layer(scheme), tokens)


def check_bits_from_logits(found, tokens, kernels="reference"):
    """The layer that routes too: logits at random and of one favourite; of the tokens one holds a NaN, one infinities,
    one is zero, and one is masked, whose values are as large as they get.
    """
    config, _, packed = found
    x = cases.make_tokens(tokens + 2, config, dtype=config.dtype.name)[:tokens]
    z = np.random.default_rng(5).standard_normal((2, tokens, cases.E)).astype(np.float32)
    z[1, :, 3] += 9
    mask = np.ones(tokens, bool)
    if tokens > 4:
        x, mask[3] = x.at[0, 7].set(jnp.nan).at[1].set(jnp.inf).at[2].set(0).at[3].set(jnp.finfo(x.dtype).max), False

    def run(unpermuted):
        plan = plan_of(config, packed, tokens, kernels, unpermuted)
        call = jax.jit(functools.partial(hopper_experts.forward_layer, config, kernels=kernels, plan=plan))
        call = call.lower(x, z[0], packed, None, mask).compile()
        return [[np.asarray(a, np.float64) for a in call(x, logits, packed, None, mask)] for logits in z]

    for ours, moved in zip(run(True), run(False), strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, moved)
        assert np.isfinite(ours[0][mask][3:]).all() and not ours[0][~mask].any()


def check_bits(found, tokens, kernels="reference"):
    config, weights, packed = found
    x = cases.make_tokens(tokens + 2, config, dtype=config.dtype.name)[:tokens]
    p, ids = cases.make_routing(tokens)
    # An expert twice, a token of infinities that is routed nowhere, one expert for all.
    p = jnp.where(jnp.isfinite(p), p, 0.5)
    if tokens > 1:  # GEMM 2 of one token adds the weights of such slots first
        x, ids = x.at[1].set(jnp.inf), ids.at[0].set(1).at[1].set(-1)
    in_place = compiled(config, (x, p, ids, packed), True, kernels)
    moved = compiled(config, (x, p, ids, packed), False, kernels)
    for slots in (ids, jnp.where(ids >= 0, 2, -1)):
        is_routed = (slots >= 0) & (slots < cases.E)
        arguments = (x, jnp.where(is_routed, p, 0), slots, packed)
        y = np.asarray(in_place(*arguments))
        np.testing.assert_array_equal(y, moved(*arguments))
        keep = np.asarray(is_routed.any(1))
        assert_layer_close(y[keep], x[keep], p[keep], slots[keep], weights, config, on_gpu=kernels == "hopper")
        assert not y[~keep].any()


@pytest.mark.parametrize(
    ("scheme", "tokens", "expected"),
    [
        ("bf16", 16, True),
        ("w8a16_g64_asym", 8, True),
        ("mxfp4_a16", 3, True),
        ("bf16", 0, False),
        ("bf16", 9, False),  # no whole boxes
        ("bf16", 24, False),  # more than a tile
        ("fp8_channel", 8, True),
        ("fp8_tensor_static", 16, True),
        ("fp8_block", 1, True),
        ("w4a8_fp8", 3, True),
        ("int8_w8a8", 9, False),
        ("fp8_tensor", 8, False),  # a scale of all tokens
        ("fp8_tensor", 1, True),
        ("mxfp4", 1, False),
        ("w4a8_int8_actorder", 1, False),
        ("w4a16_g32_asym_actorder", 1, False),  # columns in another order
    ],
)
def test_which_layers(scheme, tokens, expected):
    config, _, weights = layer(scheme)
    plan = hopper_plan.make_plan(config, weights, tokens, "reference")
    assert plan.unpermuted == expected and plan.products[0].unpermuted_rows == (tokens if expected else 0)
    assert not plan.products[1].unpermuted_rows


def test_rows_that_no_launch_quantizes():
    """Too short, and too wide for the registers of the blocks that route."""
    for hidden, expected in ((96, False), (128, True), (8192, True), (8320, False)):
        config = cases.make_config("int8_w8a8", dtype="bfloat16", hidden_size=hidden)
        weights = method_for(config.scheme).abstract_weights(config)
        assert hopper_plan.make_plan(config, weights, 3, "reference").unpermuted == expected
    assert not hopper_plan.make_plan(config, weights, 3, "reference", are_quantized=True).unpermuted


@pytest.mark.parametrize(
    ("scheme", "tokens", "expected"),
    [
        *(("bf16", 5, 4), ("bf16", 9, 5), ("int8_w8a8", 5, 5), ("int8_w8a8", 9, 6), ("fp8_block", 1, 4)),
        *(("bf16", 65, 5), ("int8_w8a8", 128, 6), ("int8_w8a8", 129, 7), ("fp8_tensor_static", 65, 6)),
    ],
)
def test_explain_and_launches(scheme, tokens, expected):
    """Route and align, both products, combine; int8 rows again between the products. Nine tokens are moved by a launch
    more. Those of 65 to 128 are moved while they are aligned."""
    sizes = dict(hidden_size=512, intermediate_size=256)
    config = cases.make_config(scheme, dtype="bfloat16", param_dtype="bfloat16", **sizes)
    weights = method_for(config.scheme).abstract_weights(config)
    x, z = (jax.ShapeDtypeStruct((tokens, n), dtype) for n, dtype in ((512, "bfloat16"), (cases.E, "float32")))
    with on_hopper():
        text = explain(config, weights, tokens, "gpu")
        assert launches(lambda *arrays: hopper_experts.forward_layer(config, *arrays), x, z, weights) == expected
    quantized = "" if scheme == "bf16" else "tokens are quantized where they are, "
    assert (f"none are moved, {quantized}GEMM 1 takes all tokens" in text) == (tokens < 9)
    assert ("one launch aligns the tokens and moves them" in text) == (tokens in (65, 128))


@pytest.mark.parametrize(("scheme", "expected"), [("bf16", 5), ("int8_w8a8", 6)])
def test_ids_as_words(scheme, expected):
    """Of 64 bits, as torch has them: tokens are aligned and moved by two launches, for one with ids of 32 bits."""
    sizes = dict(hidden_size=512, intermediate_size=256)
    config = cases.make_config(scheme, dtype="bfloat16", param_dtype="bfloat16", **sizes)
    weights = method_for(config.scheme).abstract_weights(config)
    slots = (65, config.top_k)
    x, scores = jax.ShapeDtypeStruct((65, 512), "bfloat16"), jax.ShapeDtypeStruct(slots, "float32")
    for shape, count in ((slots, expected - 1), ((*slots, 2), expected)):
        ids = jax.ShapeDtypeStruct(shape, "int32")
        with on_hopper():
            assert launches(lambda *a: hopper_experts.forward(config, *a), x, scores, ids, weights) == count


def test_ids_as_words_of_moved_tokens():
    """And they mean the same: an id beyond 32 bits is no expert's."""
    config, weights, held = layer("fp8_channel")
    x, scores, ids, _ = cases.make_call(config, 20, dtype="bfloat16")
    ids = jnp.where(jnp.arange(20)[:, None] % 3 == 1, -1, ids)
    high = jnp.where(ids < 0, 7, 0)
    words = jnp.stack([jnp.maximum(ids, 0), high], axis=-1).astype(jnp.int32)
    plan = plan_of(config, held, 20, "reference", False)
    run = functools.partial(hopper_experts.forward, config, kernels="reference", plan=plan)
    np.testing.assert_array_equal(run(x, scores, ids, held), run(x, scores, words, held))
