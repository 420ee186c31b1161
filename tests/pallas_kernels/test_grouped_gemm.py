"""grouped_gemm: the reference against NumPy float64, refusals, configurations, and lowering for CUDA without a GPU.

Layout contract: see gemm_problem.py. The numerics of the Hopper kernel are in test_grouped_gemm_gpu.py.
"""

import dataclasses
import functools
import itertools
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm import (
    GemmConfig,
    GemmDesc,
    VectorConfig,
    candidates,
    choose_config,
    config_error,
    grouped_gemm,
    pipeline_sm90,
    scheduler_sm90,
)
from pallas_kernels.grouped_gemm.api import describe_gemm
from pallas_kernels.grouped_gemm.config import shared_arrays, shared_memory
from pallas_kernels.grouped_gemm.heuristics import choose_block_m, describe, large_m_heights, refusal, space, tile_work
from pallas_kernels.grouped_gemm.packed import PackedConfig, PackedDesc, PackedVectorConfig
from pallas_kernels.grouped_gemm.scheduler_sm90 import tile_index, tiles_of_cta
from tests.support.cases.hopper_layers import on_hopper
from tests.support.kernels import warpgroups
from tests.support.kernels.case import launches
from tests.support.kernels.cases import GEMMS, PACKED, cluster_cases, gemm, gemm_case, packed_case
from tests.support.kernels.gemm_problem import (
    KINDS,
    ROUTINGS,
    dequantized,
    gemm_tolerance,
    make_problem,
    reference_of,
    together_and_apart,
)
from tests.support.oracles.tolerances import Tolerance
from tests.support.refusals import refuses

SILU = Activation("silu")
OAI = Activation("swigluoai", limit=7.0, alpha=1.702, beta=1.0)

reference = reference_of(grouped_gemm)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_against_float64(kind):
    problem = make_problem(kind, ROUTINGS["ragged"], k=160, n=136)
    problem.assert_close(reference(problem), gemm_tolerance(kind, jnp.bfloat16))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_reference_routings(routing):
    problem = make_problem("fp8_row", ROUTINGS[routing], k=128, n=64, out_dtype=jnp.float32)
    problem.assert_close(reference(problem), gemm_tolerance("fp8_row", jnp.float32))


@pytest.mark.parametrize("activation", [SILU, OAI, Activation("swiglustep", limit=1.0), Activation("gelu_tanh")])
def test_reference_gated(activation):
    problem = make_problem(
        "fp8_block",
        [9, 0, 70],
        k=192,
        n=160,
        projections=2,
        activation=activation,
        bias="float32",
        out_dtype=jnp.float32,
    )
    problem.assert_close(reference(problem), gemm_tolerance("fp8_block", jnp.float32))


def test_reference_requantized():
    common = dict(k=128, n=192, projections=2, activation=SILU)
    scales = {}
    for requantize in ("group", "group_ue8m0"):
        grouped = make_problem("fp8_block", [5, 66], requantize=requantize, **common)
        out = reference(grouped)
        assert out[0].dtype == jnp.float8_e4m3fn and out[1].shape == (2, out[0].shape[0])
        # Half a step of three mantissa bits.
        grouped.assert_close(dequantized(out), Tolerance(np.float32, 64.0, 1 / 16))
        scales[requantize] = np.asarray(out[1], np.float64)
    np.testing.assert_array_equal(scales["group_ue8m0"], np.exp2(np.ceil(np.log2(scales["group"]))))
    static = make_problem("fp8_tensor", [5, 66], requantize="tensor", **common)
    scale = float(static.kwargs["out_scale"])
    codes = np.asarray(reference(static)).astype(np.float64)
    clipped = dataclasses.replace(static, expected=np.clip(static.expected, -448 * scale, 448 * scale))
    clipped.assert_close(codes * scale, Tolerance(np.float32, 64.0, 1 / 16))


@pytest.mark.parametrize("requantize", ["group", "group_ue8m0", "tensor"])
def test_reference_requantizes_as_rows_are_apart(requantize):
    kind = "fp8_tensor" if requantize == "tensor" else "fp8_block"
    problem = make_problem(kind, [5, 66], k=128, n=256, projections=2, activation=SILU, requantize=requantize)
    (codes, scales), (apart, apart_scales) = together_and_apart(problem, reference, "reference")
    np.testing.assert_array_equal(codes, apart)
    np.testing.assert_array_equal(scales, apart_scales)


def test_padding_and_tiles_out_of_use_do_not_matter():
    clean = make_problem("fp8_row", [3, 65], k=64, n=64)
    dirty = make_problem("fp8_row", [3, 65], k=64, n=64, padding=np.nan)
    own = clean.row_expert >= 0
    np.testing.assert_array_equal(np.asarray(reference(clean))[own], np.asarray(reference(dirty))[own])


def test_the_same_rows_in_every_tile():
    """Small integers, so that every sum is exact."""
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((5, 64), (3, 48, 64)))
    tile_expert = jnp.asarray([2, 0, -1], jnp.int32)
    operands = (jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), tile_expert, jnp.int32(2))
    options = dict(block_m=8, out_dtype=jnp.float32, implementation="reference")
    scales = np.exp2(rng.integers(-2, 3, 8)).astype(np.float32)
    scales[5:] = np.nan  # of no row
    w_scale = np.exp2(rng.integers(-2, 3, (3, 48))).astype(np.float32)
    out = grouped_gemm(*operands, **options)
    scaled = grouped_gemm(*operands, x_scale=jnp.asarray(scales), w_scale=jnp.asarray(w_scale), **options)
    assert out.shape == scaled.shape == (24, 48)
    for tile, expert in enumerate((2, 0)):
        rows, expected = slice(8 * tile, 8 * tile + 5), x @ w[expert].T
        np.testing.assert_array_equal(out[rows], expected)
        np.testing.assert_array_equal(scaled[rows], expected * scales[:5, None] * w_scale[expert])


def test_wrong_calls():
    good = make_problem("fp8_row", [3, 65], k=64, n=64)
    x, w, tile_expert, num_tiles = good.args
    x_scale, w_scale = good.kwargs["x_scale"], good.kwargs["w_scale"]

    def call(x=x, w=w, tile_expert=tile_expert, num_tiles=num_tiles, **kwargs):
        return jax.eval_shape(lambda *a: grouped_gemm(*a, **kwargs), x, w, tile_expert, num_tiles)

    refuses(ValueError, r"w has K=64", call, x=x[:, :32])
    refuses(TypeError, "both operands have one dtype", call, x=x.astype(jnp.bfloat16))
    refuses(ValueError, r"needs \(E, 2, N, K\)", call, activation=SILU)
    refuses(ValueError, r"no activation needs \(E, 1, N, K\)", call, w=jnp.stack([w, w], 1))
    refuses(ValueError, "tile_expert has shape", call, tile_expert=jnp.zeros(7, jnp.int32))
    refuses(TypeError, "num_tiles is int8", call, num_tiles=jnp.int8(1))
    refuses(ValueError, r"x_scale has shape \(3,\), expected one of \(\) \(tensor\)", call, x_scale=jnp.ones(3))
    refuses(TypeError, "w_scale is bfloat16, expected float32", call, w_scale=w_scale.astype(jnp.bfloat16))
    refuses(ValueError, "bias has shape", call, bias=jnp.ones(64))
    refuses(ValueError, "out_scale is given exactly when", call, requantize="tensor")
    refuses(ValueError, "x has 320 rows, expected 1 to block_m=64", call, block_m=64)
    with pytest.raises(ValueError, match=r"x_scale has shape \(9,\), expected one of \(\) \(tensor\), \(64,\) \(row\)"):
        call(x=x[:9], block_m=64, x_scale=jnp.ones(9))
    refuses(ValueError, "implementation 'triton' of grouped_gemm is not one of", call, implementation="triton")
    with pytest.raises(NotImplementedError, match="hopper: needs a Hopper GPU"):
        call(x_scale=x_scale, w_scale=w_scale, implementation="hopper")
    refuses(ValueError, "tiles of 64 rows", call, implementation="hopper", config=GemmConfig(128, 64, 2))


def test_wrong_calls_that_quantize():
    w, scales = jnp.zeros((3, 64, 256), jnp.float8_e4m3fn), dict(channel=jnp.ones((3, 64)), block=jnp.ones((3, 1, 2)))
    tiles = jnp.zeros(4, jnp.int32), jnp.int32(4)

    x = jnp.zeros((4, 256), jnp.bfloat16)

    def call(quantization, x=x, scale="channel", **kwargs):
        return grouped_gemm(x, w, *tiles, quantization=quantization, w_scale=scales[scale], **kwargs)

    refuses(ValueError, "quantization='e4m3' is not one of 'none', 'e4m3_row'", call, "e4m3")
    refuses(TypeError, "w float8_e4m3fn; with quantization='int8_row' .* w is int8", call, "int8_row")
    refuses(TypeError, "x is float8_e4m3fn", call, "e4m3_row", w[0, :4])
    refuses(ValueError, "x_scale goes without", call, "e4m3_row", x_scale=jnp.ones(4))
    refuses(ValueError, "quantization='e4m3_group' with scales of w 'channel'; expected 'block'", call, "e4m3_group")
    refuses(ValueError, "quantization='e4m3_row' with scales of w 'block'", call, "e4m3_row", scale="block")
    assert call("e4m3_row").shape == call("e4m3_group_ue8m0", scale="block").shape == (4, 64)


def test_configurations_of_other_kernels():
    """Each product names its own; the reference asks for none."""
    x, tiles = jnp.zeros((4, 256), jnp.bfloat16), (jnp.zeros(4, jnp.int32), jnp.int32(4))
    call = functools.partial(
        grouped_gemm, x, jnp.zeros((3, 64, 256), jnp.bfloat16), *tiles, config=PackedVectorConfig(4)
    )
    refuses(
        NotImplementedError,
        "config is PackedVectorConfig; these kernels take GemmConfig or",
        call,
        implementation="hopper",
    )
    assert call().shape == (4, 64)


def test_rows_are_quantized_or_added_up():
    """Each alone the kernel of single rows has; both would make every warp quantize all rows."""
    alone: dict[str, Any] = dict(rows=2, n=64, k=256, num_experts=2, dtype="int8", lhs_scale="row", rhs_scale="channel")
    added = dict(num_tokens=1, top_k=2)
    for quantization, more in (("int8_row", {}), ("none", added)):
        assert config_error(GemmDesc(**alone, **more, quantization=quantization), VectorConfig(1)) is None
    reason = config_error(GemmDesc(**alone, **added, quantization="int8_row"), VectorConfig(1))
    assert reason is not None and "every warp would quantize all of them" in reason


def test_wrong_calls_that_add_up():
    x, w, tiles = jnp.zeros((4, 256), jnp.bfloat16), jnp.zeros((3, 64, 256), jnp.bfloat16), jnp.zeros(4, jnp.int32)
    row_of, slot_weights = jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2))

    def call(w=w, row_of=row_of, slot_weights=slot_weights, **kwargs):
        return grouped_gemm(x, w, tiles, jnp.int32(4), row_of=row_of, slot_weights=slot_weights, **kwargs)

    refuses(ValueError, "row_of and slot_weights go together", call, slot_weights=None)
    refuses(ValueError, "shared with both", call, row_of=None, slot_weights=None, shared=x[:1, :64])
    refuses(ValueError, "goes without an activation", call, jnp.stack([w, w], 1), activation=SILU)
    refuses(ValueError, "found requantize='group' and keeps_before=False", call, requantize="group")
    refuses(ValueError, "found requantize='none' and keeps_before=True", call, keeps_before=True)
    refuses(
        ValueError, r"row_of has shape \(1, 0\), expected", call, row_of=row_of[:, :0], slot_weights=jnp.ones((1, 0))
    )
    refuses(ValueError, r"row_of has shape \(0, 2\), expected", call, row_of=row_of[:0], slot_weights=jnp.ones((0, 2)))
    refuses(ValueError, r"shared has shape \(64,\), expected \(1, 64\)", call, shared=x[0, :64])
    refuses(TypeError, "shared is int32; expected float32", call, shared=jnp.ones((1, 64), jnp.int32))
    assert call(shared=x[:1, :64]).shape == (1, 64)


# The Hopper kernel, without a GPU.

DESC = GemmDesc(rows=1024, n=512, k=512, num_experts=4, dtype="float8_e4m3fn")
ROW = dict(lhs_scale="row", rhs_scale="channel")
BLOCK = dict(lhs_scale="group", rhs_scale="block")
GATED = dict(projections=2, activation=SILU)
UNSCALED = dict(dtype="bfloat16", lhs_scale="none", rhs_scale="none")
WIDE = dict(swap_ab=True, block_n=256)  # of a configuration


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("name", GEMMS)
@pytest.mark.sample(5)
def test_lowers_for_cuda(name, block_m):
    desc = gemm(name)
    config = candidates(desc, block_m, 132)[0]
    assert gemm_case(name, desc, config).launches() == 1


def arrivals(case):
    """Whether each arrival on a barrier has a fence before it, in the order of the kernel's text."""
    jaxpr = str(case.traced().jaxpr)
    fence = re.compile(r"mgpu_fn=<function fence_async_shared_cta [^=]*(=[^=]*){3}\]\s*$")
    return [fence.search(part) is not None for part in jaxpr.split("barrier_arrive ")[:-1]]


@pytest.mark.parametrize("case", cluster_cases(), ids=lambda case: case.name)
@pytest.mark.sample(5)
def test_clusters_lower_for_cuda(case):
    """Rows, or weights, are what goes to both blocks in a step: one copy, or one of each half or piece."""
    in_parts = "x 2 x" in case.name or ("fp8 block" in case.name and "x 256" in case.name)
    shared = 2 if "sharing weights" in case.name and in_parts else 1
    assert str(case.traced().jaxpr).count("collective_axes=('pair',)") == shared
    assert case.launches() == 1


@pytest.mark.parametrize("swap_ab", [False, True])
def test_stores_of_a_column_tile_past_the_last_are_off(swap_ab):
    """The second block of a pair has one where there is an odd number; of an output one tile wide it is column 0."""

    def stores(cluster, n):
        config = GemmConfig(64, 64, 3, swap_ab=swap_ab, cluster=cluster)
        case = gemm_case("bf16", dataclasses.replace(gemm("bf16"), n=n), config)
        jaxpr = str(case.traced().jaxpr)
        return jaxpr.count("copy_smem_to_gmem"), jaxpr.count("copy_smem_to_gmem[user_predicate=")

    assert [stores(1, 64), stores(2, 64), stores(2, 128)] == [(1, 0), (1, 1), (1, 0)]


READ_BY_WARPGROUPS = ("fp8 block", "fp8 block, bias", "int4 channel", "int4 to int8 g64, zero points", "mxfp4 to e4m3")


@pytest.mark.parametrize("name", READ_BY_WARPGROUPS)
def test_what_warpgroups_read_themselves_is_freed_behind_a_fence(name):
    """Bulk copies overwrite it. Matrix instructions alone read the slots of the other formats."""
    if name in PACKED:
        desc = PackedDesc(**dict(rows=1024, n=512, k=512, num_experts=4) | PACKED[name])
        case = packed_case(name, desc, PackedConfig(64, 2, 1, 2))
    else:
        case = gemm_case(name, gemm(name), GemmConfig(128, 128, 3))
    found = arrivals(case)
    assert found and all(found)


def test_slots_that_matrix_instructions_read_are_freed_without_a_fence():
    """The slot, then the tile's vectors."""
    assert arrivals(gemm_case("fp8 row", gemm("fp8 row"), GemmConfig(128, 128, 3))) == [False, True]


@pytest.mark.parametrize("name", GEMMS)
def test_candidates_are_valid_and_deepest(name):
    desc = gemm(name)
    for block_m in (64, 128):
        found = candidates(desc, block_m, 132)
        assert found
        for config in found:
            assert config_error(desc, config) is None
            deeper = dataclasses.replace(config, num_stages=config.num_stages + 1)
            assert config.num_stages == 8 or "shared memory" in config_error(desc, deeper)
    swapped = candidates(desc, 16, 132)
    assert all(config.swap_ab and config_error(desc, config) is None for config in swapped)
    is_swappable = desc.requantize == "none" or desc.n % 128 == 0
    is_swappable &= desc.out_dtype != "float32" and not desc.transposes_w
    assert bool(swapped) == is_swappable


def test_rows_of_a_tile():
    # Nearly two standard deviations above the expected rows: few experts need a second tile.
    assert [choose_block_m(r) for r in (1.0, 50.0, 51.0, 256.0)] == [64, 64, 128, 128]
    rows = [choose_block_m(r, may_swap=True) for r in (1.0, 9.0, 10.0, 16.0, 32.0, 64.0, 79.0, 81.0)]
    assert rows == [16, 16, 24, 24, 48, 80, 96, 128]


def test_rows_of_large_m_tiles():
    # The fewest tiles count, and of equal ones the lowest: mean and two deviations are 288 rows for 256.
    rows = [choose_block_m(r, may_swap=True) for r in (110.0, 128.0, 256.0, 280.0, 384.0)]
    assert rows == [128, 160, 144, 160, 192]
    rows = [choose_block_m(r, may_swap=True, may_be_large_m=False) for r in (8.0, 36.0, 50.0, 64.0, 128.0, 256.0)]
    assert rows == [16, 48, 64, 80, 128, 128]
    assert 128 not in large_m_heights(256.0)
    rng = np.random.default_rng(0)
    for mean, block_m in ((100.0, 112), (256.0, 128), (512.0, 176)):
        drawn = -(-rng.poisson(mean, 20_000) // block_m)
        assert tile_work(mean, block_m) == pytest.approx(drawn.mean() * max(block_m + 256, 2.5 * block_m), rel=0.01)


def test_blocks_in_words():
    alone = GemmConfig(128, 256, 4)
    pair = dataclasses.replace(alone, cluster=2)
    said = [describe(DESC, one) for one in (alone, pair, dataclasses.replace(pair, shares_weights=True))]
    assert [text.rpartition(" persistent ")[2] for text in said] == [
        "CTAs",
        "CTAs in pairs that share rows",
        "CTAs in pairs that share weights",
    ]


def test_every_prune_has_a_reason():
    desc = gemm("fp8 block gated, requantized, ragged")
    pruned = {c.block_n: refusal(desc, c) for c in space(desc, 64, 132) if not c.swap_ab}
    assert pruned.pop(128) is None
    assert "tile's blocks are whole" in pruned[96] and "one group per tile" in pruned[64]
    swapped = {(c.block_n, c.step_blocks): refusal(desc, c) for c in space(desc, 16, 132)}
    assert swapped.pop((128, 2)) is swapped.pop((128, 1)) is None
    assert all("128 columns a tile" in reason for reason in swapped.values())
    for block_m in (64, 128):
        assert f"{block_m} rows with swap_ab" in refusal(gemm("fp8 row"), next(space(gemm("fp8 row"), block_m, 132)))


@pytest.mark.parametrize("name", ["bf16 gated bias", "int8 row", "fp8 tensor", "fp8 block gated"])
def test_swapped_lowers_for_cuda(name):
    desc = gemm(name)
    assert gemm_case(name, desc, choose_config(desc, 8, 132)).launches() == 1


@pytest.mark.parametrize(("name", "block_m", "block_n"), [("bf16 gated bias", 144, 128), ("int8 2880", 176, 256)])
def test_large_m_tiles_lower_for_cuda(name, block_m, block_n):
    desc = dataclasses.replace(gemm(name), rows=8 * block_m)
    config = candidates(desc, block_m, 132)[0]
    assert (config.block_n, config.num_consumers, config.is_large_m) == (block_n, 2, True)
    assert gemm_case(name, desc, config).launches() == 1


@pytest.mark.parametrize(
    ("block_m", "of_one", "of_several"), [(144, (2, 2), (4, 1)), (160, (2, 2), (4, 1)), (192, (3, 1), (3, 1))]
)
@pytest.mark.parametrize(
    ("gate", "block_n"), [({}, 256), (dict(projections=2, activation=OAI), 128)], ids=["plain", "gated"]
)
def test_ring_of_large_m_tiles(block_m, of_one, of_several, gate, block_n):
    """(stages, blocks of K in one), as many as fit: in twos where an expert has one tile, so that weights bind."""
    for tiles, ring in ((1, of_one), (3, of_several)):
        desc = dataclasses.replace(DESC, rows=8 * tiles * block_m, dtype="int8", bias_dtype="bfloat16", **ROW, **gate)
        best = candidates(desc, block_m, 132)[0]
        assert (best.block_n, best.num_stages, best.step_blocks) == (block_n, *ring)


@pytest.mark.parametrize("block_m", [48, 64, 80, 96])
def test_ring_of_gate_and_up(block_m):
    """Where three steps of two blocks do not fit, two do; with block scales up to 80 rows."""
    for scales in (ROW, BLOCK):
        desc = dataclasses.replace(DESC, rows=8 * block_m, projections=2, activation=OAI, **scales)
        found = [c for c in candidates(desc, block_m, 132) if c.swap_ab and c.block_n == 128]
        two_by_two = [c for c in found if (c.num_stages, c.step_blocks) == (2, 2)]
        assert bool(two_by_two) == (block_m != 64 and (scales is ROW or block_m <= 80)), (found, scales)


def test_ring_of_rows_off_128_bytes():
    """K of 2880 bytes: boxes of 64 bytes in steps of four, narrow tiles, from 48 rows on; of two where M is large."""
    for block_m, first in ((24, (128, 1)), (48, (64, 4)), (80, (64, 4)), (160, (256, 2))):
        desc = dataclasses.replace(DESC, rows=128 * block_m, num_experts=128, n=2880, k=2880, dtype="int8", **ROW)
        config = choose_config(desc, block_m, 132)
        assert (config.block_n, config.step_blocks) == first


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(k_parts=3), "K a multiple of it"),  # of 256 columns
        (dict(k_parts=4), "expected block_m, one expert, 4 tiles"),
        (dict(k_parts=0), "k_parts=0"),
        (dict(k_parts=2, block_m=None), "block_m not given"),
        (dict(k_parts=2, bias=jnp.zeros((1, 64))), "no activation, bias, requantize"),
        (dict(k_parts=2, requantize="group"), "no activation, bias, requantize"),
        (dict(k_parts=2, quantization="int8_row", w=jnp.ones((1, 64, 256), jnp.int8)), "quantization or row_of"),
    ],
)
def test_what_has_no_parts(options, match):
    x, w = jnp.ones((64, 256), jnp.bfloat16), jnp.ones((1, 64, 256), jnp.bfloat16)
    tiles = 3 if options["k_parts"] == 3 else 2
    rows = x if options.get("block_m", 64) else jnp.ones((64 * tiles, 256), x.dtype)
    given = dict(x=rows, w=w, tile_expert=jnp.zeros(tiles, jnp.int32), num_tiles=jnp.int32(tiles), block_m=64)
    with pytest.raises(ValueError, match=match):
        grouped_gemm(**(given | dict(implementation="reference") | options))


def test_parts_add_up_to_the_product():
    """Of K in two: the reference, whose tiles see a part each, and the choice of tiles, which is one round."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((5, 256), (1, 64, 256)))
    options = dict(block_m=64, k_parts=2, out_dtype=jnp.float32, implementation="reference")
    y = grouped_gemm(x, w, jnp.zeros(2, jnp.int32), jnp.int32(2), **options).reshape(2, 64, 64)[:, :5]
    expected = np.einsum("tpk,npk->ptn", x.reshape(5, 2, -1), w[0].reshape(64, 2, -1))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    desc = GemmDesc(rows=256, n=2048, k=4096, num_experts=1, dtype="float8_e4m3fn", out_dtype="float32", k_parts=4)
    desc = dataclasses.replace(desc, unpermuted_rows=64, has_tile_rows=True, **BLOCK)
    config = choose_config(desc, 64, 132)
    assert (config.block_n, config.swap_ab, config.row_chunk) == (64, False, None)
    assert choose_config(dataclasses.replace(desc, unpermuted_rows=16), 64, 132).row_chunk == 16


def test_one_matrix_of_few_tiles_has_sharers():
    """Two consumers where tiles of 64 columns are at most half a round, and all of K is in whole steps of both."""
    for n, k, rows, sharers in ((2048, 4096, 64, 2), (2112, 7168, 16, 2), (4288, 7168, 64, 1), (2048, 896, 64, 1)):
        desc = GemmDesc(rows=rows, n=n, k=k, num_experts=1, dtype="float8_e4m3fn", unpermuted_rows=rows, **BLOCK)
        config = choose_config(desc, rows, 132)
        assert (config.sharers, config.step_blocks) == (sharers, 2) if sharers > 1 else config.sharers == 1
        of_experts = dataclasses.replace(desc, num_experts=8, rows=8 * rows, unpermuted_rows=0)
        assert choose_config(of_experts, rows, 132).sharers == 1


@pytest.mark.parametrize("sharers", [2, 3])
def test_sharers_add_up_in_lockstep(monkeypatch, sharers):
    """Three tiles one after the other: nobody writes sums that the first has not read, and it stores all of them."""
    for name, stand_in in warpgroups.stand_ins().items():
        monkeypatch.setattr(pipeline_sm90, name, stand_in, raising=False)
    sums = np.random.default_rng(0).standard_normal((3, sharers, 64, 8)).astype(np.float32)
    stored = []

    def body(partial, partial_full, partial_empty):
        ready = dict(partial=partial, partial_full=partial_full, partial_empty=partial_empty)
        own = pipeline_sm90.lax.axis_index("warpgroup")
        nothing = dict.fromkeys(("x", "w", "full", "empty", "staging"))
        scratch = pipeline_sm90.Scratch(**nothing, **ready)
        config = GemmConfig(8, 64, sharers, swap_ab=True, sharers=sharers)
        cta = pipeline_sm90.CtaContext(None, config, {}, (), scratch, own, jnp.int32(1), sharers=sharers)
        for tile in range(3):
            if int(own) == 0:
                time.sleep(0.05)  # the others would be a tile ahead
            pipeline_sm90.gather_sums(cta, [[jnp.asarray(sums[tile, int(own)])]], stored.append)

    def scratch():
        memory = warpgroups.Memory(np.full((1, sharers - 1, 1, 1, 64, 8), np.nan, np.float32))
        ready = warpgroups.Barriers(1, num_arrivals=sharers - 1)
        return dict(partial=memory, partial_full=ready, partial_empty=warpgroups.Barriers(1))

    warpgroups.run(body, 1, sharers, scratch)
    np.testing.assert_allclose(np.array([one for ((one,),) in stored]), sums.sum(axis=1), rtol=1e-5, atol=1e-6)


def test_narrow_candidates_lower():
    for name in ("fp8 row gated", "fp8 block gated", "bf16"):
        desc = gemm(name)
        narrow = min(candidates(desc, 64, 132), key=lambda config: config.block_n)
        assert narrow.block_n == (64 if desc.is_block_scaled else 32)
        assert gemm_case(name, desc, narrow).launches() == 1


def test_shared_memory_is_not_underestimated():
    # Mosaic refuses a kernel that needs more than a block has; ours says so first.
    desc = gemm("fp8 row")
    config = GemmConfig(128, 256, 4)
    assert config_error(desc, config) is None
    over = dataclasses.replace(config, num_stages=5)
    assert "shared memory" in config_error(desc, over)
    assert shared_memory(desc, over) > 232_448
    refuses(ValueError, "exceeds available shared memory", gemm_case("fp8 row", desc, over).lowered)
    # A tile whose largest values take the last of it.
    largest = dataclasses.replace(gemm("fp8 block gated, requantized"), rows=1024, bias_dtype="bfloat16")
    tight = GemmConfig(32, 128, 3, swap_ab=True, step_blocks=2)
    assert "needs 232528 bytes of shared memory" in config_error(largest, tight)
    assert config_error(dataclasses.replace(largest, requantize="none"), tight) is None


@pytest.mark.parametrize(
    ("change", "config", "match"),
    [
        (dict(dtype="float32"), {}, "have no wgmma here"),
        (dict(k=520), {}, "multiple of 32 bytes"),
        (dict(n=500), {}, "N of 8"),
        (dict(lhs_scale="group"), {}, "1x128 goes with 128x128"),
        (dict(dtype="int8", **BLOCK), {}, "only float8_e4m3fn is promoted"),
        (dict(activation=Activation("gelu"), projections=2), {}, "erf has no layout rule"),
        (dict(rows=1000), {}, "not a multiple of block_m"),
        (dict(unpermuted_rows=136), {}, "a tile has 128"),
        (dict(unpermuted_rows=9), {}, "up to 8, or a multiple of 8"),
        (dict(k_parts=3), {}, "has to be whole steps of 128 for each"),
        (dict(k_parts=2), dict(cluster=2, shares_weights=True), "k_parts=2 in clusters"),
        ({}, dict(block_m=32), "64 or 128"),
        ({}, dict(block_n=512), "at most 256 weight rows"),
        (BLOCK, dict(block_n=96), "tile's blocks are whole"),
        (dict(requantize="group", **ROW), dict(block_n=64), "one group per tile"),
        ({}, dict(num_stages=1), "at least 2"),
        ({}, dict(step_blocks=3), "1, 2 or 4"),
        (BLOCK, dict(step_blocks=2), "built with swap_ab alone"),
        (dict(k=384, **BLOCK), dict(swap_ab=True, block_m=16, step_blocks=2), "whole steps where every 128"),
        ({}, dict(row_chunk=16), "needs tile_rows"),
        ({}, dict(sharers=2), "swap_ab in small-M tiles of 64 columns"),
        (GATED, dict(swap_ab=True, block_m=16, block_n=64, sharers=2), "one projection"),
        ({}, dict(swap_ab=True, block_m=16, block_n=64, num_stages=3, sharers=2), "3 stages, each has to have as many"),
        (dict(k=384), dict(swap_ab=True, block_m=16, block_n=64, num_stages=4, sharers=2), "K steps and 4 stages"),
        ({}, dict(swap_ab=True, block_m=16, block_n=64, sharers=5), "1 to 4 consumers"),
        (dict(has_tile_rows=True), dict(row_chunk=12), "8, 16, 32 or 64"),
        (dict(has_tile_rows=True, **GATED, **UNSCALED), dict(num_stages=2, row_chunk=16), "2 x 128 columns of 16 bits"),
        ({}, dict(swap_ab=True, block_m=256), "the heights with swap_ab"),
        (dict(rows=1008, **GATED), dict(WIDE, block_m=144), "288 accumulators a thread, room for 192"),
        (GATED, dict(WIDE, block_m=80), "80 accumulators a thread"),
        ({}, dict(swap_ab=True, block_m=16, block_n=96), "four warpgroups of 64 channels"),
        ({}, dict(swap_ab=True, block_m=16, row_chunk=8), "moved whole"),
        (dict(requantize="tensor"), dict(swap_ab=True, block_m=16, block_n=64), "128 columns a tile"),
        (dict(requantize="tensor", n=576), dict(swap_ab=True, block_m=16), "N=576: 128 columns a tile"),
        (dict(requantize="tensor", out_dtype="float16"), dict(swap_ab=True, block_m=16), "float16 is not built"),
        (dict(requantize="tensor", rows=1008), dict(swap_ab=True, block_m=144), "large-M tiles"),
        (dict(requantize="tensor"), dict(swap_ab=True, block_m=16, cluster=2), "clusters"),
        (dict(rows=1008, **BLOCK), dict(swap_ab=True, block_m=144), "at most 96"),
        (BLOCK, dict(swap_ab=True, block_m=16, cluster=2), "128x128 weight blocks: not built"),
        (BLOCK, dict(WIDE, block_m=64), "64 accumulators a thread, room for 40 with 4"),
        (dict(out_dtype="float32"), dict(swap_ab=True, block_m=16), "16-bit rows"),
        ({}, dict(cluster=3), "1 or 2 CTAs"),
        ({}, dict(cluster=2, num_sms=131), "an even number"),
        ({}, dict(cluster=2, swap_ab=True, block_m=8), "each CTA loads half of the rows"),
        (dict(has_tile_rows=True), dict(cluster=2, row_chunk=16), "both CTAs load whole tiles"),
        ({}, dict(shares_weights=True), "two CTAs to share"),
    ],
)
def test_config_error(change, config, match):
    desc = dataclasses.replace(DESC, **change)
    reason = config_error(desc, dataclasses.replace(GemmConfig(128, 128, 3), **config))
    assert reason is not None and match in reason


@pytest.mark.parametrize(
    "change",
    [
        dict(**GATED, **ROW),
        dict(bias_dtype="bfloat16", **GATED),
        dict(bias_dtype="float32", **GATED, **ROW),
    ],
)
@pytest.mark.parametrize("block_n", [16, 48, 96])
def test_scales_and_biases_of_a_projection_start_where_a_tma_copy_may(change, block_n):
    desc, config = dataclasses.replace(DESC, **change), GemmConfig(128, block_n, 3)
    assert config_error(desc, config) is None
    arrays = shared_arrays(desc, config)
    for (projections, columns), dtype in (arrays[name] for name in ("columns", "bias") if name in arrays):
        assert projections == 2 and columns >= block_n and columns * jnp.dtype(dtype).itemsize % 128 == 0


def test_choice_of_width():
    assert choose_config(gemm("fp8 row"), 128, 132).block_n == 64  # 8 row tiles: narrow tiles reach more blocks
    # One token of qwen3: 8 experts, and tiles for 128 of 132 SMs where 64 columns make 96.
    token = dataclasses.replace(gemm("fp8 row gated"), rows=512, n=768, k=2048, num_experts=128)
    assert choose_config(token, 64, 132).block_n == 48
    token = dataclasses.replace(token, **UNSCALED)
    assert choose_config(token, 64, 132).block_n == 48
    assert choose_config(dataclasses.replace(token, rows=64), 8, 132).block_n == 64
    prefill = dataclasses.replace(gemm("fp8 row"), rows=1 << 16)
    assert choose_config(prefill, 128, 132) == GemmConfig(128, 256, 4)
    assert choose_config(gemm("fp8 block gated, requantized"), 64, 132).block_n == 128
    with pytest.raises(NotImplementedError, match="have no wgmma here"):
        choose_config(dataclasses.replace(DESC, dtype="float32"), 64, 132)


def test_whole_call_lowers_and_names_the_device():
    problem = make_problem(
        "fp8_block", [70, 3], k=256, n=256, block_m=128, projections=2, activation=SILU, requantize="group"
    )
    arrays, _ = problem.split()

    def call(args, arrays):
        return grouped_gemm(*args, **arrays, activation=SILU, requantize="group", implementation="hopper")

    with on_hopper():
        assert launches(call, problem.args, arrays) == 1


def test_description_of_a_call():
    problem = make_problem(
        "int8_row", [3], k=64, n=64, projections=2, activation=OAI, bias="bfloat16", with_tile_rows=True
    )
    operands = dict(zip(("x", "w", "tile_expert", "num_tiles"), problem.args, strict=True)) | problem.kwargs
    desc = describe_gemm(operands, OAI, jnp.float16, "none", None, False)
    sizes = dict(rows=192, n=64, k=64, num_experts=1, projections=2)
    dtypes = dict(dtype="int8", out_dtype="float16", bias_dtype="bfloat16")
    assert desc == GemmDesc(**sizes, **dtypes, activation=OAI, has_tile_rows=True, **ROW)


@pytest.mark.parametrize(
    ("row_tiles", "column_tiles", "raster_group_m"), [(1, 1, 8), (5, 3, 2), (16, 4, 8), (19, 7, 8), (3, 5, 8)]
)
def test_schedule_visits_every_tile_once(row_tiles, column_tiles, raster_group_m):
    total, blocks = row_tiles * column_tiles, 4
    linear = jnp.arange(total, dtype=jnp.int32)
    m, n = jax.vmap(lambda i: tile_index(i, jnp.int32(row_tiles), column_tiles, raster_group_m))(linear)
    assert sorted(zip(np.asarray(m).tolist(), np.asarray(n).tolist(), strict=True)) == [
        (i, j) for i in range(row_tiles) for j in range(column_tiles)
    ]
    assert np.all(np.diff(np.asarray(m) // raster_group_m) >= 0)
    counts = [int(tiles_of_cta(jnp.int32(b), jnp.int32(total), blocks)) for b in range(blocks)]
    assert counts == [len(range(b, total, blocks)) for b in range(blocks)]


@pytest.mark.parametrize("cluster", [dict(), dict(cluster=2), dict(cluster=2, shares_weights=True)], ids=str)
@pytest.mark.parametrize(
    ("row_tiles", "column_tiles", "raster_group_m"), [(16, 12, 8), (40, 3, 2), (16, 5, 16), (1, 1, 8)]
)
def test_likely_row_is_the_first_tile(monkeypatch, row_tiles, column_tiles, raster_group_m, cluster):
    """Of every CTA that has a tile, where raster groups are full; and never a row tile that is none."""
    config = GemmConfig(128, 128, 3, raster_group_m, num_sms=132, **cluster)
    taken, place = {}, {}
    monkeypatch.setattr(scheduler_sm90.lax, "axis_index", lambda name: jnp.int32(place[name]))
    monkeypatch.setattr(scheduler_sm90.pl, "when", lambda condition: lambda body: body() if bool(condition) else None)

    def produce(num_tiles, tile):
        taken[place["block"], place["pair"]] = int(tile(0, 0).row) if int(num_tiles) else None

    experts, number = jnp.arange(row_tiles), jnp.full((1,), row_tiles)
    for block, pair in itertools.product(range(132 // config.cluster), range(config.cluster)):
        place |= dict(block=block, pair=pair, warpgroup=config.num_consumers)
        options = dict(registers=None, produce=produce, consume=lambda tile: None)
        scheduler_sm90.run_tiles(config, experts, number, column_tiles, jnp.int32(1), **options)
        found, first = int(scheduler_sm90.likely_row(config, row_tiles, column_tiles)), taken[block, pair]
        assert 0 <= found < row_tiles and (first is None or row_tiles < raster_group_m or found == first)
    assert sum(first is not None for first in taken.values()) >= min(row_tiles * column_tiles, 40)
