"""grouped_dgrad and grouped_gemm_widened on a GPU, against NumPy in float64: every format, routings, sizes off the
tile, configurations.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm.dgrad import DgradConfig, candidates, describe_dgrad
from tests.pallas_kernels.test_dgrad import ACTIVATIONS, SILU, USED
from tests.support.kernels.dgrad_problem import PLAIN_KINDS, make_pull, make_widened
from tests.support.kernels.gemm_problem import ROUTINGS

pytestmark = pytest.mark.gpu


def check(kind, sizes, config=None, make=make_pull, **options):
    """Values; and that they repeat to the bit. Outputs land in memory that held NaN before."""
    problem = make(kind, sizes, **options)
    static = {name: problem.kwargs.pop(name) for name in ("activation",) if name in problem.kwargs}
    run = jax.jit(lambda args, kwargs: problem.op(*args, **kwargs, **static, config=config, implementation="hopper"))
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
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_plain_formats(kind, block_m, activation):
    """Gate and up of 192 channels, which end in the middle of a block of scales."""
    sizes = dict(n=192, k=704, block_m=block_m, projections=2)
    check(kind, [90, 0, 300, 1], activation=activation, **sizes)


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_plain_forward(kind, block_m):
    check(kind, [90, 0, 300, 1], make=make_widened, n=192, k=704, block_m=block_m, projections=2)


@pytest.mark.parametrize("make", [make_pull, make_widened])
@pytest.mark.parametrize("has_tile_rows", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_plain_routings(routing, has_tile_rows, make):
    options = dict(has_tile_rows=has_tile_rows, projections=2, make=make)
    check("plain e4m3 block", ROUTINGS[routing], n=384, k=768, **options)


@pytest.mark.parametrize("make", [make_pull, make_widened])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (64, 2880), (2880, 64), (192, 320)])
def test_plain_sizes_off_the_tile(n, k, make):
    check("plain e4m3 block", [90, 1, 300], n=n, k=k, make=make)
    check("plain int8 channel", [90, 1, 300], n=n, k=k, make=make)


@pytest.mark.parametrize("form", ["", "silu", "forward"])
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("kind", ["plain e4m3 block", "plain int8 channel"])
def test_plain_configs(kind, block_m, form):
    """Every width, and rings of three and more stages, walked in groups of four tiles on five SMs."""
    options = dict(make=make_widened) if form == "forward" else dict(activation=SILU if form else None)
    problem = (make_widened if form == "forward" else make_pull)(kind, [3], n=640, k=768, block_m=block_m)
    rows, activation = problem.args[0].shape[0], options.get("activation")
    desc = describe_dgrad(rows, problem.args[1], activation, has_tile_rows=True, contracts_k=form == "forward")
    found = candidates(desc, block_m, 132)
    assert len(found) >= 3
    for widest in found:
        for stages in {3, widest.num_stages}:
            config = DgradConfig(block_m, widest.block_n, stages, 4, 5)
            check(kind, [190, 1, 300, 70], config, n=640, k=768, block_m=block_m, **options)


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


def test_many_rows_of_plain_weights():
    sizes = [4000, 3000, 1, 2500]
    check("plain e4m3 block", sizes, n=1536, k=2048)
    check("plain e4m3 block", sizes, n=2048, k=768, activation=SILU)
    check("plain e4m3 block", sizes, n=1536, k=2048, make=make_widened)
