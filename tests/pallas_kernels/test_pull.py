"""grouped_gemm_pull: the reference against NumPy float64, wrong calls, refusals, and lowering for CUDA without a GPU.

The kernel runs in test_interpreter.py and, on a GPU, in test_pull_gpu.py.
"""

import dataclasses

import jax.numpy as jnp
import pytest

from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm import GemmConfig, GemmDesc, choose_config, config_error
from pallas_kernels.grouped_gemm.pull import grouped_gemm_pull
from tests.support.kernels.cases import pull_cases
from tests.support.kernels.dgrad_problem import make_plain_pull
from tests.support.refusals import refuses

SILU = Activation("silu")
DESC = GemmDesc(rows=9216, n=14336, k=4096, num_experts=8, dtype="bfloat16", transposes_w=True, pulls=SILU)


@pytest.mark.parametrize("activation", [SILU, Activation("gelu_tanh_no_mul")], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_reference(activation, dtype):
    problem = make_plain_pull([3, 0, 70], n=192, k=128, block_m=64, activation=activation, dtype=dtype)
    problem.assert_close(grouped_gemm_pull(*problem.args, **problem.kwargs, implementation="reference"))


def test_without_values():
    problem = make_plain_pull([3], n=64, k=64, activation=SILU, has_weighted=False)
    found = grouped_gemm_pull(*problem.args, **problem.kwargs, implementation="reference")
    assert found[2] is None
    problem.assert_close(found)


def test_wrong_calls():
    problem = make_plain_pull([3], n=64, k=128, activation=SILU)
    (dy, w, *tiles), kwargs = problem.args, problem.kwargs
    for wrong, message in (
        (dict(before=kwargs["before"][:, :64]), r"before is bfloat16\(384, 64\), expected bfloat16 \(384, 128\)"),
        (dict(row_weights=kwargs["row_weights"].astype(jnp.bfloat16)), "row_weights is bfloat16"),
        (dict(tile_rows=tiles[0][:1]), "tile_rows has shape"),
    ):
        refuses(ValueError, message, grouped_gemm_pull, dy, w, *tiles, **kwargs | wrong)
    refuses(ValueError, "x has K=64 and w has K=128", grouped_gemm_pull, dy[:, :64], w, *tiles, **kwargs)


@pytest.mark.parametrize(
    ("desc", "config", "reason"),
    [
        (dict(pulls=Activation("gelu")), {}, "erf"),
        (dict(pulls=Activation("silu", limit=7.0)), {}, "limit=7.0"),
        (dict(n=14352), {}, "N=14352"),
        (dict(has_tile_rows=True), dict(row_chunk=32), "row_chunk=32 with an activation's derivative"),
        ({}, dict(num_stages=5), "bytes of shared memory"),
    ],
)
def test_refusals(desc, config, reason):
    chosen = GemmConfig(**dict(block_m=128, block_n=256, num_stages=4) | config)
    assert reason in str(config_error(dataclasses.replace(DESC, **desc), chosen))


def test_rows_of_the_epilogue_take_no_stage_of_the_ring():
    config = choose_config(DESC, 128, 132)
    assert (config.block_n, config.num_stages) == (256, 4)
    assert choose_config(dataclasses.replace(DESC, rows=256, has_tile_rows=True), 128, 132).row_chunk is None


@pytest.mark.parametrize("case", list(pull_cases())[::4], ids=lambda case: case.name)
def test_lowers(case):
    assert case.launches() == 1
