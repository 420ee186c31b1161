"""grouped_wgrad: the reference against NumPy float64, refusals, and lowering for CUDA without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_gemm.wgrad import WgradConfig, WgradDesc, choose_config, config_error, grouped_wgrad
from tests.support.kernels.cases import wgrad_cases

# Rows of each expert.
SIZES = {"ragged": [3, 64, 0, 65, 1, 130], "one expert takes all": [0, 0, 200, 0], "nothing": [0, 0]}


def make_rows(sizes, n, k, *, block_m=128, dtype=jnp.bfloat16, seed=0):
    """(dy, x, first_row, num_rows) and the gradients in float64; NaN in rows of nobody past an expert's last tile."""
    rng, first = np.random.default_rng(seed), np.cumsum([0, *(-(-size // block_m) * block_m for size in sizes)])
    rows = first[-1] + 2 * block_m
    dy, x = (np.asarray(rng.standard_normal((rows, width)), dtype) for width in (n, k))
    expected = np.zeros((len(sizes), n, k))
    for expert, size in enumerate(sizes):
        own = slice(first[expert], first[expert] + size)
        expected[expert] = dy[own].astype(np.float64).T @ x[own].astype(np.float64)
        dy[own.stop : first[expert + 1]] = 0
    dy[first[-1] :] = x[first[-1] :] = np.nan
    bounds = (np.asarray(a, np.int32) for a in (first[:-1], sizes))
    return [jnp.asarray(a) for a in (dy, x, *bounds)], expected


def assert_gradients(found, expected, out_dtype):
    """Within what summing up in float32 and rounding once move, by the largest value of each row."""
    found = np.asarray(found).astype(np.float64)
    assert np.isfinite(found).all()
    largest = np.abs(expected).max(axis=-1, keepdims=True)
    step = {"float32": 2.0**-18, "float16": 2.0**-10, "bfloat16": 2.0**-8}[jnp.dtype(out_dtype).name]
    assert (np.abs(found - expected) <= step * largest).all(), "a row differs"
    assert not found[np.abs(expected).max(axis=(1, 2)) == 0].any(), "an expert without rows has zeros"


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", SIZES)
def test_reference(sizes, out_dtype):
    arguments, expected = make_rows(SIZES[sizes], 64, 128)
    found = grouped_wgrad(*arguments, out_dtype=out_dtype, implementation="reference")
    assert_gradients(found, expected, out_dtype)


def test_wrong_calls():
    dy, x, first, count = make_rows([3], 64, 64)[0]
    with pytest.raises(ValueError, match=r"dy has shape .* and x .*expected \(Mp, N\) and \(Mp, K\)"):
        grouped_wgrad(dy[1:], x, first, count)
    with pytest.raises(TypeError, match="one dtype"):
        grouped_wgrad(dy.astype(jnp.float16), x, first, count)
    with pytest.raises(ValueError, match="first_row is int32"):
        grouped_wgrad(dy, x, first[:0], count)


@pytest.mark.parametrize(
    ("desc", "config", "reason"),
    [
        (dict(dtype="float8_e4m3fn"), {}, "wgmma contracts over rows"),
        (dict(n=80), {}, "N=80"),
        (dict(rows=100), {}, "rows=100"),
        (dict(), dict(block_n=192), "block_n=192"),
        (dict(), dict(block_k=96), "block_k=96"),
        (dict(), dict(num_stages=9), "bytes of shared memory"),
    ],
)
def test_refusals(desc, config, reason):
    asked = WgradDesc(**dict(rows=256, n=128, k=128, num_experts=2) | desc)
    assert reason in str(config_error(asked, WgradConfig(**dict(block_n=128, block_k=256, num_stages=4) | config)))


def test_the_widest_tile_that_fits_is_chosen():
    def chosen(n, k):
        config = choose_config(WgradDesc(rows=256, n=n, k=k, num_experts=2), 132)
        return config.block_n, config.block_k

    assert (chosen(1536, 2048), chosen(64, 2048), chosen(2048, 64)) == ((128, 256), (64, 256), (128, 64))


@pytest.mark.parametrize("case", [case for case in wgrad_cases() if "128 x" in case.name], ids=lambda case: case.name)
def test_lowers(case):
    assert case.launches() == 1


def test_runs_under_jit_by_the_reference_where_there_is_no_gpu():
    arguments, expected = make_rows([5, 70], 64, 64)
    assert_gradients(jax.jit(grouped_wgrad)(*arguments), expected, "bfloat16")
