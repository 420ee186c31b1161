"""Clusters of two blocks that share a tile's rows or weights, on a GPU: the bits of blocks alone, every row against
float64. A wrong count of arrivals would wait for ever, so run these with a time limit around them.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm import GemmConfig, grouped_gemm
from tests.support.kernels.gemm_problem import ROUTINGS, dequantized, gemm_tolerance, make_problem
from tests.support.oracles.tolerances import Tolerance

pytestmark = pytest.mark.gpu

SILU = Activation("silu")
WAYS: dict[str, dict[str, Any]] = {"rows": dict(cluster=2), "weights": dict(cluster=2, shares_weights=True)}


def run(problem, config):
    return jax.block_until_ready(problem.compiled(grouped_gemm, config)())


def bits(tree, own):
    """Of rows in use, of outputs (rows, N) and scales (groups, rows)."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return [(leaf[own] if leaf.shape[0] == len(own) else leaf[:, own]).tobytes() for leaf in leaves]


def check(problem, config, tol, value=lambda out: out):
    own = problem.row_expert >= 0
    alone = bits(run(problem, config), own)
    for way, change in WAYS.items():
        out = run(problem, dataclasses.replace(config, **change))
        assert bits(out, own) == alone, way
    problem.assert_close(value(out), tol)


# Columns in an odd number of tiles, and in an even one.
@pytest.mark.parametrize("block_n", [128, 256])
@pytest.mark.parametrize("n", [640, 1024])
@pytest.mark.parametrize("kind", ["bf16", "fp8_row", "fp8_block", "int8_row"])
def test_bits_are_those_of_blocks_alone(kind, n, block_n):
    problem = make_problem(kind, [3, 200, 0, 129, 1, 600, 64], k=1152, n=n, block_m=128, with_tile_rows=True)
    check(problem, GemmConfig(128, block_n, 3), gemm_tolerance(kind, problem.kwargs["out_dtype"], tensor_core=True))


@pytest.mark.parametrize("num_sms", [2, 132])
@pytest.mark.parametrize("routing", [*ROUTINGS, "one tile", "odd tiles"])
@pytest.mark.parametrize("kind", ["fp8_row", "fp8_block"])
def test_routings(kind, routing, num_sms):
    """num_sms=2: one cluster passes its ring many times; 132: most have no tile, or the last one half a pair."""
    sizes = {"one tile": [0, 5], "odd tiles": [300, 0, 700, 1, 129]} | ROUTINGS
    problem = make_problem(kind, sizes[routing], k=640, n=384, block_m=128, padding=np.nan, with_tile_rows=True)
    config = GemmConfig(128, 128, 3, num_sms=num_sms)
    check(problem, config, gemm_tolerance(kind, problem.kwargs["out_dtype"], tensor_core=True))


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("with_tile_rows", [False, True])
@pytest.mark.parametrize("kind", ["bf16", "int8_row"])
def test_gated_with_bias_and_off_the_tile(kind, with_tile_rows, block_m):
    problem = make_problem(
        kind,
        [70, 0, 130, 257],
        k=736,
        n=304,
        block_m=block_m,
        projections=2,
        activation=SILU,
        bias="bfloat16",
        with_tile_rows=with_tile_rows,
        spare_tiles=0,
    )
    check(problem, GemmConfig(block_m, 64, 3), gemm_tolerance(kind, problem.kwargs["out_dtype"], tensor_core=True))


@pytest.mark.parametrize("n", [384, 736])
def test_requantized(n):
    """Codes and their scales; columns in an odd number of tiles, whose scales must not land past the array."""
    problem = make_problem(
        "fp8_block", [5, 0, 140, 300], k=384, n=n, block_m=128, projections=2, activation=SILU, requantize="group"
    )
    check(problem, GemmConfig(128, 128, 4), Tolerance(np.float32, 64.0, 1 / 16), dequantized)


def test_many_tiles_many_times():
    """Blocks that drift apart would multiply what is not yet, or no longer, in their slots."""
    problem = make_problem("fp8_row", [130, 70, 1, 257, 1000] * 4, k=2048, n=1024, block_m=128, with_tile_rows=True)
    own = problem.row_expert >= 0
    alone = bits(run(problem, GemmConfig(128, 256, 4)), own)
    for change in WAYS.values():
        config = GemmConfig(128, 256, 4, **change)
        assert all(bits(run(problem, config), own) == alone for _ in range(20))


@pytest.mark.parametrize("num_sms", [2, 132])
@pytest.mark.parametrize(
    ("block_m", "block_n", "projections"), [(96, 64, 2), (144, 256, 1), (176, 128, 1), (192, 128, 2)]
)
@pytest.mark.parametrize("kind", ["bf16", "fp8_row", "int8_row"])
def test_swapped(kind, block_m, block_n, projections, num_sms):
    """Columns in an odd number of tiles, row tiles without a partner."""
    gated: dict[str, Any] = dict(projections=2, activation=SILU) if projections == 2 else {}
    problem = make_problem(kind, [3, 400, 0, 193, 1, 145], k=1152, n=640, block_m=block_m, padding=np.nan, **gated)
    config = GemmConfig(block_m, block_n, 3, num_sms=num_sms, swap_ab=True)
    check(problem, config, gemm_tolerance(kind, problem.kwargs["out_dtype"], tensor_core=True))


@pytest.mark.parametrize(("block_m", "num_stages"), [(144, 4), (192, 3)])
def test_swapped_many_times(block_m, num_stages):
    problem = make_problem("bf16", [130, 270, 1, 257, 1000] * 4, k=2048, n=1024, block_m=block_m)
    own = problem.row_expert >= 0
    config = GemmConfig(block_m, 256, num_stages, swap_ab=True)
    alone = bits(run(problem, config), own)
    for change in WAYS.values():
        pair = dataclasses.replace(config, **change)
        assert all(bits(run(problem, pair), own) == alone for _ in range(20))
