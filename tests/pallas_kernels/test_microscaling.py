"""FP4, e8m0, NVFP4 and MX rules: all codes against ml_dtypes, worked examples, compressed-tensors' own functions."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.quantization.utils import fp4_utils, generate_mx_scales

from pallas_kernels.common import microscaling as ms
from pallas_kernels.common import numerics, packing

F = np.float32
BYTES = np.arange(256, dtype=np.uint8)


def hexes(codes):
    return packing.pack_nibbles(np.asarray(codes)).tobytes().hex(" ").upper()


def neighbours(values):
    """Each value with the float32 below and above it."""
    values = np.asarray(values, F)
    return np.concatenate([np.nextafter(values, F(-np.inf)), values, np.nextafter(values, F(np.inf))])


def amax_of(x):
    return jnp.max(jnp.abs(x), axis=-1, keepdims=True)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_all_codes_decode_as_ml_dtypes_reads_them(wrap):
    codes = BYTES[:16]
    decoded = np.asarray(wrap(ms.decode_e2m1)(jnp.asarray(codes)))
    assert decoded.tobytes() == codes.view(ml_dtypes.float4_e2m1fn).astype(F).tobytes()
    decoded = np.asarray(wrap(ms.decode_e8m0)(jnp.asarray(BYTES)))
    expected = BYTES.view(ml_dtypes.float8_e8m0fnu).astype(F)
    assert np.isnan(decoded[255]) and np.isnan(expected[255])
    assert decoded[:255].tobytes() == expected[:255].tobytes()


def test_e2m1_rounds_as_ml_dtypes_and_compressed_tensors_do():
    grid = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 1e30, np.inf], F)
    x = np.concatenate([neighbours(grid), neighbours(-grid), np.random.default_rng(0).normal(0, 3, 4000).astype(F)])
    codes = np.asarray(jax.jit(ms.encode_e2m1)(jnp.asarray(x)))
    assert codes.tolist() == np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8).tolist()
    nonzero = x != 0  # torch.sign loses the sign of zero
    even = x[nonzero][: nonzero.sum() // 2 * 2]
    theirs = pack_fp4_to_uint8(fp4_utils.cast_to_fp4(torch.tensor(even)).reshape(1, -1)).numpy()[0]
    assert packing.pack_nibbles(codes[nonzero][: even.size]).tobytes() == theirs.tobytes()


def test_every_e2m1_code_survives_a_round_trip():
    codes = jnp.arange(16, dtype=jnp.uint8)
    assert ms.encode_e2m1(ms.decode_e2m1(codes)).tolist() == codes.tolist()


@pytest.mark.parametrize(("bits", "exponent"), [(4, 2), (8, 8)])
def test_mx_exponents_equal_compressed_tensors(bits, exponent):
    """On both sides of every rounding border, over all magnitudes but subnormal ones, whose bytes are 0 in both."""
    powers = 2.0 ** np.arange(-126, 128)
    amax = neighbours(np.concatenate([powers, np.minimum(1.75 * powers, 3e38), powers * 1.3]))
    amax = amax[(amax >= 2.0**-126) & (amax < np.inf)]
    with np.errstate(over="ignore"):
        theirs = generate_mx_scales(torch.tensor(amax), bits).clamp(0, 255)
    is_top = amax >= 1.75 * 2.0**127  # there their power of two is infinite
    expected = np.where(is_top, 255 - exponent, np.nan_to_num(theirs.numpy(), posinf=0))
    assert (
        np.asarray(jax.jit(ms.mx_exponent, static_argnums=1)(jnp.asarray(amax), exponent)).tolist() == expected.tolist()
    )


def test_mx_exponents_of_the_specification():
    of = lambda values, exponent: np.asarray(ms.mx_exponent(jnp.asarray(values, F), exponent)).tolist()  # noqa: E731
    assert of([1.74, 1.75, 3.5, 6.0, 7.0], 2) == [125, 126, 127, 127, 128]
    assert of([3.0], 8) == [120]
    assert of([0.0, 1e-45, np.inf], 2) == [0, 0, 255]


def test_mxfp8_worked_example():
    x = jnp.asarray([3, -1.1, 0.26], F)
    codes, exponent = ms.quantize_mxfp8(x, amax_of(x))
    assert codes.astype(F).tolist() == [384, -144, 32] and exponent.tolist() == [120]


def test_mxfp4_worked_example():
    codes = jnp.asarray(packing.unpack_nibbles(np.array([0x21, 0xA7, 0x4F, 0x08], np.uint8)))
    values = ms.decode_e2m1(codes) * ms.decode_e8m0(jnp.uint8(125))
    assert values.tolist() == [0.125, 0.25, 1.5, -0.25, -1.5, 0.5, 0, 0]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_nvfp4_worked_example(wrap):
    x = jnp.asarray([0, 0.1, -0.2, 0.3, 0.45, -0.5, 0.6, 0.7, 0.8, -0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.5], F)
    scale = ms.nvfp4_global_scale(jnp.asarray(3.0, F))
    assert float(scale) == 896
    codes, block = wrap(ms.quantize_nvfp4)(x, amax_of(x), scale)
    assert np.asarray(block).view(np.uint8).tolist() == [0x76] and block.astype(F).tolist() == [224]
    assert hexes(codes) == "10 2A C4 54 E5 66 76 77"
    values = ms.decode_e2m1(codes) * (block.astype(F) / scale)
    expected = [0, 0.125, -0.25, 0.25, 0.5, -0.5, 0.5, 0.75, 0.75, -1, 1, 1, 1, 1.5, 1.5, 1.5]
    assert values.tolist() == expected


def test_nvfp4_codes_stay_within_half_a_step():
    """An independent float64 check: each code is the nearest grid value under the stored block scale."""
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((64, 16)) * 10.0 ** rng.uniform(-4, 2, (64, 1))).astype(F)
    scale = ms.nvfp4_global_scale(jnp.asarray(np.abs(x).max()))
    codes, block = jax.jit(ms.quantize_nvfp4)(jnp.asarray(x), amax_of(x), scale)
    step = np.asarray(block).astype(np.float64) / float(scale)
    assert (np.asarray(block).astype(F) > 0).mean() > 0.5
    grid = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    distance = np.abs(x[..., None] - grid * step[..., None])
    chosen = np.take_along_axis(distance, np.asarray(codes, np.int64)[..., None], -1)[..., 0]
    alive = step[:, 0] > 0
    assert (chosen[alive] <= distance[alive].min(-1) * (1 + 1e-6) + 1e-30).all()
    assert (np.asarray(codes)[~alive] & 7 == 0).all()


@pytest.mark.parametrize("amax", [0.0, np.inf, np.nan, 1e-38])
def test_a_global_scale_is_always_finite(amax):
    assert float(ms.nvfp4_global_scale(jnp.asarray(amax, F))) == 1.0


def nvfp4_by_seven(x, amax):
    return ms.quantize_nvfp4(x, amax, jnp.asarray(7.0, F))


@pytest.mark.parametrize("rule", [ms.quantize_mxfp4, ms.quantize_mxfp8, nvfp4_by_seven])
@pytest.mark.sample(2)
def test_zero_and_non_finite_groups(rule):
    codes, scale = rule(jnp.zeros((1, 32), F), jnp.zeros((1, 1), F))
    assert not np.asarray(codes).view(np.uint8).any()
    assert np.asarray(scale).view(np.uint8).tolist() == [[0]]
    _, scale = rule(jnp.full((1, 32), jnp.inf, F), jnp.full((1, 1), jnp.inf, F))
    assert np.asarray(scale).view(np.uint8).tolist() in ([[255]], [[0x7F]])  # NaN of e8m0 and e4m3


def test_nvfp4_block_scales_saturate():
    x = jnp.full((16,), 100.0, F)
    codes, block = ms.quantize_nvfp4(x, amax_of(x), jnp.asarray(1e6, F))
    assert block.astype(F).tolist() == [448] and set(codes.tolist()) == {7}


def test_power_of_two_scales_round_up():
    x = np.array([1.0, 1.0000001, 0.75, 2.0**-126, 3e38, 448.0, np.inf], F)
    rounded = np.asarray(jax.jit(numerics.power_of_two_scale)(jnp.asarray(x)))
    assert rounded.tolist() == [1.0, 2.0, 1.0, 2.0**-126, 2.0**127, 512.0, np.inf]
