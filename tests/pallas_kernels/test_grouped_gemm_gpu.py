"""The Hopper grouped GEMM against NumPy float64, on a GPU: every row of every expert, hostile routings, sizes off the
tile.

Outputs land in memory that held NaN before, so that a cell nobody wrote shows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm import FewRowsConfig, GemmConfig, VectorConfig, grouped_gemm
from pallas_kernels.quantize_and_permute import quantize_and_permute
from tests.support.kernels.gemm_problem import (
    KINDS,
    ROUTINGS,
    dequantized,
    gemm_tolerance,
    make_problem,
    together_and_apart,
)
from tests.support.oracles.tolerances import Tolerance, ulp

pytestmark = pytest.mark.gpu

SILU = Activation("silu")
OAI = Activation("swigluoai", limit=7.0, alpha=1.702, beta=1.0)
GATED, GATED_OAI = (dict(projections=2, activation=activation) for activation in (SILU, OAI))


def run(problem, config=None):
    return problem.compiled(grouped_gemm, config)()


def check(kind, sizes, config=None, *, out_dtype=jnp.bfloat16, **options):
    """Every row of every expert, whose numbers of rows are ``sizes``, against float64."""
    if config is not None:
        options["block_m"] = config.block_m
    problem = make_problem(kind, sizes, out_dtype=out_dtype, **options)
    problem.assert_close(run(problem, config), gemm_tolerance(kind, out_dtype, tensor_core=True))


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_plain(kind, block_m):
    check(kind, [3, 200, 0, 129, 1, 64], k=1152, n=768, block_m=block_m)


@pytest.mark.parametrize("block_n", [64, 128, 256])
@pytest.mark.parametrize("block_m", [8, 16, 32, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_swapped(kind, block_m, block_n):
    if kind == "fp8_block" and (block_m, block_n) == (64, 256):
        block_n = 128  # with more the sums of four warpgroups have no room
    config = GemmConfig(block_m, block_n, 3, swap_ab=True)
    check(kind, [3, 40, 0, 9, 1, 64], config, k=1152, n=704, padding=np.nan)


@pytest.mark.parametrize("rows", [1, 3, 5, 64, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_side_by_side(kind, rows):
    """Queries, keys and values in one launch: the bits of three with the same tiles."""
    block_m = next(height for height in (1, 4, 16, 64, 128, 1000) if height >= min(rows, 128))
    sizes: Any = dict(block_m=block_m, k=1152, spare_tiles=0, bias="bfloat16")
    problems = [make_problem(kind, [rows], n=n, seed=i, **sizes) for i, n in enumerate((1024, 256, 192))]
    x, _, *tiles = problems[0].args
    config: Any = VectorConfig(2) if block_m == 1 else GemmConfig(block_m, 64, 3, swap_ab=block_m == 16)
    config = FewRowsConfig(4) if block_m == 4 else config
    own = {name: tuple(p.kwargs[name] for p in problems) for name in ("w_scale", "bias")}
    own = {name: None if arrays[0] is None else arrays for name, arrays in own.items()}
    shared: Any = dict(x_scale=problems[0].kwargs["x_scale"], config=config, implementation="hopper")
    weights = tuple(p.args[1] for p in problems)
    found = jax.jit(lambda x, weights, own: grouped_gemm(x, weights, *tiles, **own, **shared))(x, weights, own)
    apart = []
    for index, weight in enumerate(weights):
        one = {name: None if arrays is None else arrays[index] for name, arrays in own.items()}
        apart.append(jax.jit(lambda x, w, own: grouped_gemm(x, w, *tiles, **own, **shared))(x, weight, one))
    np.testing.assert_array_equal(np.asarray(found)[:rows], np.concatenate(apart, axis=1)[:rows])


@pytest.mark.parametrize(("k_parts", "num_sms"), [(4, 132), (2, 5)])
@pytest.mark.parametrize("rows", [3, 16, 64])
@pytest.mark.parametrize("kind", ["bf16", "f16", "fp8_row", "fp8_block", "int8_row"])
def test_parts_of_k(kind, rows, k_parts, num_sms):
    """Each part has the bits of the product with rows that are zero outside of it."""
    problem = make_problem(kind, [64], block_m=64, k=2048, n=704, spare_tiles=0, out_dtype=jnp.float32)
    (x, w, *tiles), scales = problem.args, {name: problem.kwargs[name] for name in ("x_scale", "w_scale")}
    used = jnp.full(k_parts, rows, jnp.int32)
    config = GemmConfig(64, 64, 4, row_chunk=16 if rows < 48 else None, num_sms=num_sms)
    options: Any = dict(block_m=64, out_dtype=jnp.float32, config=config, implementation="hopper")

    def in_parts(x, w, scales):
        experts, number = jnp.zeros(k_parts, jnp.int32), jnp.int32(k_parts)
        return grouped_gemm(x, w, experts, number, tile_rows=used, k_parts=k_parts, **scales, **options)

    def of_rows(x, w, scales):
        return grouped_gemm(x, w, *tiles, tile_rows=used[:1], **scales, **options)

    found = jax.jit(in_parts)(x[:rows], w, scales).reshape(k_parts, 64, 704)
    part, alone = jnp.arange(2048) // (2048 // k_parts), jax.jit(of_rows)
    for index in range(k_parts):
        own = jnp.where(part == index, x[:rows], jnp.zeros((), x.dtype))
        np.testing.assert_array_equal(found[index, :rows], alone(own, w, scales)[:rows])


@pytest.mark.parametrize("channels", [1, 2, 4])
@pytest.mark.parametrize("k", [768, 1152, 2880, 14336])
@pytest.mark.parametrize("kind", KINDS)
def test_single_rows(kind, k, channels):
    check(kind, [3, 0, 1, 2], VectorConfig(channels), k=k, n=208, padding=np.nan)


@pytest.mark.parametrize("k", [768, 2880, 7168])
@pytest.mark.parametrize("kind", KINDS)
def test_single_rows_gated_with_bias(kind, k):
    check(kind, [3, 0, 1, 2], VectorConfig(2), k=k, n=208, bias="bfloat16", with_tile_rows=True, **GATED_OAI)


@pytest.mark.parametrize("k_split", [1, 2, 4])
@pytest.mark.parametrize("k", [768, 1152, 2880, 14336])
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows(kind, k, k_split):
    check(kind, [3, 0, 1, 4, 9], FewRowsConfig(k_split), k=k, n=208, padding=np.nan)


@pytest.mark.parametrize("k", [768, 2880, 7168])
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_gated_with_bias(kind, k):
    check(kind, [3, 0, 1, 6], FewRowsConfig(4), k=k, n=208, bias="bfloat16", with_tile_rows=True, **GATED_OAI)


@pytest.mark.parametrize("out_dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_few_rows_of_routings(routing, out_dtype):
    check("fp8_row", ROUTINGS[routing], FewRowsConfig(4), k=768, n=208, bias="float32", out_dtype=out_dtype)


@pytest.mark.parametrize("out_dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_single_rows_of_routings(routing, out_dtype):
    check("fp8_row", ROUTINGS[routing], VectorConfig(1), k=768, n=208, bias="float32", out_dtype=out_dtype)


@pytest.mark.parametrize("config", [VectorConfig(1), FewRowsConfig(4)])
@pytest.mark.parametrize("is_rounded_first", [True, False])
def test_single_and_few_rows_requantized(is_rounded_first, config):
    """By one given scale: the codes of tiles of 64 rows, but for products next to a tie."""
    out_dtype = jnp.bfloat16 if is_rounded_first else jnp.float32
    options: Any = dict(k=768, n=256, requantize="tensor", out_dtype=out_dtype, **GATED)
    sizes = [1, 0, 1] if config.block_m == 1 else [4, 0, 8]
    alone = make_problem("fp8_tensor", sizes, block_m=config.block_m, spare_tiles=0, **options)
    found = np.asarray(run(alone, config)).astype(np.float32)
    expected = np.asarray(grouped_gemm(*alone.args, **alone.kwargs, implementation="reference")).astype(np.float32)
    assert (found == expected).mean() > 0.99
    np.testing.assert_allclose(found, expected, rtol=0.13, atol=2**-9)


@pytest.mark.parametrize("given", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("k", [768, 2048, 2880])
@pytest.mark.parametrize("quantization", ["e4m3_row", "e4m3_group", "e4m3_group_ue8m0", "int8_row"])
def test_single_rows_that_are_quantized_first(quantization, k, given):
    """The bits of a product whose rows another launch has quantized; rows of zeros, a NaN and an infinity too."""
    kind = {"e4m3_row": "fp8_row", "int8_row": "int8_row"}.get(quantization, "fp8_block")
    problem = make_problem(kind, [3, 0, 1, 4], k=k, n=256, block_m=1, spare_tiles=0, bias="float32")
    _, w, *tiles = problem.args
    options: Any = dict(w_scale=problem.kwargs["w_scale"], bias=problem.kwargs["bias"], config=VectorConfig(2))
    x = np.random.default_rng(k).standard_normal((8, k)) * np.exp2(np.arange(-4.0, 4.0))[:, None]
    x[1], x[2, 5], x[3, 7] = 0.0, np.nan, np.inf
    x = jnp.asarray(x, given)

    def of_codes(x, w):
        codes, scale = quantize_and_permute(x, quantization=quantization, implementation="hopper")
        return grouped_gemm(codes, w, *tiles, x_scale=scale, implementation="hopper", **options)

    def alone(x, w):
        return grouped_gemm(x, w, *tiles, quantization=quantization, implementation="hopper", **options)

    found, expected = (np.asarray(jax.jit(call)(x, w), np.float32) for call in (alone, of_codes))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("k", [768, 2048, 14336])
@pytest.mark.parametrize("kind", KINDS)
def test_single_rows_added_up(kind, k, is_shared):
    """One token's rows in another order than its slots, one slot without a row, and NaN in a tile of no slot."""
    problem = make_problem(kind, [1, 0, 1, 1, 1], k=k, n=208, block_m=1, spare_tiles=1, bias="float32", padding=np.nan)
    arrays, static = problem.split()
    static["out_dtype"] = jnp.float32
    row_of = jnp.asarray([[2, -1, 0, 3, 1]], jnp.int32)
    slot_weights = jnp.asarray([[0.5, 9.0, 0.25, -0.75, 1.5]], jnp.float32)
    shared = jnp.full((1, 208), 3.0, jnp.bfloat16) if is_shared else None

    def added_up(args, arrays, *given):
        row_of, slot_weights, shared = given
        options: Any = dict(row_of=row_of, slot_weights=slot_weights, shared=shared, implementation="hopper")
        return grouped_gemm(*args, **arrays, **static, **options)

    found = jax.jit(added_up)(problem.args, arrays, row_of, slot_weights, shared)
    expected = np.asarray([0.25, 1.5, 0.5, -0.75]) @ problem.expected[:4] + (3.0 if is_shared else 0.0)
    magnitude = np.asarray([0.25, 1.5, 0.5, 0.75]) @ np.abs(problem.expected[:4]).max(axis=1) + 3.0
    bound = gemm_tolerance(kind, jnp.float32, tensor_core=True).bound(magnitude)
    assert found.shape == (1, 208)
    assert np.abs(np.asarray(found)[0] - expected).max() <= bound


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_in_all_tiles(kind):
    """Unpermuted: the bits of a row for each tile."""
    problem = make_problem(kind, [1, 0, 1, 1], k=1152, n=208, block_m=1, spare_tiles=0, **GATED)
    x, *others = problem.args
    options: Any = dict(problem.kwargs, config=VectorConfig(1), implementation="hopper")
    scale = options.pop("x_scale")
    whole = scale if scale is None or not scale.ndim else jnp.repeat(scale[..., :1], 3, axis=-1)
    apart = jax.jit(lambda x, others: grouped_gemm(x, *others, x_scale=whole, **options))(
        jnp.repeat(x[:1], 3, 0), others
    )
    one = scale if scale is None or not scale.ndim else scale[..., :1]
    found = jax.jit(lambda x, others: grouped_gemm(x, *others, x_scale=one, block_m=1, **options))(x[:1], others)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(apart))


@pytest.mark.parametrize("block_m", [24, 48, 80, 96])
@pytest.mark.parametrize("kind", ["bf16", "fp8_row", "fp8_block", "int8_row"])
def test_swapped_heights_between(kind, block_m):
    config = GemmConfig(block_m, 128, 3, swap_ab=True)
    check(kind, [3, 40, 0, 97, 1, 64], config, k=1152, n=704, padding=np.nan, **GATED)


@pytest.mark.parametrize("by_bits", [False, True])
@pytest.mark.parametrize("block_m", [8, 16, 48])
@pytest.mark.parametrize("kind", ["bf16", "f16", "fp8_row", "fp8_block", "int8_row"])
def test_rows_in_use_alone(kind, block_m, by_bits):
    """Right values, and the bits of whole tiles; the last tile is narrower than others."""
    sizes = [3, 40, 0, 97, 1, 64, block_m]
    problem = make_problem(kind, sizes, k=1152, n=720, block_m=block_m, with_tile_rows=True)
    config = GemmConfig(block_m, 128, 3, swap_ab=True)
    without = {name: value for name, value in problem.kwargs.items() if name != "tile_rows"}
    whole = np.asarray(run(dataclasses.replace(problem, kwargs=without), config))
    problem.assert_close(whole, gemm_tolerance(kind, jnp.bfloat16, tensor_core=True))
    in_use = np.arange(block_m) < np.asarray(problem.kwargs["tile_rows"])[:, None]
    if by_bits:
        in_use &= np.random.default_rng(0).random(in_use.shape) < 0.4
        bits = [sum({1 << min(int(row), 31) for row in np.flatnonzero(own)}) for own in in_use]
        problem.kwargs["tile_bits"] = jnp.asarray(np.array(bits, np.uint32).view(np.int32))
    found, in_use = np.asarray(run(problem, config)), in_use.reshape(-1)
    np.testing.assert_array_equal(found[in_use], whole[in_use])


@pytest.mark.parametrize(("projections", "block_n"), [(0, 256), (2, 128)])
@pytest.mark.parametrize("block_m", [112, 144, 160, 192])
@pytest.mark.parametrize("kind", ["bf16", "fp8_tensor", "fp8_row", "int8_row"])
def test_swap_ab_large_m(kind, block_m, projections, block_n):
    config = GemmConfig(block_m, block_n, 3, num_sms=7, swap_ab=True)
    check(kind, [3, 200, 0, 145, 1], config, k=1152, n=704, padding=np.nan, **GATED if projections else {})


@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(128, 128, 4, swap_ab=True),
        GemmConfig(144, 128, 2, swap_ab=True, step_blocks=2),
        GemmConfig(144, 64, 4, num_sms=3, swap_ab=True),
        GemmConfig(176, 128, 3, swap_ab=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["bf16", "f16", "fp8_row", "int8_row"])
def test_swap_ab_large_m_gated_with_bias(kind, config):
    check(kind, [150, 0, 3], config, k=2880, n=720, bias="bfloat16", with_tile_rows=True, **GATED_OAI)


@pytest.mark.parametrize("block_n", [64, 192, 256])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", ["bf16", "int8_row"])
def test_swap_ab_large_m_routings(kind, routing, block_n):
    check(kind, ROUTINGS[routing], GemmConfig(144, block_n, 3, swap_ab=True), k=2880, n=208, bias="float32")


@pytest.mark.parametrize("gated", [{}, GATED], ids=["plain", "gated"])
@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(8, 64, 2, swap_ab=True, step_blocks=4),
        GemmConfig(16, 128, 3, swap_ab=True, step_blocks=2),
        GemmConfig(24, 64, 5, num_sms=5, swap_ab=True, step_blocks=2),
        GemmConfig(96, 128, 2, swap_ab=True, step_blocks=2),
    ],
    ids=str,
)
def test_block_scales_in_steps_of_several_blocks(config, gated):
    check("fp8_block", [3, 40, 0, 97, 1, 64], config, k=1024, n=704, padding=np.nan, **gated)


@pytest.mark.parametrize(("gated", "block_n"), [({}, 256), (GATED, 128)], ids=["plain", "gated"])
@pytest.mark.parametrize(("block_m", "cluster"), [(48, 1), (80, 1), (80, 2), (96, 2), (144, 1), (160, 2)])
@pytest.mark.parametrize("kind", ["bf16", "f16", "fp8_row", "int8_row"])
def test_two_stages_of_two_blocks(kind, block_m, cluster, gated, block_n):
    """K in an even number of blocks and in an odd one, tiles in an odd number, rows of experts in several tiles."""
    block_n = 128 if block_m == 96 else block_n  # four consumers have no room for as many accumulators
    config = GemmConfig(block_m, block_n, 2, num_sms=14, swap_ab=True, step_blocks=2, cluster=cluster)
    for k in (1024, 1152):
        check(kind, [3, 200, 0, 145, 1, 64], config, k=k, n=704, padding=np.nan, **gated)


@pytest.mark.parametrize(("gated", "block_n"), [({}, 128), (GATED, 64)], ids=["plain", "gated"])
@pytest.mark.parametrize("block_m", [16, 24, 48, 80])
@pytest.mark.parametrize("kind", ["bf16", "f16", "fp8_row", "int8_row", "fp8_block"])
def test_steps_of_four_blocks(kind, block_m, gated, block_n):
    """K in whole steps and with a part of one, rows of K that are a multiple of 128 bytes and not; one or two experts
    at a time.
    """
    for k, group in ((1024, 1), (1152, 2), (1440, 1)):
        if kind == "fp8_block" and k % 512:
            continue  # where every 128 of K are scaled, steps have to be whole
        width = 64 if block_m == 80 else block_n  # two stages of more do not fit
        config = GemmConfig(block_m, width, 2, group, num_sms=14, swap_ab=True, step_blocks=4)
        check(kind, [3, 200, 0, 145, 1, 64], config, k=k, n=704, padding=np.nan, **gated)


@pytest.mark.parametrize(
    ("block_m", "sharers", "stages", "step_blocks"),
    [(8, 4, 8, 2), (24, 3, 3, 4), (32, 4, 4, 2), (64, 3, 3, 2), (64, 2, 6, 2), (96, 3, 6, 1), (96, 2, 4, 2)],
)
@pytest.mark.parametrize("kind", ["bf16", "f16", "fp8_row", "int8_row", "fp8_block"])
def test_consumers_that_share_channels(kind, block_m, sharers, stages, step_blocks):
    """One tile and several of a CTA, more steps than stages and fewer, columns off the tile."""
    config = GemmConfig(block_m, 64, stages, swap_ab=True, step_blocks=step_blocks, sharers=sharers)
    for num_sms, steps in ((132, 2), (5, 8), (3, 1)):
        own, k = dataclasses.replace(config, num_sms=num_sms), 512 * sharers * steps
        check(kind, [block_m - 3, 0, 5], own, k=k, n=720, bias="bfloat16", padding=np.nan)


def test_bits_of_large_m_tiles_repeat():
    problem = make_problem("bf16", [300, 0, 150], k=512, n=512, block_m=160, **GATED)
    own, config = problem.row_expert >= 0, GemmConfig(160, 128, 4, swap_ab=True)
    first, second = (np.asarray(run(problem, config))[own] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    low = make_problem("bf16", [300, 0, 150], k=512, n=512, block_m=96, **GATED)
    lows = (low.args[0].at[np.flatnonzero(low.row_expert >= 0)].set(problem.args[0][own]), problem.args[1])
    low.args = (*lows, *low.args[2:])
    other = np.asarray(run(low, GemmConfig(96, 128, 4, swap_ab=True)))[low.row_expert >= 0]
    np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("kind", ["bf16", "fp8_row", "fp8_block"])
def test_large_m_tiles_moved_in_chunks(kind):
    config = GemmConfig(128, 128, 3, row_chunk=16)
    check(kind, [3, 200, 0, 129, 1, 64], config, k=1152, n=768, with_tile_rows=True)


@pytest.mark.parametrize("kind", KINDS)
def test_swapped_gated_with_bias(kind):
    options = dict(bias="bfloat16", with_tile_rows=True, block_m=16, **GATED_OAI)
    for config in (None, GemmConfig(16, 128, 4, num_sms=7, swap_ab=True)):
        check(kind, [7, 0, 13, 1], config, k=2880, n=2880, **options)


@pytest.mark.parametrize("kind", ["bf16", "fp8_tensor", "fp8_row", "fp8_block", "int8_row"])
def test_gated_with_bias(kind):
    check(kind, [70, 0, 130], k=512, n=384, block_m=128, bias="bfloat16", out_dtype=jnp.float32, **GATED)


@pytest.mark.parametrize("bias", ["bfloat16", "float32"])
@pytest.mark.parametrize("block_n", [16, 48, 80, 96])
@pytest.mark.parametrize("kind", ["bf16", "fp8_row", "int8_row"])
def test_halves_of_biases_that_do_not_end_where_a_bulk_copy_may_start(kind, block_n, bias):
    check(kind, [150, 0, 3, 64], GemmConfig(64, block_n, 3), k=384, n=720, bias=bias, **GATED_OAI)


@pytest.mark.parametrize("block_n", [32, 64, 96, 128])
@pytest.mark.parametrize("kind", ["bf16", "fp8_row", "int8_row"])
def test_gated_widths(kind, block_n):
    bias = "float32" if block_n != 32 else None
    config = GemmConfig(64, block_n, 4, row_chunk=16)
    check(kind, [70, 0, 3], config, k=512, n=384, bias=bias, with_tile_rows=True, **GATED)


@pytest.mark.parametrize(
    "activation",
    [
        OAI,
        Activation("swiglustep", limit=1.0),
        Activation("gelu_tanh"),
        Activation("relu2_no_mul"),
        Activation("silu_no_mul"),
    ],
    ids=lambda a: a.name,
)
def test_activations(activation):
    options = dict(projections=2 if activation.is_gated else 1, activation=activation, out_dtype=jnp.float32)
    check("bf16", [70, 3], k=256, n=128, **options)


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize(("n", "requantize"), [(512, "group"), (2880, "group"), (512, "group_ue8m0")])
def test_requantized_by_group(n, requantize, block_m):
    options = dict(block_m=block_m, requantize=requantize, **GATED)
    problem = make_problem("fp8_block", [5, 0, 140], k=384, n=n, **options)
    out = run(problem)
    problem.assert_close(dequantized(out), Tolerance(np.float32, 64.0, 1 / 16))
    own = problem.row_expert >= 0
    padded = np.pad(np.abs(problem.expected[own]), ((0, 0), (0, -n % 128)))
    amax = padded.reshape(own.sum(), -1, 128).max(-1)
    scale, ideal = np.asarray(out[1]).T[own], np.maximum(amax, 1e-10) / 448.0
    rounding = 0.001 * ideal + ulp(jnp.bfloat16, amax) / 2 / 448.0  # the largest value is rounded to bfloat16 first
    if requantize == "group":
        assert (np.abs(scale - ideal) <= rounding).all()
        largest = scale.astype(np.float64) * 448.0
        np.testing.assert_allclose(largest, largest.astype(jnp.bfloat16).astype(np.float64), rtol=1e-6)
    else:
        assert (np.frexp(scale)[0] == 0.5).all(), "powers of two"
        assert ((scale > ideal - rounding) & (scale < 2 * (ideal + rounding))).all()


@pytest.mark.parametrize("block_m", [8, 16, 24, 48, 64, 80, 128])
@pytest.mark.parametrize("requantize", ["group", "group_ue8m0", "tensor"])
def test_requantized_as_rows_are_apart(requantize, block_m):
    """The same bits as from a launch of its own, which finds bfloat16. Tiles of 64 and 128 rows are not swapped."""
    kind = "fp8_tensor" if requantize == "tensor" else "fp8_block"
    options = dict(block_m=block_m, requantize=requantize, with_tile_rows=block_m % 16 == 8, **GATED)
    problem = make_problem(kind, [5, 0, 140, 8, 1], k=384, n=512, **options)
    (codes, scales), (apart, apart_scales) = together_and_apart(problem, run, "hopper")
    np.testing.assert_array_equal(codes, apart)
    np.testing.assert_array_equal(scales, apart_scales)


def test_requantized_to_a_given_scale():
    problem = make_problem("fp8_tensor", [5, 66], k=256, n=256, **GATED, requantize="tensor")
    scale = float(problem.kwargs["out_scale"])
    problem.expected = np.clip(problem.expected, -448 * scale, 448 * scale)
    problem.assert_close(np.asarray(run(problem)).astype(np.float64) * scale, Tolerance(np.float32, 64.0, 1 / 16))


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", ["fp8_row", "fp8_block", "bf16"])
def test_routings(kind, routing, block_m):
    check(kind, ROUTINGS[routing], k=256, n=256, block_m=block_m, padding=np.nan, with_tile_rows=True)


@pytest.mark.parametrize(
    ("kind", "k", "n"), [("fp8_block", 2880, 2880), ("int8_row", 2880, 2880), ("bf16", 2880, 2880), ("fp8_row", 96, 48)]
)
def test_sizes_off_the_tile(kind, k, n):
    check(kind, [90, 1, 300], k=k, n=n, block_m=128)


@pytest.mark.parametrize(("k", "n"), [(2880, 2880), (96, 48), (7168, 384)])
@pytest.mark.parametrize("projections", [0, 2])
@pytest.mark.parametrize("block_m", [8, 16, 80])
def test_swapped_blocks_off_the_tile(block_m, projections, k, n):
    """Weight blocks and the last K step in part; the same bits twice."""
    gated = dict(**GATED, bias="bfloat16") if projections else {}
    problem = make_problem("fp8_block", [90, 1, 0, 33], k=k, n=n, block_m=block_m, padding=np.nan, **gated)
    for block_n in (64, 128):
        config = GemmConfig(block_m, block_n, 4, num_sms=7, swap_ab=True)
        out = run(problem, config)
        problem.assert_close(out, gemm_tolerance("fp8_block", jnp.bfloat16, tensor_core=True))
        own = problem.row_expert >= 0
        again = np.asarray(run(problem, config), np.float32)
        np.testing.assert_array_equal(np.asarray(out, np.float32)[own], again[own])


@pytest.mark.parametrize("n", [16, 32, 64])
@pytest.mark.parametrize("kind", ["bf16", "int8_row"])
@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(64, 256, 3),
        GemmConfig(64, 256, 3, row_chunk=16),
        GemmConfig(16, 256, 4, swap_ab=True),
        GemmConfig(144, 256, 4, swap_ab=True),
    ],
    ids=str,
)
def test_one_tile_wider_than_the_output(kind, n, config):
    """What lies past the output must not land in it; four times, since whose store comes last is chance."""
    problem = make_problem(kind, [90, 1, 200], k=256, n=n, block_m=config.block_m, with_tile_rows=True)
    for _ in range(4):
        problem.assert_close(run(problem, config), gemm_tolerance(kind, jnp.bfloat16, tensor_core=True))


CONFIGS = [
    GemmConfig(64, 64, 2),
    GemmConfig(64, 128, 8, num_sms=5),
    GemmConfig(64, 256, 3, raster_group_m=1),
    GemmConfig(64, 48, 4),
    GemmConfig(64, 96, 4),
    GemmConfig(64, 64, 3, step_blocks=2),
    GemmConfig(8, 64, 3, swap_ab=True, step_blocks=4),
]


# A tile's weight blocks are whole.
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (k, c)
        for k in ("fp8_row", "fp8_block", "f16")
        for c in CONFIGS
        if k != "fp8_block" or (c.block_n in (64, 128, 256) and c.step_blocks == 1)
    ],
    ids=str,
)
def test_configs(kind, config):
    check(kind, [90, 1, 200], config, k=640, n=640)


def test_many_tiles_a_block_and_long_rings():
    check("fp8_row", [130, 70, 1, 257] * 4, k=2048, n=1024, block_m=128, **GATED)


@pytest.mark.parametrize("kind", ["bf16", "fp8_block", "int8_row"])
def test_many_rows(kind):
    check(kind, [9001, 0, 7382], k=256, n=128, block_m=128)


@pytest.mark.parametrize("kind", ["fp8_block", "int8_row", "bf16"])
def test_bits_repeat_and_rows_are_independent(kind):
    problem = make_problem(kind, [30, 100, 7], k=512, n=512, **GATED)
    own = np.flatnonzero(problem.row_expert >= 0)
    first, second = (np.asarray(run(problem))[own] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    kept = own[::3]
    x = np.array(problem.args[0])
    others = np.setdiff1d(np.arange(len(x)), kept)
    x[others] = x[np.roll(others, 1)]
    problem.args = (jnp.asarray(x), *problem.args[1:])
    np.testing.assert_array_equal(np.asarray(run(problem))[kept], first[::3])
