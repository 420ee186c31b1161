"""Tiles of a few rows of plain weights, run in NumPy from the PTX that is emitted: the copies of every thread, the order
of weights and rows, scales, sums of warps; refusals, and lowering for CUDA.

The kernel itself runs in test_grouped_gemm_gpu.py.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm import FewRowsConfig, api, few_rows_sm90, grouped_gemm
from tests.support.kernels.columns_machine import on_columns_machine
from tests.support.kernels.gemm_problem import gemm_tolerance, make_problem


@pytest.fixture(params=["late", "at once"])
def machine(request, monkeypatch):
    """The kernel on NumPy threads, whose copies land as late or as early as they may."""
    on_columns_machine(monkeypatch, api, few_rows_sm90, late=request.param == "late")


KINDS = ["bf16", "f16", "fp8_tensor", "fp8_row", "fp8_block", "int8_row"]


def run(problem, k_split, **options):
    options = dict(config=FewRowsConfig(k_split), implementation="hopper") | options
    return np.asarray(grouped_gemm(*problem.args, **problem.kwargs | options))


@pytest.mark.parametrize("k_split", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_formats(kind, k_split, machine):
    problem = make_problem(kind, [4, 0, 1, 5], k=640, n=80, block_m=4, bias="float32", out_dtype=jnp.float32)
    problem.assert_close(run(problem, k_split), gemm_tolerance(kind, jnp.float32, tensor_core=True))
