"""grouped_dgrad and grouped_gemm_widened on a GPU, against NumPy in float64: every format, routings, sizes off the
tile, configurations.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm.dgrad import DgradConfig, candidates, describe_dgrad
from pallas_kernels.grouped_gemm.dgrad.api import flattened
from pallas_kernels.grouped_gemm.dgrad.config import operand_names
from pallas_kernels.grouped_gemm.dgrad.kernel_sm90 import grouped_dgrad_sm90
from tests.pallas_kernels.test_dgrad import ACTIVATIONS, SILU, USED, WIDE_GROUPS
from tests.support.kernels.dgrad_problem import PLAIN_KINDS, check_on_gpu, make_pull, make_widened
from tests.support.kernels.gemm_problem import ROUTINGS
from tests.support.kernels.packed_problem import KINDS

pytestmark = pytest.mark.gpu


def check(kind, sizes, config=None, make=make_pull, **options):
    check_on_gpu(make(kind, sizes, **options), config)


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
            config = dataclasses.replace(widest, num_stages=stages, raster_group_m=4, num_sms=5)
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
    widths = [c.block_n for c in candidates(desc, block_m, 132) if c.neighbours == 1]
    found = [DgradConfig(block_m, width, stages, 4, 5) for width in widths for stages in (3, 4)]
    assert len(found) >= 6
    for config in found:
        check("int4 g128", [190, 1, 300, 70], config, n=640, k=768, block_m=block_m, activation=activation)


PAIRS = DgradConfig(128, 128, 3, neighbours=2)
FORMS: dict[str, dict[str, Any]] = {
    "": dict(make=make_pull, activation=None),
    "silu": dict(make=make_pull, activation=SILU),
    "forward": dict(make=make_widened),
}


@pytest.mark.parametrize(
    ("kind", "form"),
    [(kind, form) for kind in (*USED, *PLAIN_KINDS) for form in FORMS if form != "forward" or kind in PLAIN_KINDS],
)
def test_pairs(kind, form):
    """Every format: experts of two tiles, none, three and one. The forward product takes plain weights."""
    options = dict(n=192, k=704, projections=2) if kind in PLAIN_KINDS else dict(n=512, k=768)
    check(kind, [190, 0, 300, 1], PAIRS, **options, **FORMS[form])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_tile_rows", [False, True])
@pytest.mark.parametrize("routing", [*ROUTINGS.values(), [257, 256, 0, 385, 128, 1], [640]], ids=str)
def test_routings_in_pairs(routing, has_tile_rows, form):
    check("plain e4m3 block", routing, PAIRS, n=384, k=768, has_tile_rows=has_tile_rows, **FORMS[form])


@pytest.mark.parametrize("activation", [None, SILU], ids=str)
@pytest.mark.parametrize("stages", [3, None])
def test_configs_of_pairs(stages, activation):
    """Rings of three and more stages, walked in groups of two pairs on five SMs; a last column tile past K."""
    for kind in ("int4 g128", "nvfp4", "int4 channel asym", "plain int8 channel"):
        for k in (192, 768):
            problem = make_pull(kind, [300], n=640, k=k, activation=activation)
            desc = describe_dgrad(problem.args[0].shape[0], problem.args[1], activation, has_tile_rows=True)
            widest = next(config for config in candidates(desc, 128, 132) if config.neighbours == 2)
            config = dataclasses.replace(widest, num_stages=stages or widest.num_stages, raster_group_m=2, num_sms=5)
            check(kind, [190, 1, 300, 70], config, n=640, k=k, activation=activation)


@pytest.mark.parametrize("config", [PAIRS, DgradConfig(128, 128, 3)], ids=lambda config: f"{config.neighbours} tiles")
def test_groups_wider_than_a_tile(config, monkeypatch):
    monkeypatch.setitem(KINDS, "int4 g256", WIDE_GROUPS)
    check("int4 g256", [190, 1, 300], config, n=640, k=768, activation=SILU)


@pytest.mark.parametrize("activation", [None, SILU], ids=str)
@pytest.mark.parametrize("num_sms", [1, 132])
def test_a_pair_without_a_second_tile_leaves_the_rows_behind_it(num_sms, activation):
    """The experts behind two pairs of a single tile are computed before these, and after them. One CTA takes the pairs
    of a column in their order, so that what it writes last stays.
    """
    problem = make_pull("int4 g128", [100, 256, 120, 200], n=256, k=256, activation=activation)
    experts = np.asarray(problem.args[2])
    w = problem.args[1]
    desc = describe_dgrad(len(problem.row_expert), w, activation, has_tile_rows=True)
    config = dataclasses.replace(PAIRS, num_sms=num_sms)
    names = operand_names(desc, config)
    assert experts.tolist() == [0, 1, 1, 2, 3, 3, -1, -1]
    given = flattened(w) | dict(problem.kwargs, dy=problem.args[0])
    run = jax.jit(lambda operands: grouped_dgrad_sm90(desc, config)(operands))
    # (first tile, expert, rows): full pairs first, then those of one tile in front of them.
    table = np.array([(1, 1, 256), (4, 3, 200), (0, 0, 100), (3, 2, 120)], np.int32)
    for order in ([0, 1, 2, 3], [2, 3, 0, 1]):
        first, expert, rows = map(jnp.asarray, table[order].T)
        own = dict(first_tile=first, tile_expert=expert, tile_rows=rows, num_tiles=jnp.full((1,), 4, jnp.int32))
        operands = {name: (given | own)[name] for name in names}
        found = run(operands)
        problem.assert_close(found if activation is None else (found[0], found[1].sum(axis=0)))


def test_many_rows():
    """Several rounds of tiles for every CTA."""
    check("int4 g128", [4000, 3000, 1, 2500], n=1536, k=2048)
    check("int4 g128", [4000, 3000, 1, 2500], n=2048, k=768, activation=Activation("silu"))
    single = DgradConfig(128, 256, 4)
    check("int4 g128", [4000, 3000, 1, 2500], single, n=1536, k=2048)
    check("int4 g128", [4000, 3000, 1, 2500], single, n=2048, k=768, activation=Activation("silu"))


def test_many_rows_of_plain_weights():
    sizes = [4000, 3000, 1, 2500]
    check("plain e4m3 block", sizes, n=1536, k=2048)
    check("plain e4m3 block", sizes, n=2048, k=768, activation=SILU)
    check("plain e4m3 block", sizes, n=1536, k=2048, make=make_widened)
