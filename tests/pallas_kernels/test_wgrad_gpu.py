"""What the gradient of a grouped GEMM runs, on a GPU: grouped_wgrad, and grouped_gemm with transposed weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_gemm import GemmConfig, grouped_gemm
from pallas_kernels.grouped_gemm.wgrad import WgradDesc, candidates, grouped_wgrad
from tests.pallas_kernels.test_wgrad import SIZES, assert_gradients, cut_off, make_rows
from tests.support.kernels.gemm_problem import ROUTINGS, gemm_tolerance, make_problem

pytestmark = pytest.mark.gpu


def check(sizes, n, k, config=None, *, out_dtype=jnp.bfloat16, dtype=jnp.bfloat16, block_m=128):
    arguments, expected = make_rows(sizes, n, k, block_m=block_m, dtype=dtype)
    run = jax.jit(lambda *a: grouped_wgrad(*a, out_dtype=out_dtype, config=config, implementation="hopper"))
    jnp.full(expected.shape, jnp.nan, out_dtype).block_until_ready()  # memory that held NaN before
    found = run(*arguments)
    sums = cut_off(sizes, arguments) if jnp.dtype(out_dtype) == jnp.float32 else 0.0
    assert_gradients(found, expected, out_dtype, sums)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(run(*arguments), np.float32))


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("sizes", SIZES)
def test_routings(sizes, block_m, out_dtype):
    check(SIZES[sizes], 384, 512, out_dtype=out_dtype, block_m=block_m)


@pytest.mark.parametrize(("n", "k"), [(64, 64), (64, 2880), (2880, 64), (2880, 2880), (192, 320)])
def test_sizes_off_the_tile(n, k):
    check([70, 0, 300], n, k)


@pytest.mark.parametrize(
    "config",
    candidates(WgradDesc(rows=1024, n=384, k=512, num_experts=3), 132)
    + [
        dataclasses.replace(c, num_sms=5)
        for c in candidates(WgradDesc(rows=1024, n=384, k=512, num_experts=3), 132)[:1]
    ],
    ids=str,
)
def test_configs(config):
    check([130, 3, 0, 257], 448, 576, config)


def test_float16():
    check([130, 0, 3], 256, 384, dtype=jnp.float16, out_dtype=jnp.float16)


def test_many_rows():
    check([9001, 0, 7382], 256, 128, out_dtype=jnp.float32)


def test_many_tiles():
    """Several for every CTA, each stored while the next one is multiplied, and some that are too short for it."""
    check([300, 0, 270, 130, 520], 1536, 2048)
    check([300, 0, 270, 130, 520], 1472, 1984, dtype=jnp.float16, out_dtype=jnp.float16)


def check_transposed(kind, sizes, config=None, *, k, n, block_m=128):
    problem = make_problem(kind, sizes, k=k, n=n, block_m=block_m, padding=0.0)
    x, w, *tiles = problem.args
    problem.args = (x, jnp.swapaxes(w, 1, 2), *tiles)
    problem.kwargs["transposes_w"] = True
    out = problem.compiled(grouped_gemm, config)()
    problem.assert_close(out, gemm_tolerance(kind, jnp.bfloat16, tensor_core=True))


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_transposed(kind, routing, block_m):
    check_transposed(kind, ROUTINGS[routing], k=1152, n=768, block_m=block_m)


@pytest.mark.parametrize(("k", "n"), [(64, 64), (64, 2880), (2880, 64), (2880, 2880), (192, 320)])
def test_transposed_sizes_off_the_tile(k, n):
    for _ in range(2):
        check_transposed("bf16", [90, 1, 300], k=k, n=n)


@pytest.mark.parametrize("block_n", [64, 128, 192, 256])
def test_transposed_configs(block_n):
    check_transposed("bf16", [90, 1, 200], GemmConfig(128, block_n, 3, num_sms=7), k=640, n=640)
