"""norm_and_multiply: the reference against NumPy float64, refusals, lowering for CUDA, and the kernel on a GPU."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.add_and_norm import add_and_norm
from pallas_kernels.grouped_gemm import grouped_gemm
from pallas_kernels.grouped_gemm.vector import VectorConfig
from pallas_kernels.norm_and_multiply import choose_config, config_error, describe, norm_and_multiply
from tests.support.kernels.cases import norm_and_multiply_cases
from tests.support.refusals import refuses

EPS = 1e-5
DTYPES = ["bfloat16", "float16"]
ADDENDS = ["nothing", "one", "parts and bias"]


def make(dtype, width, widths, addend, *, has_bias=False):
    """(arguments, arrays by name) of a call; widths: of weights side by side, or a number for one."""
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    added = bias = None
    if addend == "one":
        added = normal(1, width)
    if addend == "parts and bias":  # rows past the token's mean nothing
        added = normal(3, 4, width, dtype="float32").at[:, 1:].set(jnp.nan)
        bias = normal(width)
    several = widths if isinstance(widths, tuple) else (widths,)
    w = tuple(normal(1, n, width) * jnp.asarray(width**-0.5, dtype) for n in several)
    w_bias = tuple(normal(1, n) for n in several) if has_bias else None
    if not isinstance(widths, tuple):
        w, w_bias = w[0], w_bias[0] if has_bias else None
    return (normal(1, width), normal(width), added, w), dict(bias=bias, w_bias=w_bias)


def compiled(function, **static):
    """``function`` of calls."""
    jitted = jax.jit(lambda arguments, given: function(*arguments, **given, eps=EPS, **static))
    return lambda call: jitted(*call)


def apart(x, weight, addend, w, *, eps, bias, w_bias, config, implementation):
    """The same in two launches, with the product's own."""
    total, row = add_and_norm(x, weight, addend, eps=eps, bias=bias, implementation=implementation)
    tile = dict(tile_expert=jnp.zeros(1, jnp.int32), num_tiles=jnp.ones(1, jnp.int32))
    options = dict(bias=w_bias, out_dtype=x.dtype, config=config, implementation=implementation)
    return total, grouped_gemm(row, w, **tile, **options)


def exact(call):
    """Sum and product in float64, of a norm that is not rounded; and the sum of magnitudes."""
    (x, weight, addend, w), given = call
    as_float = lambda a: np.asarray(a, np.float64)  # noqa: E731
    side_by_side = lambda leaves: leaves if isinstance(leaves, tuple) else (leaves,)  # noqa: E731
    addends = [as_float(x)]
    if addend is not None:
        addends += [as_float(addend)] if addend.ndim == 2 else list(as_float(addend)[:, :1])
    addends += [] if given["bias"] is None else [np.broadcast_to(as_float(given["bias"]), x.shape)]
    wide = np.sum(addends, axis=0)
    normal = wide / np.sqrt((wide**2).mean() + EPS) * as_float(weight)
    y = np.concatenate([normal @ as_float(one)[0].T for one in side_by_side(w)], axis=1)
    biases = given["w_bias"]
    y = y if biases is None else y + np.concatenate([as_float(one) for one in side_by_side(biases)], axis=1)
    return wide, y, np.sum(np.abs(addends), axis=0)


def check(call, implementation):
    """Close to float64 in every column."""
    total, product = compiled(norm_and_multiply, implementation=implementation)(call)
    dtype = call[0][0].dtype
    wide, y, magnitude = exact(call)
    step, least = float(jnp.finfo(dtype).eps), float(jnp.finfo(dtype).smallest_subnormal)
    may_differ = np.maximum(0.52 * step * np.abs(wide), 0.5 * least) + 2.0**-23 * magnitude  # sums are float32
    assert (np.abs(np.asarray(total, np.float64) - wide) <= may_differ).all()
    assert total.dtype == product.dtype == dtype and product.shape == y.shape
    np.testing.assert_allclose(np.asarray(product, np.float64), y, rtol=0.6 * step, atol=2.5 * step)


@pytest.mark.parametrize("addend", ADDENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reference(dtype, addend):
    for widths, has_bias in (((256, 128), True), (192, False)):
        call = make(dtype, 512, widths, addend, has_bias=has_bias)
        check(call, "reference")
        found = compiled(norm_and_multiply, implementation="reference")(call)
        for one, other in zip(found, compiled(apart, config=None, implementation="reference")(call), strict=True):
            np.testing.assert_array_equal(one, other)


def test_out_dtype():
    arguments, _ = make("bfloat16", 512, 192, "one")
    wide = norm_and_multiply(*arguments, eps=EPS, out_dtype=jnp.float32)[1]
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(wide.astype(jnp.bfloat16), norm_and_multiply(*arguments, eps=EPS)[1])


def test_wrong_calls():
    (x, weight, addend, w), _ = make("bfloat16", 512, (256, 128), "one")
    call = functools.partial(norm_and_multiply, eps=EPS)
    refuses(ValueError, r"\(2, 512\), expected \(1, H\)", call, jnp.tile(x, (2, 1)), weight, addend, w)
    narrow = tuple(one[..., :256] for one in w)
    refuses(ValueError, "x has K=512 and w has K=256", call, x, weight, addend, narrow)
    for one in (jnp.tile(w[0], (2, 1, 1)), w[0][:0], w[0][0]):  # of two experts, of none, without their axis
        message = rf"w has shape {re.escape(str(one.shape))}, expected \(1, N, 512\)"
        for given in (one, (w[0], one)):
            refuses(ValueError, message, call, x, weight, addend, given)
    codes = tuple(one.astype(jnp.float8_e4m3fn) for one in w)
    refuses(TypeError, "x is bfloat16 and w is float8_e4m3fn", call, x, weight, addend, codes)
    refuses(ValueError, r"x \(1, 512\), weight \(512,\), addend \(1, 256\)", call, x, weight, addend[:, :256], w)
    biased = functools.partial(call, w_bias=(jnp.zeros((1, 256)), jnp.zeros((1, 256))))
    refuses(ValueError, r"bias has shape \(1, 256\), expected \(1, 128\)", biased, x, weight, addend, w)


def test_config_error():
    arguments, given = make("bfloat16", 2048, (4096, 512, 512), "one")
    desc, *_ = describe(*arguments, **given, eps=EPS, out_dtype=jnp.bfloat16)
    assert choose_config(desc, 132) == VectorConfig(1)
    assert config_error(desc, VectorConfig(2)) is None
    assert "channels=3" in config_error(desc, VectorConfig(3))
    more = dataclasses.replace(desc, norm=dataclasses.replace(desc.norm, num_tokens=2))
    assert "T=2 tokens: one" in config_error(more, VectorConfig(2))
    wide = dataclasses.replace(desc, norm=dataclasses.replace(desc.norm, width=16384))
    assert "H=16384" in config_error(wide, VectorConfig(2))
    narrow = dataclasses.replace(desc, gemm=dataclasses.replace(desc.gemm, widths=(4096, 520, 520), n=5136))
    assert "N=4096, 520, 520" in config_error(narrow, VectorConfig(4))


@pytest.mark.parametrize("case", norm_and_multiply_cases(), ids=lambda case: case.name)
@pytest.mark.sample(7)
def test_lowers_for_cuda(case):
    assert case.launches() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("addend", ADDENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [512, 2048, 2880, 4096, 7168])
def test_gpu(dtype, width, addend):
    """Right, and the bits of two launches, with most and fewest columns a warp; and again."""
    for widths, has_bias in (((4096, 512, 512), False), (704, True)):
        call = make(dtype, width, widths, addend, has_bias=has_bias)
        check(call, "hopper")
        for channels in (1, 4):
            options = dict(config=VectorConfig(channels), implementation="hopper")
            fused = compiled(norm_and_multiply, **options)
            for found in zip(fused(call), fused(call), compiled(apart, **options)(call), strict=True):
                np.testing.assert_array_equal(found[0], found[1])
                np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.gpu
def test_gpu_nan_spreads():
    """NaN in the row reaches every column."""
    (x, *others), given = make("bfloat16", 2048, (4096, 512), "one")
    _, product = compiled(norm_and_multiply, implementation="hopper")(((x.at[0, 7].set(jnp.nan), *others), given))
    assert jnp.isnan(product.astype(jnp.float32)).all()
