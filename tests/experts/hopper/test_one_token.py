"""A token by itself: tiles of one row, products that quantize and add up rows; few tokens in tiles of four. Against the
float64 judge."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.experts.hopper import _experts as hopper_experts
from moe_jax.experts.hopper import _plan as hopper_plan
from moe_jax.experts.hopper._kernel_layout import to_kernel_layout
from moe_jax.quantization import method_for
from pallas_kernels.grouped_gemm.packed import PackedVectorConfig
from tests.support.cases import experts as cases
from tests.support.cases.hopper_layers import on_hopper
from tests.support.oracles.layer_judge import assert_layer_close

SCHEMES = (
    "bf16",
    "fp8_tensor",
    "fp8_tensor_static",
    "fp8_tensor_token",
    "fp8_channel",
    "fp8_block",
    "fp8_block_ue8m0",
    "int8_w8a8",
)
PACKED = (
    *("w4a16_g128", "w4a16_g32_asym", "w4a16_g64_actorder", "w8a16_channel", "nvfp4_a16", "nvfp4_dynamic", "mxfp4_a16"),
    *("mxfp4", "mxfp8", "w4a8_int8", "w4a8_int8_channel_asym", "w4a8_fp8"),
)
QUANTIZE = {
    "fp8_tensor_token": "e4m3_row",
    "fp8_channel": "e4m3_row",
    "fp8_block": "e4m3_group",
    "fp8_block_ue8m0": "e4m3_group_ue8m0",
    "int8_w8a8": "int8_row",
}

SIZES = dict(dtype="bfloat16", hidden_size=512, intermediate_size=320)


def make_layer(scheme, **options):
    """(config, weights, weights as the kernels read them)."""
    stored = dict(param_dtype="float32" if scheme != "bf16" else options.get("dtype", "bfloat16"))
    config = cases.make_config(scheme, **SIZES | stored | options)
    weights = cases.make_stored_weights(config)
    return config, weights, to_kernel_layout(weights, config) if scheme in PACKED else weights


def check(scheme, kernels, tokens=1, **options):
    """From ids, one slot without an expert; and from logits, with a shared output, masked or not."""
    config, weights, held = make_layer(scheme, **options)
    plan = hopper_plan.make_plan(config, held, tokens, kernels)
    assert plan.block_m == (1 if tokens == 1 else 4)
    x = cases.make_tokens(3, config, dtype=config.dtype.name)[3 - tokens :]
    p, ids = cases.make_routing(3)
    p, ids = jnp.where(jnp.isfinite(p), p, 0.5)[3 - tokens :], ids[3 - tokens :].at[0, 0].set(-1)
    p = jnp.where(ids >= 0, p, 0.0)
    run = jax.jit(functools.partial(hopper_experts.forward, config, kernels=kernels))
    y = np.asarray(run(x, p, ids, held))
    judge = functools.partial(assert_layer_close, weights=weights, config=config, on_gpu=kernels == "hopper")
    judge(y, x, p, ids)

    z = jnp.asarray(np.random.default_rng(3).standard_normal((tokens, cases.E)), jnp.float32)
    shared = jnp.ones((tokens, config.hidden_size), x.dtype)
    layer = jax.jit(functools.partial(hopper_experts.forward_layer, config, kernels=kernels))
    routed, ids, sizes = layer(x, z, held, None, None, None)
    with_shared, *_ = layer(x, z, held, None, None, shared)
    masked, _, of_masked = layer(x, z, held, None, jnp.zeros(tokens, bool), shared)
    chosen = jnp.take_along_axis(jax.nn.softmax(z), ids, axis=1)
    judge(routed, x, chosen / chosen.sum(axis=1, keepdims=True) if config.renormalize else chosen, ids)
    assert sizes.sum() == tokens * config.top_k and not of_masked.any()
    spacing = float(jnp.finfo(x.dtype).eps) * (1 + np.abs(np.asarray(routed, np.float64)).max())
    difference = np.asarray(with_shared, np.float64) - np.asarray(routed, np.float64)
    assert np.abs(difference - 1).max() <= 2 * spacing
    np.testing.assert_array_equal(np.asarray(masked, np.float64), 1.0)


ALL = [dict(), dict(has_bias=True, activation="swigluoai"), dict(dtype="float16"), dict(intermediate_size=1152)]
IDS = ["plain", "bias", "float16", "long"]
LAYERS = [
    pytest.param(scheme, options, id=f"{scheme}-{name}")
    for scheme in (*SCHEMES, *PACKED)
    for options, name in zip(ALL, IDS, strict=True)
    if name != "float16" or not scheme.startswith(("nvfp4", "mxfp"))  # which are multiplied in bfloat16
]


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("scheme", "options"), LAYERS)
@pytest.mark.sample(9)
def test_plumbing_on_kernel_references(scheme, options, tokens):
    check(scheme, "reference", tokens, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("scheme", "options"), LAYERS)
def test_gpu(scheme, options, tokens):
    check(scheme, "hopper", tokens, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", PACKED)
def test_packed_rows_added_up_gpu(scheme, monkeypatch):
    """By GEMM 2, as where its CTAs fill the machine."""
    monkeypatch.setattr(hopper_plan.packed_gemm, "adds_up_at_once", lambda desc, num_sms: True)
    check(scheme, "hopper")


@pytest.mark.parametrize("scheme", ["w4a16_g64_actorder", "nvfp4_a16", "w4a8_int8"])
def test_packed_rows_added_up_by_references(scheme, monkeypatch):
    """The whole layer, also with a shared output and masked."""

    def adding(*args, **options):
        plan = make_plan(*args, **options)
        second = dataclasses.replace(plan.products[1], num_tokens=1, top_k=cases.K)
        return dataclasses.replace(plan, products=(plan.products[0], second))

    make_plan = hopper_plan.make_plan
    monkeypatch.setattr(hopper_experts, "make_plan", adding)
    check(scheme, "reference")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_who_quantizes_and_who_adds_up(scheme):
    """GEMM 2 quantizes short hidden rows; where it does not, it adds rows up."""
    for columns, is_short in ((768, True), (1024, True), (1152, False), (14336, False)):
        config = cases.make_config(scheme, **SIZES | dict(intermediate_size=columns, param_dtype="bfloat16"))
        weights = method_for(config.scheme).abstract_weights(config)
        plan = hopper_plan.make_plan(config, weights, 1, "reference")
        expected = QUANTIZE.get(scheme, "none") if is_short else "none"
        assert plan.hidden_quantization == expected and plan.adds_up == (expected == "none")
        assert plan.requantize == ("tensor" if scheme == "fp8_tensor_static" else "none")


@pytest.mark.parametrize(
    ("columns", "work"),
    [(768, "1024 CTAs, which quantize their rows (e4m3_row)"), (1152, "512 CTAs, which add up 8 rows")],
)
def test_explained(columns, work):
    """What the second product does besides, and no measurement, though a table has one of the first."""
    sizes = dict(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=columns, dtype="bfloat16")
    config = cases.make_config("fp8_channel", **sizes)
    weights = method_for(config.scheme).abstract_weights(config)
    with on_hopper():
        plan = hopper_plan.make_plan(config, weights, 1)
        first, second = hopper_plan.describe_products(plan, weights)
    assert first.startswith("GEMM 1: matrix times vector, 1 x 2 channels a warp, ") and first.endswith(
        "by the heuristic"
    )
    assert second.endswith(f"{work}, by the heuristic")


@pytest.mark.parametrize("change", [{}, dict(call_axes=("experts",)), dict(tokens=2)], ids=str)
def test_a_token_is_the_whole_call(change):
    """One token's scale for the call is its own, so that it is quantized where it is; not where a mesh shares it."""
    config, weights, _ = make_layer("fp8_tensor")
    tokens = change.pop("tokens", 1)
    plan = hopper_plan.make_plan(dataclasses.replace(config, **change), weights, tokens, "reference")
    is_alone = tokens == 1 and not change
    assert (plan.unpermuted, plan.quantization) == ((True, "e4m3_tensor_row") if is_alone else (False, "none"))


SEVERAL = [dict(pinned_tokens=1), dict(intermediate_size=336), dict(hidden_size=528)]


@pytest.mark.parametrize("change", SEVERAL)
def test_who_has_tiles_of_several_rows(change):
    """Calls whose tiles are pinned, and rows that no load of a warp divides."""
    config = cases.make_config("bf16", **SIZES | dict(param_dtype="bfloat16") | change)
    weights = method_for(config.scheme).abstract_weights(config)
    assert hopper_plan.make_plan(config, weights, 1, "reference").block_m > 1


@pytest.mark.parametrize("change", [dict(pinned_tokens=4), dict(intermediate_size=336), dict(has_bias=True)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_scale_for_the_call(change, dtype):
    """Of one token, also in tiles of several rows, whose scales have room for all of them."""
    config, weights, held = make_layer("fp8_tensor", dtype=dtype, **change)
    plan = hopper_plan.make_plan(config, held, 1, "reference")
    assert plan.quantization == "e4m3_tensor_row" and (plan.block_m > 1) == ("has_bias" not in change)
    x = cases.make_tokens(3, config, dtype=dtype)[2:]
    z = jnp.asarray(np.random.default_rng(3).standard_normal((1, cases.E)), jnp.float32)
    layer = jax.jit(functools.partial(hopper_experts.forward_layer, config, kernels="reference"))
    y, ids, _ = layer(x, z, held, None, None, None)
    chosen = jnp.take_along_axis(jax.nn.softmax(z), ids, axis=1)
    p = chosen / chosen.sum() if config.renormalize else chosen
    assert_layer_close(np.asarray(y), x, p, ids, weights=weights, config=config, on_gpu=False)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_few_tokens(scheme):
    """Nothing is left where it is that a tile does not hold, and nobody quantizes or adds up; pinned calls, and rows
    that are quantized already, have other tiles."""
    config, _, held = make_layer(scheme)
    for tokens in (2, 4):
        plan = hopper_plan.make_plan(config, held, tokens, "reference")
        assert plan.block_m == 4 and plan.unpermuted == (scheme != "fp8_tensor")
        assert plan.requantize == ("tensor" if scheme == "fp8_tensor_static" else "none")
        assert not plan.adds_up and plan.hidden_quantization == "none"
        assert not hopper_plan.make_plan(config, held, tokens, "reference", may_stay=False).unpermuted
        assert hopper_plan.make_plan(config, held, tokens, "reference", are_quantized=True).block_m > 4
        pinned = dataclasses.replace(config, pinned_tokens=tokens)
        assert hopper_plan.make_plan(pinned, held, tokens, "reference").block_m > 4
    wide = dataclasses.replace(config, num_experts=1024, top_k=2)  # as a layer of many experts: 1.01 rows of each
    many = method_for(config.scheme).abstract_weights(wide)
    for tokens in (5, 16, 17):
        is_few = tokens <= 16 and not scheme.startswith("fp8_block")
        plan = hopper_plan.make_plan(wide, many, tokens, "reference")
        assert (plan.block_m == 4, plan.unpermuted) == (is_few, not is_few and scheme != "fp8_tensor" and tokens <= 16)


def test_packed_rows_are_added_up_where_all_ctas_run_at_once():
    """Not by a shard of the experts, and not where CTAs would wait for others."""
    for hidden, experts, adds_up in ((2048, 64, True), (7168, 64, False), (2048, 128, False)):
        sizes = dict(num_experts=64, top_k=8, hidden_size=hidden, intermediate_size=768, dtype="bfloat16")
        config = cases.make_config("w4a16_g128", **sizes)
        weights = method_for(config.scheme).abstract_weights(config)
        held = jax.eval_shape(lambda weights, config=config: to_kernel_layout(weights, config), weights)
        with on_hopper():
            plan = hopper_plan.make_plan(dataclasses.replace(config, num_experts=experts), held, 1)
        assert (plan.block_m, plan.adds_up) == (1, adds_up)


def test_packed_products_of_a_shard():
    """As many CTAs are expected as its part of the rows has, and with few of them warps read far ahead."""
    sizes = dict(num_experts=32, top_k=8, hidden_size=7168, intermediate_size=2048, dtype="bfloat16")
    config = cases.make_config("w4a16_g128", **sizes)
    weights = method_for(config.scheme).abstract_weights(config)
    held = jax.eval_shape(lambda weights: to_kernel_layout(weights, config), weights)
    deep, shallow = PackedVectorConfig(4), PackedVectorConfig(4, 4)
    for experts, expected in (
        (32, (None, None)),
        (33, (PackedVectorConfig(2, 4), shallow)),  # eight rows of 1024 and 3584 CTAs
        (96, (shallow, shallow)),  # three
        (256, (deep, shallow)),  # one row, of 128 and 448 CTAs
    ):
        shard = dataclasses.replace(config, num_experts=experts)
        with on_hopper():
            plan = hopper_plan.make_plan(shard, held, 1)
            described = hopper_plan.describe_products(plan, held)
        assert plan.configs == expected and not plan.adds_up
        assert ("K in 2 parts" in described[0]) == (experts <= 33)
        assert hopper_plan.make_plan(shard, held, 1, "reference").configs == (None, None)


def test_packed_weights_explained():
    config, _, held = make_layer("w4a16_g128")
    with on_hopper():
        plan = hopper_plan.make_plan(config, held, 1)
        first, second = hopper_plan.describe_products(plan, held)
    assert first.endswith("matrix times vector, 2 x 16 channels a warp, K in 4 parts, 40 CTAs, by the heuristic")
    assert second.endswith("matrix times vector, 1 x 16 channels a warp, K in 2 parts, 32 CTAs, by the heuristic")
    pinned = dataclasses.replace(config, pinned_tokens=1)
    assert hopper_plan.make_plan(pinned, held, 1, "reference").block_m > 1
