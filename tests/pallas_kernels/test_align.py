"""align: the reference and the Hopper kernel against a loop over experts, refusals, lowering for CUDA.

The layout contract is that of tile_checks.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import align_cases
from tile_checks import check_tiles, check_tiles_by_token

from pallas_kernels.align import AlignConfig, AlignDesc, align, config_error

RNG = np.random.default_rng(0)
ROUTINGS = {
    "random": (RNG.integers(0, 5, (7, 3)), 5),
    "one expert takes all": (np.full((90, 2), 3), 5),
    "descending": (np.arange(12)[::-1].reshape(6, 2) % 5, 5),
    "nothing routed": (np.full((4, 2), -1), 3),
    "invalid mixed in": (np.array([[0, -1], [7, 2], [-5, 2**31 - 1], [2, 3]]), 3),
    "single pair": (np.array([[0]]), 1),
    "first and last expert empty": (np.array([[1, 2], [2, 1]]), 4),
    "expert repeated in a token": (np.array([[1, 1, 1], [0, 1, 0]]), 2),
    "more experts than pairs": (np.array([[100], [3]]), 128),
    "many": (RNG.integers(-3, 260, (1000, 8)), 257),
}


FEW = [name for name, (ids, _) in ROUTINGS.items() if len(ids) <= 8]


def run(ids, num_experts, block_m, implementation, config=None, offset=None, by_token=False):
    options = dict(implementation=implementation, config=config, by_token=by_token)
    call = jax.jit(lambda ids, offset: align(ids, num_experts, block_m, group_offset=offset, **options))
    return call(jnp.asarray(ids, jnp.int32), None if offset is None else jnp.int32(offset))


def check_shards(implementation):
    """Four shards of five experts: each sees its own pairs alone, whatever the ids of the others are."""
    ids = np.concatenate([RNG.integers(0, 20, (60, 3)), [[-1, 20, 2**31 - 1], [-(2**31), 19, 0]]])
    rows = 0
    for offset in (0, 5, 10, 15):
        local = np.where((ids >= offset) & (ids < offset + 5), ids - offset, -1)
        tiles = run(ids, 5, 16, implementation, offset=offset)
        check_tiles(local, 5, 16, tiles)
        rows += int(tiles.group_sizes.sum())
    assert rows == ((ids >= 0) & (ids < 20)).sum()


def test_shards_of_experts():
    check_shards("reference")


@pytest.mark.parametrize("block_m", [1, 16])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_reference(routing, block_m):
    ids, num_experts = ROUTINGS[routing]
    check_tiles(ids, num_experts, block_m, run(ids, num_experts, block_m, "reference"))


def check_by_token(routing, implementation):
    ids, num_experts = ROUTINGS[routing]
    for block_m in (8, len(ids)):
        check_tiles_by_token(ids, num_experts, block_m, run(ids, num_experts, block_m, implementation, by_token=True))
    shard = run(ids + 3, num_experts, 8, implementation, offset=3, by_token=True)
    check_tiles_by_token(ids, num_experts, 8, shard)


@pytest.mark.parametrize("routing", FEW)
def test_by_token(routing):
    check_by_token(routing, "reference")


def test_wrong_calls():
    ids = jnp.zeros((4, 2), jnp.int32)
    with pytest.raises(ValueError, match="4 tokens in tiles of block_m=3 rows"):
        align(ids, 3, 3, by_token=True)
    with pytest.raises(ValueError, match=r"topk_ids is int32\(4,\)"):
        align(ids[:, 0], 3, 16)
    with pytest.raises(ValueError, match="topk_ids is int16"):
        align(ids.astype(jnp.int16), 3, 16)
    with pytest.raises(ValueError, match="block_m=0"):
        align(ids, 3, 0)
    with pytest.raises(ValueError, match=r"group_offset is int32\(1,\), expected int32 \(\)"):
        align(ids, 3, 16, group_offset=jnp.zeros(1, jnp.int32))
    with pytest.raises(NotImplementedError, match="mosaic: needs a Hopper GPU"):
        align(ids, 3, 16, implementation="mosaic")


def test_config_error():
    desc = AlignDesc(8, 4, 16, 64)
    assert config_error(desc, AlignConfig(1)) is None
    assert "1 to 8" in config_error(desc, AlignConfig(9))
    assert "nothing to align" in config_error(AlignDesc(0, 4, 16, 0), AlignConfig(1))
    assert "1 to 1024" in config_error(AlignDesc(8, 2000, 16, 64), AlignConfig(1))


@pytest.mark.parametrize("case", align_cases(), ids=lambda case: case.name)
def test_lowers_for_cuda(case):
    arguments = [jax.ShapeDtypeStruct(*shape) for shape in case.shapes]
    lowered = jax.jit(case.function).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu_v2") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("block_m", [1, 64])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_gpu(routing, block_m):
    ids, num_experts = ROUTINGS[routing]
    for config in (None, AlignConfig(1), AlignConfig(8)):
        check_tiles(ids, num_experts, block_m, run(ids, num_experts, block_m, "mosaic", config))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "num_experts"), [((8192, 8), 256), ((16384, 2), 8), ((1, 8), 512), ((4097, 4), 1000)]
)
def test_gpu_sizes(shape, num_experts):
    ids = np.random.default_rng(1).integers(0, num_experts, shape)
    check_tiles(ids, num_experts, 128, run(ids, num_experts, 128, "mosaic"))


@pytest.mark.gpu
@pytest.mark.parametrize("routing", FEW)
def test_gpu_by_token(routing):
    check_by_token(routing, "mosaic")


@pytest.mark.gpu
def test_gpu_shards_of_experts():
    check_shards("mosaic")
