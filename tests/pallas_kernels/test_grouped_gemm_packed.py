"""grouped_gemm_packed: order of fragments, the reference against NumPy float64, refusals, and lowering for CUDA without
a GPU.

Layout contract: see packed_problem.py. How words become operands: test_packed_operands.py. The numerics of the Hopper
kernel are in test_grouped_gemm_packed_gpu.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm.packed import (
    PackedConfig,
    PackedDesc,
    PackedFormat,
    candidates,
    choose_block_m,
    choose_config,
    config_error,
    from_kernel_layout,
    grouped_gemm_packed,
    to_kernel_layout,
)
from pallas_kernels.grouped_gemm.packed import format as blocks
from pallas_kernels.grouped_gemm.packed.config import shared_memory
from tests.support.kernels.calls import PACKED_TILES
from tests.support.kernels.cases import packed_case
from tests.support.kernels.gemm_problem import ROUTINGS, reference_of
from tests.support.kernels.packed_problem import KINDS, make_problem, make_stored, packed_tolerance
from tests.support.refusals import refuses

SILU = Activation("silu")
GATED = dict(projections=2, activation=SILU)
FORMATS = {
    "int4": PackedFormat("int4"),
    "int8": PackedFormat("int8"),
    "e2m1": PackedFormat("e2m1"),
    "e4m3": PackedFormat("e4m3"),
    "int4 to int8": PackedFormat("int4", "int8"),
    "int4 to e4m3": PackedFormat("int4", "float8_e4m3fn"),
    "e2m1 to e4m3": PackedFormat("e2m1", "float8_e4m3fn", "e8m0", 32),
}


# Order of a block's words.


@pytest.mark.parametrize("name", FORMATS)
def test_a_thread_finds_its_fragment_in_its_own_words(name):
    """PTX ISA, fragments of A: register i of thread t, at step q of K, holds row and columns as computed here."""
    fmt = FORMATS[name]
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 1 << fmt.bits, (128, 2 * fmt.block_k)).astype(np.uint8)
    words = blocks.to_words(codes, fmt).view(np.uint32)
    assert words.shape == (2, 2, 64 * fmt.block_k * fmt.bits // 32)
    per_register = 32 // (8 if fmt.is_8bit else 16)
    places = blocks._places(fmt)
    threads = np.arange(128)
    row = 16 * (threads // 32) + threads % 32 // 4
    for step, k_half, row_half in np.ndindex(4, 2, 2):
        if fmt.bits == 4 and not fmt.is_8bit:
            word, register = step, 2 * k_half + row_half
        else:
            word, register = 2 * step + k_half, row_half
        # Words come in 16-byte loads of four, 128 threads side by side.
        flat = 512 * (word // 4) + 4 * threads + word % 4
        first = 8 * per_register * step + 4 * per_register * k_half + per_register * (threads % 4)
        for column in range(per_register):
            found = sum((words[1, 0, flat] >> place & 1) << bit for bit, place in enumerate(places[register, column]))
            np.testing.assert_array_equal(found, codes[64 + row + 8 * row_half, first + column])


@pytest.mark.parametrize("name", FORMATS)
def test_places_use_every_bit_once(name):
    assert sorted(blocks._places(FORMATS[name]).reshape(-1)) == list(range(32))


@pytest.mark.parametrize("kind", KINDS)
def test_unpack_inverts_pack(kind):
    stored, _ = make_stored(kind, (2, 2), 72, 160, np.random.default_rng(1))
    packed = to_kernel_layout(KINDS[kind][0], **stored)
    assert packed.words.shape == (2, 2, 2, -(-160 // packed.fmt.block_k), *packed.fmt.block_shape)
    found = from_kernel_layout(packed)
    if KINDS[kind][0].scale == "e4m3":
        # Signs of scales move to the codes, and codes under a zero scale are zeros.
        wide = stored["scale"].astype(np.float32)
        spread = np.repeat(wide, 16, -1)[..., :160]
        flipped = stored["codes"] ^ np.where(np.signbit(spread), 8, 0).astype(np.uint8)
        stored["codes"] = np.where(spread == 0, 0, flipped)
        stored["scale"] = np.abs(wide).astype(stored["scale"].dtype)
    assert found.keys() == stored.keys()
    for name, value in stored.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name].astype(np.float32), value.astype(np.float32), err_msg=name)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "int8 g64 asym", "w4a8 int8 g64"])
def test_packing_on_device_gives_the_same(kind):
    stored, _ = make_stored(kind, (1, 2), 72, 160, np.random.default_rng(1))
    on_device = jax.jit(lambda stored: to_kernel_layout(KINDS[kind][0], **stored))(stored)
    jax.tree.map(
        np.testing.assert_array_equal, to_kernel_layout(KINDS[kind][0], **stored), jax.tree.map(np.asarray, on_device)
    )


def test_powers_of_two_far_apart_survive_packing():
    fmt = KINDS["mxfp4"][0]
    scale = np.array([[[[0, 1], [127, 254]]]], np.uint8)
    found = from_kernel_layout(to_kernel_layout(fmt, codes=np.full((1, 1, 2, 64), 3, np.uint8), scale=scale))["scale"]
    np.testing.assert_array_equal(found, [[[[0, 1], [127, 254]]]])


# The reference.

reference = reference_of(grouped_gemm_packed)


# One of every conversion and place of scales; the others differ in static numbers.
REFERENCE_KINDS = (
    *("int4 channel asym", "int4 g32", "int4 g32 asym f16", "int8 g64 asym", "e4m3 g128"),
    *("nvfp4", "mxfp4", "mxfp8", "w4a8 int8 g128", "w4a8 fp8 channel"),
    *("w4a8 int8 g128 asym", "w4a8 int8 channel asym", "mxfp4 fp8"),
)


@pytest.mark.parametrize("kind", REFERENCE_KINDS)
def test_reference_against_float64(kind):
    problem = make_problem(
        kind, [3, 0, 17], k=160, n=72, activation=SILU, bias="float32", x_scale="row", out_dtype=jnp.float32
    )
    problem.assert_close(reference(problem), packed_tolerance(kind, jnp.float32))


@pytest.mark.parametrize("routing", ["ragged", "nothing routed"])
def test_reference_routings(routing):
    problem = make_problem("nvfp4", ROUTINGS[routing], k=64, n=64, x_scale="tensor", out_dtype=jnp.float32)
    problem.assert_close(reference(problem), packed_tolerance("nvfp4", jnp.float32))


def test_wrong_calls():
    problem = make_problem("int4 g64", [3, 5], k=128, n=64)
    x, w, tile_expert, num_tiles = problem.args

    def call(x=x, w=w, tile_expert=tile_expert, num_tiles=num_tiles, **kwargs):
        return jax.eval_shape(lambda *a: grouped_gemm_packed(*a, **kwargs), x, w, tile_expert, num_tiles)

    refuses(ValueError, r"expected \(Mp, 128\)", call, x=x[:, :64])
    refuses(TypeError, "packed for bfloat16", call, x=x.astype(jnp.float16))
    refuses(ValueError, "w has 1 projections; silu needs 2", call, activation=SILU)
    refuses(ValueError, "tile_expert has shape", call, tile_expert=jnp.zeros(7, jnp.int32))
    refuses(TypeError, "num_tiles is int8", call, num_tiles=jnp.int8(1))
    refuses(ValueError, "bias has shape", call, bias=jnp.ones(64))
    refuses(ValueError, "x_scale is float32", call, x_scale=jnp.ones(3))
    refuses(NotImplementedError, "hopper: needs a Hopper GPU", call, implementation="hopper")
    refuses(ValueError, "tiles of 16 rows", call, implementation="hopper", config=PackedConfig(64, 2, 2, 2))


# The Hopper kernel, without a GPU.

DESC = PackedDesc(rows=1024, n=512, k=512, num_experts=4, fmt=PackedFormat("int4", scale="group", group_size=128))
CONFIG = PackedConfig(16, 4, 2, 4)
FEW = dict(rows=960, **GATED)
G = {g: dict(fmt=PackedFormat("int4", scale="group", group_size=g)) for g in (32, 48, 64)}


def desc_of(kind, **options):
    fmt, scale_dtype, has_channel_scale = KINDS[kind]
    return dataclasses.replace(
        DESC,
        fmt=fmt,
        scale_dtype=scale_dtype or "float32",
        has_channel_scale=has_channel_scale or fmt.scale == "e8m0",
        out_dtype="float16" if fmt.operand == "float16" else "bfloat16",
        lhs_scale="row" if fmt.is_8bit else "none",
        **options,
    )


@pytest.mark.parametrize("kind", REFERENCE_KINDS)
def test_lowers_for_cuda(kind):
    """Small tiles alone and taller gated ones, by turns; every kind at every height is compiled in sass/."""
    block_m = 32 if REFERENCE_KINDS.index(kind) % 2 else 16
    desc = desc_of(kind, **(dict(bias_dtype="bfloat16", **GATED) if block_m == 32 else {}))
    assert packed_case("", desc, next(candidates(desc, block_m, 132))).launches() == 1


@pytest.mark.parametrize("kind", ["nvfp4", "w4a8 int8 g128"])
def test_large_m_tiles_lower_for_cuda(kind):
    desc = desc_of(kind, rows=1152, **GATED)
    assert packed_case("", desc, next(candidates(desc, 144, 132))).launches() == 1


@pytest.mark.parametrize("kind", ["int4 g128", "int4 g128 f32", "nvfp4", "w4a8 int8 g128"])
def test_candidates_are_valid_and_deepest(kind):
    desc = desc_of(kind, rows=1152)
    for block_m in (8, 32, 128, 144):
        found = list(candidates(desc, block_m, 132))
        assert found
        for config in found:
            assert config_error(desc, config) is None
            deeper = dataclasses.replace(config, num_stages=config.num_stages + 1)
            assert config.num_stages == 12 or "shared memory" in str(config_error(desc, deeper))


def test_shared_memory_is_not_underestimated():
    desc = desc_of("nvfp4", **GATED)
    config = next(candidates(desc, 64, 132))
    over = dataclasses.replace(config, num_stages=config.num_stages + 1)
    assert shared_memory(desc, over) > 232_448
    refuses(ValueError, "exceeds available shared memory", packed_case("", desc, over).lowered)


@pytest.mark.parametrize(
    ("change", "config", "match"),
    [
        (dict(out_dtype="int8"), {}, "out_dtype int8"),
        (dict(k=520), {}, "whole blocks of 64"),
        (dict(n=500), {}, "multiple of 32 bytes"),
        (dict(fmt=PackedFormat("e2m1", "float16", "e4m3", 16)), {}, "only bfloat16 holds their scales"),
        (G[48], {}, "groups of 48"),
        (dict(fmt=PackedFormat("int8", "int8")), {}, "int8 activations go with int4 weights"),
        (dict(fmt=PackedFormat("int4", "float8_e4m3fn", has_zero_point=True)), {}, "zero points with int8 and 16 bits"),
        (dict(fmt=PackedFormat("int4", "int8"), k=1 << 18), {}, "stay in 32 bits"),
        (dict(activation=Activation("gelu"), projections=2), {}, "erf has no layout rule"),
        (dict(rows=1000), {}, "not a multiple of block_m"),
        ({}, dict(block_m=40), "is not one of"),
        ({}, dict(num_consumers=5), "is not one of"),
        ({}, dict(step_blocks=9), "longer than K=512"),
        ({}, dict(splits_projections=True), "two projections"),
        (GATED, dict(splits_projections=True, num_consumers=3), "even number"),
        (dict(k=960), dict(step_blocks=3), "do not fit each other"),
        (dict(k=768), dict(step_blocks=6, k_split=2, num_consumers=2), "parts of steps of 192 and groups of 128 do"),
        ({}, dict(block_m=128), "accumulators a thread"),
        (FEW, dict(block_m=24, step_blocks=4, k_split=2), "36 accumulators a thread, room for 32 with 4"),
        (FEW, dict(block_m=24, step_blocks=8, k_split=4), "36 accumulators a thread, room for 32 with 4"),
        (dict(**G[32], **FEW), dict(block_m=24), "36 accumulators a thread, room for 32 with 4"),
        (dict(**G[64], **FEW), dict(block_m=80, num_consumers=2), "100 accumulators a thread, room for 96"),
        (dict(rows=960, **G[64]), dict(block_m=80, num_consumers=2, step_blocks=4), "beside 60 accumulators a thread"),
        (dict(rows=1152), dict(block_m=144), "num_consumers=4 is not one of (2, 3)"),
        (dict(rows=1152, **GATED), dict(block_m=144, num_consumers=2), "of both projections spill"),
        (dict(rows=1152), dict(block_m=192, num_consumers=2), "192 accumulators a thread, room for 176 with 2"),
        ({}, dict(folds_scales=True), "needs group scales in bfloat16"),
        (
            dict(fmt=PackedFormat("e4m3", scale="group", group_size=128), scale_dtype="bfloat16"),
            dict(folds_scales=True, num_consumers=2),
            "e4m3 weights spend the one multiplication on their exponents",
        ),
        ({}, dict(num_stages=1), "at least 2"),
    ],
)
def test_config_error(change, config, match):
    desc = dataclasses.replace(DESC, **change)
    reason = config_error(desc, dataclasses.replace(CONFIG, **config))
    assert reason is not None and match in reason


def test_choices():
    expected = {1.0: 8, 4.0: 8, 9.0: 16, 16.0: 24, 32.0: 48, 64.0: 80, 79.0: 96, 90.0: 112, 256.0: 144, 1000.0: 176}
    for rows, height in expected.items():
        assert choose_block_m(rows) == height
    few = choose_config(dataclasses.replace(DESC, rows=16, k=1024), 16, 132)
    assert few.channel_groups == 1  # one row tile: narrow tiles reach more blocks
    assert few.k_split == few.num_consumers == 4  # whose warpgroups share K then
    many = choose_config(dataclasses.replace(DESC, rows=1 << 14), 16, 132)
    assert (many.num_consumers, many.k_split) == (4, 1)
    gated = desc_of("int4 g128", **GATED)
    assert choose_config(gated, 128, 132).folds_scales and not choose_config(gated, 64, 132).folds_scales
    of_blocks = dataclasses.replace(desc_of("e4m3 g128"), scale_dtype="bfloat16")
    assert not choose_config(of_blocks, 128, 132).folds_scales
    wide_scales = desc_of("int4 g128 f32", **GATED)
    assert choose_config(wide_scales, 128, 132).splits_projections
    assert choose_config(dataclasses.replace(wide_scales, rows=1152), 144, 132).splits_projections
    refuses(NotImplementedError, "accumulators a thread", choose_config, wide_scales, 256, 132)


@pytest.mark.parametrize("mean", [100.0, 128.0, 200.0, 256.0, 512.0, 2048.0])
def test_taller_tiles_where_they_multiply_least(mean):
    """Against rows of experts drawn at random: as good as the best height, each tile's unpacking counted as 32 rows."""
    rows = np.random.default_rng(0).poisson(mean, 100_000)
    work = {height: (-(-rows // height) * (height + 32)).mean() for height in (112, 128, 144, 160, 176)}
    assert work[choose_block_m(mean)] < 1.01 * min(work.values())


@pytest.mark.parametrize("kind", PACKED_TILES)
def test_tiles_of_small_calls_can_run(kind):
    """Those that the sanitizer and the guards see on a GPU (kernel_calls.py): a refusal would show nowhere else."""
    for config in PACKED_TILES[kind]:
        desc = desc_of(kind, rows=8 * config.block_m, n=336, k=1024, bias_dtype="bfloat16", **GATED)
        desc = dataclasses.replace(desc, lhs_scale="row")
        assert config_error(desc, config) is None, config
