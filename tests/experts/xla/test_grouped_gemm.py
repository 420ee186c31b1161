"""One tile against one expert: exact integer sums, operand types, the tile loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax import fused_experts
from moe_jax.experts.xla._align import align
from moe_jax.experts.xla._experts import MAX_TILE, choose_tile
from moe_jax.experts.xla._grouped_gemm import (
    dot_in_bfloat16,
    dot_of_integers,
    for_each_tile,
    plan_product,
    quantize_rows,
    tile_gemm,
)
from moe_jax.quantization import SCHEMES, QuantizedTensor, quantize_weight
from pallas_kernels.common.numerics import widen
from tests.support.cases.experts import make_config, make_routing, make_stored_weights, make_tokens
from tests.support.kernels.traces import equations
from tests.support.oracles.tolerances import assert_rows_close, tolerance


@pytest.mark.parametrize("k", [1, 127, 4096])
def test_int8_sums_are_exact(k):
    # 4096 * 127 * 127 is past 2^24: a float32 sum would have to round on the way.
    rng = np.random.default_rng(k)
    codes, w = rng.integers(-127, 128, (5, k), np.int8), rng.integers(-127, 128, (2, 9, k), np.int8)
    codes[0], w[0, 0] = 127, 127
    product = plan_product(SCHEMES["int8_w8a8"].weights, SCHEMES["int8_w8a8"].activations, jnp.bfloat16)
    weight = QuantizedTensor(jnp.asarray(w), jnp.ones((2, 9)), fmt=SCHEMES["int8_w8a8"].weights)
    y = jax.jit(lambda rows, weight: tile_gemm(rows, jnp.ones(5), weight, None, product))(codes, weight)
    exact = np.einsum("rk,gnk->rgn", codes.astype(np.int64), w.astype(np.int64))
    np.testing.assert_array_equal(y, exact.astype(np.float32))


@pytest.mark.parametrize(("dtype", "least", "most"), [("int8", -128, 127), ("int16", -255, 255)])
@pytest.mark.parametrize("k", [0, 1, 256, 257, 1024, 1025, 7168])
def test_sums_of_integers_are_exact_in_bfloat16(k, dtype, least, most):
    """Random signs, the largest codes, and large ones of one sign, whose sums pass 2**24 by odd steps."""
    rng = np.random.default_rng(k)
    rows, matrix = (rng.integers(least, most + 1, (n, k)).astype(dtype) for n in (5, 9))
    rows[0], matrix[0], matrix[1] = least, least, most
    rows[1:3], matrix[2:5] = (rng.integers(most // 2, most + 1, (n, k)) for n in (2, 3))
    found = jax.jit(dot_in_bfloat16)(rows, matrix)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, rows.astype(np.int64) @ matrix.astype(np.int64).T)
    lowered = jax.jit(dot_of_integers).trace(rows, matrix).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("dot_general") == 1 and "xbf16>, tensor<" in lowered


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if "e4m3" in str(SCHEMES[name])])
def test_no_cast_back_from_e4m3(scheme):
    """XLA drops a cast to e4m3 and the one back from GPU programs, and activations would not be quantized there."""
    config = make_config(scheme, implementation=("xla",))
    weights, x = make_stored_weights(config), make_tokens(4, config)
    jaxpr = jax.make_jaxpr(functools.partial(fused_experts, config=config))(x, *make_routing(4), weights)
    casts = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "convert_element_type"]
    assert casts
    assert not [e for e in casts if e.invars[0].aval.dtype == jnp.float8_e4m3fn]


@pytest.mark.parametrize("k", [1, 127, 2048])
@pytest.mark.parametrize("scheme", ["fp8_channel", "fp8_tensor_token"])
@pytest.mark.sample(4)
def test_e4m3_products_are_exact_in_bfloat16(scheme, k):
    rng = np.random.default_rng(k)
    formats = SCHEMES[scheme]
    product = plan_product(formats.weights, formats.activations, jnp.bfloat16)
    assert product.operand_dtype == jnp.bfloat16
    rows, row_scale = quantize_rows(
        jnp.asarray(rng.standard_normal((6, k)), jnp.float32), product, formats.activations, None
    )
    data, scale = quantize_weight(jnp.asarray(rng.standard_normal((2, 9, k)), jnp.float32), formats.weights)
    bias = jnp.asarray(rng.standard_normal((2, 9)), jnp.float32)
    y = jax.jit(tile_gemm, static_argnums=4)(
        rows, row_scale, QuantizedTensor(data, scale, fmt=formats.weights), bias, product
    )
    wide = np.asarray(data, np.float64) * np.asarray(scale, np.float64).reshape(2, -1, 1)
    exact = np.einsum("rk,gnk->rgn", np.asarray(rows, np.float64) * np.asarray(row_scale)[:, None], wide) + np.asarray(
        bias
    )
    assert_rows_close(y, exact, tolerance("bf16", "float32"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_e4m3_code_widens_to_itself(dtype):
    codes = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), jnp.float8_e4m3fn)
    widened = jax.jit(widen, static_argnums=1)(codes, dtype)
    assert widened.dtype == dtype
    expected = np.asarray(codes).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(widened).astype(np.float32), expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(widened)[number], np.signbit(expected)[number])  # -0 stays -0


@pytest.mark.parametrize(
    ("scheme", "dtype", "operand", "sums", "scales_after"),
    [
        ("bf16", "bfloat16", "bfloat16", "float32", False),
        ("bf16", "float16", "float32", "float32", False),
        ("bf16", "float32", "float32", "float32", False),
        ("fp8_channel", "float32", "bfloat16", "float32", True),
        ("fp8_channel_a16", "float32", "float32", "float32", True),
        ("fp8_channel_a16", "bfloat16", "bfloat16", "float32", True),
        ("fp8_block", "bfloat16", "float32", "float32", False),
        ("int8_w8a8", "float32", "int8", "int32", True),
        ("int8_w8a16", "float32", "float32", "float32", True),
    ],
)
def test_operands_hold_their_values_exactly(scheme, dtype, operand, sums, scales_after):
    product = plan_product(SCHEMES[scheme].weights, SCHEMES[scheme].activations, dtype)
    assert (jnp.dtype(product.operand_dtype), jnp.dtype(product.accumulator_dtype)) == (operand, sums)
    assert product.scales_after is scales_after


@pytest.mark.parametrize("ids", [[[0, 3], [3, 3], [1, -1]], [[-1, -1]] * 3, [[2, 2]] * 3])
@pytest.mark.sample(2)
def test_loop_visits_the_tiles_in_use_once(ids):
    alignment = align(jnp.asarray(ids, jnp.int32), 4, 2)

    def body(carry, start, expert, slices):
        visits, sizes = carry
        return visits.at[start].add(1), sizes.at[expert].add(slices)

    start = (jnp.zeros(alignment.row_token.size, jnp.int32), jnp.zeros(4, jnp.int32))
    visits, total = jax.jit(lambda c, a: for_each_tile(body, c, a, 2, jnp.arange(10, 14)))(start, alignment)
    tiles = np.asarray(alignment.tile_expert)[: int(alignment.num_tiles)]
    expected = np.zeros_like(visits)
    expected[: 2 * len(tiles) : 2] = 1
    np.testing.assert_array_equal(visits, expected)
    np.testing.assert_array_equal(total, np.bincount(tiles, minlength=4) * np.arange(10, 14))


@pytest.mark.parametrize(("num_tokens", "top_k", "num_experts"), [(1, 8, 64), (256, 8, 64), (5, 2, 8), (4096, 8, 8)])
def test_tile_height(num_tokens, top_k, num_experts):
    tile = choose_tile(num_tokens, top_k, num_experts)
    assert 1 <= tile <= min(num_tokens, MAX_TILE)
    mean = num_tokens * top_k / num_experts
    assert tile >= min(mean, num_tokens, MAX_TILE)
