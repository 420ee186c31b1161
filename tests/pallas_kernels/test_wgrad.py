"""grouped_wgrad: the reference against NumPy float64, refusals, and lowering for CUDA without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_gemm.wgrad import WgradConfig, WgradDesc, choose_config, config_error, grouped_wgrad
from tests.support.kernels.cases import wgrad_cases
from tests.support.refusals import refuses

# Rows of each expert.
SIZES = {"ragged": [3, 64, 0, 65, 1, 130], "one expert takes all": [0, 0, 200, 0], "nothing": [0, 0]}


def make_rows(sizes, n, k, *, block_m=128, dtype=jnp.bfloat16):
    """(dy, x, first_row, num_rows) and the gradients in float64; NaN in rows of nobody past an expert's last tile."""
    rng, first = np.random.default_rng(0), np.cumsum([0, *(-(-size // block_m) * block_m for size in sizes)])
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


STEP = 16  # rows that one wgmma instruction adds to the sums


def cut_off(sizes, arguments):
    """By how much sums may be off that a tensor core cuts off, (E, N, K).

    An instruction adds 16 products and the sum so far. Each of the 17 is cut, toward zero, at the last of the 24 bits
    of the largest, and so is the result: less than 18 units in the last place of the largest of them all. Nothing
    averages out, since all cuts go one way: the bound grows with the number of instructions.
    """
    dy, x, first, _ = (np.asarray(a) for a in arguments)
    bound = np.zeros((len(sizes), dy.shape[1], x.shape[1]))
    for expert, size in enumerate(sizes):
        total = np.zeros(bound.shape[1:])
        for start in range(first[expert], first[expert] + size, STEP):
            own = slice(start, min(start + STEP, first[expert] + size))
            left, right = dy[own].astype(np.float64), x[own].astype(np.float64)
            before, total = np.abs(total), total + left.T @ right
            products = np.outer(np.abs(left).max(0), np.abs(right).max(0))  # at least the largest of each sum
            largest = np.maximum(np.maximum(before, np.abs(total)), products)
            bound[expert] += (STEP + 2) * np.ldexp(1.0, np.frexp(largest)[1] - 24)
    return bound


def assert_gradients(found, expected, out_dtype, sums=0.0):
    """Within what summing up in float32 and rounding once move, by the largest value of each row; sums may be off by
    ``sums`` besides.
    """
    found = np.asarray(found).astype(np.float64)
    assert np.isfinite(found).all()
    largest = np.abs(expected).max(axis=-1, keepdims=True)
    step = {"float32": 2.0**-18, "float16": 2.0**-10, "bfloat16": 2.0**-8}[jnp.dtype(out_dtype).name]
    assert (np.abs(found - expected) <= step * largest + sums).all(), "a row differs"
    assert not found[np.abs(expected).max(axis=(1, 2)) == 0].any(), "an expert without rows has zeros"


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", SIZES)
def test_reference(sizes, out_dtype):
    arguments, expected = make_rows(SIZES[sizes], 64, 128)
    found = grouped_wgrad(*arguments, out_dtype=out_dtype, implementation="reference")
    assert_gradients(found, expected, out_dtype)


def cut(values, exponent, bits):
    unit = np.ldexp(1.0, exponent - bits)
    return np.trunc(values / unit) * unit


def sums_of_a_tensor_core(dy, x, extra_bits):
    """dy^T x (N, K) in steps of 16 rows: addends are cut to 24 bits of the largest and some more, then their sum."""
    total = np.zeros((dy.shape[1], x.shape[1]))
    for start in range(0, len(dy), STEP):
        products = dy[start : start + STEP, :, None] * x[start : start + STEP, None]
        addends = np.concatenate([products, total[None]])
        total = cut(addends, np.frexp(np.abs(addends).max(0))[1], 24 + extra_bits).sum(0)
        total = cut(total, np.frexp(total)[1], 24)
    return total


@pytest.mark.parametrize("extra_bits", [0, 2])
def test_bound_of_sums_that_are_cut_off(extra_bits):
    """It holds an emulated tensor core, whose 9,001 rows are off by more than rounding moves; not a sum that lacks a
    row, nor one of two halves that were rounded to bfloat16.
    """
    sizes = [9001]
    arguments, expected = make_rows(sizes, 64, 64)
    dy, x = (np.asarray(a)[: sizes[0]].astype(np.float64) for a in arguments[:2])
    bound, found = cut_off(sizes, arguments), sums_of_a_tensor_core(dy, x, extra_bits)
    assert_gradients(found[None], expected, "float32", bound)
    if extra_bits:
        refuses(AssertionError, "a row differs", assert_gradients, found[None], expected, "float32")
    halves = sum(
        np.asarray(dy[own].T @ x[own], jnp.bfloat16).astype(np.float64) for own in np.array_split(np.arange(9001), 2)
    )
    for wrong in (dy[1:].T @ x[1:], halves):
        refuses(AssertionError, "a row differs", assert_gradients, wrong[None], expected, "float32", bound)


def test_wrong_calls():
    dy, x, first, count = make_rows([3], 64, 64)[0]
    with pytest.raises(ValueError, match=r"dy has shape .* and x .*expected \(Mp, N\) and \(Mp, K\)"):
        grouped_wgrad(dy[1:], x, first, count)
    with pytest.raises(TypeError, match="one dtype"):
        grouped_wgrad(dy.astype(jnp.float16), x, first, count)
    refuses(ValueError, "first_row is int32", grouped_wgrad, dy, x, first[:0], count)


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
@pytest.mark.sample(3)
def test_lowers(case):
    assert case.launches() == 1


def test_runs_under_jit_by_the_reference_where_there_is_no_gpu():
    arguments, expected = make_rows([5, 70], 64, 64)
    assert_gradients(jax.jit(grouped_wgrad)(*arguments), expected, "bfloat16")
