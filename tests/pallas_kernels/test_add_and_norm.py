"""add_and_norm: the reference against NumPy float64, refusals, lowering for CUDA, and the Hopper kernel on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.add_and_norm import (
    FEW_TOKENS,
    AddNormConfig,
    AddNormDesc,
    add_and_norm,
    choose_config,
    config_error,
    most_routed,
)
from pallas_kernels.combine import RoutedRows, combine
from pallas_kernels.quantize_and_permute import quantize_and_permute
from tests.support.kernels.layer_cases import add_and_norm_cases
from tests.support.refusals import refuses

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
EPS = 1e-5


def make(rows, width, dtype, has_addend):
    rng = np.random.default_rng(0)
    x, addend = (rng.standard_normal((rows, width)).astype(DTYPES[dtype]) for _ in range(2))
    weight = rng.standard_normal(width).astype(DTYPES[dtype])
    wide = x.astype(np.float64) + (addend.astype(np.float64) if has_addend else 0)
    normal = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * weight.astype(np.float64)
    return (x, weight, addend if has_addend else None), wide.astype(DTYPES[dtype]), normal


def in_parts(arguments, parts):
    """The same call, its addend in this many float32 partial sums of three rows more, which hold NaN."""
    x, weight, addend = arguments
    rows, width = x.shape
    split = np.full((parts, rows + 3, width), np.nan, np.float32)
    split[1:, :rows] = np.random.default_rng(1).integers(-8, 9, (parts - 1, rows, width)) / 4
    split[0, :rows] = addend.astype(np.float32) - split[1:, :rows].sum(0)
    return (x, weight, split), split[:, :rows].astype(np.float64).sum(0)


def run(arguments, implementation, **options):
    call = jax.jit(functools.partial(add_and_norm, eps=EPS, implementation=implementation, **options))
    return [np.asarray(a) for a in call(*jax.tree.map(jnp.asarray, arguments))]


def check(implementation, rows, width, dtype):
    for has_addend in (True, False):
        arguments, total, normal = make(rows, width, dtype, has_addend)
        found = run(arguments, implementation)
        np.testing.assert_array_equal(found[0], total)
        step = float(ml_dtypes.finfo(DTYPES[dtype]).eps)
        np.testing.assert_allclose(found[1].astype(np.float64), normal, rtol=0.52 * step, atol=1e-6)
        np.testing.assert_array_equal(found[1], run(arguments, implementation)[1])


def check_parts(implementation, rows, width, dtype):
    """The sum is rounded once, behind all additions."""
    (arguments, _, _), step = make(rows, width, dtype, True), float(ml_dtypes.finfo(DTYPES[dtype]).eps)
    arguments, added = in_parts(arguments, 4)
    wide = arguments[0].astype(np.float64) + added
    normal = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * arguments[1].astype(np.float64)
    found = run(arguments, implementation)
    np.testing.assert_allclose(found[0].astype(np.float64), wide, rtol=0.52 * step, atol=1e-6)
    np.testing.assert_allclose(found[1].astype(np.float64), normal, rtol=0.52 * step, atol=1e-5)
    one = run((*arguments[:2], arguments[2].sum(0, keepdims=True)), implementation)  # exact: so are the sums
    for parts, whole in zip(found, one, strict=True):
        np.testing.assert_array_equal(parts, whole)
    bias = np.random.default_rng(2).standard_normal(width).astype(DTYPES[dtype])
    wide = wide + bias.astype(np.float64)
    normal = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * arguments[1].astype(np.float64)
    found = run(arguments, implementation, bias=jnp.asarray(bias))
    for one, exact in zip(found, (wide, normal), strict=True):
        np.testing.assert_allclose(one.astype(np.float64), exact, rtol=0.52 * step, atol=1e-5)


def check_router(implementation, rows, width, experts, dtype):
    """Sum and norm have the bits of a call without a router. Logits are of the rounded norm: exact but for the order of
    a float32 sum, which a norm in float32, or logits in 16 bits, would miss by far."""
    arguments, *_ = make(rows, width, dtype, True)
    rng, atol = np.random.default_rng(3), 1e-5
    router = rng.standard_normal((experts, width)).astype(DTYPES[dtype]) * DTYPES[dtype](width**-0.5)
    router_bias = rng.standard_normal(experts).astype(DTYPES[dtype])
    bias = rng.standard_normal(width).astype(DTYPES[dtype])
    in_four, _ = in_parts(arguments, 4)
    cases = [(arguments, {}), ((*arguments[:2], None), {}), (in_four, {}), (in_four, dict(bias=jnp.asarray(bias)))]
    for operands, options in cases:
        apart = run(operands, implementation, **options)
        for own in (None, router_bias):
            of_router = dict(router=jnp.asarray(router), router_bias=None if own is None else jnp.asarray(own))
            total, normal, logits = run(operands, implementation, **options, **of_router)
            np.testing.assert_array_equal(total, apart[0])
            np.testing.assert_array_equal(normal, apart[1])
            exact = normal.astype(np.float64) @ router.astype(np.float64).T
            exact += 0 if own is None else own.astype(np.float64)
            assert logits.dtype == np.float32
            np.testing.assert_allclose(logits, exact, rtol=1e-6, atol=atol)


def of_experts(rows, width, dtype, top_k=3, rows_dtype=None, shared_dtype=None):
    """Rows of experts in any order, those that no slot names NaN; a token without any expert; and the float64 sum."""
    rng, held = np.random.default_rng(4), rows * top_k + 2
    row_of = (rng.permutation(held - 1)[: rows * top_k] + 1).reshape(rows, top_k).astype(np.int32)
    row_of[0, 1], row_of[rows // 2 if rows > 1 else 0, 2:] = -1, -1
    data = np.full((held, width), np.nan)
    named = row_of[row_of >= 0]
    data[named] = rng.standard_normal((len(named), width))
    data = data.astype(rows_dtype or DTYPES[dtype])
    weights = rng.standard_normal((rows, top_k)).astype(np.float32)
    shared = None if shared_dtype is None else rng.standard_normal((rows, width)).astype(shared_dtype)
    wide = np.zeros((rows, width)) if shared is None else shared.astype(np.float64)
    for t, j in zip(*np.nonzero(row_of >= 0), strict=True):
        wide[t] += np.float64(weights[t, j]) * data[row_of[t, j]].astype(np.float64)
    return RoutedRows(data, row_of, weights, shared), wide


def check_rows_of_experts(implementation, rows, width, dtype):
    """Their weighted sum is added and rounded once, with x: the bits of ``combine``'s float32 sum as one part."""
    (x, weight, _), step = make(rows, width, dtype, False)[0], float(ml_dtypes.finfo(DTYPES[dtype]).eps)
    for rows_dtype, shared_dtype in ((None, None), (None, np.float32), (np.float32, DTYPES[dtype])):
        routed, added = of_experts(rows, width, dtype, 3, rows_dtype, shared_dtype)
        wide = x.astype(np.float64) + added
        normal = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * weight.astype(np.float64)
        total, found = run((x, weight, routed), implementation)
        np.testing.assert_allclose(total.astype(np.float64), wide, rtol=0.52 * step, atol=1e-6)
        np.testing.assert_allclose(found.astype(np.float64), normal, rtol=0.52 * step, atol=1e-5)
        added = jax.tree.map(jnp.asarray, routed).whole(jnp.float32, implementation)
        for one, other in zip((total, found), run((x, weight, added[None]), implementation), strict=True):
            np.testing.assert_array_equal(one, other)


def check_quantized_rows_of_experts(implementation, kind, rows, width):
    (x, weight, _), *_ = make(rows, width, "bfloat16", False)
    routed, _ = of_experts(rows, width, "bfloat16")
    added = combine(*map(jnp.asarray, (routed.rows, routed.row_of, routed.weights)), out_dtype=jnp.float32)
    options = dict(quantization=kind, scale_rows=rows)
    found, apart = (run((x, weight, a), implementation, **options) for a in (routed, added[None]))
    for one, other in zip(found, apart, strict=True):
        np.testing.assert_array_equal(one, other)


KINDS = {"e4m3_row": (448, 2**-4), "e4m3_group": (448, 2**-4), "e4m3_group_ue8m0": (448, 2**-4), "int8_row": (127, 0)}


def check_quantized(implementation, kind, rows, width):
    """Codes times scales are the norm to within half a step of the codes, whose largest fills its range."""
    arguments, total, normal = make(rows, width, "bfloat16", True)
    most, step = KINDS[kind]
    group = 128 if "group" in kind else width
    options = dict(quantization=kind, scale_rows=rows + 5)
    found_total, codes, scales = run(arguments, implementation, **options)
    np.testing.assert_array_equal(found_total, total)
    assert scales.shape == ((width // group, rows + 5) if group < width else (rows + 5,))
    scales = scales.reshape(-1, rows + 5)[:, :rows].T.repeat(group, axis=1).astype(np.float64)
    codes = codes.astype(np.float64)
    largest = np.abs(normal).reshape(rows, -1, group).max(-1).repeat(group, axis=1)
    ratio = scales * most / largest
    assert ratio.min() > 0.99 and ratio.max() < (2.01 if "ue8m0" in kind else 1.01)
    half = np.maximum(np.abs(normal) * step, scales * (0.5 if kind == "int8_row" else 2**-10))
    assert (np.abs(codes * scales - normal) <= 1.01 * half + np.abs(normal) * 2**-8).all()
    return codes, scales


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_reference(kind):
    check_quantized("reference", kind, 5, 512)
    check_quantized_rows_of_experts("reference", kind, 4, 512)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "width"), [(1, 2048), (64, 4096), (300, 7168)])
def test_quantized_gpu(kind, rows, width):
    codes, scales = check_quantized("hopper", kind, rows, width)
    if "group" not in kind:  # with groups squares are added in another order
        arguments, *_ = make(rows, width, "bfloat16", True)
        _, normal = run(arguments, "hopper")
        apart = quantize_and_permute(jnp.asarray(normal), quantization=kind, implementation="hopper")
        np.testing.assert_array_equal(codes, np.asarray(apart[0]).astype(np.float64))
        np.testing.assert_array_equal(scales[:, 0], apart[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference(dtype):
    check("reference", 5, 96, dtype)
    check_parts("reference", 5, 96, dtype)
    check_router("reference", 5, 96, 7, dtype)
    check_rows_of_experts("reference", 5, 96, dtype)


def test_wrong_calls():
    x, weight = jnp.zeros((4, 128), jnp.bfloat16), jnp.zeros(128, jnp.bfloat16)
    refuses(ValueError, r"expected .T, H., .H,., .T, H.", add_and_norm, x, weight[:64], eps=EPS)
    refuses(ValueError, r"addend .3, 128.", add_and_norm, x, weight, x[:3], eps=EPS)
    refuses(ValueError, r"addend .2, 3, 128.; .* R >= T", add_and_norm, x, weight, jnp.zeros((2, 3, 128)), eps=EPS)
    refuses(ValueError, "'nvfp4' is not one of", add_and_norm, x, weight, eps=EPS, quantization="nvfp4")
    refuses(ValueError, "at least T=4", add_and_norm, x, weight, eps=EPS, quantization="e4m3_row", scale_rows=3)
    words = r"bias is bfloat16\(128,\), expected a float dtype and \(128,\), with an addend"
    refuses(ValueError, words, add_and_norm, x, weight, eps=EPS, bias=weight)
    refuses(ValueError, r"bias is int32\(128,\)", add_and_norm, x, weight, x, eps=EPS, bias=jnp.zeros(128, jnp.int32))
    router = jnp.zeros((6, 128), jnp.bfloat16)
    words = r"router has shape \(6, 64\), expected \(E, 128\)"
    refuses(ValueError, words, add_and_norm, x, weight, eps=EPS, router=router[:, :64])
    refuses(ValueError, r"router has shape \(0, 128\)", add_and_norm, x, weight, eps=EPS, router=router[:0])
    refuses(ValueError, r"router has shape \(128,\)", add_and_norm, x, weight, eps=EPS, router=router[0])
    words = "router is float16, expected bfloat16 as x"
    refuses(TypeError, words, add_and_norm, x, weight, eps=EPS, router=router.astype(jnp.float16))
    refuses(ValueError, "without a router; pass both", add_and_norm, x, weight, eps=EPS, router_bias=weight)
    words = r"router_bias is bfloat16\(128,\), expected a float dtype and \(6,\)"
    refuses(ValueError, words, add_and_norm, x, weight, eps=EPS, router=router, router_bias=weight)
    words, counts = r"router_bias is int32\(6,\)", jnp.zeros(6, jnp.int32)
    refuses(ValueError, words, add_and_norm, x, weight, eps=EPS, router=router, router_bias=counts)
    routed = RoutedRows(x, jnp.zeros((4, 2), jnp.int32), jnp.zeros((4, 2)))
    other = dataclasses.replace(routed, weights=jnp.zeros((4, 1)))
    refuses(ValueError, r"rows \(4, 128\), row_of \(4, 2\), weights \(4, 1\)", add_and_norm, x, weight, other, eps=EPS)
    words = r"rows of experts of \(T, H\) \(4, 128\), expected \(3, 128\) as x"
    refuses(ValueError, words, add_and_norm, x[:3], weight, routed, eps=EPS)
    other = dataclasses.replace(routed, row_of=routed.row_of[:, :0], weights=routed.weights[:, :0])
    refuses(ValueError, "with top_k > 0", add_and_norm, x, weight, other, eps=EPS)
    other = dataclasses.replace(routed, rows=x.astype(jnp.float16))
    refuses(TypeError, "rows of experts in float16, expected bfloat16", add_and_norm, x, weight, other, eps=EPS)
    words = r"expected a float dtype and \(128,\), with an addend"
    refuses(ValueError, words, add_and_norm, x, weight, routed, eps=EPS, bias=weight)
    wide = jnp.zeros((4, 128), jnp.float32)
    refuses(TypeError, "or partial sums in float32", add_and_norm, x, weight, wide, eps=EPS)
    refuses(TypeError, "bfloat16, float32", add_and_norm, x, weight.astype(jnp.float32), eps=EPS)
    refuses(NotImplementedError, "needs a Hopper GPU", add_and_norm, x, weight, eps=EPS, implementation="hopper")


def test_config_error():
    assert config_error(AddNormDesc(4, 2880, "bfloat16", True, EPS), AddNormConfig(1)) is None
    assert "from 128 to" in config_error(AddNormDesc(4, 96, "bfloat16", True, EPS), AddNormConfig(1))
    assert "from 128 to" in config_error(AddNormDesc(4, 16384, "bfloat16", True, EPS), AddNormConfig(1))
    of_groups = AddNormDesc(4, 640, "bfloat16", 0, EPS, quantization="e4m3_group")
    assert "a multiple of 512" in config_error(of_groups, AddNormConfig(1))
    of_parts = AddNormDesc(4, 128, "bfloat16", 2, EPS, "float16")
    assert "parts of float16" in config_error(of_parts, AddNormConfig(1))
    of_experts = functools.partial(AddNormDesc, width=128, dtype="bfloat16", num_parts=0, eps=EPS, top_k=2)
    assert config_error(of_experts(64), AddNormConfig(1)) is None
    assert "2 rows of experts, H=128, of T=65 tokens: up to 64" in config_error(of_experts(65), AddNormConfig(1))
    of_many = dict(width=2048, top_k=8)
    assert config_error(of_experts(64, **of_many), AddNormConfig(1)) is None
    assert config_error(of_experts(FEW_TOKENS, **of_many | dict(width=7168)), AddNormConfig(1)) is None
    assert "of T=5 tokens: up to 4" in config_error(of_experts(5, **of_many | dict(width=7168)), AddNormConfig(1))
    assert [most_routed(8, 2048), most_routed(8, 2056), most_routed(2, 8192)] == [64, 4, 64]
    assert "shared: int8" in config_error(of_experts(1, shared_dtype="int8"), AddNormConfig(1))
    assert "float32" in config_error(AddNormDesc(4, 128, "float32", True, EPS), AddNormConfig(1))
    assert "at least 1" in config_error(AddNormDesc(4, 128, "float16", True, EPS), AddNormConfig(0))


def test_config_of_a_router():
    """One CTA an SM, as far as it holds the weights of its experts; each row has CTAs for all of them."""
    of_router = functools.partial(AddNormDesc, dtype="bfloat16", num_parts=1, eps=EPS)
    for tokens, width, experts, per_cta in (
        *((1, 2048, 128, 1), (1, 7168, 256, 2), (4, 2048, 128, 4), (1, 2048, 1, 1), (3, 2880, 32, 1)),
        *((4, 2048, 512, 8), (4, 8192, 512, 2), (4, 2048, 3, 1)),
    ):
        desc = of_router(tokens, width, num_experts=experts)
        config = choose_config(desc, 132)
        assert config == AddNormConfig(tokens * -(-experts // per_cta), per_cta)
        assert config_error(desc, config) is None
    assert FEW_TOKENS == 4
    desc = of_router(5, 2048, num_experts=128)
    assert "a router of T=5 tokens: up to 4" in config_error(desc, choose_config(desc, 132))
    desc = of_router(1, 2048, num_experts=128, quantization="e4m3_row")
    assert "quantized (e4m3_row)" in config_error(desc, choose_config(desc, 132))
    for experts in (0, 9):
        words = f"experts={experts} of a CTA: from 1 to 8"
        assert words in config_error(of_router(1, 2048, num_experts=128), AddNormConfig(1, experts))
    assert "from 1 to 3" in config_error(of_router(1, 2048, num_experts=3), AddNormConfig(1, 4))


@pytest.mark.parametrize("case", add_and_norm_cases(), ids=lambda case: case.name)
@pytest.mark.sample(7)
def test_lowers_for_cuda(case):
    assert case.launches() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 2048), (64, 2880), (3000, 4096), (7, 7168), (5, 200)])
def test_gpu(rows, width, dtype):
    check("hopper", rows, width, dtype)
    check_parts("hopper", rows, width, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "experts"),
    [(1, 2048, 128), (4, 2048, 128), (1, 7168, 256), (3, 2880, 32), (4, 8192, 513), (2, 200, 3), (1, 4096, 1)],
)
def test_router_gpu(rows, width, experts, dtype):
    check_router("hopper", rows, width, experts, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 2048), (4, 2880), (3, 7168), (2, 200), (4, 8192), (64, 2048)])
def test_rows_of_experts_gpu(rows, width, dtype):
    check_rows_of_experts("hopper", rows, width, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "width"), [(1, 2048), (4, 7168), (64, 2048)])
def test_quantized_rows_of_experts_gpu(kind, rows, width):
    check_quantized_rows_of_experts("hopper", kind, rows, width)


@pytest.mark.gpu
def test_gpu_nan_stays_in_its_row():
    arguments, *_ = make(3, 2048, "bfloat16", True)
    arguments[0][1, 7] = np.nan
    for found in run(arguments, "hopper"):
        assert np.isfinite(found[[0, 2]].astype(np.float32)).all()
    assert np.isnan(found[1].astype(np.float32)).all()
