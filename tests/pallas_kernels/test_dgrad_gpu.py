"""grouped_dgrad on a GPU, against NumPy in float64: every format, routings, sizes off the tile, configurations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm.dgrad import DgradConfig, candidates, describe_dgrad, grouped_dgrad
from tests.pallas_kernels.test_dgrad import ACTIVATIONS, SILU, USED
from tests.support.kernels.dgrad_problem import make_pull
from tests.support.kernels.gemm_problem import ROUTINGS

pytestmark = pytest.mark.gpu


def check(kind, sizes, config=None, **options):
    """Values; and that they repeat to the bit. Outputs land in memory that held NaN before."""
    problem = make_pull(kind, sizes, **options)
    static = {name: problem.kwargs.pop(name) for name in ("activation",) if name in problem.kwargs}
    run = jax.jit(lambda args, kwargs: grouped_dgrad(*args, **kwargs, **static, config=config, implementation="hopper"))
    run = run.lower(problem.args, problem.kwargs).compile()
    own = problem.row_expert >= 0

    def once():
        for leaf in jax.tree.leaves(run.out_info):
            jnp.full(leaf.shape, jnp.nan, leaf.dtype).block_until_ready()
        return run(problem.args, problem.kwargs)

    found = once()
    problem.assert_close(found)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(once()), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32)[own], np.asarray(other, np.float32)[own])


@pytest.mark.parametrize("activation", [None, SILU], ids=str)
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("kind", USED)
def test_formats(kind, block_m, activation):
    check(kind, [90, 0, 300, 1], n=512, k=768, block_m=block_m, activation=activation)


@pytest.mark.parametrize("activation", [None, SILU], ids=str)
@pytest.mark.parametrize("has_tile_rows", [False, True])
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings(routing, block_m, has_tile_rows, activation):
    options = dict(block_m=block_m, has_tile_rows=has_tile_rows, activation=activation, projections=2)
    check("int4 g128", ROUTINGS[routing], n=384, k=768, **options)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(activation):
    check("int4 g128 asym", [90, 1, 300], n=256, k=640, activation=activation)


@pytest.mark.parametrize("activation", [None, SILU], ids=str)
@pytest.mark.parametrize(("n", "k"), [(64, 64), (64, 2880), (2880, 64), (2880, 2880), (192, 320)])
def test_sizes_off_the_tile(n, k, activation):
    check("mxfp4", [90, 1, 300], n=n, k=k, activation=activation)


@pytest.mark.parametrize("activation", [None, SILU], ids=str)
@pytest.mark.parametrize("block_m", [64, 128])
def test_configs(block_m, activation):
    problem = make_pull("int4 g128", [3], n=640, k=768, block_m=block_m, activation=activation)
    rows = problem.args[0].shape[0]
    desc = describe_dgrad(rows, problem.args[1], activation, has_tile_rows=True)
    widths = [c.block_n for c in candidates(desc, block_m, 132)]
    found = [DgradConfig(block_m, width, stages, 4, 5) for width in widths for stages in (3, 4)]
    assert len(found) >= 6
    for config in found:
        check("int4 g128", [190, 1, 300, 70], config, n=640, k=768, block_m=block_m, activation=activation)


def test_many_rows():
    """Several rounds of tiles for every CTA."""
    check("int4 g128", [4000, 3000, 1, 2500], n=1536, k=2048)
    check("int4 g128", [4000, 3000, 1, 2500], n=2048, k=768, activation=Activation("silu"))
