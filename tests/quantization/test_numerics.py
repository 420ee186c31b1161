"""Rounding and scale rules against NumPy float32, ml_dtypes and torch, bit for bit, and worked examples."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from jax.experimental import pallas as pl

from moe_jax import quantization
from moe_jax.quantization import QuantFormat, QuantizedTensor, Strategy, dequantize_tensor
from pallas_kernels.common import WeightLayout, numerics

E4M3 = ml_dtypes.float8_e4m3fn
TINY = np.finfo(np.float32).tiny
F = np.float32

TENSOR = QuantFormat("e4m3", Strategy.TENSOR)
CHANNEL = QuantFormat("e4m3", Strategy.CHANNEL)
BLOCK = QuantFormat("e4m3", Strategy.BLOCK, block_shape=(128, 128))
INT8 = QuantFormat("int8", Strategy.CHANNEL)
ACT_TENSOR = QuantFormat("e4m3", Strategy.TENSOR, dynamic=True)
ACT_STATIC = QuantFormat("e4m3", Strategy.TENSOR)
ACT_TOKEN = QuantFormat("e4m3", Strategy.TOKEN, dynamic=True)
ACT_GROUP = QuantFormat("e4m3", Strategy.GROUP, group_size=128, dynamic=True)
ACT_INT8 = QuantFormat("int8", Strategy.TOKEN, dynamic=True)
# Compiled, since that is where XLA may change arithmetic; the worked examples also run operation by operation.
quantize_weight = jax.jit(quantization.quantize_weight, static_argnums=1, static_argnames="arithmetic_dtype")
quantize_activations = jax.jit(quantization.quantize_activations, static_argnums=1, static_argnames="rounding")
dequantize = jax.jit(quantization.dequantize, static_argnums=2)
fake_quantize = jax.jit(quantization.fake_quantize, static_argnums=1)
MODES = {"compiled": (quantize_weight, quantize_activations)}
MODES["eager"] = (quantization.quantize_weight, quantization.quantize_activations)
WEIGHT_FORMATS = {"tensor": TENSOR, "channel": CHANNEL, "block": BLOCK, "int8": INT8}
ACTIVATION_FORMATS = {"tensor": ACT_TENSOR, "token": ACT_TOKEN, "group": ACT_GROUP, "int8": ACT_INT8}


def codes(q):
    """Byte view of codes, -0 written as +0: a zero's sign carries no meaning."""
    q = np.asarray(q)
    if q.dtype == np.int8:
        return q
    return np.where(q.view(np.uint8) == 0x80, 0, q.view(np.uint8))


def torch_e4m3(x):
    """torch's conversion of float32 values, clipped first, as ml_dtypes."""
    clipped = torch.tensor(np.asarray(x, F)).clamp(-448, 448)
    return clipped.to(torch.float8_e4m3fn).view(torch.uint8).numpy().view(E4M3)


# -- the casts ---------------------------------------------------------------------------------------------------------


def test_e4m3_facts():
    values = [17, 18, 19, 2.0**-10, 3 * 2.0**-10, 2.0**-9, 2.0**-6, 448, 464, 465, 1e30, np.inf, -np.inf, -1e9]
    expected = [16, 18, 20, 0, 2.0**-8, 2.0**-9, 2.0**-6, 448, 448, 448, 448, 448, -448, -448]
    q = numerics.cast_e4m3(jnp.asarray(values, F))
    assert q.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(np.asarray(q).astype(F), np.asarray(expected, F))
    assert np.asarray(numerics.cast_e4m3(jnp.asarray([448.0, -448.0], F))).view(np.uint8).tolist() == [0x7E, 0xFE]
    assert np.isnan(np.asarray(numerics.cast_e4m3(jnp.asarray([np.nan], F))).astype(F)).all()


def test_all_256_codes_widen_exactly():
    bits = np.arange(256, dtype=np.uint8)
    widened = np.asarray(jax.jit(lambda q: q.astype(jnp.float32))(jnp.asarray(bits.view(E4M3))))
    judge = torch.tensor(bits).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(widened, judge)
    assert np.isnan(judge[[0x7F, 0xFF]]).all() and np.isfinite(np.delete(judge, [0x7F, 0xFF])).all()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_cast_e4m3_of_every_16_bit_value(dtype):
    values = np.arange(2**16, dtype=np.uint16).view(dtype).astype(F)
    values = values[~np.isnan(values)]
    q = np.asarray(jax.jit(numerics.cast_e4m3)(jnp.asarray(values)))
    np.testing.assert_array_equal(q.view(np.uint8), torch_e4m3(values).view(np.uint8))
    np.testing.assert_array_equal(q.view(np.uint8), np.clip(values, -448, 448).astype(E4M3).view(np.uint8))


def test_cast_e4m3_around_every_midpoint():
    """The float32 neighbours of every tie go their own way, the tie itself to the even code."""
    grid = np.arange(0x7F, dtype=np.uint8).view(E4M3).astype(F)
    middle = (grid[:-1] + grid[1:]) / 2
    below, above = np.nextafter(middle, F(0)), np.nextafter(middle, F(np.inf))
    code = np.arange(0x7E)
    for x, expected in ((below, code), (above, code + 1), (middle, code + code % 2)):
        for sign, bit in ((1, 0), (-1, 0x80)):
            q = np.asarray(numerics.cast_e4m3(jnp.asarray(sign * x))).view(np.uint8)
            np.testing.assert_array_equal(q, expected | bit)


def test_round_to_int_and_cast_int8():
    x = np.asarray([-63.5, 0.5, 1.5, 2.5, -0.5, 0.49999997, 31.877, 126.5, 127.5, -300, 8388609.0], F)
    even = np.asarray(numerics.round_to_int(jnp.asarray(x)))
    away = np.asarray(numerics.round_to_int(jnp.asarray(x), "half_away"))
    np.testing.assert_array_equal(even, torch.round(torch.tensor(x)).numpy())
    np.testing.assert_array_equal(away, [-64, 1, 2, 3, -1, 0, 32, 127, 128, -300, 8388609.0])
    assert np.asarray(numerics.cast_int8(jnp.asarray([-1e9, -127.6, 127.6, np.inf, np.nan], F))).tolist() == [
        *(-127, -127, 127, 127, 0)
    ]


def test_division_is_correctly_rounded_however_it_is_compiled():
    """XLA's own rewriting to a multiplication fails this in each of the four settings."""
    rng = np.random.default_rng(0)
    x, s = rng.standard_normal((64, 256)).astype(F), np.abs(rng.standard_normal((64, 1))).astype(F)
    assert (x * (F(1) / s) != x / s).any() and (x * F(1 / 448) != x / F(448)).any()  # or the test shows nothing
    jx, js = jnp.asarray(x), jnp.asarray(s)
    for run in (lambda f: f, jax.jit):
        np.testing.assert_array_equal(run(numerics.divide)(jx, js), x / s)
        np.testing.assert_array_equal(run(lambda x: numerics.divide(x, 448.0))(jx), x / F(448))
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda x: numerics.divide(x, 448.0)))(jx), x / F(448))
    np.testing.assert_array_equal(
        jax.jit(lambda x: jax.lax.map(lambda r: numerics.divide(r, 127.0), x))(jx), x / F(127)
    )


# -- the worked examples -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_example_fp8_per_tensor(mode):
    quantize_weight, quantize_activations = MODES[mode]
    x = jnp.asarray([[0.5, -1, 2, 0.013]], F)
    for q, scale in (quantize_weight(x, TENSOR), quantize_activations(x, ACT_TENSOR)):
        assert scale == F(2) / F(448) and abs(float(scale) - 0.0044642859) < 1e-9
        assert np.asarray(q).view(np.uint8).tolist() == [[0x6E, 0xF6, 0x7E, 0x44]]
        np.testing.assert_array_equal(np.asarray(q).astype(F), [[112, -224, 448, 3]])
        assert abs(float(dequantize(q, scale, TENSOR)[0, 3]) - 0.01339286) < 1e-8


@pytest.mark.parametrize("mode", MODES)
def test_example_fp8_token_and_channel(mode):
    quantize_weight, quantize_activations = MODES[mode]
    x = jnp.asarray([[3, -1.5, 0.25, 0]], F)
    for q, scale in (quantize_weight(x, CHANNEL), quantize_activations(x, ACT_TOKEN)):
        assert scale.shape == (1,) and abs(float(scale[0]) - 0.0066964286) < 1e-9
        assert np.asarray(q).astype(F).tolist() == [[448, -224, 36, 0]]


@pytest.mark.parametrize("mode", MODES)
def test_example_fp8_block(mode):
    quantize_weight, quantize_activations = MODES[mode]
    q, scale = quantize_weight(jnp.asarray([[1.5, -0.75], [0.1, 0]], F), BLOCK)
    assert scale.shape == (1, 1) and abs(float(scale[0, 0]) - 0.0033482142) < 1e-9
    assert np.asarray(q).astype(F).tolist() == [[448, -224], [30, 0]]


def test_example_separate_scales_need_no_requantization():
    """s1 = 0.01 and s3 = 0.02 on [448, 96, -3.5]: kept apart, the values of w1 are exactly q * s1."""
    q = jnp.asarray(np.asarray([[[448, 96, -3.5]], [[448, 96, -3.5]]], F).astype(E4M3))
    real = dequantize_tensor(QuantizedTensor(q, jnp.asarray([0.01, 0.02], F), fmt=TENSOR))
    np.testing.assert_array_equal(real[0, 0], np.asarray([448, 96, -3.5], F) * F(0.01))
    np.testing.assert_array_equal(real[1, 0], np.asarray([448, 96, -3.5], F) * F(0.02))


@pytest.mark.parametrize("mode", MODES)
def test_example_int8_channel(mode):
    quantize_weight, quantize_activations = MODES[mode]
    row = np.asarray([[1, -0.3, 0.004, 0.5]], ml_dtypes.bfloat16)
    q, scale = quantize_weight(jnp.asarray(row), INT8, arithmetic_dtype=jnp.bfloat16)
    assert float(scale[0]) == 0.00787353515625 and np.asarray(q).tolist() == [[127, -38, 1, 64]]
    q, scale = quantize_weight(jnp.asarray(row), INT8)
    assert float(scale[0]) == F(1) / F(127) and np.asarray(q).tolist() == [[127, -38, 1, 64]]


def test_example_int8_token_and_product():
    x = jnp.asarray([[1, -0.5, 0.251, 0]], F)
    for rounding in ("half_even", "half_away"):
        q, scale = quantize_activations(x, ACT_INT8, rounding=rounding)
        assert np.asarray(q).tolist() == [[127, -64, 32, 0]] and abs(float(scale[0]) - 0.0078740157) < 1e-9
    accumulated = int(np.asarray(q).astype(np.int32)[0] @ np.asarray([10, 0, -5, 7]))
    assert accumulated == 1110 and abs(accumulated * float(scale[0]) * 0.02 - 0.1748032) < 1e-6


def test_int8_token_rounding_option():
    x = jnp.asarray([[127.0, 2.5, -2.5, 3.5]], F)  # scale 1: ties stay ties
    assert np.asarray(quantize_activations(x, ACT_INT8)[0]).tolist() == [[127, 2, -2, 4]]
    assert np.asarray(quantize_activations(x, ACT_INT8, rounding="half_away")[0]).tolist() == [[127, 3, -3, 4]]


# -- every rule against plain NumPy ------------------------------------------------------------------------------------


def hostile(shape, seed=0):
    """Rows of every kind: normal, zero, huge, tiny, one outlier, exact ties, wide range."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(F)
    rows = x.reshape(-1, shape[-1])
    rows[1::9] = 0
    rows[2::9] *= F(1e36)
    rows[3::9] *= F(1e-30)
    rows[4::9, 0] = 5e4
    rows[5::9] = rng.integers(-16, 17, rows[5::9].shape) / F(2)
    rows[6::9] *= np.exp2(rng.integers(-20, 20, rows[6::9].shape)).astype(F)
    return rows.reshape(shape)


def judge_e4m3_tensor(x):
    scale = np.maximum(np.abs(x).max() / F(448), TINY)
    return torch_e4m3(x * (F(1) / scale)), scale


def judge_e4m3_row(x):
    scale = np.maximum(np.abs(x).max() / F(448), F(1 / (448 * 512)))
    return torch_e4m3(x / scale), scale


def judge_e4m3_block(x):
    scale = np.maximum(np.abs(x).max(), F(1e-4)) / F(448)
    return torch_e4m3(x * (F(1) / scale)), scale


def judge_e4m3_group(x):
    scale = np.maximum(np.abs(x).max(), F(1e-10)) * F(1 / 448)
    return torch_e4m3(x / scale), scale


def judge_int8_channel(x):
    scale = np.abs(x).max() / F(127)
    quotient = x / scale if scale else np.zeros_like(x)
    return np.clip(np.rint(quotient), -127, 127).astype(np.int8), scale


def judge_int8_token(x):
    amax = np.maximum(np.abs(x).max(), F(1e-10))
    return np.rint(x * (F(127) / amax)).astype(np.int8), amax / F(127)


def tiles(fmt, shape):
    """(scale index, slices) of every extent of one scale in a (N, K) matrix, ragged edges included."""
    n, k = shape
    match fmt.strategy:
        case Strategy.TENSOR:
            yield (), np.s_[:, :]
        case Strategy.CHANNEL | Strategy.TOKEN:
            for row in range(n):
                yield (row,), np.s_[row, :]
        case Strategy.GROUP:
            for row in range(n):
                for start in range(0, k, fmt.group_size):
                    yield (row, start // fmt.group_size), np.s_[row, start : start + fmt.group_size]
        case Strategy.BLOCK:
            bn, bk = fmt.block_shape
            for row in range(0, n, bn):
                for column in range(0, k, bk):
                    yield (row // bn, column // bk), np.s_[row : row + bn, column : column + bk]


def assert_matches_judge(x, q, scale, fmt, judge):
    q, scale = np.asarray(q), np.asarray(scale)
    assert q.dtype == fmt.element_type.storage and q.shape == x.shape
    assert scale.dtype == F and scale.shape == fmt.scale_shape(*x.shape) and np.isfinite(scale).all()
    seen = 0
    for index, where in tiles(fmt, x.shape):
        expected_q, expected_scale = judge(x[where])
        assert scale[index] == expected_scale, f"scale at {index}"
        np.testing.assert_array_equal(codes(q[where]), codes(expected_q), err_msg=f"codes at {index}")
        seen += x[where].size
    assert seen == x.size


WEIGHT_JUDGES = {
    "tensor": judge_e4m3_tensor,
    "channel": judge_e4m3_row,
    "block": judge_e4m3_block,
    "int8": judge_int8_channel,
}
ACTIVATION_JUDGES = {
    "tensor": judge_e4m3_tensor,
    "token": judge_e4m3_row,
    "group": judge_e4m3_group,
    "int8": judge_int8_token,
}


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_weights_match_numpy(name):
    fmt = WEIGHT_FORMATS[name]
    stack = hostile((3, 160, 200))  # ragged in both directions; three experts, each with scales of its own
    q, scale = map(np.asarray, quantize_weight(jnp.asarray(stack), fmt))
    for expert, x in enumerate(stack):
        assert_matches_judge(x, q[expert], scale[expert], fmt, WEIGHT_JUDGES[name])


@pytest.mark.parametrize("shape", [(128, 256), (1, 1), (129, 127), (5, 300), (300, 5)])
def test_block_edges(shape):
    x = hostile(shape, seed=1)
    q, scale = quantize_weight(jnp.asarray(x), BLOCK)
    assert_matches_judge(x, q, scale, BLOCK, judge_e4m3_block)
    real = np.asarray(dequantize(q, scale, BLOCK))
    rows, columns = np.indices(shape)
    np.testing.assert_array_equal(real, np.asarray(q).astype(F) * np.asarray(scale)[rows // 128, columns // 128])


@pytest.mark.parametrize("name", [*WEIGHT_FORMATS, "token", "group", "int8_token"])
def test_near_ties_tell_division_from_reciprocal(name):
    """Values in the middle between two codes, where the last bit of the quotient decides."""
    activations = {"token": ACT_TOKEN, "group": ACT_GROUP, "int8_token": ACT_INT8}
    fmt = {**WEIGHT_FORMATS, **activations}[name]
    judge = {**ACTIVATION_JUDGES, **WEIGHT_JUDGES, "int8_token": judge_int8_token}[name]
    is_int8 = fmt.element == "int8"
    grid = np.arange(0x7F, dtype=np.uint8).view(E4M3).astype(F)
    middles = np.arange(0.5, 127, dtype=F) if is_int8 else (grid[:-1] + grid[1:]) / 2
    amax = np.random.default_rng(12).uniform(0.5, 8, (64, 1, 1)).astype(F)
    x = np.concatenate([amax, amax / F(127 if is_int8 else 448) * middles], axis=-1)  # 64 matrices of one row
    run = quantize_activations if name in activations else quantize_weight
    q, scale = map(np.asarray, run(jnp.asarray(x), fmt))
    for expert in range(64):
        assert_matches_judge(x[expert], q[expert], scale[expert], fmt, judge)


@pytest.mark.parametrize("name", ACTIVATION_FORMATS)
@pytest.mark.parametrize("columns", [200, 5])
def test_activations_match_numpy(name, columns):
    fmt = ACTIVATION_FORMATS[name]
    x = hostile((27, columns), seed=2)
    q, scale = quantize_activations(jnp.asarray(x), fmt)
    assert_matches_judge(x, q, scale, fmt, ACTIVATION_JUDGES[name])


@pytest.mark.parametrize("name", ACTIVATION_FORMATS)
def test_activations_of_16_bits_are_quantized_in_float32(name):
    x = jnp.asarray(hostile((9, 64), seed=3), jnp.bfloat16)
    q, scale = quantize_activations(x, ACTIVATION_FORMATS[name])
    wide_q, wide_scale = quantize_activations(x.astype(jnp.float32), ACTIVATION_FORMATS[name])
    np.testing.assert_array_equal(codes(q), codes(wide_q))
    np.testing.assert_array_equal(scale, wide_scale)


def test_static_activations():
    x = hostile((27, 40), seed=4)
    x[0, :3] = [np.inf, -np.inf, 1e38]
    a = F(0.0371)
    q, scale = quantize_activations(jnp.asarray(x), ACT_STATIC, a)
    assert scale == a and scale.shape == ()
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(codes(q), codes(torch_e4m3(x * (F(1) / a))))
    assert np.asarray(q).astype(F)[0, :3].tolist() == [448, -448, 448]
    for dead in (0.0, 1e-23, 1e-42):
        q, scale = quantize_activations(jnp.asarray(x[1:]), ACT_STATIC, F(dead))
        real = np.asarray(dequantize(q, scale, ACT_STATIC))
        assert np.isfinite(real).all() and np.abs(real).max() <= 448 * F(dead)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int8_in_the_weights_dtype_is_bit_exact_with_torch(dtype):
    """vLLM's online int8: every step in the weight dtype."""
    w = torch.tensor(hostile((48, 96), seed=5)).clamp(-6e4, 6e4).to(dtype)
    w[:3] = torch.tensor([[1e-3], [3e-6], [0]])  # float16: a subnormal scale, one that underflows, none
    scale = w.abs().amax(dim=1, keepdim=True) / 127
    q = torch.round(w / scale).clamp(-127, 127)
    alive = scale[:, 0] != 0
    jax_dtype = {torch.bfloat16: jnp.bfloat16, torch.float16: jnp.float16}[dtype]
    ours = jnp.asarray(w.float().numpy()).astype(jax_dtype)
    our_q, our_scale = quantize_weight(ours, INT8, arithmetic_dtype=jax_dtype)
    np.testing.assert_array_equal(our_scale, scale[:, 0].float().numpy())
    np.testing.assert_array_equal(np.asarray(our_q)[alive], q[alive].to(torch.int8).numpy())
    assert not np.asarray(our_q)[~alive].any()
    float_q, _ = quantize_weight(ours, INT8)
    assert (np.asarray(float_q) != np.asarray(our_q)).any(), "float32 arithmetic is another choice"


def test_rules_run_in_a_kernel_body():
    """Reduced and quantized inside a Pallas kernel: the same bits."""
    x = jnp.asarray(hostile((16, 128), seed=11))

    def body(x_ref, q_ref, scale_ref, i_ref, i_scale_ref):
        x = x_ref[...]
        amax = jnp.max(numerics.magnitude(x), axis=1, keepdims=True)
        q_ref[...], scale_ref[...] = numerics.quantize_e4m3_row(x, amax)
        i_ref[...], i_scale_ref[...] = numerics.quantize_int8_token(x, amax)

    def out(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    scale = out((16, 1), jnp.float32)
    shapes = [out(x.shape, jnp.float8_e4m3fn), scale, out(x.shape, jnp.int8), scale]
    q, scale, i, i_scale = pl.pallas_call(body, out_shape=shapes, interpret=True)(x)
    for fmt, codes_of, scale_of in ((ACT_TOKEN, q, scale), (ACT_INT8, i, i_scale)):
        expected, expected_scale = quantize_activations(x, fmt)
        np.testing.assert_array_equal(codes(codes_of), codes(expected))
        np.testing.assert_array_equal(scale_of[:, 0], expected_scale)


# -- zero, NaN and extreme values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_zero_weights(name):
    q, scale = quantize_weight(jnp.zeros((130, 130), jnp.bfloat16), WEIGHT_FORMATS[name])
    assert not codes(q).any() and np.isfinite(scale).all()
    assert not np.asarray(dequantize(q, scale, WEIGHT_FORMATS[name])).any()


@pytest.mark.parametrize("name", ACTIVATION_FORMATS)
def test_zero_and_no_rows(name):
    fmt = ACTIVATION_FORMATS[name]
    q, scale = quantize_activations(jnp.zeros((3, 130)), fmt)
    assert not codes(q).any() and np.isfinite(scale).all()
    q, scale = quantize_activations(jnp.zeros((0, 130)), fmt)
    assert q.shape == (0, 130) and scale.shape == fmt.scale_shape(0, 130)
    assert dequantize(q, scale, fmt).shape == (0, 130)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ACTIVATION_FORMATS)
def test_nan_and_infinity_spoil_their_extent_and_nothing_else(name, poison):
    """With enough rows that XLA's own maximum on the CPU would lose the NaN."""
    fmt = ACTIVATION_FORMATS[name]
    x = np.random.default_rng(6).standard_normal((64, 256)).astype(F)
    clean = np.asarray(fake_quantize(jnp.asarray(x), fmt))
    x[2, 200] = poison
    out = np.asarray(fake_quantize(jnp.asarray(x), fmt))
    touched = {"tensor": np.s_[:, :], "token": np.s_[2, :], "int8": np.s_[2, :], "group": np.s_[2, 128:]}[name]
    expected = np.zeros(x.shape, bool)
    expected[touched] = True
    np.testing.assert_array_equal(out[~expected], clean[~expected])
    assert np.isnan(out[expected]).all() and np.isfinite(clean).all()


@pytest.mark.parametrize("scale", [0.0, 1e-23, 3e38])
def test_extreme_stored_scales(scale):
    """Dead experts carry scales such as 1e-23 or 0: the product is exact in float32, never NaN."""
    q = np.arange(256, dtype=np.uint8).view(E4M3)
    q = q[np.isfinite(q.astype(F))].reshape(2, -1)
    with np.errstate(over="ignore"):
        expected = q.astype(F) * F(scale)
    real = np.asarray(dequantize(jnp.asarray(q), jnp.full((2,), scale, jnp.float32), CHANNEL))
    np.testing.assert_array_equal(real, expected)
    assert not np.isnan(real).any()


# -- dequantization and fake quantization ------------------------------------------------------------------------------


def test_dequantize_tensor_dtypes_and_layout():
    w = jnp.asarray(np.random.default_rng(7).standard_normal((2, 3, 20, 30)).astype(F))
    data, scale = quantize_weight(w, CHANNEL)
    tensor = QuantizedTensor(data, scale, fmt=CHANNEL)
    exact = np.asarray(data).astype(F) * np.asarray(scale)[..., None]
    np.testing.assert_array_equal(dequantize_tensor(tensor), exact)
    rounded = dequantize_tensor(tensor, jnp.bfloat16)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(rounded), exact.astype(ml_dtypes.bfloat16))
    plain = dequantize_tensor(QuantizedTensor(w.astype(jnp.float16)), jnp.float32)
    np.testing.assert_array_equal(plain, np.asarray(w).astype(np.float16).astype(F))
    with pytest.raises(ValueError, match="layout 'tiled'"):
        dequantize_tensor(QuantizedTensor(data, scale, fmt=CHANNEL, layout=WeightLayout("tiled")))


@pytest.mark.parametrize("name", ACTIVATION_FORMATS)
def test_fake_quantize_is_quantize_then_dequantize(name):
    fmt = ACTIVATION_FORMATS[name]
    x = jnp.asarray(hostile((2, 9, 200), seed=8))
    expected = dequantize(*quantize_activations(x, fmt), fmt)
    out = fake_quantize(x, fmt)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, expected)


def test_fake_quantize_gradient_is_straight_through():
    x = jnp.asarray(np.random.default_rng(9).standard_normal((4, 256)), jnp.float32)
    cotangent = jnp.asarray(np.random.default_rng(10).standard_normal((4, 256)), jnp.float32)
    for fmt in ACTIVATION_FORMATS.values():
        gradient = jax.grad(lambda x, fmt=fmt: jnp.sum(fake_quantize(x, fmt) * cotangent))(x)
        np.testing.assert_array_equal(gradient, cotangent)
    gradient = jax.grad(lambda x: jnp.sum(fake_quantize(x, ACT_TOKEN)))(x.astype(jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16 and (gradient == 1).all()


def test_fake_quantize_gradient_of_a_static_scale():
    """Zero where the value was clipped, and nothing for the scale."""
    x = jnp.asarray([[0.1, -4.48, 4.49, -100.0]], jnp.float32)
    gradient, scale_gradient = jax.grad(lambda x, a: jnp.sum(fake_quantize(x, ACT_STATIC, a)), (0, 1))(
        x, jnp.float32(0.01)
    )
    assert np.asarray(gradient).tolist() == [[1, 1, 0, 0]] and scale_gradient == 0


def test_input_scale_exactly_when_static():
    x = jnp.ones((2, 4))
    with pytest.raises(ValueError, match="expected exactly when static"):
        quantize_activations(x, ACT_STATIC)
    with pytest.raises(ValueError, match="expected exactly when static"):
        quantize_activations(x, ACT_TOKEN, jnp.float32(1))


def test_formats_without_a_rule_are_refused():
    with pytest.raises(NotImplementedError, match="int8 with strategy 'tensor'"):
        quantize_weight(jnp.ones((2, 4)), QuantFormat("int8", Strategy.TENSOR))
    with pytest.raises(NotImplementedError, match="int8 per group"):
        quantize_activations(jnp.ones((2, 4)), QuantFormat("int8", Strategy.GROUP, group_size=2, dynamic=True))
