"""Low-rank addends on the Hopper kernels, their references run here: outputs against NumPy float64, gradients against
torch's in float64 and the xla backend's in float32; and which calls the kernels take.

The kernels themselves are compared on a GPU in test_adapters_gpu.py.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_jax.experts import explain, fused_experts
from moe_jax.experts._backend import Problem
from moe_jax.experts._choice import choose
from moe_jax.experts.hopper._adapters import adapter_refusal
from moe_jax.experts.hopper._backward import Static, differentiable
from moe_jax.experts.hopper._gradient_products import packed_block_m, packed_operands
from moe_jax.experts.hopper._kernel_layout import kernel_format, to_kernel_layout
from moe_jax.experts.hopper._plan import gemm_of, make_plan
from moe_jax.quantization import ExpertWeights, QuantizedTensor, dequantize_tensor
from pallas_kernels.grouped_gemm.packed import describe_call
from tests.experts.test_adapters import RANK, torch_gradients, with_adapters
from tests.support.cases import experts as cases
from tests.support.cases.hopper_layers import on_hopper
from tests.support.kernels.case import launches
from tests.support.oracles.experts import experts_numpy
from tests.support.oracles.tolerances import assert_rows_close, tolerance

TOKENS = 17
SCHEMES = (
    *("w4a16_g32", "bf16", "fp8_channel", "fp8_tensor", "fp8_block", "int8_w8a8", "fp8_tensor_static", "w4a8_int8"),
    *("w8a16_channel", "nvfp4_a16", "mxfp4_a16", "fp8_channel_a16"),
)
LEAVES = ("a", "b", "scale")


def call_of(scheme="w4a16_g32", tokens=TOKENS, *, dtype="bfloat16", shares_gate=True, targets=("w13", "w2"), **options):
    """(config, x, topk_weights, topk_ids, weights in the plain layout); ids are cleaned."""
    sizes = dict(hidden_size=256, intermediate_size=256 if "block" in scheme else 192)
    given: Any = dict(dtype=dtype, param_dtype=dtype) | sizes | options
    config = cases.make_config(scheme, **given)
    x, p, ids, weights = cases.make_call(config, tokens, dtype=dtype)
    is_routed = (ids >= 0) & (ids < config.num_experts)
    ids, p = jnp.where(is_routed, ids, -1), jnp.where(is_routed, p, 0.0)
    return config, x, p, ids, with_adapters(weights, dtype=dtype, shares_gate=shares_gate, targets=targets)


def held(weights, config):
    """As the kernels read them."""
    return weights if kernel_format(config.scheme, config.dtype) is None else to_kernel_layout(weights, config)


def by_references(config, x, p, ids, weights):
    return differentiable(Static(config, jnp.dtype("float32"), "reference"), x, p, ids, weights)


def chosen_by(weights, tokens, seed=3):
    """``weights`` whose tokens take one of two adapters, of RANK - 1 ranks and of 1, or none."""
    one_hot = np.zeros((tokens, RANK), np.float32)
    for token, choice in enumerate(np.random.default_rng(seed).integers(-1, 2, tokens)):
        one_hot[token] = [choice == 0] * (RANK - 1) + [choice == 1]
    w13, w2 = (dataclasses.replace(lora, chosen=jnp.asarray(one_hot)) for lora in (weights.w13_lora, weights.w2_lora))
    return weights.adapted(w13, w2)


def quick(values, *kept):
    """``values`` as parameters, all but ``kept`` slow."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]


# -- outputs ----------------------------------------------------------------------------------------------------------


def check_outputs(run, scheme, tokens=TOKENS, **options):
    config, x, p, ids, weights = call_of(scheme, tokens, **options)
    y = jax.jit(functools.partial(run, config))(x, p, ids, held(weights, config))
    want = experts_numpy(x, p, ids, weights, config)
    bare = experts_numpy(x, p, ids, weights.adapted(None, None), config)
    assert np.abs(want - bare).max() > 0.3 * np.abs(bare).max(), "adapters that hardly add would hide their absence"
    bound = tolerance(config.scheme, "bfloat16") if config.scheme.activations is None else FLIPPED
    assert_rows_close(y, want, bound, experts=ids)


# Of quantized activations: rounding before the activation moves hidden values to the next code, now and then many.
FLIPPED = dataclasses.replace(tolerance("bf16", "bfloat16"), fraction=2.0**-4)


@pytest.mark.parametrize("scheme", quick(SCHEMES, "w4a16_g32", "fp8_tensor"))
def test_outputs(scheme):
    check_outputs(by_references, scheme, has_bias=True, shares_gate=scheme != "w4a16_g32")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [dict(targets=("w13",)), dict(targets=("w2",)), dict(is_act_and_mul=False)], ids=str
)
def test_one_target_and_one_projection(options):
    check_outputs(by_references, "w4a16_g32", **options)


# -- gradients --------------------------------------------------------------------------------------------------------


def gradients(run, config, x, p, ids, weights, g):
    """Of sum(g * y) by x, topk_weights, the leaves of the adapters and biases, by name."""

    def parts(weights):
        own = {f"{name}.{leaf}": getattr(lora, leaf) for name, lora in loras(weights) for leaf in LEAVES}
        return own | {name: bias for name in ("w13_bias", "w2_bias") if (bias := getattr(weights, name)) is not None}

    def with_parts(trained):
        own: dict[str, Any] = {}
        for name, lora in loras(weights):
            own[name] = dataclasses.replace(lora, **{leaf: trained[f"{name}.{leaf}"] for leaf in LEAVES})
        own |= {name: value for name, value in trained.items() if name.endswith("bias")}
        return dataclasses.replace(weights, **own)

    def loss(x, p, trained):
        return (run(config, x, p, ids, with_parts(trained)).astype(jnp.float32) * g).sum()

    x_bar, p_bar, found = jax.jit(jax.grad(loss, (0, 1, 2)))(x, p, parts(weights))
    return found | dict(x=x_bar, topk_weights=p_bar)


def loras(weights):
    return [(name, lora) for name in ("w13_lora", "w2_lora") if (lora := getattr(weights, name)) is not None]


def dequantized(weights, config):
    """The same layer in float32, unquantized: (config, weights)."""
    w13, w2 = (QuantizedTensor(dequantize_tensor(tensor)) for tensor in (weights.w13, weights.w2))
    plain = ExpertWeights(w13, w2, weights.w13_bias, weights.w2_bias).adapted(weights.w13_lora, weights.w2_lora)
    scheme = moe_jax.Scheme.parse("bf16")
    wide = dataclasses.replace(config, scheme=scheme, dtype=jnp.dtype("float32"), implementation=("xla",))
    return wide, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), plain)


def by_xla(config, x, p, ids, weights):
    return fused_experts(x, p, ids, weights, config)


def float32_call(*, with_choice=False, **options):
    """Arguments of ``gradients`` for a layer in float32, where the references round nothing."""
    config, x, p, ids, weights = call_of("bf16", dtype="float32", **options)
    if with_choice:
        weights = chosen_by(weights, TOKENS)
    return config, x, p, ids, weights, jax.random.normal(jax.random.key(7), x.shape)


def assert_same(found, wanted, fraction=2.0**-16):
    """Each expert, or row, of each gradient within ``fraction`` of its largest value; router weights, whose gradients
    are sums that cancel, of the largest of all.
    """
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        value, own = np.asarray(value, np.float64), np.asarray(found[name], np.float64)
        size = np.abs(value).max(axis=tuple(range(name != "topk_weights", value.ndim)), keepdims=True)
        assert (np.abs(own - value) <= fraction * size).all(), name


@pytest.mark.parametrize("shares_gate", quick((False, True), False))
def test_gradients(shares_gate):
    """By x and the adapters beside torch, in float32, so that one wrong product of many shows."""
    config, x, p, ids, weights, g = float32_call(shares_gate=shares_gate)
    found = gradients(by_references, config, x, p, ids, weights, g)
    want_x, want_leaves = torch_gradients(x, p, ids, weights, config, np.asarray(g, np.float64))
    want = dict(want_leaves, x=want_x)
    assert_same({name: found[name] for name in want}, want)


@pytest.mark.parametrize(
    "options",
    quick(
        (
            dict(with_choice=True, shares_gate=False),
            dict(has_bias=True),
            dict(targets=("w13",), is_act_and_mul=False),
            dict(targets=("w2",)),
        ),
        dict(with_choice=True, shares_gate=False),
    ),
    ids=str,
)
def test_gradients_beside_xla(options):
    """Also by router weights, scales of ranks and biases; and where each token takes an adapter of its own."""
    call = float32_call(**options)
    assert_same(gradients(by_references, *call), gradients(by_xla, *call))


def test_each_token_takes_its_own_adapter():
    config, x, p, ids, weights = call_of(shares_gate=False)
    own = chosen_by(weights, TOKENS)
    run = jax.jit(functools.partial(by_references, config))
    y, of_all = run(x, p, ids, held(own, config)), run(x, p, ids, held(weights, config))
    wide, plain = dequantized(own, config)
    want = np.asarray(by_xla(wide, x.astype(jnp.float32), p, ids, plain))
    assert_rows_close(y, want, tolerance("bf16", "bfloat16"), experts=ids)
    assert np.abs(np.asarray(y - of_all)).max() > 0.1 * np.abs(want).max()


def check_gradients_of_quantized(run, scheme, tokens, *, with_choice=False):
    """In bfloat16 beside the dequantized layer in float32; tokens as models have them, all of one size."""
    config, _, p, ids, weights = call_of(scheme, tokens, shares_gate=False)
    if with_choice:
        weights = chosen_by(weights, tokens)
    x, g = (jax.random.normal(jax.random.key(seed), (tokens, 256)).astype(jnp.bfloat16) for seed in (6, 7))
    found = gradients(run, config, x, p, ids, held(weights, config), g.astype(jnp.float32))
    wide, plain = dequantized(weights, config)
    wanted = gradients(by_xla, wide, x.astype(jnp.float32), p, ids, plain, g.astype(jnp.float32))
    for name, value in wanted.items():
        if name == "topk_weights" or name.endswith("scale"):  # sums that cancel, beside others of their own
            continue
        assert_rows_close(
            found[name].reshape(-1, value.shape[-1]),
            np.asarray(value).reshape(-1, value.shape[-1]),
            dataclasses.replace(tolerance("bf16", "bfloat16"), ulps=8.0),
            row_scale=np.abs(np.asarray(value)).max(),
        )


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a16_g32", "fp8_block", "mxfp4_a16"])
def test_gradients_beside_quantized_weights(scheme):
    check_gradients_of_quantized(by_references, scheme, 150)


# -- which calls ------------------------------------------------------------------------------------------------------


def test_the_kernels_run_layers_with_adapters():
    """GEMM 1 and 2, two products for each addend, and what moves, aligns and combines rows."""
    config, x, p, ids, weights = call_of()
    weights = held(weights, config)
    config = dataclasses.replace(config, implementation=("hopper", "xla"))
    with on_hopper():
        chosen, skipped = choose(Problem(config, weights, TOKENS, "gpu"))
        assert chosen is not None and chosen.name == "hopper" and not skipped
        text = explain(config, weights, TOKENS, platform="gpu")
        assert "adapters: by kernels" in text and "GEMM 1" in text and "gradient: by kernels" in text
        run = functools.partial(fused_experts, topk_ids=ids, weights=weights, config=config)
        assert launches(lambda x: run(x, p), x) == 10
        assert launches(jax.grad(lambda x: run(x, p).astype(jnp.float32).sum()), x) >= 14


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(scheme="w4a16_g32", dtype="float16"), "multiplies adapters .* in bfloat16, the layer .* in float16"),
        (dict(scheme="w4a16_g32_asym_actorder"), "beside act-order"),
        (dict(scheme="fp8_block", intermediate_size=192), "intermediate_size=192 is not whole blocks"),
    ],
    ids=str,
)
def test_refusals_by_name(options, reason):
    given: Any = dict(dtype="bfloat16", hidden_size=256, intermediate_size=256) | options
    config = cases.make_config(**given)
    weights = with_adapters(cases.make_stored_weights(config))
    found = adapter_refusal(config, weights)
    assert found is not None and re.search(reason, found)
    with on_hopper():
        chosen, skipped = choose(Problem(config, held(weights, config), TOKENS, "gpu"))
    assert chosen is not None and chosen.name == "xla" and ("hopper", found) in skipped


@pytest.mark.parametrize("scheme", ["w4a16_g32", "w4a8_int8", "w8a16_channel", "nvfp4_a16", "mxfp4_a16"])
def test_packed_weights_have_tiles_for_many_rows(scheme):
    config, *_, weights = call_of(scheme, 700)
    weights = held(weights, config)
    plan = make_plan(config, weights, 700)
    assert all(gemm_of(weights).choose_config(desc, plan.block_m, 132) for desc in plan.products)
    if (operands := packed_operands(config, weights)) is not None:
        block_m = packed_block_m(config, operands[0], 128)
        desc = describe_call(block_m, operands[0], config.dtype, "none", None, None)
        assert gemm_of(weights).choose_config(desc, block_m, 132) and block_m == (64 if scheme == "w4a16_g32" else 128)
