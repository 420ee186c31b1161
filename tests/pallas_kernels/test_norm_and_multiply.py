"""norm_and_multiply: the reference against NumPy float64, refusals, lowering for CUDA, and the kernel on a GPU."""

import dataclasses
import functools

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
# Kind of rows, dtype of the layer, scales of weights.
KINDS = {
    "bf16": ("none", "bfloat16", "none"),
    "f16": ("none", "float16", "none"),
    "fp8 row": ("e4m3_row", "bfloat16", "channel"),
    "fp8 tensor": ("e4m3_row", "float16", "tensor"),
    "int8 row": ("int8_row", "bfloat16", "channel"),
    "fp8 block": ("e4m3_group", "bfloat16", "block"),
    "fp8 block ue8m0": ("e4m3_group_ue8m0", "bfloat16", "block"),
}
ADDENDS = ["nothing", "one", "parts and bias"]


def make(name, width, widths, addend, *, has_bias=False):
    """(arguments, options) of a call; widths: of weights side by side, or a number for one."""
    kind, dtype, scale = KINDS[name]
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    def scales(n):
        shape = {"tensor": (1,), "channel": (1, n), "block": (1, -(-n // 128), -(-width // 128))}[scale]
        return jnp.asarray(rng.uniform(0.5, 2, shape) * width**-0.5 / (64 if kind == "int8_row" else 1), jnp.float32)

    def weight(n):
        if kind == "none":
            return normal(1, n, width) * jnp.asarray(width**-0.5, dtype)
        if kind == "int8_row":
            return jnp.asarray(rng.integers(-127, 128, (1, n, width)), jnp.int8)
        return normal(1, n, width, dtype="float32").astype(jnp.float8_e4m3fn)

    options = dict(eps=EPS, quantization=kind, out_dtype=dtype, bias=None, w_scale=None, w_bias=None)
    added = None
    if addend == "one":
        added = normal(1, width)
    if addend == "parts and bias":
        added = normal(3, 4, width, dtype="float32").at[:, 1:].set(jnp.nan)
        options["bias"] = normal(width)
    several = widths if isinstance(widths, tuple) else (widths,)
    w = tuple(weight(n) for n in several)
    if scale != "none":
        options["w_scale"] = tuple(scales(n) for n in several)
    if has_bias:
        options["w_bias"] = tuple(normal(1, n) for n in several)
    if not isinstance(widths, tuple):
        w = w[0]
        options |= {leaf: options[leaf][0] for leaf in ("w_scale", "w_bias") if options[leaf] is not None}
    return (normal(1, width), normal(width), added, w), options


def compiled(call, function, **more):
    """``function`` of calls like this one."""
    _, options = call
    static = {name: options[name] for name in ("eps", "quantization", "out_dtype")}
    jitted = jax.jit(lambda arguments, given: function(*arguments, **given, **static, **more))

    def run(call):
        arguments, options = call
        return jitted(arguments, {name: options[name] for name in ("bias", "w_scale", "w_bias")})

    return run


def run(call, implementation, **more):
    return compiled(call, norm_and_multiply, implementation=implementation, **more)(call)


def side_by_side(leaves):
    return leaves if leaves is None or isinstance(leaves, tuple) else (leaves,)


def apart(x, weight, addend, w, *, eps, bias, w_scale, w_bias, quantization, out_dtype, config, implementation):
    """The same in two launches, with the product's own."""
    given = dict(eps=eps, bias=bias, quantization=quantization, implementation=implementation)
    total, rows, *scales = add_and_norm(x, weight, addend, **given)
    leaves = dict(w_scale=w_scale, bias=w_bias, x_scale=scales[0] if scales else None, out_dtype=out_dtype)
    tile = dict(tile_expert=jnp.zeros(1, jnp.int32), num_tiles=jnp.ones(1, jnp.int32))
    return total, grouped_gemm(rows, w, **tile, **leaves, config=config, implementation=implementation)


def exact(call):
    """Sum and product in float64, of a norm that is not rounded."""
    (x, weight, addend, w), options = call
    as_float = lambda a: np.asarray(a, np.float64)  # noqa: E731
    wide = as_float(x)
    if addend is not None:
        wide = wide + (as_float(addend) if addend.ndim == 2 else as_float(addend)[:, :1].sum(0))
    wide = wide + (0 if options["bias"] is None else as_float(options["bias"]))
    normal = wide / np.sqrt((wide**2).mean() + EPS) * as_float(weight)
    products = []
    for i, one in enumerate(side_by_side(w)):
        n, k = one.shape[1:]
        factor = np.ones((n, k))
        if options["w_scale"] is not None:
            factor = as_float(side_by_side(options["w_scale"])[i])[0]
            if factor.ndim == 2:
                factor = factor.repeat(128, 0).repeat(128, 1)[:n, :k]
            factor = factor[:, None] if factor.ndim == 1 else factor
        y = normal @ (as_float(one)[0] * factor).T
        biases = side_by_side(options["w_bias"])
        products.append(y if biases is None else y + as_float(biases[i]))
    return wide, np.concatenate(products, axis=1)


def check(call, implementation):
    """Close to float64 in every column, by the step of the rows' codes."""
    total, product = run(call, implementation)
    (x, *_), options = call
    wide, y = exact(call)
    np.testing.assert_allclose(np.asarray(total, np.float64), wide, rtol=0.52 * float(jnp.finfo(x.dtype).eps))
    assert total.dtype == x.dtype and product.dtype == options["out_dtype"] and product.shape == y.shape
    error = {"none": 0.02, "int8_row": 0.05}.get(options["quantization"], 0.3)  # of values of about 1
    assert np.abs(np.asarray(product, np.float64) - y).max() < error * max(1, np.abs(y).max() / 4)


@pytest.mark.parametrize("addend", ADDENDS)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.sample(10)
def test_reference(name, addend):
    for widths, has_bias in (((256, 128), True), (192, False)):
        call = make(name, 512, widths, addend, has_bias=has_bias)
        check(call, "reference")
        both = (compiled(call, f, config=None, implementation="reference")(call) for f in (norm_and_multiply, apart))
        for one, other in zip(*both, strict=True):
            np.testing.assert_array_equal(one, other)


def test_wrong_calls():
    (x, weight, addend, w), options = make("fp8 block", 512, (256, 128), "one")
    call = functools.partial(norm_and_multiply, **options)
    refuses(ValueError, r"\(2, 512\), expected \(1, H\)", call, jnp.tile(x, (2, 1)), weight, addend, w)
    narrow = tuple(one[..., :256] for one in w)
    refuses(ValueError, "x has K=512 and w has K=256", call, x, weight, addend, narrow)
    plain = functools.partial(norm_and_multiply, eps=EPS)
    refuses(TypeError, "x is bfloat16 and w is float8_e4m3fn", plain, x, weight, addend, w)
    call_of = functools.partial(plain, quantization="e4m3_tensor")
    refuses(ValueError, "quantization='e4m3_tensor' is not one of", call_of, x, weight, addend, w)
    refuses(ValueError, r"x \(1, 512\), weight \(512,\), addend \(1, 256\)", call, x, weight, addend[:, :256], w)


def test_config_error():
    (x, weight, addend, w), options = make("bf16", 2048, (4096, 512, 512), "one")
    desc, *_ = describe(x, weight, addend, w, **options)
    assert choose_config(desc, 132) == VectorConfig(2)
    assert config_error(desc, VectorConfig(2)) is None
    assert "channels=3" in config_error(desc, VectorConfig(3))
    more = dataclasses.replace(desc, norm=dataclasses.replace(desc.norm, num_tokens=2))
    assert "T=2 tokens: one" in config_error(more, VectorConfig(2))
    wide = dataclasses.replace(desc, norm=dataclasses.replace(desc.norm, width=16384))
    assert "H=16384" in config_error(wide, VectorConfig(2))
    narrow = dataclasses.replace(desc, gemm=dataclasses.replace(desc.gemm, widths=(4096, 520, 520), n=5136))
    assert "N=4096, 520, 520" in config_error(narrow, VectorConfig(4))


@pytest.mark.parametrize("case", norm_and_multiply_cases(), ids=lambda case: case.name)
@pytest.mark.sample(4)
def test_lowers_for_cuda(case):
    assert case.launches() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("addend", ADDENDS)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("width", [2048, 2880, 7168])
def test_gpu(name, width, addend):
    """Right, and the bits of two launches, with every number of columns a warp; and again."""
    if "block" in name and width % 512:
        pytest.skip("groups take whole rounds of four warps")
    for widths, has_bias in (((4096, 512, 512), False), (704, True)):
        call = make(name, width, widths, addend, has_bias=has_bias)
        check(call, "hopper")
        for channels in (1, 4):
            options = dict(config=VectorConfig(channels), implementation="hopper")
            fused = compiled(call, norm_and_multiply, **options)
            for found in zip(fused(call), fused(call), compiled(call, apart, **options)(call), strict=True):
                np.testing.assert_array_equal(found[0], found[1])
                np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_gpu_nan_spreads(name):
    """NaN in the row reaches every column; it is not rounded away with the codes."""
    (x, *others), options = make(name, 2048, (4096, 512), "one")
    _, product = run(((x.at[0, 7].set(jnp.nan), *others), options), "hopper")
    if options["quantization"] == "int8_row":  # whose codes have none: the scale has
        assert not jnp.isfinite(product.astype(jnp.float32)).any()
        return
    assert jnp.isnan(product.astype(jnp.float32)).all()
