"""Layers of every scheme with the portable kernels, on any GPU that they run on, against NumPy float64.

JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false pytest -m gpu tests/experts/portable
"""

import pytest

from tests.support.cases.gpu_layers import (
    KINDS,
    WITH_KERNELS,
    check,
    check_independence,
    check_no_tokens,
    has_kernels,
)

pytestmark = pytest.mark.gpu

PORTABLE = dict(implementation="portable")


@pytest.mark.parametrize("tokens", [1, 16, 129, 2048])
@pytest.mark.parametrize("scheme", WITH_KERNELS)
def test_every_scheme(scheme, tokens):
    """Biases with every second scheme."""
    check(scheme, tokens, has_bias=WITH_KERNELS.index(scheme) % 2 == 0, **PORTABLE)


@pytest.mark.parametrize("scheme", KINDS)
def test_not_gated(scheme):
    check(scheme, 37, is_act_and_mul=False, activation="relu2", has_bias=True, **PORTABLE)


@pytest.mark.parametrize("scheme", [name for name in KINDS if has_kernels(name, "float16")])
def test_float16(scheme):
    check(scheme, 37, dtype="float16", **PORTABLE)


@pytest.mark.parametrize("scheme", KINDS)
def test_eight_of_many_experts(scheme):
    check(scheme, 70, num_experts=40, top_k=8, activation="swigluoai", has_bias=True, **PORTABLE)


@pytest.mark.parametrize("scheme", ["bf16", "fp8_block", "int8_w8a8", "mxfp4_a16", "w4a16_g32", "w4a8_int8"])
def test_sizes_of_gpt_oss(scheme):
    sizes = dict(hidden_size=2880, intermediate_size=2880, num_experts=4, top_k=4)
    check(scheme, 21, activation="swigluoai", **sizes, **PORTABLE)


@pytest.mark.parametrize("scheme", KINDS)
def test_group_scales_of_bfloat16_and_whole_tiles(scheme):
    """Sizes in whole tiles of 128, so that nothing is cut off; more rows than a tile has."""
    check(scheme, 700, hidden_size=768, intermediate_size=512, param_dtype="bfloat16", **PORTABLE)


def test_no_tokens():
    check_no_tokens(**PORTABLE)


@pytest.mark.parametrize("scheme", ["bf16", "fp8_block", "w4a16_g128", "w4a8_int8"])
def test_a_token_does_not_depend_on_its_batch(scheme):
    check_independence(scheme, **PORTABLE)
