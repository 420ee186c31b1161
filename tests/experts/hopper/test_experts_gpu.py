"""Layers of every scheme with Hopper kernels, on a GPU, against NumPy float64: every row, hostile routings, sizes off
the tile, the same bits twice.

A call's memory held bytes that are NaN in every float format before it ran, so that a row which no kernel wrote, or a
buffer read before it was written, shows. Most of the time is compilation; the tests run side by side:

    JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false pytest -m gpu -n 8 --dist worksteal tests
"""

import pytest

from moe_jax.experts.hopper import _plan as hopper_plan
from tests.support.cases.gpu_layers import (
    KINDS,
    WITH_KERNELS,
    check,
    check_independence,
    check_no_tokens,
    has_kernels,
    layer,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [1, 3, 7, 16, 129, 2048])
@pytest.mark.parametrize("scheme", WITH_KERNELS)
def test_every_scheme(scheme, tokens):
    """Biases with every second scheme."""
    check(scheme, tokens, has_bias=WITH_KERNELS.index(scheme) % 2 == 0)


@pytest.mark.parametrize("tokens", [1, 16, 60, 129, 2048])
@pytest.mark.parametrize(
    ("scheme", "apart"),
    [("fp8_block", (16, 60)), ("fp8_block_ue8m0", (16, 60)), ("fp8_tensor_static", (16, 2048))],
)
def test_rows_requantized_apart_or_not(scheme, apart, tokens):
    """Tiles of 64 columns and large-M ones leave requantization to another launch; 1152 columns: nine groups. With 60
    tokens biases take the shared memory that hands over rows of groups."""
    sizes = dict(hidden_size=640, intermediate_size=1152, num_experts=12, top_k=4)
    check(scheme, tokens, has_bias=tokens == 60, **sizes)
    config, _, packed = layer(scheme, has_bias=tokens == 60, **sizes)
    plan = hopper_plan.make_plan(config, packed, tokens)
    if tokens == 1:  # in tiles of one row, for which GEMM 1 takes a given scale; nine groups are a launch of their own
        assert (plan.block_m, plan.hidden_quantization) == (1, "none")
        assert (plan.requantize == "none") == scheme.startswith("fp8_block")
        return
    assert (plan.products[0].requantize == "none") == (tokens in apart)


@pytest.mark.parametrize("scheme", KINDS)
def test_not_gated(scheme):
    check(scheme, 37, is_act_and_mul=False, activation="relu2", has_bias=True)


@pytest.mark.parametrize("tokens", [3, 37])
@pytest.mark.parametrize("scheme", [name for name in KINDS if has_kernels(name, "float16")])
def test_float16(scheme, tokens):
    check(scheme, tokens, dtype="float16")


@pytest.mark.parametrize("scheme", KINDS)
def test_eight_of_many_experts(scheme):
    check(scheme, 70, num_experts=40, top_k=8, activation="swigluoai", has_bias=True)


@pytest.mark.parametrize("scheme", ["bf16", "int8_w8a8", "w4a16_g128"])
def test_sixteen_of_512_experts(scheme):
    check(scheme, 33, num_experts=512, top_k=16, hidden_size=256, intermediate_size=128)


GPT_OSS = ("bf16", "fp8_channel", "fp8_block", "int8_w8a8", "w4a16_g32", "mxfp4_a16", "mxfp8", "w4a8_int8")


@pytest.mark.parametrize("scheme", GPT_OSS)
def test_sizes_of_gpt_oss(scheme):
    check(scheme, 21, num_experts=4, top_k=4, hidden_size=2880, intermediate_size=2880, activation="swigluoai")


@pytest.mark.parametrize("scheme", ["bf16", "fp8_block", "w4a16_g128", "w4a8_int8"])
def test_many_tokens(scheme):
    check(scheme, 16383)


def test_no_tokens():
    check_no_tokens()


@pytest.mark.parametrize("scheme", ["bf16", "fp8_block", "w4a16_g128", "w4a8_int8"])
def test_a_token_does_not_depend_on_its_batch(scheme):
    check_independence(scheme)
