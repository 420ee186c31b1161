"""The references of grouped_dgrad and grouped_gemm_widened beside NumPy in float64, which calls and configurations
there are, and the conversion of their weights in NumPy, thread by thread. The kernel runs in test_interpreter.py and,
on a GPU, in test_dgrad_gpu.py.
"""

import dataclasses
import functools
import math
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.align import row_capacity
from pallas_kernels.common.activations import Activation, slopes_refusal, with_slopes
from pallas_kernels.grouped_gemm import dgrad
from pallas_kernels.grouped_gemm.dgrad import (
    DgradConfig,
    DgradDesc,
    choose_config,
    config_error,
    grouped_dgrad,
    grouped_gemm_widened,
    plain_sm90,
    plain_weights,
    stmatrix_sm90,
)
from pallas_kernels.grouped_gemm.dgrad import kernel_sm90 as kernel
from pallas_kernels.grouped_gemm.dgrad.api import flattened, tile_table
from pallas_kernels.grouped_gemm.dgrad.config import MATRICES, operand_names, shared_arrays
from pallas_kernels.grouped_gemm.dgrad.pairs import tile_pairs
from pallas_kernels.grouped_gemm.packed import PackedFormat, dequantize_sm90
from pallas_kernels.grouped_gemm.packed.reference import dequantized
from tests.pallas_kernels import test_packed_operands as operands
from tests.pallas_kernels.test_packed_operands import as_matrix, on_numpy, on_threads  # noqa: F401  two fixtures
from tests.pallas_kernels.test_packed_pipeline import Ref
from tests.support.kernels import warpgroups
from tests.support.kernels.cases import dgrad_cases, plain_dgrad_cases
from tests.support.kernels.dgrad_problem import PLAIN_KINDS, make_pull, make_widened, store_matrices, unpacked
from tests.support.kernels.gemm_problem import ROUTINGS, tiles_of
from tests.support.kernels.packed_problem import KINDS
from tests.support.refusals import refuses

SILU = Activation("silu")
USED = [
    kind
    for kind, (fmt, dtype, _) in KINDS.items()
    if not fmt.is_8bit
    and not (fmt.scale == "group" and (fmt.group_size or 0) < 64 and dtype not in (fmt.operand, "float32"))
]
ACTIVATIONS = [
    SILU,
    Activation("swigluoai", alpha=1.702, beta=1.0),
    Activation("gelu_tanh"),
    Activation("gelu_tanh_no_mul"),
    Activation("silu_no_mul"),
    Activation("relu2_no_mul"),
]


@pytest.mark.parametrize(("kind", "activation"), [("int4 g128 asym", SILU), ("nvfp4", Activation("relu2_no_mul"))])
def test_reference(kind, activation):
    """Of stacked projections, too: rows of the product are (NB, G, 64)."""
    sizes: Any = dict(n=128, k=192, block_m=64, projections=2)
    problem = make_pull(kind, [3, 0, 70], activation=activation, rounds_once=True, **sizes)
    problem.assert_close(grouped_dgrad(*problem.args, **problem.kwargs, implementation="reference"))


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_reference_of_plain_weights(kind):
    """Both ways: projections one below the other, whose 192 channels end in the middle of a block of scales."""
    sizes: Any = dict(n=192, k=192, block_m=64, projections=2)
    for problem in (make_pull(kind, [3, 0, 70], activation=SILU, **sizes), make_widened(kind, [3, 0, 70], **sizes)):
        problem.assert_close(problem.op(*problem.args, **problem.kwargs, implementation="reference"))


def test_int8_codes_become_halves(monkeypatch):
    """Every code, in both pairs of a word."""
    codes = np.arange(-128, 128, dtype=np.int8).reshape(-1, 4)
    monkeypatch.setattr(plain_sm90, "_asm", operands.run_ptx)
    words = codes.view(np.uint32).reshape(-1)
    pairs = [operands.in_registers(plain_sm90._two_halves(words, pair), np.float16) for pair in range(2)]
    np.testing.assert_array_equal(np.concatenate(pairs, axis=1), codes.astype(np.float64))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_slopes_are_the_derivatives(activation):
    """Beside JAX's own derivative of the value, both in float32."""
    keys = jax.random.split(jax.random.key(0))
    given = [3 * jax.random.normal(key, (64, 64)) for key in keys][: 2 if activation.is_gated else 1]
    value, slopes = with_slopes(activation, *given)
    expected, pull = jax.vjp(activation, *given)
    np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6)
    for slope, other in zip(slopes, pull(jnp.ones_like(value)), strict=True):
        np.testing.assert_allclose(slope, other, rtol=2e-5, atol=2e-6)


def test_activations_without_slopes():
    assert "limit=7.0" in str(slopes_refusal(Activation("swiglustep", limit=7.0)))
    assert "erf" in str(slopes_refusal(Activation("gelu_no_mul")))


@pytest.mark.parametrize("block_n", [128, 256])
@pytest.mark.parametrize("kind", USED)
@pytest.mark.sample(5)
def test_numbers_in_shared_memory(kind, block_n, on_threads, monkeypatch):  # noqa: F811
    """Each piece of a step is the stored numbers, every scale applied, rounded once: the second column tile of one
    expert's second block of channels, its scales at the rows that the copies bring.
    """
    problem = make_pull(kind, [64], n=128, k=512, block_m=64)
    w = problem.args[1]
    monkeypatch.setattr(operands, "IS_EXACT", False)
    expected = np.asarray(dequantized(w))[0, 0].astype(np.float64)
    expected = expected[64:128, block_n : 2 * block_n]
    w = jax.tree.map(np.asarray, w)
    desc = dgrad.describe_dgrad(64, w, None)
    config, column, block = DgradConfig(64, block_n, 3), 1, 1
    assert config_error(desc, config) is None
    found = np.zeros((64, block_n))

    def load_block(fmt, ref, width, rows, *vectors):
        beside = [None if vector is None else vector.array.view(f"u{vector.dtype.itemsize}") for vector in vectors]
        words = np.ascontiguousarray(ref.array).view(np.uint32)
        return (as_matrix(fmt, dequantize_sm90.load_block(fmt, words, width, rows, *beside)).astype(np.float32),)

    monkeypatch.setattr(kernel, "load_block", load_block)
    monkeypatch.setattr(
        kernel, "mosaic", types.SimpleNamespace(ROWS=None, load=lambda ref, **_: ref.array.astype(np.float32))
    )
    spread = types.SimpleNamespace(
        broadcast_in_dim=lambda a, shape, _: np.broadcast_to(a[:, None], shape), div=lambda a, b: a // int(b)
    )
    monkeypatch.setattr(kernel, "lax", spread)
    first = kernel._first_group(desc, config, column)
    groups = slice(first, first + dgrad.config.tile_groups(desc, config))
    pieces = slice(column * config.pieces, (column + 1) * config.pieces)
    scratch = dict(w=Ref(w.words[0, block, 0, pieces][None]))
    for name, leaf in (("scale", w.scale), ("zero", w.zero)):
        if leaf is not None:
            scratch[name] = Ref(leaf[0, block, 0, groups][None])
    if w.channel_scale is not None:
        scratch["channel_scale"] = Ref(w.channel_scale[0, block, 0][None])
    cta = kernel._Cta(desc, config, {}, (), scratch, 0, 2)
    for piece in range(config.pieces):
        found[:, 64 * piece : 64 * (piece + 1)] = kernel._dequantized(cta, 0, piece).astype(np.float64)
    step = 2.0**-8 if desc.dtype == "bfloat16" else 2.0**-11
    bound = np.abs(expected) * (step + 2.0**-17) + (0.0 if desc.dtype == "bfloat16" else 2.0**-25)
    assert (np.abs(found / desc.unit - expected) <= bound).all()


@pytest.mark.parametrize(
    ("kind", "config", "k", "activation"),
    [
        ("int4 g64", DgradConfig(64, 128, 4, num_sms=2), 192, SILU),
        ("int4 g128 asym", DgradConfig(128, 128, 3, raster_group_m=2, num_sms=2), 192, None),
        ("int4 channel", DgradConfig(64, 64, 5, num_sms=2), 128, None),
    ],
)
def test_body_in_threads(monkeypatch, kind, config, k, activation):
    """The kernel's body itself, by a thread for each warpgroup: its values, and that no wait is for ever. Three steps
    of N in rings of other lengths, a last column tile past K, and an expert's last tile with an empty half.
    """
    sizes = [3, 0, 70, 129] if config.block_m == 128 else [3, 70]
    problem = make_pull(kind, sizes, n=192, k=k, block_m=config.block_m, activation=activation)
    run_body(monkeypatch, problem, config, activation)


PAIRS = DgradConfig(128, 128, 3, raster_group_m=2, num_sms=2, neighbours=2)


@pytest.mark.parametrize("kind", ["int4 g128 asym", "plain e4m3 block"])
@pytest.mark.parametrize(
    ("sizes", "activation", "config"),
    [
        ([190, 0, 70, 257, 1], SILU, PAIRS),
        ([64, 300], None, dataclasses.replace(PAIRS, num_stages=4)),
    ],
)
def test_body_in_threads_of_pairs(monkeypatch, kind, sizes, activation, config):
    """Experts with odd and even numbers of tiles; two rounds of tiles a CTA, so that a pair without a second tile is
    taken after the one whose rows lie behind it, and before.
    """
    problem = make_pull(kind, sizes, n=192, k=192, activation=activation)
    run_body(monkeypatch, problem, config, activation)


WIDE_GROUPS = (PackedFormat("int4", scale="group", group_size=256), "bfloat16", False)


def test_body_in_threads_of_pairs_in_wide_groups(monkeypatch):
    """Two column tiles share the scales of a group."""
    monkeypatch.setitem(KINDS, "int4 g256", WIDE_GROUPS)
    run_body(monkeypatch, make_pull("int4 g256", [190], n=192, k=512), PAIRS)


def test_body_in_threads_of_pairs_of_whole_tiles(monkeypatch):
    """The number of rows in use is not known; the last pair ends past the array."""
    problem = make_pull("int4 g64", [70, 300], n=192, k=192, has_tile_rows=False)
    (dy, w, tile_expert, _), tiles = problem.args, 4
    own = problem.row_expert[: 128 * tiles]
    problem = dataclasses.replace(
        problem,
        args=(dy[: 128 * tiles], w, tile_expert[:tiles], jnp.int32(tiles)),
        expected=(problem.expected[0][: 128 * tiles],),
        row_expert=own,
    )
    run_body(monkeypatch, problem, PAIRS)


@pytest.mark.parametrize(
    ("kind", "config", "k", "activation"),
    [
        ("plain e4m3 block", DgradConfig(128, 256, 3, raster_group_m=2, num_sms=2), 192, SILU),
        ("plain int8 channel", DgradConfig(64, 64, 5, num_sms=2), 128, None),
    ],
)
def test_body_in_threads_with_plain_weights(monkeypatch, kind, config, k, activation):
    sizes = [3, 0, 70, 129] if config.block_m == 128 else [3, 70]
    problem = make_pull(kind, sizes, n=192, k=k, block_m=config.block_m, activation=activation)
    run_body(monkeypatch, problem, config, activation)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("plain e4m3 block", DgradConfig(128, 128, 3, raster_group_m=2, num_sms=2)),
        ("plain int8 channel f16", DgradConfig(64, 64, 4, num_sms=2)),
        ("plain e4m3 block", PAIRS),
    ],
)
def test_body_in_threads_of_the_forward_product(monkeypatch, kind, config):
    """The last column tile of each expert reaches into the next one's channels; those of the last end at the array."""
    sizes = [3, 0, 70, 129] if config.block_m == 128 else [3, 70]
    run_body(monkeypatch, make_widened(kind, sizes, n=192, k=192, block_m=config.block_m), config)


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_matrices_are_stored_where_wgmma_reads_them(pieces, monkeypatch):
    """The row of 8 columns that each thread names, in tiles of 8 x 64 whose chunks of 8 columns are swizzled."""
    monkeypatch.setattr(stmatrix_sm90, "_asm", operands.run_ptx)
    thread, pair = np.arange(128, dtype=np.uint32)[:, None], np.arange(4)
    found = stmatrix_sm90.row_offset(thread, pieces) ^ np.array([stmatrix_sm90.pair_bits(each) for each in range(4)])
    matrix = thread // 8 % 4
    row = thread // 32 * 16 + matrix % 2 * 8 + thread % 8
    chunk = pair * 2 + matrix // 2
    np.testing.assert_array_equal(found, row // 8 * pieces * 1024 + row % 8 * 128 + (chunk ^ row % 8) * 16)


def run_body(monkeypatch, problem, config, activation=None):
    """The kernel's body on a problem, and what it must give."""
    (dy, w, tile_expert, num_tiles), kwargs = problem.args, problem.kwargs
    contracts_k = problem.op is grouped_gemm_widened
    given = dict(dy=dy, tile_expert=tile_expert, num_tiles=num_tiles, tile_rows=None) | kwargs
    has_tile_rows = given["tile_rows"] is not None
    desc = dgrad.describe_dgrad(len(dy), w, activation, has_tile_rows=has_tile_rows, contracts_k=contracts_k)
    assert config_error(desc, config) is None
    given |= flattened(w) | tile_table(desc, config, given)
    stand_ins = warpgroups.stand_ins()
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(kernel, name, stand_in)
    monkeypatch.setattr(plain_sm90, "mosaic", stand_ins["mosaic"])
    monkeypatch.setattr(plain_sm90, "int8_to_half", lambda codes: codes.astype(jnp.float16))
    monkeypatch.setattr(kernel.accumulator_math_sm90, "sigmoid", jax.nn.sigmoid)

    def load_block(fmt, words, width, rows, *vectors):
        return unpacked(fmt, words.array, width, rows, *(None if v is None else v.array for v in vectors))

    monkeypatch.setattr(kernel, "load_block", load_block)
    monkeypatch.setattr(kernel, "store_matrices", store_matrices)
    outputs = [np.full((desc.rows, desc.projections * desc.width), np.nan, desc.dtype)]
    if activation is not None:
        outputs.append(np.full((-(-desc.k // config.block_n), desc.rows), np.nan, np.float32))
    copies = 2 + desc.has_groups + desc.fmt.has_zero_point + desc.has_channel_scale

    def scratch():
        shapes = shared_arrays(desc, config)
        return dict(
            {name: warpgroups.Memory(np.zeros(shape, dtype)) for name, (shape, dtype) in shapes.items()},
            full=warpgroups.Barriers(config.num_stages, copies),
            ready=warpgroups.Barriers(MATRICES),
            drained=warpgroups.Barriers(MATRICES, config.num_consumers),
            **({} if activation is None else dict(before_full=warpgroups.Barriers(config.num_consumers, 2))),
        )

    refs = [warpgroups.Memory(np.asarray(given[name])) for name in operand_names(desc, config)]
    refs += [warpgroups.Memory(output) for output in outputs]
    body = functools.partial(kernel._kernel, desc, config, *refs)
    warpgroups.run(body, config.num_sms, config.num_consumers + 1, scratch)
    # Of 64 rows without one in use nothing is written, but where whole tiles are computed.
    unit = 64 if has_tile_rows else config.block_m
    is_left = np.repeat(~(problem.row_expert >= 0).reshape(-1, unit).any(1), unit)
    if config.num_consumers > 1:
        assert np.isnan(outputs[0][is_left].astype(np.float32)).all()
        assert activation is None or np.isnan(outputs[1][:, is_left]).all()
    problem.assert_close(outputs[0] if activation is None else (outputs[0], outputs[1].sum(axis=0)))


def pairs_by_loop(tile_expert, num_tiles, tile_rows, block_m):
    """(first tile, expert, rows up to the last one in use) of each pair: those of two tiles, then those of one."""
    found, tile = ([], []), 0
    while tile < num_tiles:
        expert = tile_expert[tile]
        start = tile
        while tile < num_tiles and tile_expert[tile] == expert:
            tile += 1
        for first in range(start, tile, 2):
            rows = 0
            for place, one in enumerate(range(first, min(first + 2, tile))):
                own = block_m if tile_rows is None else tile_rows[one]
                rows = place * block_m + own if own else rows
            found[first + 1 == tile].append((first, expert, rows))
    return found[0] + found[1]


@pytest.mark.parametrize("has_tile_rows", [False, True])
@pytest.mark.parametrize("spare", [0, 1, 40])
@pytest.mark.parametrize(
    "sizes",
    [
        *ROUTINGS.values(),
        [257, 256, 255, 384, 385, 0, 1],
        [128] * 9,
        [0, 1000],
        [129, 0, 0, 500],
        list(np.random.default_rng(0).integers(0, 700, 60)),
    ],
    ids=str,
)
@pytest.mark.sample(5)  # each routing, and beside several of them each number of spare tiles, with rows and without
def test_pairs(sizes, spare, has_tile_rows):
    """Beside a loop; in tables without a tile to spare the last pair ends at the last tile, or has one tile."""
    tile_expert, tile_rows, _ = tiles_of(sizes, 128, spare)
    if not len(tile_expert):
        return
    count, rows = len(tile_expert) - spare, tile_rows if has_tile_rows else None
    expected = pairs_by_loop(tile_expert, count, rows, 128)
    given = None if rows is None else jnp.asarray(rows)
    found = tile_pairs(jnp.asarray(tile_expert), jnp.full((1,), count, jnp.int32), given, 128)
    assert {leaf.dtype for leaf in found.values()} == {jnp.dtype("int32")}
    assert {leaf.shape for leaf in found.values()} == {tile_expert.shape}
    names = ("first_tile", "tile_expert", "tile_rows")
    number = int(found["num_tiles"][0])
    table = zip(*(np.asarray(found[name])[:number].tolist() for name in names), strict=True)
    assert list(table) == expected


@pytest.mark.parametrize("experts", [[1, 0, 1, 1, 1, 0], [0, 1, 0, 1, 0, 1]], ids=str)
def test_pairs_of_an_expert_in_several_places(experts):
    """Up to as many pairs as tiles; and tiles whose rows in use do not fill the first of a pair."""
    rows = [5, 128, 70, 128, 0, 9]
    for count in range(7):
        found = tile_pairs(jnp.asarray(experts, jnp.int32), jnp.int32(count), jnp.asarray(rows, jnp.int32), 128)
        number = int(found["num_tiles"][0])
        columns = (found[name][:number].tolist() for name in ("first_tile", "tile_expert", "tile_rows"))
        assert list(zip(*columns, strict=True)) == pairs_by_loop(experts, count, rows, 128)


def test_the_calls_of_a_backward_pass_share_the_pairs():
    """XLA merges the equal tables of both products: three reductions, not six."""
    tiles = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((384,), (1,), (384,))]

    def both(expert, count, rows):
        one, other = (tile_pairs(expert, count, rows, 128) for _ in range(2))
        return jax.tree.map(lambda a, b: a * b, one, other)

    text = str(jax.jit(both).lower(*tiles).compile().as_text())
    assert len(re.findall(r"s32\[\d+\].* reduce\(", text)) <= 3, text


def test_wrong_calls():
    problem = make_pull("int4 g128", [3], n=64, k=128, activation=SILU)
    (dy, w, *tiles), kwargs = problem.args, problem.kwargs
    for wrong, message in (
        (dict(before=kwargs["before"][:, :128]), r"before is bfloat16\(384, 128\), expected bfloat16 \(384, 256\)"),
        (dict(before=None), "exactly with an activation"),
        (dict(tile_rows=tiles[0][:1]), "tile_rows has shape"),
    ):
        refuses(ValueError, message, grouped_dgrad, dy, w, *tiles, **kwargs | wrong)
    refuses(ValueError, r"dy has shape \(384, 32\), expected \(Mp, 64\)", grouped_dgrad, dy[:, :32], w, *tiles)
    with pytest.raises(TypeError, match="dy is float16, these weights are packed for bfloat16"):
        grouped_dgrad(dy.astype(jnp.float16), w, *tiles)
    with pytest.raises(ValueError, match="w has 2 projections, expected 1: see stacked_projections"):
        words = jnp.concatenate([w.words, w.words], axis=2)
        grouped_dgrad(dy, dataclasses.replace(w, words=words), *tiles)


def test_wrong_plain_weights():
    codes, scale = jnp.zeros((2, 2, 192, 128), jnp.int8), jnp.ones((2, 2, 192))
    refuses(TypeError, "codes are uint8", plain_weights, codes.astype(jnp.uint8), scale, "bfloat16")
    refuses(ValueError, "N=96 to be a multiple of 64", plain_weights, codes[:, :, :96], scale[..., :96], "bfloat16")
    refuses(ValueError, r"scale has shape \(2, 192\), expected one of", plain_weights, codes, scale[:, 0], "bfloat16")
    problem = make_widened("plain int8 channel", [3], n=64, k=128)
    x, *rest = problem.args
    refuses(ValueError, r"x has shape \(384, 64\), expected \(Mp, 128\)", grouped_gemm_widened, x[:, :64], *rest)
    refuses(TypeError, "x is float16, these weights are", grouped_gemm_widened, x.astype(jnp.float16), *rest)


DESC = DgradDesc(rows=4096, n=2048, k=768, num_experts=4, groups=6, fmt=PackedFormat("int4", "bfloat16", "group", 128))


@pytest.mark.parametrize(
    ("desc", "config", "reason"),
    [
        (dict(k=736), {}, "K=736"),
        (dict(n=100), {}, "N=100"),
        (dict(fmt=PackedFormat("int4", "int8", "group", 128)), {}, "words for int8"),
        (dict(fmt=PackedFormat("int4", "float16", "group", 32)), {}, "groups of 32 with scales of float32"),
        (dict(activation=Activation("gelu")), {}, "erf"),
        ({}, dict(block_m=192), "block_m=192"),
        ({}, dict(block_n=96), "block_n=96"),
        ({}, dict(neighbours=3), "neighbours=3"),
        ({}, dict(neighbours=2), "pairs of tiles of 128 x 256: of 128 x 128 alone"),
        (dict(rows=128), dict(neighbours=2, block_n=128), "dy has 128 rows"),
        ({}, dict(block_n=192), "groups of 128"),
        ({}, dict(num_stages=2), "num_stages=2"),
        (dict(n=64), dict(num_stages=4), "the 1 steps of N"),
        ({}, dict(num_stages=7), "bytes of shared memory"),
        (dict(is_plain=True), {}, "e4m3 or int8 with float32 scales"),
        (dict(contracts_k=True), {}, "of plain weights, without an activation"),
        (dict(fmt=PackedFormat("int8"), is_plain=True, contracts_k=True, activation=SILU), {}, "without an activation"),
        (dict(fmt=PackedFormat("int8"), is_plain=True, contracts_k=True, k=64), dict(num_stages=4), "1 steps of K"),
    ],
)
def test_refusals(desc, config, reason):
    chosen = DgradConfig(**dict(block_m=128, block_n=256, num_stages=3) | config)
    assert reason in str(config_error(dataclasses.replace(DESC, **desc), chosen))


@pytest.mark.parametrize(
    ("rows", "block_m", "neighbours", "block_n", "stages"),
    [(192, 128, 2, 128, (4, 3)), (191, 128, 1, 256, (5, 4)), (192, 64, 1, 256, (6, 6))],
)
def test_the_form_that_multiplies_numbers_most_often_is_chosen(rows, block_m, neighbours, block_n, stages):
    """Pairs of tiles of 128 rows from 192 rows of an expert on, else the widest tile. With the copies of an
    activation's arguments there is room for fewer stages.
    """
    desc = dataclasses.replace(DESC, rows=row_capacity(rows * 128, 128, block_m), num_experts=128)
    for activation, num_stages in zip((None, SILU), stages, strict=True):
        found = choose_config(dataclasses.replace(desc, activation=activation, scale_dtype="bfloat16"), block_m, 132)
        form = (found.block_m, found.neighbours, found.block_n, found.num_stages)
        assert form == (block_m, neighbours, block_n, num_stages)
        assert shared_arrays(desc, found)["matrix"] == ((2, 64, block_n), "bfloat16")


@pytest.mark.parametrize("kind", [*USED[::4], *PLAIN_KINDS])
def test_copies_go_to_aligned_memory(kind):
    """Boxes of TMA copies start at multiples of 128 bytes, swizzled ones at those of their pattern, 1,024 at most."""
    problem = make_pull(kind, [3], n=256, k=256)
    for contracts_k in (False, True) if kind in PLAIN_KINDS else (False,):
        desc = dgrad.describe_dgrad(384, problem.args[1], None, contracts_k=contracts_k)
        for config in dgrad.candidates(desc, 128, 132):
            for name, (shape, dtype) in shared_arrays(desc, config).items():
                is_swizzled = name in ("dy", "matrix", "staging") or (name == "w" and desc.is_plain)
                unit = 1024 if is_swizzled else 128
                assert math.prod(shape[1:]) * jnp.dtype(dtype).itemsize % unit == 0, (name, shape)


@pytest.mark.parametrize(
    "case", [*list(dgrad_cases())[::12], *list(plain_dgrad_cases())[::12]], ids=lambda case: case.name
)
@pytest.mark.sample(3)
def test_lowers(case):
    assert case.launches() == 1
