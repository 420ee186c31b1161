"""The Hopper grouped GEMM with packed weights against NumPy float64, on a GPU: every row of every expert, hostile
routings, sizes off the tile.

Outputs land in memory that held NaN before, so that a cell nobody wrote shows; x holds NaN where no expert owns a row.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm.packed import (
    BLOCK_MS,
    PackedConfig,
    PackedDesc,
    PackedVectorConfig,
    candidates,
    describe_call,
    grouped_gemm_packed,
)
from pallas_kernels.grouped_gemm.packed.config import LARGE_M, config_error, heights
from tests.support.kernels.gemm_problem import ROUTINGS
from tests.support.kernels.packed_problem import KINDS, make_problem, packed_tolerance

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [1, 3, 5, 64])
@pytest.mark.parametrize("kind", ["int4 g128", "int4 g128 asym", "int8 channel", "w4a8 int8 g128", "nvfp4", "mxfp8"])
def test_side_by_side(kind, rows):
    """Queries, keys and values in one launch: the bits of three with the same tiles."""
    block_m = next(height for height in (1, 4, 8, 64) if rows <= height)
    x_scale = "row" if "w4a8" in kind else "none"
    sizes: Any = dict(block_m=block_m, k=1024, spare_tiles=0, bias="bfloat16", x_scale=x_scale)
    problems = [make_problem(kind, [rows], n=n, seed=i, **sizes) for i, n in enumerate((1024, 256, 192))]
    x, _, *tiles = problems[0].args
    config = PackedVectorConfig(4, block_m=block_m) if block_m <= 4 else PackedConfig(block_m, 1, 1, 3)
    weights, biases = (tuple(p.args[1] for p in problems), tuple(p.kwargs["bias"] for p in problems))
    shared: Any = dict(x_scale=problems[0].kwargs["x_scale"], config=config, implementation="hopper")
    run = jax.jit(lambda x, w, bias: grouped_gemm_packed(x, w, *tiles, bias=bias, **shared))
    found, apart = run(x, weights, biases), [run(x, w, bias) for w, bias in zip(weights, biases, strict=True)]
    np.testing.assert_array_equal(np.asarray(found)[:rows], np.concatenate(apart, axis=1)[:rows])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_token_added_up(kind):
    """Eight slots in another order than tiles, of which one has no row; columns of a CTA past N."""
    scale = "row" if KINDS[kind][0].is_8bit else "none"
    options: dict[str, Any] = dict(k=1536, n=200, block_m=1, bias="bfloat16", out_dtype=jnp.float32, x_scale=scale)
    problem = make_problem(kind, [1] * 7, spare_tiles=1, **options)
    row_of, weights = np.array([[6, 0, 3, -1, 1, 5, 2, 4]]), np.linspace(0.5, 2, 8)[None]
    shared = np.random.default_rng(1).standard_normal((1, 200)).astype(np.float32)
    given: Any = dict(config=PackedVectorConfig(4), implementation="hopper", shared=jnp.asarray(shared))
    given |= dict(row_of=jnp.asarray(row_of, jnp.int32), slot_weights=jnp.asarray(weights, jnp.float32))
    found = np.asarray(grouped_gemm_packed(*problem.args, **problem.kwargs, **given))
    used = row_of[0] >= 0
    own, factors = problem.expected[row_of[0][used]], weights[0][used]
    bound = packed_tolerance(kind, jnp.float32, tensor_core=True).bound(factors @ np.abs(own).max(axis=1) + 4)
    assert found.shape == (1, 200) and np.abs(found[0] - factors @ own - shared[0]).max() <= bound


GATED: dict[str, Any] = dict(activation=Activation("silu"), bias="bfloat16", x_scale="row")
RAGGED = [3, 0, 130, 1, 64, 17]


def run(problem, config=None):
    return np.asarray(problem.compiled(grouped_gemm_packed, config)())


def check(kind, problem, out, *, folded=False):
    tol = packed_tolerance(kind, problem.kwargs["out_dtype"], folded=folded, tensor_core=True)
    problem.assert_close(out, tol)


def describe(problem):
    x, w = problem.args[:2]
    given = problem.kwargs
    lhs = "none" if given["x_scale"] is None else "row" if given["x_scale"].ndim else "tensor"
    return describe_call(x.shape[0], w, given["out_dtype"], lhs, given["bias"], given["activation"])


def configurations(problem, block_m):
    found = list(candidates(describe(problem), block_m, 132))
    assert found, "a loop over these would check nothing"
    return found


def cases(kinds, heights, *none_fits):
    """Every (kind, block_m) but those that no configuration fits."""
    return [case for case in itertools.product(kinds, heights) if case not in none_fits]


def out_dtype(kind):
    return jnp.float16 if KINDS[kind][0].operand == "float16" else jnp.bfloat16


@pytest.mark.parametrize(("kind", "block_m"), cases(KINDS, [8, 16, 64, 128], ("w4a8 int8 g128 asym", 128)))
def test_gated_with_bias(kind, block_m):
    """With every number of consumers, scales applied to partial sums and folded into operands."""
    problem = make_problem(kind, RAGGED, k=384, n=336, block_m=block_m, out_dtype=out_dtype(kind), **GATED)
    for config in configurations(problem, block_m):
        check(kind, problem, run(problem, config), folded=config.folds_scales)


ALONE = ["int4 g128", "int4 channel", "nvfp4", "mxfp4", "w4a8 int8 g128", "w4a8 fp8 g128", "mxfp4 fp8"]


@pytest.mark.parametrize(
    ("kind", "block_m"), cases(ALONE, [8, 32, 256], ("w4a8 int8 g128", 256), ("w4a8 fp8 g128", 256))
)
def test_alone(kind, block_m):
    problem = make_problem(kind, RAGGED, k=448, n=336, block_m=block_m, x_scale="row")
    for config in configurations(problem, block_m)[:1]:
        check(kind, problem, run(problem, config), folded=config.folds_scales)


@pytest.mark.parametrize("block_m", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_gated_with_bias(kind, block_m):
    """K in every number of parts, which 11 blocks do not divide by; rows of tiles that are not in use hold NaN."""
    k = 11 * KINDS[kind][0].block_k
    problem = make_problem(kind, [3, 0, 1, 6], k=k, n=336, block_m=block_m, out_dtype=out_dtype(kind), **GATED)
    for config in configurations(problem, block_m):
        once = problem.compiled(grouped_gemm_packed, config)
        out, own = np.asarray(once()), problem.row_expert >= 0
        check(kind, problem, out)
        np.testing.assert_array_equal(out[own], np.asarray(once())[own])


@pytest.mark.parametrize("k", [80, 768, 2880, 14336])
@pytest.mark.parametrize(
    "kind", ["int4 g128", "int4 g32", "int4 channel asym", "nvfp4", "mxfp8", "w4a8 int8 g128", "mxfp4 fp8"]
)
@pytest.mark.parametrize("block_m", [1, 4])
def test_few_rows(kind, k, block_m):
    """Rings that hold a warp's part of K and rings that do not; a last block that K does not fill. Rows that are known
    not to be in use are left."""
    problem = make_problem(kind, [3, 0, 1, 6], k=k, n=208, block_m=block_m, x_scale="row")
    counted = dataclasses.replace(problem, kwargs=problem.kwargs | dict(tile_rows=problem.tile_rows))
    is_used = problem.row_expert >= 0
    for config in configurations(problem, block_m):
        found = run(problem, config)
        check(kind, problem, found)
        of_used = run(counted, config)
        np.testing.assert_array_equal(of_used[is_used], found[is_used])
        assert block_m == 1 or np.isnan(of_used[~is_used]).all()


@pytest.mark.parametrize("to", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", ["int4 g128", "w4a8 fp8 g128"])
def test_single_rows_of_routings(kind, routing, to):
    scale = "row" if "w4a8" in kind else "tensor"
    problem = make_problem(
        kind, ROUTINGS[routing], k=768, n=208, block_m=1, x_scale=scale, bias="float32", out_dtype=to
    )
    check(kind, problem, run(problem))


@pytest.mark.parametrize("kind", ["int4 g128", "w4a8 int8 g128", "nvfp4"])
def test_one_token_in_all_tiles(kind):
    """Unpermuted: the bits of a row for each tile."""
    problem = make_problem(kind, [1, 0, 1, 1], k=1152, n=208, block_m=1, spare_tiles=0, **GATED)
    x, *others = problem.args
    options: Any = dict(problem.kwargs, implementation="hopper")
    scale = options.pop("x_scale")
    apart = jax.jit(lambda x, others: grouped_gemm_packed(x, *others, x_scale=jnp.repeat(scale[:1], 3), **options))
    found = jax.jit(lambda x, others: grouped_gemm_packed(x, *others, x_scale=scale[:1], block_m=1, **options))
    expected = apart(jnp.repeat(x[:1], 3, 0), others)
    np.testing.assert_array_equal(np.asarray(found(x[:1], others)), np.asarray(expected))


@pytest.mark.parametrize(
    ("kind", "block_m"),
    cases(["int4 g128", "nvfp4", "w4a8 int8 g128"], [24, 48, 80, 96], ("w4a8 int8 g128", 80)),
)
def test_heights_between(kind, block_m):
    """Tiles that hold an expert's rows more closely than a power of two does."""
    problem = make_problem(kind, RAGGED, k=384, n=336, block_m=block_m, **GATED)
    for config in configurations(problem, block_m):
        check(kind, problem, run(problem, config), folded=config.folds_scales)


SEVERAL_HEIGHTS = ["int4 g128", "int4 g128 asym", "nvfp4", "mxfp4 fp8", "w4a8 int8 g128"]


@pytest.mark.parametrize(
    ("kind", "block_m"), cases(SEVERAL_HEIGHTS, BLOCK_MS[1:], ("w4a8 int8 g128", 80), ("w4a8 int8 g128", 256))
)
def test_rows_in_use(kind, block_m):
    """Tiles at every height, the most and the fewest rows that take it: the bits of whole tiles. Scales in sums and
    folded into operands, a consumer for each projection, K shared.
    """
    shape = dict(rows=block_m, n=64, k=128, num_experts=2, has_tile_rows=True)
    found = heights(PackedDesc(fmt=KINDS[kind][0], **shape), PackedConfig(block_m, 2, 1, 2))
    sizes = [size for height in (0, *found) for size in (height, height + 1) if size <= block_m]
    problem = make_problem(kind, [*sizes, 2 * block_m + 3], k=512, n=336, block_m=block_m, **GATED)
    ragged = dataclasses.replace(problem, kwargs=problem.kwargs | dict(tile_rows=problem.tile_rows))
    own = problem.own
    configs = [dataclasses.replace(config, num_sms=5) for config in candidates(describe(problem), block_m, 132)][:3]
    splits = [
        PackedConfig(block_m, 2, 1, 2, num_sms=5, splits_projections=True),
        PackedConfig(block_m, 4, 4, 2, k_split=2),
    ]
    configs += [config for config in splits if config_error(describe(problem), config) is None]
    assert configs
    for config in configs:
        whole = run(problem, config)
        check(kind, problem, whole, folded=config.folds_scales)
        np.testing.assert_array_equal(run(ragged, config)[own], whole[own])


@pytest.mark.parametrize("is_large_m", [False, True])
@pytest.mark.parametrize(("kind", "tallest"), [("int4 g128", 128), ("nvfp4", 128), ("w4a8 int8 g128", 48)])
def test_three_consumers(kind, tallest, is_large_m):
    """192 channels a tile, which 336 are no multiple of."""
    block_m, options = (tallest, dict(x_scale="row")) if is_large_m else (24, GATED)
    problem = make_problem(kind, RAGGED, k=512, n=336, block_m=block_m, **options)
    check(kind, problem, run(problem, PackedConfig(block_m, 3, 1, 2, num_sms=5)))


@pytest.mark.parametrize(("consumers", "split", "step"), [(4, 2, 4), (4, 4, 4), (2, 2, 2)])
@pytest.mark.parametrize(
    "kind", ["int4 g128", "int4 g32", "nvfp4", "mxfp4", "w4a8 int8 g128", "int8 channel", "mxfp4 fp8"]
)
def test_warpgroups_that_share_k(kind, consumers, split, step):
    for block_m, options in ((16, GATED), (32, dict(x_scale="row"))):
        problem = make_problem(kind, RAGGED, k=1024, n=336, block_m=block_m, **options)
        config = PackedConfig(block_m, consumers, step, 2, num_sms=5, k_split=split)
        out = run(problem, config)
        check(kind, problem, out)
        np.testing.assert_array_equal(out[problem.row_expert >= 0], run(problem, config)[problem.row_expert >= 0])


@pytest.mark.parametrize(("block_m", "consumers", "step"), [(128, 2, 2), (80, 4, 2), (64, 4, 1), (16, 4, 4)])
@pytest.mark.parametrize("kind", ["int4 g128", "int4 g128 f32", "nvfp4", "mxfp4", "w4a8 int8 g128"])
def test_warpgroups_that_share_halves(kind, block_m, consumers, step):
    """Of the configurations with one consumer a half those that fit, scales in sums and folded into operands."""
    problem = make_problem(kind, RAGGED, k=1024, n=336, block_m=block_m, **GATED)
    folds = (False, True) if kind == "int4 g128" else (False,)
    step = step // 2 or 1 if problem.args[1].fmt.is_8bit else step
    configs = [PackedConfig(block_m, consumers, step, 2, fold, num_sms=5, splits_projections=True) for fold in folds]
    configs = [config for config in configs if config_error(describe(problem), config) is None]
    assert configs or (consumers == 4 and block_m > 16)
    for config in configs:
        out = run(problem, config)
        check(kind, problem, out, folded=config.folds_scales)
        np.testing.assert_array_equal(out[problem.row_expert >= 0], run(problem, config)[problem.row_expert >= 0])


TALL_FORMATS = ("int4 g128", "int4 g128 f32", "nvfp4", "mxfp4", "w4a8 int8 g128")


def check_tall(kind, block_m, options: dict[str, Any], shapes, k):
    """(consumers, blocks of K a step, whether projections are split), with and without folded scales: those that
    fit."""
    problem = make_problem(kind, [3, 0, 400, 1, block_m, 150], k=k, n=336, block_m=block_m, **options)
    own = problem.row_expert >= 0
    configs = [PackedConfig(block_m, c, step, 2, fold, 4, 5, 1, h) for c, step, h in shapes for fold in (False, True)]
    configs = [config for config in configs if config_error(describe(problem), config) is None]
    assert configs
    for config in configs:
        once = problem.compiled(grouped_gemm_packed, config)
        out = np.asarray(once())
        check(kind, problem, out, folded=config.folds_scales)
        np.testing.assert_array_equal(out[own], np.asarray(once())[own])


@pytest.mark.parametrize("block_m", LARGE_M)
@pytest.mark.parametrize("kind", TALL_FORMATS)
def test_tall_gated(kind, block_m):
    """Experts of none, one and several tiles; rows in one tile's sums, one consumer a half where it needs both."""
    step = 2 if block_m < 192 else 1
    check_tall(kind, block_m, GATED, [(2, step, False), (2, step, True)], k=512)


@pytest.mark.parametrize("block_m", LARGE_M)
@pytest.mark.parametrize("kind", TALL_FORMATS)
def test_tall_alone(kind, block_m):
    """A last step past K, 192 channels a tile, which 336 are no multiple of."""
    step = 2 if block_m < 192 else 1
    check_tall(kind, block_m, dict(x_scale="row"), [(2, step, False), (3, step, False)], k=320)


@pytest.mark.parametrize("kind", ["int4 channel asym", "int4 g128 asym", "e4m3 channel", "mxfp8", "w4a8 fp8 g128"])
def test_tall_in_other_formats(kind):
    check_tall(kind, 144, GATED, [(2, 2, False), (2, 2, True)], k=512)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", ["int4 g128", "nvfp4", "w4a8 int8 g128"])
def test_routings(kind, routing):
    problem = make_problem(kind, ROUTINGS[routing], k=256, n=256, x_scale="row")
    check(kind, problem, run(problem))


@pytest.mark.parametrize(
    ("kind", "k", "n"),
    [
        ("mxfp4", 2880, 2880),
        ("mxfp4 fp8", 2880, 2880),
        ("int4 g32", 2880, 1440),
        ("nvfp4", 80, 48),
        ("w4a8 int8 g128", 320, 64),
    ],
)
def test_sizes_off_the_tile(kind, k, n):
    problem = make_problem(kind, [40, 1, 90], k=k, n=n, block_m=32, x_scale="row")
    check(kind, problem, run(problem))


@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize(
    "kind", ["int4 g128", "int4 g128 f32", "int4 channel asym", "nvfp4", "mxfp4", "w4a8 int8 g128"]
)
def test_last_step_past_k(kind, step):
    """Nothing beyond K enters the sums: 45 blocks of K, or 23 of 8-bit operands, in steps of an even number."""
    problem = make_problem(kind, [40, 1, 90], k=2880, n=336, block_m=32, **GATED)
    config = PackedConfig(32, 2, step // 2 if problem.args[1].fmt.is_8bit else step, 2, num_sms=5)
    if config_error(describe(problem), config) is None:
        check(kind, problem, run(problem, config))
    else:
        assert step == 4, config_error(describe(problem), config)


@pytest.mark.parametrize("n", [16, 32, 64])
@pytest.mark.parametrize("kind", ["int4 g128", "w4a8 int8 channel", "nvfp4"])
def test_one_tile_wider_than_the_output(kind, n):
    """Channels past the output must not land in it; four times, since whose store comes last is chance."""
    problem = make_problem(kind, [40, 1, 90], k=256, n=n, block_m=32, x_scale="row")
    for config in configurations(problem, 32):
        for _ in range(4):
            check(kind, problem, run(problem, config), folded=config.folds_scales)


def test_many_tiles_a_block_and_long_rings():
    problem = make_problem("int4 g128", [33, 17, 1, 57] * 4, k=2048, n=2048, **GATED)
    check("int4 g128", problem, run(problem))


@pytest.mark.parametrize("kind", ["int4 g128", "nvfp4", "w4a8 int8 g128"])
def test_many_rows(kind):
    problem = make_problem(kind, [9001, 0, 7382], k=256, n=128, block_m=128, x_scale="row")
    config = configurations(problem, 128)[0]
    check(kind, problem, run(problem, config), folded=config.folds_scales)


@pytest.mark.parametrize("kind", ["int4 g128", "mxfp4", "w4a8 fp8 g128"])
def test_bits_repeat_and_rows_are_independent(kind):
    problem = make_problem(kind, [30, 100, 7], k=512, n=512, block_m=32, **GATED)
    own = np.flatnonzero(problem.row_expert >= 0)
    first, second = (run(problem)[own] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    kept = np.arange(0, len(own), 3)
    x = np.array(problem.args[0])
    others = np.delete(own, kept)
    x[others] = x[np.roll(others, 1)]
    problem.args = (jnp.asarray(x), *problem.args[1:])
    np.testing.assert_array_equal(run(problem)[own][kept], first[kept])
