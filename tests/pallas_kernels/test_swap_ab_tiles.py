"""The body of the swap_ab kernel where consumers requantize rows together, run by Python threads on NumPy arrays."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.activations import Activation
from pallas_kernels.common.numerics import quantize_e4m3_static
from pallas_kernels.common.numerics_sm90 import e4m3_in_groups
from pallas_kernels.grouped_gemm import (
    GemmConfig,
    GemmDesc,
    config_error,
    epilogue_sm90,
    kernel_sm90,
    pipeline_sm90,
    scheduler_sm90,
    side_by_side_sm90,
)
from pallas_kernels.grouped_gemm import mainloop_swap_ab_sm90 as swap_ab
from pallas_kernels.grouped_gemm import smem_operands_sm90 as smem
from pallas_kernels.grouped_gemm.api import describe_gemm, flattened
from tests.support.kernels import warpgroups
from tests.support.kernels.gemm_problem import gemm_tolerance, make_problem


@pytest.fixture
def on_threads(monkeypatch):
    modules = (kernel_sm90, swap_ab, smem, pipeline_sm90, scheduler_sm90, side_by_side_sm90, epilogue_sm90)
    warpgroups.stand_in_for(monkeypatch, modules)
    monkeypatch.setattr(smem, "sigmoid", lambda config: jax.nn.sigmoid)


def operands_of(problem: Any) -> dict[str, Any]:
    operands = dict(zip(("x", "w", "tile_expert", "num_tiles"), problem.args, strict=True))
    names = ("x_scale", "w_scale", "bias", "out_scale", "tile_rows", "tile_bits")
    return operands | {name: problem.kwargs.get(name) for name in names}


def run(problem: Any, desc: GemmDesc, config: GemmConfig) -> list[np.ndarray]:
    """What the kernel writes to memory that held NaN; so does its shared memory at first."""
    assert config_error(desc, config) is None
    flat = flattened(operands_of(problem))
    outs = [np.full((desc.rows, desc.n), np.nan, desc.stored_dtype)]
    if desc.requantize == "group":
        outs.append(np.full((desc.n // 128, desc.rows), np.nan, np.float32))
    refs = [warpgroups.Memory(np.asarray(flat[name])) for name in desc.operand_names]
    refs += [warpgroups.Memory(out) for out in outs]
    loop = pipeline_sm90.MainLoop({}, None, smem.load_tile, swap_ab._consume, smem.load_vectors)
    body = functools.partial(kernel_sm90._kernel, desc, config, loop, *refs)
    scratch = functools.partial(smem.scratch_types, desc, config)
    warpgroups.run(body, config.num_sms, config.num_consumers + 1, scratch)
    return outs


CASES = {
    "groups": ("fp8_block", "group", 24, {}),
    "groups, powers of two, a bias": ("fp8_block", "group_ue8m0", 8, dict(bias="bfloat16")),
    "a given scale": ("fp8_tensor", "tensor", 48, {}),
    "groups, not gated, longer steps": (
        *("fp8_block", "group", 16),
        dict(activation=Activation("relu2_no_mul"), projections=1, step_blocks=2, k=512),
    ),
    "a given scale, scales of rows": ("fp8_row", "tensor", 24, {}),
    "groups, rows in use unknown": ("fp8_block", "group", 16, dict(with_tile_rows=False)),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_requantized_together(case, on_threads):
    """Codes and scales of what the kernel stores otherwise, of the rows in use and no others but those of a piece."""
    kind, requantize, block_m, options = CASES[case]
    sizes = [1, 0, block_m, 8, block_m + 9]
    options = dict(with_tile_rows=True, activation=Activation("silu"), projections=2, k=256) | options
    step_blocks = options.pop("step_blocks", 1)
    problem = make_problem(kind, sizes, n=384, block_m=block_m, requantize=requantize, **options)
    given = problem.kwargs
    desc = describe_gemm(operands_of(problem), given["activation"], jnp.bfloat16, requantize, None, False)
    config = GemmConfig(block_m, 128, 3, num_sms=2, swap_ab=True, step_blocks=step_blocks)
    codes, *scales = run(problem, desc, config)
    (plain,) = run(problem, dataclasses.replace(desc, requantize="none"), config)
    own = problem.row_expert >= 0
    problem.assert_close(plain, gemm_tolerance(kind, jnp.bfloat16))

    hidden = jnp.asarray(plain[own], jnp.float32)
    if requantize == "tensor":
        expected = quantize_e4m3_static(hidden, given["out_scale"])
    else:
        groups = hidden.reshape(-1, 128)
        quantized, expected_scales = e4m3_in_groups(groups, jnp.max(jnp.abs(groups), axis=1), "ue8m0" in requantize)
        expected = quantized.reshape(hidden.shape)
        np.testing.assert_array_equal(scales[0][:, own].T.reshape(-1), expected_scales)
    np.testing.assert_array_equal(codes[own].view(np.uint8), np.asarray(expected).view(np.uint8))
    in_use = (
        np.full(len(problem.args[2]), block_m) if given.get("tile_rows") is None else np.asarray(given["tile_rows"])
    )
    is_behind = np.arange(block_m) >= -(-in_use[:, None] // 8) * 8
    is_behind[int(problem.args[3]) :] = True
    assert np.isnan(codes[is_behind.reshape(-1)].astype(np.float32)).all()


@pytest.mark.parametrize("by_bits", [False, True], ids=["first rows", "any rows"])
@pytest.mark.parametrize("block_m", [8, 16, 24])
@pytest.mark.parametrize("kind", ["bf16", "fp8_block"])
def test_rows_in_use_alone(kind, block_m, by_bits, on_threads):
    """Of low tiles the rows in use alone are written, of higher ones all. The last tile has 32 columns."""
    sizes = [1, 0, block_m, 3, block_m + 9]
    activation = Activation("relu2_no_mul")
    options: Any = dict(with_tile_rows=True, activation=activation, projections=1)
    problem = make_problem(kind, sizes, k=256, n=160, block_m=block_m, **options)
    counts = np.asarray(problem.kwargs["tile_rows"])
    in_use = np.arange(block_m) < counts[:, None]
    if by_bits:
        in_use &= np.random.default_rng(0).random(in_use.shape) < 0.4
        bits = [sum(1 << int(row) for row in np.flatnonzero(own)) for own in in_use]
        problem.kwargs["tile_bits"] = jnp.asarray(bits, jnp.int32)
    desc = describe_gemm(operands_of(problem), activation, jnp.bfloat16, "none", None, False)
    assert desc.has_tile_bits == by_bits
    config = GemmConfig(block_m, 128, 2, num_sms=2, swap_ab=True)
    (found,) = run(problem, desc, config)
    (whole,) = run(problem, dataclasses.replace(desc, has_tile_rows=False, has_tile_bits=False), config)
    is_written = in_use if block_m <= 16 else np.ones_like(in_use)
    is_written[int(problem.args[3]) :] = False
    is_written = is_written.reshape(-1)
    assert np.isnan(found[~is_written].astype(np.float32)).all()
    np.testing.assert_array_equal(found[is_written], whole[is_written])
