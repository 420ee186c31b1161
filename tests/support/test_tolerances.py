"""The comparison itself must be able to fail: one wrong row among many, NaN, rows that must be zero."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.oracles.tolerances import Tolerance, assert_rows_close, tolerance, ulp
from tests.support.refusals import refuses


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    return rng.normal(size=(64, 32)) * np.exp2(np.arange(64) - 32)[:, None]


@pytest.mark.parametrize("value, spacing", [(1.0, 2**-7), (1.99, 2**-7), (2.0, 2**-6), (0.75, 2**-8), (0.0, 0.0)])
def test_ulp_of_bfloat16(value, spacing):
    assert ulp(jnp.bfloat16, value) == spacing


def test_equal_rows_pass_exactly(rows):
    assert_rows_close(rows, rows, tolerance("exact", jnp.float32))


def test_empty_passes():
    assert_rows_close(np.zeros((0, 4)), np.zeros((0, 4)), tolerance("bf16", jnp.float32))


def test_one_small_wrong_row_is_found_and_named(rows):
    """Row 3 is 2^-29 of the largest: a global norm would not see it."""
    wrong = rows.copy()
    wrong[3, 5] *= -1
    with pytest.raises(AssertionError, match=r"1 of 64 row\(s\) differ; worst at \(3, 5\) \(experts \[7, 1\]\)"):
        assert_rows_close(wrong, rows, tolerance("bf16", jnp.bfloat16), experts=np.tile([7, 1], (64, 1)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("side", ["actual", "expected", "both"])
def test_non_finite_never_passes(rows, bad, side):
    actual, expected = rows.copy(), rows.copy()
    if side != "expected":
        actual[0, 0] = bad
    if side != "actual":
        expected[0, 0] = bad
    refuses(AssertionError, "non-finite", assert_rows_close, actual, expected, Tolerance(jnp.float32, 1e9, 1.0))


def test_zero_row_is_compared_exactly(rows):
    expected = rows.copy()
    expected[10] = 0
    actual = expected.copy()
    actual[10, 0] = 1e-30
    with pytest.raises(AssertionError, match=r"worst at \(10, 0\)"):
        assert_rows_close(actual, expected, tolerance("fp8_block", jnp.float32))


def test_row_scale_widens_a_cancelling_row():
    expected = np.array([[1e-6, -1e-6]])
    actual = expected + 1e-7
    with pytest.raises(AssertionError):
        assert_rows_close(actual, expected, tolerance("bf16", jnp.float32))
    assert_rows_close(actual, expected, tolerance("bf16", jnp.float32), row_scale=1.0)


def test_shapes_do_not_broadcast(rows):
    refuses(AssertionError, "shape", assert_rows_close, rows[:1], rows, tolerance("bf16", jnp.float32))


@pytest.mark.parametrize("scheme", ["bf16", "fp8_tensor", "fp8_block", "int8_w8a16", "int8_w8a8"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_table_bounds_stay_far_below_a_missing_expert(scheme, dtype):
    """Dropping one of eight equal experts changes a row by about 1/8 of its magnitude or more."""
    assert tolerance(scheme, dtype).bound(np.array(1.0)) < 1 / 15
