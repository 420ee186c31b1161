"""Matrix times vector with packed weights, run in NumPy from the PTX that is emitted: the copies of every thread, the
order of words and of the row, scales, sums of warps; refusals, and lowering for CUDA.

The kernel itself runs in test_grouped_gemm_packed_gpu.py.
"""

import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm.packed import PackedVectorConfig, api, grouped_gemm_packed, vector_sm90
from tests.pallas_kernels.test_packed_operands import on_numpy  # noqa: F401
from tests.support.kernels.packed_problem import KINDS, make_problem, packed_tolerance
from tests.support.kernels.simt_machine import Machine


@pytest.fixture(params=["late", "at once"])
def machine(request, on_numpy, monkeypatch):  # noqa: F811
    """The kernel on NumPy threads, whose copies land as late or as early as they may."""
    found = Machine(late=request.param == "late")
    for name, stub in {
        "simt": found.namespace(),
        "lax": found.lax(),
        "row_kernel": found.row_kernel,
        "mosaic": types.SimpleNamespace(begin=lambda: None),
        "pl": types.SimpleNamespace(when=lambda condition: lambda run: run() if bool(condition) else None),
        "plgpu": types.SimpleNamespace(SMEM=lambda shape, dtype: (shape, dtype), RefType=lambda: None),
        "ir": types.SimpleNamespace(F32Type=types.SimpleNamespace(get=lambda: "f32")),
        "llvm": types.SimpleNamespace(ptrtoint=lambda kind, ref: (ref, 0)),
        "mgpu": types.SimpleNamespace(utils=types.SimpleNamespace(memref_ptr=lambda ref: ref)),
        "arith": types.SimpleNamespace(
            muli=lambda a, b: a * b,
            addi=lambda place, b: (place[0], place[1] + b),
            bitcast=lambda kind, value: value.view(np.float32 if kind == "f32" else np.uint32),
        ),
    }.items():
        monkeypatch.setattr(vector_sm90, name, stub)
    monkeypatch.setattr(api, "hopper_sms", lambda: 132)
    return found


GATED: dict[str, Any] = dict(activation=Activation("silu"), bias="bfloat16", x_scale="row")
OUT = {"float16": jnp.float16}


def check(kind, sizes, k_split, **options):
    is_8bit = KINDS[kind][0].is_8bit
    options = dict(x_scale="row" if is_8bit else "none", out_dtype=jnp.float32) | options
    problem = make_problem(kind, sizes, block_m=1, **options)
    config = PackedVectorConfig(k_split)
    out = grouped_gemm_packed(*problem.args, **problem.kwargs, config=config, implementation="hopper")
    problem.assert_close(np.asarray(out), packed_tolerance(kind, options["out_dtype"]))


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind, machine):
    check(kind, [1, 0, 1], 4, k=5 * KINDS[kind][0].block_k, n=80)
