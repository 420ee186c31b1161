"""dequantize_packed by its kernel, on a GPU, beside stored numbers in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_gemm.packed import dequantize_packed
from tests.pallas_kernels.test_dequantize_packed import USED, assert_rounded_once, packed_weights

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("k", [256, 704, 2048])
@pytest.mark.parametrize("projections", [1, 2])
@pytest.mark.parametrize("kind", USED)
def test_every_number(kind, projections, k):
    packed, expected = packed_weights(kind, k, projections)
    packed = jax.tree.map(jnp.asarray, packed)
    run = jax.jit(lambda w: dequantize_packed(w, w.fmt.operand, implementation="hopper"))
    jnp.full(expected.shape, jnp.nan, packed.fmt.operand).block_until_ready()  # memory that held NaN before
    found = run(packed)
    assert_rounded_once(np.asarray(found), expected, packed.fmt.operand)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(run(packed), np.float32))
