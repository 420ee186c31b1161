"""Tiles of a few rows of packed weights, run in NumPy from the PTX that is emitted: the copies of every thread, the
order of words and of rows, scales, sums of warps; refusals, and lowering for CUDA.

The kernel itself runs in test_grouped_gemm_packed_gpu.py.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm.packed import (
    PackedConfig,
    PackedDesc,
    PackedVectorConfig,
    api,
    choose_config,
    config_error,
    describe,
    grouped_gemm_packed,
    vector,
    vector_sm90,
)
from pallas_kernels.grouped_gemm.packed.vector import adds_up_at_once
from tests.pallas_kernels.test_packed_operands import on_numpy  # noqa: F401
from tests.support.kernels.cases import packed_case
from tests.support.kernels.columns_machine import on_columns_machine
from tests.support.kernels.packed_problem import KINDS, make_problem, packed_tolerance
from tests.support.refusals import refuses


@pytest.fixture(params=["late", "at once"])
def machine(request, on_numpy, monkeypatch):  # noqa: F811
    """The kernel on NumPy threads, whose copies land as late or as early as they may."""
    on_columns_machine(monkeypatch, api, vector_sm90, late=request.param == "late")


OUT = dict(bfloat16=jnp.bfloat16, float16=jnp.float16, int8=jnp.float32, float8_e4m3fn=jnp.float32)
GATED: dict[str, Any] = dict(activation=Activation("silu"), bias="bfloat16", x_scale="row")


def run(problem, k_split, **options):
    options = problem.kwargs | dict(config=PackedVectorConfig(k_split), implementation="hopper") | options
    return np.asarray(grouped_gemm_packed(*problem.args, **options))


def check(kind, sizes, k_split, block_m=1, **options):
    given: dict[str, Any] = dict(x_scale="row" if KINDS[kind][0].is_8bit else "none", out_dtype=jnp.float32)
    given |= options
    problem = make_problem(kind, sizes, block_m=block_m, **given)
    config = PackedVectorConfig(k_split, block_m=block_m)
    found = run(problem, k_split, config=config)
    problem.assert_close(found, packed_tolerance(kind, given["out_dtype"]))
    if block_m == 1:
        return
    known = run(problem, k_split, config=config, tile_rows=problem.tile_rows)
    is_used = problem.row_expert >= 0
    np.testing.assert_array_equal(known[is_used], found[is_used])
    assert np.isnan(known[~is_used].astype(np.float32)).all(), "other rows are left as they were"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(2)  # each kind, its copies late and at once by turns, since the kinds are an odd number
def test_formats(kind, machine):
    """Five blocks of K, of which one warp has two; 80 channels of blocks of 64; tiles out of use."""
    check(kind, [1, 0, 1], 4, k=5 * KINDS[kind][0].block_k, n=80, out_dtype=OUT[KINDS[kind][0].operand])


@pytest.mark.sample(5)
@pytest.mark.parametrize("k_split", [1, 2, 4])
@pytest.mark.parametrize("kind", ["int4 g32", "int4 g128 asym", "nvfp4", "w4a8 int8 g128"])
def test_gated_in_every_number_of_parts(kind, k_split, machine):
    """Columns of a CTA past N, which lie behind the array in its last row."""
    check(kind, [1, 2], k_split, k=704, n=72, spare_tiles=0, **GATED)


@pytest.mark.parametrize("k_split", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(4)
def test_few_rows(kind, k_split, machine):
    """Whole tiles, a row by itself, an expert with two tiles; NaN in rows that are not in use."""
    check(kind, [4, 0, 1, 5], k_split, 4, k=5 * KINDS[kind][0].block_k, n=80)


@pytest.mark.parametrize("k_split", [1, 2, 4])
@pytest.mark.parametrize("kind", ["int4 g32", "int4 g128 asym", "nvfp4", "w4a8 int8 g128"])
@pytest.mark.sample(3)
def test_few_rows_gated(kind, k_split, machine):
    """Rings that hold less than K; columns of a CTA past N; a bias, and a scale for each row."""
    check(kind, [3, 2], k_split, 4, k=1408, n=72, spare_tiles=1, **GATED)


@pytest.mark.parametrize("kind", ["int4 g128", "mxfp8", "w4a8 int8 channel asym"])
def test_rings_that_hold_less_than_k(kind, machine, monkeypatch):
    monkeypatch.setattr(vector, "_RING_BYTES", 0)
    check(kind, [1], 2, k=13 * KINDS[kind][0].block_k, n=32)


@pytest.mark.parametrize("kind", ["int4 g32", "nvfp4", "mxfp4 fp8"])
def test_last_block_past_k(kind, machine):
    """Groups and blocks that K does not fill, fewer blocks than warps."""
    check(kind, [1], 4, k=80, n=16)


@pytest.mark.parametrize(("block_m", "rows"), [(1, 1), (4, 4), (4, 3)])
def test_weights_side_by_side(block_m, rows, machine):
    parts = [
        make_problem("int4 g128", [rows], k=128, n=n, block_m=block_m, spare_tiles=0, seed=n, bias="float32")
        for n in (80, 48)
    ]
    x, _, *tiles = parts[0].args
    config = PackedVectorConfig(4, block_m=block_m)
    options: Any = dict(config=config, implementation="hopper", out_dtype=jnp.float32)
    weights, biases = tuple(p.args[1] for p in parts), tuple(p.kwargs["bias"] for p in parts)
    found = grouped_gemm_packed(x, weights, *tiles, bias=biases, **options)
    apart = [grouped_gemm_packed(x, w, *tiles, bias=b, **options) for w, b in zip(weights, biases, strict=True)]
    np.testing.assert_array_equal(np.asarray(found), np.concatenate(apart, axis=1))
    parts[0].assert_close(np.asarray(apart[0]), packed_tolerance("int4 g128", jnp.float32))


@pytest.mark.parametrize("k_split", [1, 4])
def test_few_rows_with_one_scale(k_split, machine):
    """In one and two passes over the rows that threads store."""
    check("int4 channel", [4, 0, 3], k_split, 4, k=320, n=80, x_scale="tensor")


@pytest.mark.parametrize("x_scale", ["none", "tensor", "row"])
def test_one_token_in_all_tiles(x_scale, machine):
    problem = make_problem("int4 channel", [1, 0, 1, 1], k=128, n=16, block_m=1, spare_tiles=0, x_scale=x_scale)
    x, w, *tiles = problem.args
    own = whole = problem.kwargs["x_scale"]
    if own is not None and own.ndim:
        own, whole = own[:1], jnp.repeat(own[:1], 3)
    apart = dataclasses.replace(problem, args=(jnp.repeat(x[:1], 3, 0), w, *tiles))
    one = dataclasses.replace(problem, args=(x[:1], w, *tiles))
    np.testing.assert_array_equal(run(one, 4, x_scale=own, block_m=1), run(apart, 4, x_scale=whole))


@pytest.mark.parametrize("tokens", [2, 3, 4])
@pytest.mark.parametrize("kind", ["int4 g128", "w4a8 int8 g128"])
def test_few_tokens_in_all_tiles(kind, tokens, machine):
    """The same rows in every tile: the bits of tiles that have copies of them, with what those left out unwritten."""
    is_8bit = KINDS[kind][0].is_8bit
    options: dict[str, Any] = dict(k=640, n=80, block_m=4, spare_tiles=0, x_scale="row" if is_8bit else "none")
    problem = make_problem(kind, [4, 4, 4], **options)
    x, w, *tiles = problem.args
    scale = problem.kwargs["x_scale"]
    own, whole = (None, None) if scale is None else (scale[:4], jnp.tile(scale[:4], 3))
    apart = dataclasses.replace(problem, args=(jnp.tile(x[:4], (3, 1)), w, *tiles))
    few = dataclasses.replace(problem, args=(x[:tokens], w, *tiles))
    config = PackedVectorConfig(2, block_m=4)
    given: Any = dict(config=config, tile_rows=jnp.full(3, tokens, jnp.int32))
    found = run(few, 2, x_scale=own, block_m=4, **given).reshape(3, 4, 80)
    expected = run(apart, 2, x_scale=whole, config=config).reshape(3, 4, 80)
    np.testing.assert_array_equal(found[:, :tokens], expected[:, :tokens])
    assert np.isnan(found[:, tokens:].astype(np.float32)).all()


@pytest.mark.parametrize("kind", ["int4 g128", "nvfp4", "w4a8 int8 g128", "mxfp8"])
@pytest.mark.sample(2)
def test_added_up(kind, machine, monkeypatch):
    """Slots in another order than tiles, one expert in two of them, and a tile that nobody chose; rings that hold less
    than K; columns of a CTA past N.
    """
    monkeypatch.setattr(vector, "_RING_BYTES_OF_MANY", 0)
    options: dict[str, Any] = dict(x_scale="row" if KINDS[kind][0].is_8bit else "none", out_dtype=jnp.float32)
    k = 13 * KINDS[kind][0].block_k
    problem = make_problem(kind, [1, 1, 1], k=k, n=48, block_m=1, spare_tiles=1, bias="float32", **options)
    row_of, weights = jnp.asarray([[2, 0, 1, 0]], jnp.int32), np.asarray([1.25, 2.0, 0.5])
    slot_weights = jnp.asarray([[0.5, 0.25, 2.0, 1.0]])
    shared = jnp.asarray(np.random.default_rng(1).standard_normal((1, 48)), jnp.bfloat16)
    added = np.asarray(shared, np.float64)[0]
    of_sum: dict[str, Any] = dict(row_of=row_of, slot_weights=slot_weights, shared=shared)
    found = run(problem, 2, **of_sum)
    expected = weights @ problem.expected[:3] + added
    magnitude = weights @ np.abs(problem.expected[:3]).max(axis=1) + np.abs(added).max()
    bound = packed_tolerance(kind, jnp.float32).bound(magnitude)
    assert found.shape == (1, 48) and np.abs(found[0] - expected).max() <= bound
    reference = grouped_gemm_packed(*problem.args, **problem.kwargs | of_sum | dict(implementation="reference"))
    assert np.abs(np.asarray(reference)[0] - expected).max() <= bound
    rounded = run(problem, 2, **of_sum | dict(out_dtype=jnp.bfloat16))
    np.testing.assert_array_equal(rounded, found.astype(jnp.bfloat16))


def test_describes_and_refuses():
    desc = PackedDesc(rows=8, n=768, k=2048, num_experts=128, fmt=KINDS["int4 g128"][0])
    assert choose_config(desc, 1, 132) == PackedVectorConfig(4, 4)
    assert describe(desc, PackedVectorConfig(4)).endswith("1 x 16 channels a warp, K in 4 parts, 384 CTAs")
    short = dataclasses.replace(desc, k=256)
    assert choose_config(short, 1, 132) == PackedVectorConfig(2)
    assert describe(short, PackedVectorConfig(1)).endswith("1 x 16 channels a warp, 96 CTAs")
    wide = dataclasses.replace(desc, num_experts=1, widths=(736, 32))
    assert choose_config(wide, 1, 132) == PackedVectorConfig(4, 4)
    for change, config, match in (
        (dict(k=520), PackedVectorConfig(4), "whole blocks of 64"),
        ({}, PackedVectorConfig(3), "k_split=3: one of 1, 2, 4"),
        (dict(unpermuted_rows=2), PackedVectorConfig(4), "the same 2 rows"),
        (dict(num_experts=1, widths=(736, 32)), PackedVectorConfig(1), "multiples of the 64 columns of a CTA"),
        (dict(num_tokens=1, top_k=9, rows=9), PackedVectorConfig(4), "the sum of 9 rows: at most 8"),
        (dict(num_tokens=2, top_k=4), PackedVectorConfig(4), "of one token in tiles of one row, with no"),
        (dict(num_tokens=1, top_k=8), PackedVectorConfig(4, block_m=4), "of one token in tiles of one row, with no"),
        ({}, PackedVectorConfig(4, block_m=3), "block_m=3: one of 1, 4 rows"),
        (dict(num_tokens=1, top_k=8), PackedConfig(8, 4, 2, 3), "tiles of one row alone"),
    ):
        reason = config_error(dataclasses.replace(desc, **change), config)
        assert reason is not None and match in reason
    adding = dataclasses.replace(desc, num_tokens=1, top_k=8, n=2048)
    assert describe(adding, PackedVectorConfig(4)).endswith("128 CTAs, which add up 8 rows")
    assert adds_up_at_once(adding, 132) and not adds_up_at_once(dataclasses.replace(adding, n=2128), 132)
    sizes = (
        (2, 4096, 2048, True),
        (4, 2880, 2048, False),
        (4, 4096, 2048, True),
        (8, 960, 2048, True),
        (8, 944, 2048, False),
    )
    for rows, n, k, is_balanced in (*sizes, (8, 2048, 256, True), (8, 2048, 192, False)):  # CTAs of 32 columns, of 64
        assert adds_up_at_once(dataclasses.replace(adding, rows=rows, top_k=rows, n=n, k=k), 132) == is_balanced
    refuses(NotImplementedError, "whole blocks of 64", choose_config, dataclasses.replace(desc, k=520), 1, 132)


def test_ring():
    """A warp's whole part of K where it is small, else as many blocks as there is room for, or few; at least three."""
    desc = PackedDesc(rows=8, n=2048, k=2048, num_experts=32, fmt=KINDS["int4 g128"][0], scale_dtype="bfloat16")
    gated = dict(projections=2, activation=Activation("silu"))
    deep, shallow = PackedVectorConfig(4), PackedVectorConfig(4, 4)
    # Slots of 2688 bytes, 4864 of both projections, 8704 in mxfp8: 32 and 24 KiB hold 12 and 9, 6 and 5, 3 and 2.
    for changes, steps, of_deep, of_shallow in (
        (dict(k=256), 1, 1, 1),
        (dict(k=2304), 9, 9, 9),
        (dict(k=2560), 10, 10, 4),
        (dict(k=3072), 12, 12, 4),
        (dict(k=3328), 13, 12, 4),
        (dict(k=3328, num_tokens=1, top_k=8), 13, 9, 4),
        (dict(k=1280, **gated), 5, 5, 5),
        (dict(k=1536, **gated), 6, 6, 4),
        (dict(k=7168, **gated), 28, 6, 4),
        (dict(k=7168, fmt=KINDS["mxfp8"][0], **gated), 28, 3, 3),
    ):
        for config, slots in ((deep, of_deep), (shallow, of_shallow)):
            ring = vector.ring_of(dataclasses.replace(desc, **changes), config)
            assert (ring.steps, ring.slots) == (steps, slots), changes
            assert ring.ahead == slots - (slots < steps)
    # Four rows: slots of 4224 and 6400 bytes, of which 32 KiB hold 7 and 5.
    for changes, slots in ((dict(k=1792), 7), (dict(k=2048), 7), ({"k": 1280, **gated}, 5), ({"k": 7168, **gated}, 5)):
        assert vector.ring_of(dataclasses.replace(desc, **changes), PackedVectorConfig(4, block_m=4)).slots == slots


def test_rounds():
    """Few blocks where SMs have several warpgroups; no second round of a few CTAs of gate and up projections."""
    desc = PackedDesc(rows=8, n=2048, k=7168, num_experts=32, fmt=KINDS["int4 g128"][0], scale_dtype="bfloat16")
    gated = dict(projections=2, activation=Activation("silu"))
    # 7 warpgroups on each of 132 SMs are 924: 1024 leave 100 for a second round, 1792 fill it, 720 have none.
    for changes, expected in (
        (gated, PackedVectorConfig(2, 4)),
        (dict(k=256, **gated), PackedVectorConfig(2, 4)),  # two blocks a warp come first
        (dict(n=14336, rows=2, **gated), PackedVectorConfig(4, 4)),
        (dict(n=2880, rows=4, **gated), PackedVectorConfig(4, 4)),
        (dict(n=5600, rows=4, **gated), PackedVectorConfig(4, 4)),  # 1400: the second round is half full
        (dict(n=4096, **gated), PackedVectorConfig(4, 4)),  # 2048: of a third round
        ({}, PackedVectorConfig(4, 4)),
        (dict(num_tokens=1, top_k=8), PackedVectorConfig(4, 4)),
        (dict(n=656, **gated), PackedVectorConfig(4)),  # 328 of 330
        (dict(n=672, **gated), PackedVectorConfig(4, 4)),  # 336
        (dict(rows=1), PackedVectorConfig(4)),
    ):
        assert choose_config(dataclasses.replace(desc, **changes), 1, 132) == expected, changes
    assert choose_config(dataclasses.replace(desc, **gated), 1, 264) == PackedVectorConfig(4, 4)  # 1024 of 1848
    # Eight tiles of four rows are as many CTAs as eight of one.
    for changes in (gated, dict(n=656, **gated)):
        few, one = (dataclasses.replace(desc, rows=rows, **changes) for rows in (32, 8))
        expected = dataclasses.replace(choose_config(one, 1, 132), block_m=4)
        assert choose_config(few, 4, 132) == expected


_GATED_DESC: dict[str, Any] = dict(projections=2, activation=Activation("silu"), bias_dtype="bfloat16")


def test_lowers_for_cuda():
    """One of each place of scales, gated and alone; every format is compiled in sass/."""
    for kind, k_split in (("int4 g128 asym", 4), ("nvfp4", 2), ("w4a8 int8 channel", 1), ("mxfp4 fp8", 4)):
        for options in (_GATED_DESC, {}):
            fmt, scale_dtype, _ = KINDS[kind]
            desc = PackedDesc(
                rows=8,
                n=208,
                k=640,
                num_experts=4,
                fmt=fmt,
                scale_dtype=scale_dtype or "float32",
                has_channel_scale=fmt.scale != "group",
                lhs_scale="row",
                **options,
            )
            assert packed_case("", desc, PackedVectorConfig(k_split)).launches() == 1
