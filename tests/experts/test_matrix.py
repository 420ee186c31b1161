"""One quantized matrix outside the experts: every scheme by every way that runs here, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.experts._backend import MatrixProblem
from moe_jax.experts._choice import BACKENDS
from moe_jax.experts._matrix import multiply
from moe_jax.experts.hopper import _matrix as hopper
from moe_jax.experts.hopper._matrix import multiply as run_kernels
from moe_jax.experts.hopper._matrix import refusal as hopper_refusal
from moe_jax.experts.hopper._matrix import to_kernel_layout, to_plain_layout
from moe_jax.quantization import SCHEMES, QuantizedMatrix, Scheme, Strategy, method_for, scheme_per_token
from pallas_kernels.quantize_and_permute import quantize_and_permute
from tests.support.cases.hopper_layers import on_hopper
from tests.support.oracles.experts import matrix_numpy
from tests.support.oracles.grids import grid_of
from tests.support.oracles.tolerances import assert_rows_close, tolerance

T, K, N = 11, 256, 136  # a ragged last block of rows
MORE = ("w4a16_g32_actorder", "w4a8_int8_asym", "w3a16_g32_asym", "w4a16_g32_unpacked")
NAMES = [name for name in (*SCHEMES, *MORE) if name != "bf16"]


def matrix_of(name, rng, n=N, k=K):
    """A random matrix as a checkpoint of the scheme would have it, static scales and orders of columns included."""
    scheme = scheme_per_token(Scheme.parse(name))
    fmt = scheme.weight_format
    w = rng.standard_normal((n, k)).astype(np.float32) * np.exp2(rng.integers(-2, 3, (n, 1)))
    method, leaves = method_for(scheme), {}
    for leaf in method.matrix_specs(n, k):
        if "input" in leaf:
            leaves[leaf] = np.float32(300.0 if "global" in leaf else 0.011)
        elif leaf == "weight_g_idx":
            leaves[leaf] = rng.permutation(np.arange(k, dtype=np.int32) // fmt.group_size)
    plain = Scheme.parse(name.replace("_actorder", "")).weight_format
    made = jax.jit(method_for(Scheme("", plain)).quantize_stack, static_argnums=1)(w[None], jnp.float32)
    leaves |= {leaf: np.asarray(value[0]) for leaf, value in made.items()}
    return QuantizedMatrix(jax.tree.map(jnp.asarray, method.process_matrix(leaves, n, k)), scheme)


def expected_product(x, matrix, bias):
    rows, fmt = np.asarray(x).astype(np.float64), matrix.scheme.activations
    if fmt is not None:
        stored = matrix.tensor.input_scale
        rows = grid_of(rows, fmt, None if stored is None else float(stored)).values(rows)
    return rows @ matrix_numpy(matrix.tensor, 0).T + np.asarray(bias).astype(np.float64)


def assert_close(y, x, matrix, bias, *, is_rounded=False):
    """is_rounded: operands hold values that are rounded to bfloat16, element times group scale."""
    fmt = matrix.scheme.activations
    # No value of these lies beside a border of e2m1, whose steps are too wide for a tolerance.
    is_coarse = fmt is not None and fmt.element == "e2m1"
    dtype = "bfloat16" if is_rounded else y.dtype
    assert_rows_close(y, expected_product(x, matrix, bias), tolerance("bf16" if is_coarse else matrix.scheme, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.sample(3)
def test_product(implementation, name, dtype):
    rng = np.random.default_rng(0)
    matrix, bias = matrix_of(name, rng), jnp.asarray(rng.standard_normal(N), dtype)
    x = jnp.asarray(rng.standard_normal((1, T, K)) * np.exp2(rng.integers(-3, 4, (1, T, 1))), dtype)
    product = functools.partial(multiply, out_dtype=x.dtype, implementation=(implementation,))
    y = jax.jit(product)(x, matrix, bias)
    assert y.shape == (1, T, N) and y.dtype == x.dtype
    assert_close(y[0], x[0], matrix, bias)


KERNEL_TOKENS = (1, 8, 11, 64, 100, 300)


@pytest.mark.parametrize("num_tokens", KERNEL_TOKENS)
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sample(11)  # each scheme, and each dtype beside each number of rows
def test_product_of_the_kernels(name, out_dtype, num_tokens):
    """What surrounds the Hopper kernels, with their references inside: tiles, rows in use, layouts and scales."""
    rng = np.random.default_rng(4)
    plain = matrix_of(name, rng)
    matrix = jax.jit(functools.partial(to_kernel_layout, dtype=jnp.bfloat16))(plain)
    assert hopper_refusal(matrix, jnp.bfloat16) is None
    jax.tree.map(np.testing.assert_array_equal, jax.jit(to_plain_layout)(matrix), plain)
    x = jnp.asarray(rng.standard_normal((num_tokens, K)), jnp.bfloat16)
    bias = jnp.asarray(rng.standard_normal(N), jnp.bfloat16)
    y = jax.jit(functools.partial(run_kernels, out_dtype=jnp.dtype(out_dtype), kernels="reference"))(x, matrix, bias)
    assert y.shape[0] >= num_tokens and y.shape[1] == N and y.dtype == out_dtype
    assert_close(y[:num_tokens], x, plain, bias, is_rounded=True)


@pytest.mark.parametrize("num_tokens", [2, 11, 64])
@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel", "fp8_tensor", "int8_w8a8"])
@pytest.mark.sample(4)
def test_products_in_parts_of_the_kernels(name, num_tokens):
    """Each part of K has the product of its own columns; rows that were quantized before give the same bits."""
    rng, parts, k = np.random.default_rng(5), 4, 2048
    matrix = matrix_of(name, rng, k=k)
    assert hopper.choose_parts(matrix, num_tokens) == parts
    x = jnp.asarray(rng.standard_normal((num_tokens, k)), jnp.bfloat16)
    run = functools.partial(hopper.multiply_in_parts, parts=parts, kernels="reference")
    y = jax.jit(run)(x, matrix).reshape(parts, -1, N)
    assert y.dtype == jnp.float32 and y.shape[1] >= num_tokens
    rows, fmt = np.asarray(x).astype(np.float64), matrix.scheme.activations
    rows = grid_of(rows, fmt, None).values(rows).reshape(num_tokens, parts, -1)
    weights = matrix_numpy(matrix.tensor, 0).reshape(N, parts, -1)
    for part, found in enumerate(y):
        assert_rows_close(found[:num_tokens], rows[:, part] @ weights[:, part].T, tolerance(matrix.scheme, "float32"))
    kind, room = hopper.rows_of_tiles(matrix, num_tokens, jnp.bfloat16, parts)
    codes, scales = quantize_and_permute(x, quantization=kind, scale_rows=room, implementation="reference")
    options = dict(parts=parts, kernels="reference")
    same = hopper.multiply_rows(codes, scales, num_tokens, matrix, None, jnp.float32, **options)
    np.testing.assert_array_equal(same.reshape(y.shape)[:, :num_tokens], y[:, :num_tokens])


def test_which_products_come_in_parts():
    """Few rows of plain weights whose column tiles are at most half as many as SMs, in parts 512 deep or more."""

    def parts_of(n, k, num_tokens=64, name="fp8_block"):
        scheme = Scheme.parse(name)
        matrix = QuantizedMatrix(method_for(scheme).abstract_matrix(n, k), scheme)
        held = jax.eval_shape(functools.partial(to_kernel_layout, dtype=jnp.bfloat16), matrix)
        return hopper.choose_parts(held, num_tokens)

    assert [parts_of(2048, 4096, tokens) for tokens in (1, 2, 64, 65)] == [1, 4, 4, 1]
    assert [parts_of(*shape) for shape in ((4224, 4096), (4288, 4096), (2048, 1024), (2112, 7168))] == [2, 1, 2, 2]
    assert parts_of(2048, 2560) == 1 and parts_of(2048, 4096, name="w4a16_g128") == 1


@pytest.mark.parametrize("num_tokens", [1, 300])
@pytest.mark.parametrize("name", ["fp8_block", "w4a16_g128", "nvfp4", "int8_w8a8"])
@pytest.mark.sample(3)
def test_kernels_take_it_on_hopper(name, num_tokens):
    """One launch quantizes where rows are quantized, one multiplies, and no row is gathered."""
    scheme = Scheme.parse(name)
    plain = QuantizedMatrix(method_for(scheme).abstract_matrix(512, K), scheme)
    matrix = jax.eval_shape(functools.partial(to_kernel_layout, dtype=jnp.bfloat16), plain)
    hopper, x = BACKENDS["hopper"], jax.ShapeDtypeStruct((num_tokens, K), jnp.bfloat16)
    with on_hopper():
        problem = MatrixProblem(matrix, num_tokens, x.dtype, x.dtype, has_bias=False, platform="gpu")
        assert hopper.matrix_refusal(problem) is None
        call = jax.jit(lambda x, matrix: hopper.multiply(x, matrix, None, x.dtype))
        text = call.trace(x, matrix).lower(lowering_platforms=("cuda",)).as_text()
    launches = text.count("stablehlo.custom_call @mosaic_gpu")
    assert launches == (1 if scheme.activations is None else 2) and "stablehlo.gather" not in text


def test_rows_do_not_see_each_other():
    """A row is the same beside padding of any size: what is dynamic per tensor in a file is so per token."""
    assert Scheme.parse("fp8_tensor").activation_format.strategy is Strategy.TENSOR
    rng = np.random.default_rng(1)
    matrix = matrix_of("fp8_tensor", rng)
    assert matrix.scheme.name == "fp8_tensor_token"
    x = jnp.asarray(rng.standard_normal((T, K)), jnp.float32)
    alone, beside = (multiply(rows, matrix, out_dtype=jnp.float32)[:1] for rows in (x[:1], x.at[1:].mul(1e4)))
    np.testing.assert_allclose(alone, beside, rtol=1e-6)


@pytest.mark.parametrize("name", ["fp8_block", "int8_w8a8", "w4a16_g32"])
@pytest.mark.sample(3)
def test_gradients_pass_rounding_straight_through(name):
    rng = np.random.default_rng(2)
    matrix = matrix_of(name, rng)
    x, bias = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((T, K), (N,)))
    cotangent = rng.standard_normal((T, N)).astype(np.float32)
    _, pull = jax.vjp(lambda x, bias: multiply(x, matrix, bias, out_dtype=jnp.float32), x, bias)
    of_x, of_bias = pull(jnp.asarray(cotangent))
    wanted = cotangent.astype(np.float64) @ matrix_numpy(matrix.tensor, 0)
    assert np.abs(of_x - wanted).max() < 1e-5 * np.abs(wanted).max()
    np.testing.assert_allclose(of_bias, cotangent.sum(0), rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match=r"gradient requested for weights.weight\.\w+ "):
        jax.grad(lambda m: multiply(x, m, out_dtype=jnp.float32).sum(), allow_int=True)(matrix)


def test_no_rows_and_nobody_to_ask():
    matrix = matrix_of("fp8_channel", np.random.default_rng(3))
    assert multiply(jnp.zeros((2, 0, K)), matrix, out_dtype=jnp.bfloat16).shape == (2, 0, N)
    with pytest.raises(ValueError, match="implementation=.*nobody"):
        multiply(jnp.zeros((1, K)), matrix, out_dtype=jnp.bfloat16, implementation=("nobody",))
