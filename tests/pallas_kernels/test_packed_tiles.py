"""The body of the packed kernel, run by Python threads on NumPy arrays: which rows it loads, multiplies and stores
where those in use are known, and what its barriers count. Unpacking is a stand-in; test_packed_operands.py has it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm import (
    epilogue_sm90,
    kernel_sm90,
    pipeline_sm90,
    scheduler_sm90,
    side_by_side_sm90,
)
from pallas_kernels.grouped_gemm import mainloop_dequant_sm90 as dequant
from pallas_kernels.grouped_gemm.packed import PackedConfig, PackedDesc, api, config_error
from pallas_kernels.grouped_gemm.packed.config import heights, shared_arrays
from tests.support.kernels import warpgroups
from tests.support.kernels.dgrad_problem import unpacked
from tests.support.kernels.packed_problem import KINDS, make_problem, packed_tolerance


@pytest.fixture
def on_threads(monkeypatch):
    modules = (kernel_sm90, dequant, pipeline_sm90, scheduler_sm90, side_by_side_sm90, epilogue_sm90)
    warpgroups.stand_in_for(monkeypatch, modules)

    def load_block(fmt, words, width, rows, *vectors):
        own = [None if vector is None else vector.array for vector in vectors]
        (value,) = unpacked(fmt, words.array, width, rows, *own, None)
        return tuple(value[:, start : start + width] for start in range(0, fmt.block_k, width))

    monkeypatch.setattr(dequant, "load_block", load_block)
    monkeypatch.setattr(dequant, "sigmoid", jax.nn.sigmoid)


def run(problem: Any, config: PackedConfig, *, has_tile_rows: bool) -> np.ndarray:
    """What the kernel writes to memory that held NaN; so does its shared memory at first."""
    (x, w, tile_expert, num_tiles), given = problem.args, problem.kwargs
    scale = "none" if given["x_scale"] is None else "row"
    desc = api.describe_call(x.shape[0], w, given["out_dtype"], scale, given["bias"], given["activation"])
    desc = dataclasses.replace(desc, has_tile_rows=has_tile_rows)
    assert config_error(desc, config) is None
    tiles = dict(tile_expert=tile_expert, num_tiles=num_tiles, tile_rows=problem.tile_rows)
    flat = api._flattened(desc, dict(x=x, w=w, x_scale=given["x_scale"], bias=given["bias"], **tiles))
    shapes = shared_arrays(desc, config)

    def scratch():
        is_float = {name: jnp.issubdtype(jnp.dtype(dtype), jnp.floating) for name, (_, dtype) in shapes.items()}
        memory = {
            name: np.full(shape, np.nan if is_float[name] else 0, dtype) for name, (shape, dtype) in shapes.items()
        }
        arrivals = 1 + config.k_split + ("scale" in shapes) + ("zero" in shapes)
        barriers = dict(
            full=warpgroups.Barriers(config.num_stages, arrivals),
            empty=warpgroups.Barriers(config.num_stages, config.num_consumers),
        )
        if config.sharers > 1:
            barriers["partial_full"] = warpgroups.Barriers(config.channel_groups, config.sharers - 1)
            barriers["partial_empty"] = warpgroups.Barriers(config.channel_groups)
        return {name: warpgroups.Memory(array) for name, array in memory.items()} | barriers

    loop = pipeline_sm90.MainLoop({}, None, dequant._load_tile, dequant._consume)
    out = np.full((desc.rows, desc.n), np.nan, desc.out_dtype)
    refs = [warpgroups.Memory(np.asarray(flat[name])) for name in desc.operand_names] + [warpgroups.Memory(out)]
    body = functools.partial(kernel_sm90._kernel, desc, config, loop, *refs)
    warpgroups.run(body, config.num_sms, config.num_consumers + 1, scratch)
    return out


GATED = dict(activation=Activation("silu"), bias="bfloat16")
CASES = {
    "sums, gated": ("int4 g128", PackedConfig(24, 2, 2, 2, num_sms=2), GATED),
    "operands": ("int4 g128", PackedConfig(80, 2, 2, 2, True, num_sms=2), dict(x_scale="row")),
    "pieces": ("int4 g128", PackedConfig(80, 2, 2, 2, num_sms=2), dict(x_scale="row", out_dtype=jnp.float32)),
    "whole pieces": ("int4 g128", PackedConfig(80, 4, 2, 2, num_sms=2), dict(x_scale="row")),
    "K shared": ("int4 g64", PackedConfig(32, 4, 4, 2, num_sms=1, k_split=2), dict(x_scale="row")),
    "a projection each": ("int4 g128", PackedConfig(96, 2, 2, 2, num_sms=1, splits_projections=True), GATED),
    "zero points": ("int4 g128 asym", PackedConfig(48, 2, 2, 2, True, num_sms=2), dict(x_scale="row")),
    "8 bits": ("int8 g128", PackedConfig(48, 2, 2, 3, True, num_sms=2), dict(x_scale="row")),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_in_use(case, on_threads):
    """At every height, the fewest and the most rows that take it: right values, the bits of whole tiles, and nothing
    behind the height.
    """
    kind, config, options = CASES[case]
    block_m = config.block_m
    shape: Any = dict(rows=block_m, n=64, k=128, num_experts=2, fmt=KINDS[kind][0], has_tile_rows=True)
    found = heights(PackedDesc(**shape), config)
    sizes = [size for height in (0, *found) for size in (height, height + 1) if size <= block_m]
    problem = make_problem(kind, sizes, k=256, n=192, block_m=block_m, **options)
    rows = run(problem, config, has_tile_rows=True)
    problem.assert_close(rows, packed_tolerance(kind, problem.kwargs["out_dtype"], folded=config.folds_scales))
    whole = run(problem, config, has_tile_rows=False)
    np.testing.assert_array_equal(rows[problem.own], whole[problem.own])
    counts = np.asarray(problem.tile_rows)
    used = [next(height for height in found if height >= count) if count else 0 for count in counts]
    is_behind = np.arange(block_m) >= np.asarray(used)[:, None]
    assert np.isnan(rows[is_behind.reshape(-1)].astype(np.float32)).all()
