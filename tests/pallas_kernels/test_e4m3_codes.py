"""Codes of e4m3 by a corrected product, as kernels compute them, against codes by a division, on the CPU."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.common.numerics import quantize_e4m3_group, quantize_e4m3_row
from pallas_kernels.common.numerics_sm90 import e4m3_in_groups, e4m3_of_row

EVERY = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
AMAXES = (3.3895314e38, 448.0, 1.3671875, 0.12890625, 1e-12, 0.0, np.inf)


def bits(codes):
    """NaN as one."""
    found = np.asarray(codes).view(np.uint8)
    return np.where(found & 0x7F == 0x7F, 0x7F, found)


def up_to(amax):
    return np.where(np.abs(EVERY) <= amax, EVERY, -0.0) if np.isfinite(amax) else EVERY


@pytest.mark.parametrize("amax", AMAXES)
def test_with_powers_of_two_every_bit_is_that_of_a_division(amax):
    """The sign of zeros, NaN and infinities included: nothing is rounded but the code."""
    x, amax = jnp.asarray(up_to(amax)[None]), jnp.full(1, amax, jnp.float32)
    codes, scale = e4m3_in_groups(x, amax, True)
    expected, expected_scale = quantize_e4m3_group(x, amax[:, None], True)
    np.testing.assert_array_equal(scale, expected_scale[:, 0])
    np.testing.assert_array_equal(bits(codes), bits(expected))


@pytest.mark.parametrize("amax", AMAXES)
@pytest.mark.parametrize("rule", ["row", "group"])
def test_other_scales_move_a_code_beside_a_tie_alone(rule, amax):
    """A GPU fuses the product and the sum of a remainder; a CPU may not, and then ties may fall either way."""
    x, amax = up_to(amax), jnp.float32(amax)
    if rule == "row":
        (codes, scale), (expected, _) = e4m3_of_row(jnp.asarray(x), amax), quantize_e4m3_row(jnp.asarray(x), amax)
    else:
        codes, scale = e4m3_in_groups(jnp.asarray(x[None]), amax[None], False)
        expected, codes, scale = quantize_e4m3_group(jnp.asarray(x), amax)[0], codes[0], scale[0]
    differ = bits(codes) != bits(expected)
    quotients = x[differ].astype(np.float64) / float(scale)
    below, above = (np.asarray(quotients * by, ml_dtypes.float8_e4m3fn) for by in (1 - 2.0**-22, 1 + 2.0**-22))
    assert (below.view(np.uint8) != above.view(np.uint8)).all()
    assert differ.mean() < 1e-3
