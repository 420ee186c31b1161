"""grouped_gemm_pull, and grouped_gemm with keeps_before, whose rows it takes: references against NumPy float64, wrong
calls, refusals, and lowering for CUDA without a GPU.

The kernels run in test_interpreter.py and, on a GPU, in test_pull_gpu.py.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm import GemmConfig, GemmDesc, choose_config, config_error, grouped_gemm
from pallas_kernels.grouped_gemm.pull import grouped_gemm_pull
from tests.support.kernels.cases import pull_cases
from tests.support.kernels.dgrad_problem import make_plain_pull
from tests.support.kernels.gemm_problem import tiles_of
from tests.support.refusals import refuses

SILU = Activation("silu")
DESC = GemmDesc(rows=9216, n=14336, k=4096, num_experts=8, dtype="bfloat16", transposes_w=True, pulls=SILU)


@pytest.mark.parametrize("activation", [SILU, Activation("gelu_tanh_no_mul")], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_reference(activation, dtype):
    problem = make_plain_pull([3, 0, 70], n=192, k=128, block_m=64, activation=activation, dtype=dtype)
    problem.assert_close(grouped_gemm_pull(*problem.args, **problem.kwargs, implementation="reference"))


def make_gated(sizes, n, k, block_m=128):
    """Arguments of grouped_gemm, gate and up of each row in float64 (Mp, 2, N), and which rows have an owner."""
    rng = np.random.default_rng(0)
    tile_expert, tile_rows, row_expert = tiles_of(sizes, block_m, 2)
    x = rng.standard_normal((len(row_expert), k), np.float32).astype(jnp.bfloat16)
    w = (rng.standard_normal((len(sizes), 2, n, k), np.float32) / k**0.5).astype(jnp.bfloat16)
    bias = rng.standard_normal((len(sizes), 2, n), np.float32).astype(jnp.bfloat16)
    wide = [np.asarray(a, np.float64) for a in (x, w, bias)]
    given = np.stack([row @ wide[1][e].mT + wide[2][e] for row, e in zip(wide[0], row_expert, strict=True)])
    arguments = [jnp.asarray(a) for a in (x, w, tile_expert, np.int32(len(tile_expert) - 2))]
    options = dict(bias=jnp.asarray(bias), tile_rows=jnp.asarray(tile_rows), activation=SILU, keeps_before=True)
    return arguments, options, given, row_expert >= 0


def assert_kept(found, given, own):
    gate, up = given[own].swapaxes(0, 1)
    value = gate / (1 + np.exp(-gate)) * up
    for one, other in zip(found, (value, given[own].reshape(own.sum(), -1)), strict=True):
        error = np.abs(np.asarray(one, np.float64)[own] - other)
        assert (error <= 2.0**-8 * np.abs(other) + 2.0**-16 * np.abs(other).max()).all()


def test_what_an_activation_is_given_is_kept():
    arguments, options, given, own = make_gated([3, 0, 70], 96, 64)
    assert_kept(grouped_gemm(*arguments, **options, implementation="reference"), given, own)
    message = "keeps_before without an activation, requantized"
    with pytest.raises(NotImplementedError, match=message):
        options |= dict(requantize="tensor", out_scale=jnp.float32(1))
        grouped_gemm(*arguments, **options, config=GemmConfig(128, 64, 2), implementation="hopper")


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
        (dict(has_tile_rows=True), dict(row_chunk=32), "row_chunk=32 with several outputs"),
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


@pytest.mark.parametrize("case", list(pull_cases())[::5], ids=lambda case: case.name)
def test_lowers(case):
    assert case.launches() == 1
