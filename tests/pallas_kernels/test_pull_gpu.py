"""grouped_gemm_pull, and grouped_gemm with keeps_before, on a GPU, against NumPy in float64: routings, sizes off the
tile, configurations.
"""

import jax
import pytest

from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm import GemmConfig, grouped_gemm
from tests.pallas_kernels.test_dgrad import ACTIVATIONS, SILU
from tests.pallas_kernels.test_pull import assert_kept, make_gated
from tests.support.kernels.dgrad_problem import check_on_gpu, make_plain_pull
from tests.support.kernels.gemm_problem import ROUTINGS

pytestmark = pytest.mark.gpu


def check(sizes, config=None, *, activation=SILU, **options):
    check_on_gpu(make_plain_pull(sizes, activation=activation, **options), config)


@pytest.mark.parametrize("has_weighted", [False, True])
@pytest.mark.parametrize("has_tile_rows", [False, True])
@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings(routing, block_m, has_tile_rows, has_weighted):
    options = dict(block_m=block_m, has_tile_rows=has_tile_rows, has_weighted=has_weighted)
    check(ROUTINGS[routing], n=768, k=384, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(activation, dtype):
    check([90, 1, 300], n=640, k=256, activation=activation, dtype=dtype)


@pytest.mark.parametrize(("n", "k"), [(64, 64), (2880, 64), (64, 2880), (2880, 2880), (320, 192)])
def test_sizes_off_the_tile(n, k):
    check([90, 1, 300], n=n, k=k)


@pytest.mark.parametrize("activation", [SILU, Activation("silu_no_mul")], ids=str)
@pytest.mark.parametrize("block_m", [64, 128])
def test_configs(block_m, activation):
    """Rings shorter and longer than what an epilogue reads, and than the steps of K."""
    for block_n in (64, 128, 192, 256):
        for stages in (2, 3, 4):
            config = GemmConfig(block_m, block_n, stages, raster_group_m=4, num_sms=5)
            check([190, 1, 300, 70], config, n=768, k=640, block_m=block_m, activation=activation)


@pytest.mark.parametrize(("n", "k"), [(96, 64), (1536, 512), (2880, 2880)])
@pytest.mark.parametrize("block_m", [64, 128])
def test_what_an_activation_is_given_is_kept(block_m, n, k):
    arguments, options, given, own = make_gated([90, 1, 0, 300], n, k, block_m)
    static = {name: options.pop(name) for name in ("activation", "keeps_before")}
    run = jax.jit(lambda a, kw: grouped_gemm(*a, **kw, **static, implementation="hopper"))
    assert_kept(run(arguments, options), given, own)


def test_many_rows():
    """Several rounds of tiles for every CTA."""
    check([4000, 3000, 1, 2500], n=2048, k=1536)
