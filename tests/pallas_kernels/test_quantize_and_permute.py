"""quantize_and_permute: the reference against NumPy, refusals, lowering for CUDA, and the Hopper kernel on a GPU.

Layout contract: row_of[t, j] is the output row of token t for its j-th expert, -1 for none, no row twice. Scales
multiply the codes: one per row, or (groups, rows) with a group of 128 columns each.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from moe_jax.quantization import QuantFormat, Strategy, dequantize, quantize_activations
from pallas_kernels.common.microscaling import decode_e2m1, encode_e2m1
from pallas_kernels.common.numerics import cast_int8
from pallas_kernels.grouped_gemm.reference import quantize_rows_by_group
from pallas_kernels.quantize_and_permute import (
    PermuteConfig,
    PermuteDesc,
    config_error,
    narrow_sm90,
    quantize_and_permute,
)
from pallas_kernels.quantize_and_permute.config import MICROSCALING, QUANTIZATIONS, TAKES_SCALE, choose_config
from tests.support.kernels.cases import gather_cases, permute_cases
from tests.support.kernels.in_lockstep import Memory, simt_of
from tests.support.refusals import refuses

# For 0.03 one bfloat16 value in 128 is a tie of e4m3, decided by the last bit of 1 / scale.
SCALE = 0.03137

# The global scale of "nvfp4": no power of two, and large enough that scales of zero, subnormal and the largest occur.
GLOBAL_SCALE = 37.3

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def make(num_tokens, width, top_k, num_rows, dtype="bfloat16", seed=0):
    """Tokens of very different magnitudes, one of them zero, and distinct rows for three quarters of the slots."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_tokens, width)) * np.exp2(rng.integers(-8, 8, (num_tokens, 1)))
    x[num_tokens // 2] = 0.0
    rows = rng.permutation(num_rows)[: num_tokens * top_k].reshape(num_tokens, top_k)
    row_of = np.where(rng.random(rows.shape) < 0.75, rows, -1).astype(np.int32)
    return x.astype(DTYPES[dtype]), row_of


def expected_values(x, quantization, scale):
    """Codes as float64, scales, by the rules as they read in numerics.py, rounding by ml_dtypes."""
    v = np.asarray(x).astype(np.float32)

    def e4m3(values):
        return np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)

    def e2m1(values):
        return np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)

    one = np.float32(1)
    match quantization:
        case "none":
            return v.astype(np.float64), None
        case "e4m3_tensor":
            return e4m3(v * (one / np.float32(scale))), None
        case "e4m3_tensor_row":
            s = np.maximum(np.abs(v).max(1) / np.float32(448), np.finfo(np.float32).tiny)
            return e4m3(v * (one / s)[:, None]), s
        case "e4m3_row":
            s = np.maximum(np.abs(v).max(1) / np.float32(448), one / np.float32(448 * 512))
            return e4m3(v / s[:, None]), s
        case "e4m3_group" | "e4m3_group_ue8m0":
            groups = np.pad(v, ((0, 0), (0, -v.shape[1] % 128))).reshape(len(v), -1, 128)
            s = np.maximum(np.abs(groups).max(2), np.float32(1e-10)) * np.float32(1 / 448)
            if quantization.endswith("ue8m0"):
                s = np.exp2(np.ceil(np.log2(s.astype(np.float64)))).astype(np.float32)
            return e4m3(groups / s[..., None]).reshape(len(v), -1)[:, : v.shape[1]], s.T
        case "int8_row":
            amax = np.maximum(np.abs(v).max(1), np.float32(1e-10))
            return np.clip(np.rint(v * (np.float32(127) / amax)[:, None]), -127, 127).astype(float), amax / np.float32(
                127
            )
        case "nvfp4" | "nvfp4_row":
            inverse = np.full((1, 1), scale, np.float32)
            if quantization == "nvfp4_row":
                largest = np.abs(v).max(1)
                inverse = np.where(largest > 0, np.float32(2688) / np.where(largest > 0, largest, one), one)[:, None]
            groups, amax = in_groups(v, 16)
            b = np.minimum(inverse * (amax * np.float32(1 / 6)), 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            factor = np.where(b > 0, inverse / np.where(b > 0, b, one), 0).astype(np.float32)
            values = e2m1(groups * factor[..., None]) * b[..., None].astype(np.float64)
            return from_groups(values, v), None if quantization == "nvfp4" else one / inverse[:, 0]
        case "mxfp4" | "mxfp8":
            groups, amax = in_groups(v, 32)
            mantissa, exponent = np.frexp(amax.astype(np.float64))  # 0.5 <= mantissa < 1
            exponent = exponent - 1 + (mantissa >= 0.875) - (2 if quantization == "mxfp4" else 8)
            power = np.exp2(np.where(amax > 0, np.maximum(exponent, -127), -127).astype(np.float64))
            round_to = e2m1 if quantization == "mxfp4" else e4m3
            return from_groups(round_to(groups / power[..., None]) * power[..., None], v), None
    raise AssertionError(quantization)


def in_groups(v, size):
    """(T, groups, size) with zeros behind the last column, and the largest magnitude of each."""
    groups = np.pad(v, ((0, 0), (0, -v.shape[1] % size))).reshape(len(v), -1, size)
    return groups, np.abs(groups).max(2)


def from_groups(values, v):
    return values.reshape(len(v), -1)[:, : v.shape[1]]


def check(x, row_of, num_rows, quantization, out, scale, *, flips=0.0):
    """Every (token, slot) that has a row; ``flips`` is the share of codes that may be one grid step off. Values of
    microscaling formats are exact.
    """
    codes, scales = (None if a is None else np.asarray(a).astype(np.float64) for a in out)
    want, want_scales = expected_values(x, quantization, scale)
    assert codes.shape == (num_rows, x.shape[1])
    tokens, slots = np.nonzero(row_of >= 0)
    rows = row_of[tokens, slots]
    step = {"int8": 1.0, "e4m3": 1 / 8}.get(quantization.partition("_")[0], 0.0)
    bound = step if quantization == "int8_row" else step * np.maximum(np.abs(want[tokens]), 2.0**-6)
    error = np.abs(codes[rows] - want[tokens])
    assert np.all(error <= bound)
    assert (error > 0).mean() <= flips
    if want_scales is None:
        assert scales is None
    else:
        own = scales[rows] if want_scales.ndim == 1 else scales[:, rows].T
        other = want_scales[tokens] if want_scales.ndim == 1 else want_scales[:, tokens].T
        np.testing.assert_allclose(own, other, rtol=3e-7)


def call(x, row_of, num_rows, quantization, implementation):
    number = SCALE if quantization == "e4m3_tensor" else GLOBAL_SCALE
    scale = jnp.float32(number) if quantization in TAKES_SCALE else None

    def run(x, row_of, scale):
        return quantize_and_permute(
            x, row_of, num_rows, quantization=quantization, scale=scale, implementation=implementation
        )

    return jax.jit(run)(jnp.asarray(x), jnp.asarray(row_of), scale), number


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.sample(2)
def test_reference(quantization):
    x, row_of = make(9, 160, 3, 40)
    out, scale = call(x, row_of, 40, quantization, "reference")
    check(x, row_of, 40, quantization, out, scale)


@pytest.mark.parametrize("quantization", ["e4m3_row", "e4m3_tensor_row", "int8_row", "e4m3_group", "e4m3_group_ue8m0"])
def test_nan_spreads_over_what_shares_its_scale(quantization):
    """And no further. In an array this large XLA's maximum on a CPU loses it."""
    x = np.random.default_rng(0).standard_normal((3, 2048)).astype(np.float32)
    x[1, -1] = np.nan
    x = jnp.asarray(x)
    codes, scales = quantize_and_permute(x, quantization=quantization, implementation="reference")
    spread = np.full((3, 2048), scales[:, None]) if scales.ndim == 1 else np.repeat(scales.T, 128, axis=1)
    with np.errstate(invalid="ignore"):  # 0 times infinity
        is_damaged = np.isnan(np.asarray(codes, np.float32) * spread)
    first = 0 if scales.ndim == 1 else 2048 - 128
    assert is_damaged[1, first:].all() and is_damaged.sum() == 2048 - first
    if scales.ndim == 2:  # a product's epilogue has the same groups
        for one, other in zip((codes, scales), quantize_rows_by_group(x, quantization.endswith("ue8m0")), strict=True):
            np.testing.assert_array_equal(one.astype(jnp.float32), other.astype(jnp.float32))


@pytest.mark.parametrize("quantization", MICROSCALING)
def test_rows_equal_what_layers_elsewhere_multiply(quantization):
    """``quantize_activations``, which the other implementations round with; one row has a NaN, one tiny values."""
    x, _ = make(7, 96, 1, 7)
    x[1, 40], x[2] = np.nan, 1e-30 * np.arange(96)
    options: dict = dict(scale="e8m0", strategy=Strategy.GROUP, group_size=32, dynamic=True)
    if quantization.startswith("nvfp4"):
        kind = "token" if quantization == "nvfp4_row" else "divides"
        options |= dict(scale="e4m3", group_size=16, global_scale=kind)
    fmt = QuantFormat("e4m3" if quantization == "mxfp8" else "e2m1", **options)
    given = jnp.float32(GLOBAL_SCALE) if quantization == "nvfp4" else None
    values, scale = quantize_and_permute(
        jnp.asarray(x), quantization=quantization, scale=given, implementation="reference"
    )
    expected = dequantize(*quantize_activations(jnp.asarray(x), fmt, given), fmt)
    factor = {"nvfp4": 1 / GLOBAL_SCALE, "nvfp4_row": scale}.get(quantization, 1.0)
    values = np.asarray(values).astype(np.float32) * np.reshape(factor, (-1, 1)).astype(np.float32)
    assert np.isnan(values[1]).any() and not np.isnan(values[2:]).any()
    np.testing.assert_allclose(values, expected, rtol=1e-6 if quantization.startswith("nvfp4") else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", MICROSCALING)
def test_gpu_rounds_as_the_reference(quantization, dtype):
    """The same bits as on the CPU, of random float bits among others, NaN and infinity included. XLA on a GPU divides
    up to 2 ulp off.
    """
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        pytest.skip("needs JAX_PLATFORMS=cuda,cpu")
    x, row_of = make(65, 1440, 2, 150, dtype)
    bits = np.random.default_rng(1).integers(0, 1 << 8 * x.itemsize, (32, 1440), np.uint64)
    x[:32] = bits.astype(f"u{x.itemsize}").view(x.dtype)
    found = call(x, row_of, 150, quantization, "hopper")[0]
    with jax.default_device(cpu):
        expected = call(x, row_of, 150, quantization, "reference")[0]
    used = row_of[row_of >= 0]
    for one, other in zip(found, expected, strict=True):
        if one is not None:
            one, other = (np.asarray(a).astype(np.float32)[used] for a in (one, other))
            is_normal = ~(np.abs(other) < 2.0**-120)  # XLA counts subnormal numbers as zeros, the kernel does not
            np.testing.assert_array_equal(one[is_normal], other[is_normal])


@pytest.mark.parametrize("quantization", ["e4m3_row", "int8_row"])
@pytest.mark.parametrize("form", ["named", "all in place", "gathered"])
def test_narrow_rows_in_lockstep(monkeypatch, form, quantization):
    """The kernel's own statements, a block after the other, but for its inline PTX: which rows each warp takes, and
    where they go. A four of unnamed rows among them, and a last four that is not full.
    """
    x, row_of = make(30, 128, 3 if form == "gathered" else 1, 100 if form == "gathered" else 30)
    names = np.where(np.arange(30) // 4 == 2, -1, np.where(row_of[:, 0] < 0, -1, np.arange(30)))
    num_named = 30 if form == "named" else None
    rows, top_k = (100, 3) if form == "gathered" else (30, 0)
    desc = PermuteDesc(30, 128, top_k, rows, "bfloat16", quantization, num_named)
    codes, scales = np.zeros((rows, 128), desc.out_dtype), Memory(rows)

    def own(row):
        by_warp = np.asarray(row).reshape(4, 32)
        assert np.all(by_warp == by_warp[:, :1])
        return by_warp[:, 0]

    def store(codes, quantized, row, thread, desc):
        del thread, desc
        used = own(row) >= 0
        codes[own(row)[used]] = np.asarray(quantized)[used]

    def bits(values, desc):
        del desc
        return jnp.repeat(lax.bitcast_convert_type(values, jnp.int32), 32)

    stand_ins = dict(_load=lambda x, row, thread, desc: jnp.asarray(x[own(row)]), _store=store, _by_thread=bits)
    stand_ins |= dict(simt=simt_of(128), cast_int8_in=lambda x, layout: cast_int8(x))
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(narrow_sm90, name, stand_in)
    monkeypatch.setattr(narrow_sm90.mosaic, "begin", lambda: None)
    monkeypatch.setattr(narrow_sm90.plgpu, "layout_cast", lambda values, layout: values)
    places = {"named": [names], "all in place": [], "gathered": [row_of]}[form]
    with jax.disable_jit():
        for block in range(3):
            monkeypatch.setattr(narrow_sm90.lax, "axis_index", lambda name, block=block: jnp.int32(block))
            refs = [Memory(place.size, place.reshape(-1)) for place in places]
            narrow_sm90._kernel(desc, PermuteConfig(3, 4), x, *refs, codes, scales)
    expected = dict(named=names[:, None], gathered=row_of).get(form, np.arange(30)[:, None])
    np.testing.assert_array_equal(np.flatnonzero(scales.is_written), np.sort(expected[expected >= 0]))
    check(x, expected, rows, quantization, (codes, scales.values.view(np.float32)), None, flips=1e-3)


def test_reference_in_place_and_dtypes():
    x, _ = make(6, 256, 1, 6, "float16")
    codes, scales = quantize_and_permute(jnp.asarray(x), quantization="e4m3_group", implementation="reference")
    check(x, np.arange(6)[:, None], 6, "e4m3_group", (codes, scales), None)


def gathered(num_tokens, width, block_m, dtype="bfloat16"):
    """(x, row_of, columns, tile_expert, expected rows, which rows are in use): every expert has an order of its own."""
    rng = np.random.default_rng(1)
    tiles = -(-num_tokens * 3 * 2 // block_m)
    x, row_of = make(num_tokens, width, 3, tiles * block_m, dtype)
    columns = rng.permuted(np.tile(np.arange(width, dtype=np.int32), (5, 1)), axis=1)
    tile_expert = rng.integers(0, 5, tiles).astype(np.int32)
    expected, used = np.zeros((tiles * block_m, width), x.dtype), np.zeros(tiles * block_m, bool)
    for token, slot in np.argwhere(row_of >= 0):
        row = row_of[token, slot]
        expected[row], used[row] = x[token, columns[tile_expert[row // block_m]]], True
    return *map(jnp.asarray, (x, row_of, columns, tile_expert)), expected, used


def check_gathered(implementation, *problem):
    x, row_of, columns, tile_expert, expected, used = gathered(*problem)

    def run(x, row_of, columns, tile_expert):
        options = dict(columns=columns, tile_expert=tile_expert, implementation=implementation)
        return quantize_and_permute(x, row_of, len(used), quantization="none", **options)

    rows, scales = jax.jit(run)(x, row_of, columns, tile_expert)
    assert scales is None and rows.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(rows)[used], expected[used])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_columns_in_the_order_of_each_expert(dtype):
    check_gathered("reference", 9, 160, 4, dtype)


def test_wrong_orders_of_columns():
    x, row_of, columns, tile_expert, _, used = gathered(4, 128, 4)

    def call(columns=columns, tile_expert=tile_expert, quantization="none"):
        quantize_and_permute(x, row_of, len(used), quantization=quantization, columns=columns, tile_expert=tile_expert)

    beside = "columns goes with tile_expert, row_of and quantization='none'"
    refuses(ValueError, beside, call, tile_expert=None)
    refuses(ValueError, beside, call, quantization="int8_row")
    refuses(ValueError, r"columns is int32\(5, 127\), expected int32 \(E, 128\)", call, columns=columns[:, 1:])
    expected = r"tile_expert is int32\(5,\), expected int32 \(Mp / block_m,\) for Mp=24 rows"
    refuses(ValueError, expected, call, tile_expert=tile_expert[:5])


def test_wrong_calls():
    x, row_of = jnp.zeros((4, 128), jnp.bfloat16), jnp.zeros((4, 2), jnp.int32)
    call = functools.partial(quantize_and_permute, x, quantization="none")
    refuses(ValueError, "quantization='fp8' is not one of", call, row_of, 8, quantization="fp8")
    refuses(ValueError, "scale is given exactly when", call, row_of, 8, quantization="e4m3_tensor")
    refuses(ValueError, "num_rows is needed", call, row_of)
    refuses(ValueError, r"row_of has shape \(3, 2\), expected \(4, top_k\)", call, row_of[:3], 8)
    refuses(TypeError, "row_of is int16", call, row_of.astype(jnp.int16), 8)
    refuses(ValueError, "rows keep their places", call, None, 8)
    refuses(ValueError, "rows goes with row_of=None", call, row_of, 8, rows=jnp.zeros(3, jnp.int32))
    refuses(NotImplementedError, "hopper: needs a Hopper GPU", call, row_of, 8, implementation="hopper")


@pytest.mark.parametrize("case", [*permute_cases(), *gather_cases()], ids=lambda case: case.name)
@pytest.mark.sample(11)
def test_lowers_for_cuda(case):
    assert case.launches() == 1


def test_config_error():
    for width, parts in ((2048, 1), (2176, 1), (2304, 1), (2560, 5), (4096, 2), (7168, 7), (14336, 7)):
        wide = PermuteDesc(4, width, 0, 4, "bfloat16", "e4m3_group", 4)
        assert (wide.parts, wide.num_items) == (parts, 4 * parts)
    assert dataclasses.replace(wide, num_named=None).num_items == 28
    many = dataclasses.replace(wide, num_tokens=4096, num_rows=4096)
    assert (many.parts, dataclasses.replace(many, num_named=None).parts) == (7, 1)
    assert dataclasses.replace(wide, num_named=None, top_k=2, num_rows=8).parts == 1
    assert dataclasses.replace(wide, quantization="none").parts == 1
    good = PermuteDesc(4, 512, 2, 8, "bfloat16", "e4m3_row")
    assert config_error(good, PermuteConfig(1)) is None
    assert "at least 1" in config_error(good, PermuteConfig(0))
    assert "each of 128 threads" in config_error(PermuteDesc(4, 96, 2, 8, "bfloat16", "none"), PermuteConfig(1))
    short = PermuteDesc(4, 2880, 0, 4, "bfloat16", "e4m3_group", 4)
    assert (config_error(short, PermuteConfig(1)), short.parts) == (None, 1)
    short = dataclasses.replace(short, width=2848)
    assert "groups of 128 take a multiple of 64" in config_error(short, PermuteConfig(1))
    assert "nvfp4 takes a multiple of 16" in config_error(
        PermuteDesc(4, 2888, 2, 8, "bfloat16", "nvfp4"), PermuteConfig(1)
    )
    for width, quantization in ((768, "e4m3_group"), (1040, "e4m3_row"), (2048, "int8_row"), (770, "e4m3_row")):
        desc = PermuteDesc(4, width, 2, 8, "bfloat16", quantization)
        assert "rows_at_once=4 of" in config_error(desc, PermuteConfig(1, 4)), desc
    assert config_error(PermuteDesc(4, 704, 0, 8, "float16", "int8_row"), PermuteConfig(1, 4)) is None
    assert "rows_at_once=2: 1 or 4" in config_error(good, PermuteConfig(1, 2))
    assert "x is int8" in config_error(PermuteDesc(4, 512, 2, 8, "int8", "none"), PermuteConfig(1))


GPU_SIZES = [
    (quantization, *size)
    for quantization in QUANTIZATIONS
    for size in ((1, 2048), (37, 2880), (600, 768), (16384, 640), (130, 7168))
]
GPU_SIZES += [
    (f"e4m3_group{kind}", *size)
    for kind in ("", "_ue8m0")
    for size in ((5, 128), (600, 256), (37, 384), (5, 64), (37, 192), (37, 704), (3, 8256))
]


@pytest.mark.gpu
@pytest.mark.parametrize(("quantization", "num_tokens", "width"), GPU_SIZES)
def test_gpu(quantization, num_tokens, width):
    num_rows = num_tokens * 8 + 5
    x, row_of = make(num_tokens, width, 8, num_rows)
    out, scale = call(x, row_of, num_rows, quantization, "hopper")
    # Division on the device is off by up to 2 ulp, which moves a code only where it is at a boundary.
    check(x, row_of, num_rows, quantization, out, scale, flips=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", [kind for kind in QUANTIZATIONS if kind not in ("none", *TAKES_SCALE)])
def test_gpu_in_place(quantization, dtype):
    x, _ = make(300, 1024, 1, 300, dtype)
    run = jax.jit(lambda x, n: quantize_and_permute(x, quantization=quantization, rows=n, implementation="hopper"))
    row_of = np.where(np.arange(300) < 257, np.arange(300), -1)[:, None]
    out = run(jnp.asarray(x), jnp.asarray(np.random.default_rng(0).permutation(row_of[:, 0]), jnp.int32))
    check(x, row_of, 300, quantization, out, None, flips=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [128, 704, 768, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", ["e4m3_row", "int8_row"])
def test_gpu_narrow_rows_have_the_bits_of_others(quantization, dtype, width):
    """Four rows at once against one: named ones in place and gathered ones, NaN, infinities and zeros among them."""
    x, row_of = make(1003, width, 3, 4000, dtype)
    x[5, 7], x[6, 0], x[7, width - 1], x[8, 3:5] = np.nan, np.inf, -np.inf, [np.inf, -np.inf]
    bits = np.random.default_rng(1).integers(0, 1 << 8 * x.itemsize, (64, width), np.uint64)
    x[16:80] = bits.astype(f"u{x.itemsize}").view(x.dtype)
    names = np.random.default_rng(2).permutation(np.where(row_of[:, 0] < 0, -1, np.arange(1003)))
    names[40:48] = -1
    named = jnp.asarray(names, jnp.int32)

    def run(x, row_of, rows, *, config):
        return quantize_and_permute(
            x, row_of, 4000 if rows is None else None, quantization=quantization, rows=rows, config=config,
            implementation="hopper",
        )  # fmt: skip

    for places, used in (((None, named), names[names >= 0]), ((jnp.asarray(row_of), None), row_of[row_of >= 0])):
        one, four = (
            jax.jit(functools.partial(run, config=PermuteConfig(37, rows)))(jnp.asarray(x), *places) for rows in (1, 4)
        )
        for a, b in zip(one, four, strict=True):
            a, b = (np.asarray(v)[used] for v in (a, b))
            np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


def check_named(rows, width, count, unnamed, quantization, flips=0.0):
    """``count`` names of rows in any order, each ``unnamed``-th of them none."""
    x, _ = make(rows, width, 1, rows)
    names = np.random.default_rng(0).permutation(rows)[:count].astype(np.int32)
    names[::unnamed] = -1
    row_of = np.full((rows, 1), -1)
    row_of[names[names >= 0], 0] = names[names >= 0]
    run = jax.jit(lambda x, n: quantize_and_permute(x, quantization=quantization, rows=n, implementation="hopper"))
    check(x, row_of, rows, quantization, run(jnp.asarray(x), jnp.asarray(names)), None, flips=flips)


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["e4m3_group", "e4m3_group_ue8m0"])
@pytest.mark.parametrize(("rows", "width", "parts"), [(3, 14336, 7), (300, 7168, 7), (40, 2048, 1), (40, 3584, 7)])
def test_gpu_wide_rows_in_parts(rows, width, parts, quantization):
    assert PermuteDesc(rows, width, 0, rows, "bfloat16", quantization, rows).parts == parts
    check_named(rows, width, rows, 3, quantization)
    x, _ = make(rows, width, 1, rows)
    run = jax.jit(lambda x: quantize_and_permute(x, quantization=quantization, implementation="hopper"))
    check(x, np.arange(rows)[:, None], rows, quantization, run(jnp.asarray(x)), None, flips=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["e4m3_row", "int8_row"])
def test_gpu_many_narrow_rows(quantization):
    """As many as 8192 tokens have, where four at a time are the choice."""
    desc = PermuteDesc(70000, 768, 0, 70000, "bfloat16", quantization, 65536)
    assert choose_config(desc, 132).rows_at_once == 4
    check_named(70000, 768, 65536, 9, quantization, flips=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem",
    [(1, 2048, 16, "bfloat16"), (37, 2880, 8, "float16"), (300, 7168, 64, "bfloat16"), (33, 200, 16, "float32")],
)
def test_gpu_columns_in_the_order_of_each_expert(problem):
    check_gathered("hopper", *problem)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scales_of_nvfp4_at_ties(dtype):
    """16-bit maxima make ``G * (amax * (1 / 6))`` fall between two e4m3 numbers exactly; one ulp decides."""
    x = np.random.default_rng(0).standard_normal((65, 1440)).astype(dtype)
    groups = x.astype(np.float32).reshape(65, 90, 16)
    amax = np.abs(groups).max(-1, keepdims=True)
    large = np.float32(2688) / amax.max(1, keepdims=True)
    scale = (large * (amax * np.float32(1 / 6))).astype("float8_e4m3fn").astype(np.float32)
    expected = decode_e2m1(encode_e2m1(jnp.asarray(groups * (large / scale)))) * scale
    found = call(x, np.arange(65, dtype=np.int32)[:, None], 65, "nvfp4_row", "reference")[0][0]
    np.testing.assert_array_equal(np.asarray(found).astype(np.float32), np.asarray(expected).reshape(x.shape))
