"""combine: the reference against NumPy float64, refusals, lowering for CUDA, and the Hopper kernel on a GPU.

Layout contract: out[t] = sum_j weights[t, j] * rows[row_of[t, j]] (+ shared[t]); row_of -1 contributes nothing,
whatever any row holds.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.combine import CombineConfig, CombineDesc, combine, config_error
from tests.support.kernels.cases import combine_cases
from tests.support.oracles.tolerances import Tolerance, assert_rows_close
from tests.support.refusals import refuses

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def make(num_tokens, width, top_k, num_rows, dtype="bfloat16", with_shared=False, seed=0, weights_dtype="float32"):
    """Rows that no slot names hold NaN, row 0 among them."""
    rng = np.random.default_rng(seed)
    row_of = (rng.permutation(num_rows - 1)[: num_tokens * top_k] + 1).reshape(num_tokens, top_k)
    row_of = np.where(rng.random(row_of.shape) < 0.7, row_of, -1).astype(np.int32)
    row_of[num_tokens // 2] = -1
    rows = np.full((num_rows, width), np.nan)
    named = row_of[row_of >= 0]
    rows[named] = rng.standard_normal((len(named), width))
    rows = rows.astype(DTYPES[dtype])
    weights = rng.standard_normal((num_tokens, top_k)).astype(DTYPES[weights_dtype])
    shared_dtype = DTYPES["float32" if num_tokens % 2 else dtype]
    shared = rng.standard_normal((num_tokens, width)).astype(shared_dtype) if with_shared else None
    expected = np.zeros((num_tokens, width)) if shared is None else shared.astype(np.float64)
    for t, j in zip(*np.nonzero(row_of >= 0), strict=True):
        expected[t] += np.float64(weights[t, j]) * rows[row_of[t, j]].astype(np.float64)
    return (rows, row_of, weights), shared, expected


def run(arguments, shared, out_dtype, implementation):
    call = jax.jit(
        lambda arguments, shared: combine(*arguments, shared=shared, out_dtype=out_dtype, implementation=implementation)
    )
    return call(*jax.tree.map(jnp.asarray, (arguments, shared)))


def tolerance(out_dtype):
    return Tolerance(out_dtype, 16.0 if out_dtype == jnp.float32 else 1.0)


@pytest.mark.parametrize("out_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("with_shared", [False, True])
def test_reference(out_dtype, with_shared):
    arguments, shared, expected = make(7, 96, 4, 60, with_shared=with_shared)
    assert_rows_close(run(arguments, shared, out_dtype, "reference"), expected, tolerance(out_dtype))


@pytest.mark.parametrize("weights_dtype", ["bfloat16", "float16"])
def test_weights_of_a_narrow_dtype(weights_dtype):
    """They are multiplied with in float32: products are not rounded to their dtype."""
    arguments, _, expected = make(7, 96, 4, 60, weights_dtype=weights_dtype)
    assert_rows_close(run(arguments, None, jnp.float32, "reference"), expected, tolerance(jnp.float32))


def test_wrong_calls():
    rows, row_of, weights = jnp.zeros((8, 128), jnp.bfloat16), jnp.zeros((4, 2), jnp.int32), jnp.zeros((4, 2))
    refuses(ValueError, "expected \\(Mp, H\\), \\(T, top_k\\), \\(T, top_k\\)", combine, rows, row_of, weights[:3])
    refuses(TypeError, "row_of is int32 and weights int8", combine, rows, row_of, weights.astype(jnp.int8))
    refuses(ValueError, r"shared has shape \(3, 128\)", combine, rows, row_of, weights, shared=jnp.zeros((3, 128)))
    shared = jnp.zeros((4, 128), jnp.int32)
    refuses(TypeError, "shared is int32; expected float32", combine, rows, row_of, weights, shared=shared)
    refuses(NotImplementedError, "hopper: needs a Hopper GPU", combine, rows, row_of, weights, implementation="hopper")


@pytest.mark.parametrize("case", combine_cases(), ids=lambda case: case.name)
@pytest.mark.sample(2)
def test_lowers_for_cuda(case):
    assert case.launches() == 1


def test_config_error_and_pieces():
    desc = CombineDesc(4, 2880, 2, 8, "bfloat16", "bfloat16")
    assert config_error(desc, CombineConfig(1)) is None
    assert desc.starts == [0, 1024, 1856]
    assert "at least 1" in config_error(desc, CombineConfig(0))
    assert "each of 128 threads" in config_error(CombineDesc(4, 96, 2, 8, "bfloat16", "bfloat16"), CombineConfig(1))
    assert "the output: int8" in config_error(CombineDesc(4, 128, 2, 8, "bfloat16", "int8"), CombineConfig(1))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_tokens", "width", "top_k"), [(1, 2048, 8), (37, 2880, 4), (600, 768, 2), (130, 7168, 16), (16383, 256, 3)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu(num_tokens, width, top_k, dtype):
    for with_shared in (False, True):
        arguments, shared, expected = make(num_tokens, width, top_k, num_tokens * top_k + 9, dtype, with_shared)
        out_dtype = jnp.float32 if with_shared else jnp.bfloat16
        out = run(arguments, shared, out_dtype, "hopper")
        assert_rows_close(out, expected, tolerance(out_dtype))
        np.testing.assert_array_equal(np.asarray(out), np.asarray(run(arguments, shared, out_dtype, "hopper")))


@pytest.mark.gpu
@pytest.mark.parametrize("weights_dtype", ["bfloat16", "float16"])
def test_gpu_weights_of_a_narrow_dtype(weights_dtype):
    for dtype in DTYPES:
        arguments, _, expected = make(37, 768, 4, 160, dtype, weights_dtype=weights_dtype)
        out = run(arguments, None, jnp.float32, "hopper")
        assert_rows_close(out, expected, tolerance(jnp.float32))
