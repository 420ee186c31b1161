"""Layers of FP8 blocks whose last group of 128 columns is short, as gpt-oss' 2880 are 22 groups and 64 columns.

A short group has a scale of its own, over the columns that it has. A float64 layer is written out here, one group and
one block after the other; the sequence of kernels on their references, and the xla backend, must be it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moe_jax import fused_experts
from moe_jax.experts import explain
from moe_jax.experts.hopper import _experts as hopper_experts
from moe_jax.experts.hopper import _plan as hopper_plan
from moe_jax.quantization import method_for
from tests.support.cases import experts as cases
from tests.support.cases.gpu_layers import check
from tests.support.cases.hopper_layers import on_hopper
from tests.support.oracles.experts import experts_numpy
from tests.support.oracles.layer_judge import assert_layer_close

SIZES: dict[str, Any] = dict(hidden_size=320, intermediate_size=192, num_experts=6, top_k=2, activation="swigluoai")
GPT_OSS: dict[str, Any] = dict(
    num_experts=128, top_k=4, hidden_size=2880, intermediate_size=2880, activation="swigluoai"
)
EIGHT_EXPERTS: dict[str, Any] = GPT_OSS | dict(num_experts=8)
BLOCKS = ("fp8_block", "fp8_block_ue8m0")


def rounded(row, scheme):
    """A row (K,) with every 128 columns, or what remains of them, on the grid of their own scale."""
    out = np.zeros(len(row))
    for start in range(0, len(row), 128):
        group = row[start : start + 128].astype(np.float32)
        scale = np.maximum(np.abs(group).max(), np.float32(1e-10)) * np.float32(1 / 448)
        if scheme.endswith("ue8m0"):
            scale = np.float32(2.0 ** np.ceil(np.log2(float(scale))))
        codes = np.clip(group / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        out[start : start + 128] = codes.astype(np.float64) * float(scale)
    return out


def matrix(codes, scales):
    """(N, K) codes with a scale for each 128 x 128 of them, at the edges for what remains."""
    out = np.asarray(codes).astype(np.float64)
    for i, j in np.ndindex(*scales.shape):
        out[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] *= float(scales[i, j])
    return out


def layer_float64(x, p, ids, weights, config, scheme):
    """The layer, token after token; hidden values are rounded to bfloat16 before their groups are."""
    w13, w2 = (tuple(map(np.asarray, (tensor.data, tensor.scale))) for tensor in (weights.w13, weights.w2))
    biases = [None if b is None else np.asarray(b, np.float64) for b in (weights.w13_bias, weights.w2_bias)]
    up13 = [[matrix(w13[0][e, g], w13[1][e, g]) for g in range(2)] for e in range(config.num_experts)]
    down = [matrix(w2[0][e], w2[1][e]) for e in range(config.num_experts)]
    y = np.zeros(x.shape)
    for token, slot in np.argwhere((ids >= 0) & (ids < config.num_experts)):
        expert, row = ids[token, slot], rounded(x[token], scheme)
        gate, up = (w @ row + (0 if biases[0] is None else biases[0][expert, g]) for g, w in enumerate(up13[expert]))
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
        hidden = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
        hidden = rounded(hidden.astype(ml_dtypes.bfloat16), scheme)
        out = down[expert] @ hidden + (0 if biases[1] is None else biases[1][expert])
        y[token] += float(p[token, slot]) * out
    return y


@functools.cache
def problem(scheme, has_bias, dtype="bfloat16"):
    config = cases.make_config(scheme, dtype=dtype, has_bias=has_bias, **SIZES)
    return config, cases.make_weights(config)


def call_of(tokens, config):
    x = cases.make_tokens(tokens, config, dtype=config.dtype)
    return x, *cases.make_routing(tokens, config.top_k, config.num_experts)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("scheme", BLOCKS)
def test_the_judge_has_scales_of_short_groups(scheme, has_bias):
    """``experts_numpy``, by which the layers below and on a GPU are judged, beside the layer that is written out."""
    config, weights = problem(scheme, has_bias)
    x, p, ids = (np.asarray(array) for array in call_of(64, config))
    expected = layer_float64(x.astype(np.float64), p, ids, weights, config, scheme)
    found = experts_numpy(x, p, ids, weights, config, hidden_dtype="bfloat16")
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize("tokens", [1, 5, 64, 300])
@pytest.mark.parametrize(("scheme", "has_bias"), [("fp8_block", False), ("fp8_block", True), (BLOCKS[1], True)])
@pytest.mark.sample(6)
def test_kernels(scheme, has_bias, tokens):
    """One expert takes most, one nearly nothing; a few tokens stay where they are and are quantized there."""
    config, weights = problem(scheme, has_bias)
    kind = "group_ue8m0" if scheme == BLOCKS[1] else "group"
    plan = hopper_plan.make_plan(config, weights, tokens, "reference")
    few = tokens <= 5
    assert (plan.unpermuted, plan.quantization) == (few, f"e4m3_{kind}" if few else "none")
    assert plan.requantize == (kind if tokens == 300 else "none")
    x, p, ids = call_of(tokens, config)
    is_here = (ids >= 0) & (ids < config.num_experts)
    run = jax.jit(functools.partial(hopper_experts.forward, config, kernels="reference"))
    found = run(x, jnp.where(is_here, p, 0.0), jnp.where(is_here, ids, -1), weights)
    assert_layer_close(found, x, p, ids, weights, config)


def test_xla():
    config, weights = problem("fp8_block", True, "float32")
    call = call_of(64, config)
    assert_layer_close(cases.jitted(fused_experts, config)(*call, weights), *call, weights, config)


@pytest.mark.parametrize(
    ("tokens", "tiles", "requantized"),
    [
        (1, "matrix times vector", False),
        (3, "4 rows, 2 x 16 channels a warp", False),
        (64, "16 x 2 x ", False),
        (1024, "48 x 2 x ", False),
        (8192, "128 x 2 x ", True),
    ],
)
def test_gpt_oss_has_kernels_for_everything(tokens, tiles, requantized):
    """No rows are left to XLA, and few of them take tiles of few rows."""
    config = cases.make_config("fp8_block", dtype="bfloat16", has_bias=True, implementation=("hopper",), **GPT_OSS)
    weights = method_for(config.scheme).abstract_weights(config)
    with on_hopper():
        text = explain(config, weights, tokens)
        plan = hopper_plan.make_plan(config, weights, tokens)
    assert "by XLA" not in text and f"GEMM 1: {tiles}" in text
    assert (plan.requantize == "group") == requantized


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 64, 300])
@pytest.mark.parametrize("scheme", BLOCKS)
def test_gpu_gpt_oss(scheme, tokens, has_bias):
    """Experts of its size, of which some get no token: every row of the layer."""
    check(scheme, tokens, has_bias=has_bias, **EIGHT_EXPERTS)
