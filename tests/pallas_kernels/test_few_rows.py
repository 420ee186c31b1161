"""Tiles of a few rows of plain weights, run in NumPy from the PTX that is emitted: the copies of every thread, the
order of weights and rows, scales, sums of warps; refusals, and lowering for CUDA.

The kernel itself runs in test_grouped_gemm_gpu.py.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm import (
    FewRowsConfig,
    GemmDesc,
    VectorConfig,
    api,
    choose_config,
    config_error,
    describe,
    few_rows,
    few_rows_sm90,
    grouped_gemm,
)
from tests.support.kernels.cases import gemm, gemm_case
from tests.support.kernels.columns_machine import on_columns_machine
from tests.support.kernels.gemm_problem import gemm_tolerance, make_problem
from tests.support.refusals import refuses

KINDS = ["bf16", "f16", "fp8_tensor", "fp8_row", "fp8_block", "int8_row"]
GATED: dict[str, Any] = dict(projections=2, activation=Activation("silu"), bias="bfloat16")


@pytest.fixture(params=["late", "at once"])
def machine(request, monkeypatch):
    """The kernel on NumPy threads, whose copies land as late or as early as they may."""
    on_columns_machine(monkeypatch, api, few_rows_sm90, late=request.param == "late")


def run(problem, k_split, **options):
    options = dict(config=FewRowsConfig(k_split), implementation="hopper") | options
    return np.asarray(grouped_gemm(*problem.args, **problem.kwargs | options)).astype(np.float32)


def check(kind, sizes, k_split, **options):
    options = dict(out_dtype=jnp.float32, padding=0 if kind == "int8_row" else np.nan) | options
    problem = make_problem(kind, sizes, block_m=4, with_tile_rows=True, **options)
    found, known = run(problem, k_split, tile_rows=None), run(problem, k_split)
    problem.assert_close(found, gemm_tolerance(kind, options["out_dtype"], tensor_core=True))
    np.testing.assert_array_equal(known[problem.own], found[problem.own])
    assert np.isnan(known[~problem.own]).all(), "other rows are left as they were"


@pytest.mark.parametrize("k_split", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(2)
def test_formats(kind, k_split, machine):
    """Whole tiles, a row by itself, an expert with two tiles, one with none, tiles out of use; NaN in other rows.

    Eleven blocks of K, more than rings hold, which no number of warps shares evenly; 80 columns of CTAs with 64."""
    k = 11 * 128 // (2 if kind in ("bf16", "f16") else 1)
    check(kind, [4, 0, 1, 5], k_split, k=k, n=80, bias="float32")


@pytest.mark.parametrize("k_split", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(2)
def test_gated(kind, k_split, machine):
    """K that ends within a block, columns of a CTA past N, whose weights lie behind the array in its last row."""
    k = 272 if kind in ("bf16", "f16") else 480
    check(kind, [3, 2], k_split, k=k, n=72, spare_tiles=0, **GATED)


@pytest.mark.parametrize("kind", ["bf16", "fp8_block", "int8_row"])
def test_fewer_blocks_than_warps(kind, machine):
    check(kind, [2, 4], 4, k=64, n=16)


def test_several_blocks_of_scales(machine):
    """Columns on both sides of a border between two blocks of weights."""
    check("fp8_block", [4, 3], 4, k=384, n=272)


@pytest.mark.parametrize("tokens", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(3)
def test_unpermuted_rows(kind, tokens, machine):
    """The bits of rows that are moved: every tile has the same ones."""
    problem = make_problem(kind, [4, 4, 4], k=320, n=32, block_m=4, spare_tiles=0, out_dtype=jnp.float32)
    x, *others = problem.args
    moved, scale = jnp.concatenate([x[:4]] * 3), problem.kwargs["x_scale"]
    one = scale if scale is None or not scale.ndim else scale[..., :4]
    whole = scale if scale is None or not scale.ndim else jnp.concatenate([one] * 3, axis=-1)
    options: Any = problem.kwargs | dict(config=FewRowsConfig(4), implementation="hopper")
    expected = np.asarray(grouped_gemm(moved, *others, **options | dict(x_scale=whole)))
    found = np.asarray(grouped_gemm(x[:tokens], *others, block_m=4, **options | dict(x_scale=one)))
    is_token = np.arange(12) % 4 < tokens
    np.testing.assert_array_equal(found[is_token], expected[is_token])
    assert np.isnan(found[~is_token]).all()


@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("kind", ["bf16", "fp8_block", "int8_row"])
def test_weights_side_by_side(kind, rows, machine):
    sizes: Any = dict(k=256, block_m=4, spare_tiles=0, bias="float32", out_dtype=jnp.float32)
    parts = [make_problem(kind, [rows], n=n, seed=n, **sizes) for n in (144, 48)]
    x, _, *tiles = parts[0].args
    own: dict[str, Any] = {name: tuple(part.kwargs[name] for part in parts) for name in ("w_scale", "bias")}
    own = {name: None if arrays[0] is None else arrays for name, arrays in own.items()}
    options: Any = dict(x_scale=parts[0].kwargs["x_scale"], out_dtype=jnp.float32, implementation="hopper")
    options["config"] = FewRowsConfig(4)
    found = np.asarray(grouped_gemm(x, tuple(part.args[1] for part in parts), *tiles, **own, **options))
    apart = []
    for index, part in enumerate(parts):
        one = {name: None if arrays is None else arrays[index] for name, arrays in own.items()}
        apart.append(np.asarray(grouped_gemm(x, part.args[1], *tiles, **one, **options)))
    np.testing.assert_array_equal(found[:rows], np.concatenate(apart, axis=1)[:rows])


def test_chosen():
    """As many warps share K as have two blocks each; every reason not to run."""
    desc = GemmDesc(rows=32, n=768, k=2048, num_experts=8, dtype="float8_e4m3fn", lhs_scale="row", rhs_scale="channel")
    assert choose_config(desc, 4, 132) == FewRowsConfig(4)
    assert choose_config(dataclasses.replace(desc, k=1024), 4, 132) == FewRowsConfig(4)
    assert choose_config(dataclasses.replace(desc, k=896), 4, 132) == FewRowsConfig(2)
    assert choose_config(dataclasses.replace(desc, k=256), 4, 132) == FewRowsConfig(1)
    assert describe(desc, FewRowsConfig(4)) == "4 rows, 1 x 16 channels a warp, K in 4 parts, 384 CTAs"
    assert describe(desc, FewRowsConfig(1)) == "4 rows, 1 x 16 channels a warp, 96 CTAs"
    apart = dict(num_experts=1, widths=(720, 48))
    for change, config, match in (
        (dict(k=2040), FewRowsConfig(4), "a multiple of 32 bytes"),
        ({}, FewRowsConfig(3), "k_split=3: one of 1, 2, 4"),
        ({}, FewRowsConfig(4, block_m=8), "block_m=8: a tile has 4 rows"),
        (dict(unpermuted_rows=5), FewRowsConfig(4), "the same 5 rows"),
        (dict(k_parts=2), FewRowsConfig(4), "k_parts=2"),
        (apart, FewRowsConfig(2), "720, 48 columns side by side: multiples of the 32 columns"),
        (dict(dtype="bfloat16", lhs_scale="none", rhs_scale="none", transposes_w=True), FewRowsConfig(4), "transposed"),
        (dict(num_tokens=1, top_k=8), FewRowsConfig(4), "added up or quantized first"),
        (dict(quantization="e4m3_row"), FewRowsConfig(4), "added up or quantized first"),
        (dict(requantize="group"), FewRowsConfig(4), "requantize='group'"),
    ):
        reason = config_error(dataclasses.replace(desc, **change), config)
        assert reason is not None and match in reason
    assert config_error(dataclasses.replace(desc, **apart), FewRowsConfig(4)) is None
    refuses(NotImplementedError, "k_parts=2", choose_config, dataclasses.replace(desc, k_parts=2), 4, 132)
    assert "a multiple of" in str(config_error(dataclasses.replace(desc, n=772), VectorConfig(1)))


def test_ring():
    """Three blocks of a warp, or its whole part of K."""
    desc = GemmDesc(rows=32, n=768, k=2880, num_experts=8, dtype="int8", lhs_scale="row", rhs_scale="channel")
    assert few_rows.blocks_of(desc) == 23
    for k_split, steps, slots, ahead in ((4, 6, 3, 2), (1, 23, 3, 2)):
        ring = few_rows.ring_of(desc, FewRowsConfig(k_split))
        assert (ring.steps, ring.slots, ring.ahead) == (steps, slots, ahead)
    short = few_rows.ring_of(dataclasses.replace(desc, k=256), FewRowsConfig(4))
    assert (short.steps, short.slots, short.ahead) == (1, 1, 1)


def test_lowers_for_cuda():
    """Every kind of scale; every description is compiled in sass/."""
    for name in ("bf16", "fp8 row", "fp8 block", "int8 row"):
        desc = dataclasses.replace(gemm(name), rows=16)
        assert gemm_case(name, desc, choose_config(desc, 4, 132)).launches() == 1
