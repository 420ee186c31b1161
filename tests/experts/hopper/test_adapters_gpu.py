"""Low-rank addends on the Hopper kernels, on a GPU: outputs against NumPy float64, gradients against the dequantized
layer in float32 by the xla backend, which test_adapters.py compares with torch in float64.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from moe_jax.experts import explain, fused_experts
from tests.experts.hopper.test_adapters import (
    SCHEMES,
    call_of,
    check_gradients_of_quantized,
    check_outputs,
    chosen_by,
    gradients,
    held,
)
from tests.experts.hopper.test_backward_gpu import assert_bits_repeat

pytestmark = pytest.mark.gpu


def by_kernels(config, x, p, ids, weights):
    """By nothing else."""
    config = dataclasses.replace(config, implementation=("hopper",))
    return fused_experts(x.astype(jnp.bfloat16), p, ids, weights, config)


@pytest.mark.parametrize("tokens", [3, 17, 700])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_outputs(scheme, tokens):
    check_outputs(by_kernels, scheme, tokens, has_bias=True, shares_gate=tokens == 17)


@pytest.mark.parametrize(
    "options", [dict(targets=("w13",)), dict(targets=("w2",)), dict(is_act_and_mul=False)], ids=str
)
def test_one_target_and_one_projection(options):
    check_outputs(by_kernels, "w4a16_g32", 700, **options)


@pytest.mark.parametrize("with_choice", [False, True])
@pytest.mark.parametrize("tokens", [17, 700])
@pytest.mark.parametrize("scheme", ["bf16", "w4a16_g32", "fp8_block", "nvfp4_a16", "mxfp4_a16", "int8_w8a8"])
def test_gradients(scheme, tokens, with_choice):
    check_gradients_of_quantized(by_kernels, scheme, tokens, with_choice=with_choice)


@pytest.mark.parametrize("scheme", ["bf16", "w4a16_g32"])
def test_gradients_of_rows_that_are_kept(scheme):
    def run(config, *given):
        return by_kernels(dataclasses.replace(config, keep_hidden=True), *given)

    check_gradients_of_quantized(run, scheme, 700)


@pytest.mark.parametrize("options", [dict(), dict(keep_hidden=True), dict(with_choice=True)], ids=str)
@pytest.mark.parametrize("tokens", [700, 9000])
def test_bits_repeat(tokens, options):
    """Gradients of adapters, and of their scales, sum over the rows of an expert."""
    config, x, p, ids, weights = call_of("w4a16_g32", tokens, shares_gate=False)
    weights = chosen_by(weights, tokens) if options.get("with_choice") else weights
    config = dataclasses.replace(config, keep_hidden=options.get("keep_hidden", False))
    run = jax.jit(functools.partial(gradients, by_kernels, config))
    g = jax.random.normal(jax.random.key(7), x.shape)
    assert_bits_repeat(run, x, p, ids, held(weights, config), g)


def test_explain():
    config, *_, weights = call_of()
    text = explain(config, held(weights, config), 700)
    assert "implementation: hopper" in text and "adapters: by kernels" in text and "gradient: by kernels" in text
