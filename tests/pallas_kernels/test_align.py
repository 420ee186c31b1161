"""align: the reference and the Hopper kernel against a loop over experts, refusals, lowering for CUDA.

Layout contract: expert e owns ceil(size / block_m) consecutive tiles, experts ascending; its rows are the first
``size`` rows of its tiles, one for each pair that names it, in any order. Ids outside [0, E) own nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import align_cases

from pallas_kernels.align import AlignConfig, AlignDesc, align, config_error, row_capacity

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


def check(ids, num_experts, block_m, found):
    ids, found = np.asarray(ids, np.int32), jax.tree.map(np.asarray, found)
    tiles = row_capacity(ids.size, num_experts, block_m) // block_m
    is_routed = (ids >= 0) & (ids < num_experts)
    sizes = np.bincount(ids[is_routed], minlength=num_experts)
    np.testing.assert_array_equal(found.group_sizes, sizes)
    np.testing.assert_array_equal(found.row_of == -1, ~is_routed)
    tile_expert, tile_rows, first = [], [], 0
    for e in range(num_experts):
        rows = found.row_of[is_routed & (ids == e)]
        np.testing.assert_array_equal(np.sort(rows), np.arange(first, first + sizes[e]))
        used = -(-sizes[e] // block_m)
        tile_expert += [e] * used
        tile_rows += [min(block_m, sizes[e] - i * block_m) for i in range(used)]
        first += used * block_m
    spare = tiles - len(tile_expert)
    assert spare >= 0
    np.testing.assert_array_equal(found.tile_expert, tile_expert + [-1] * spare)
    np.testing.assert_array_equal(found.tile_rows, tile_rows + [0] * spare)
    np.testing.assert_array_equal(found.num_tiles, [len(tile_expert)])
    assert all(leaf.dtype == np.int32 for leaf in jax.tree.leaves(found))


def run(ids, num_experts, block_m, implementation, config=None):
    call = jax.jit(lambda ids: align(ids, num_experts, block_m, implementation=implementation, config=config))
    return call(jnp.asarray(ids, jnp.int32))


@pytest.mark.parametrize("block_m", [1, 16])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_reference(routing, block_m):
    ids, num_experts = ROUTINGS[routing]
    check(ids, num_experts, block_m, run(ids, num_experts, block_m, "reference"))


def test_wrong_calls():
    ids = jnp.zeros((4, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"topk_ids is int32\(4,\)"):
        align(ids[:, 0], 3, 16)
    with pytest.raises(ValueError, match="topk_ids is int16"):
        align(ids.astype(jnp.int16), 3, 16)
    with pytest.raises(ValueError, match="block_m=0"):
        align(ids, 3, 0)
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
        check(ids, num_experts, block_m, run(ids, num_experts, block_m, "mosaic", config))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "num_experts"), [((8192, 8), 256), ((16384, 2), 8), ((1, 8), 512), ((4097, 4), 1000)]
)
def test_gpu_sizes(shape, num_experts):
    ids = np.random.default_rng(1).integers(0, num_experts, shape)
    check(ids, num_experts, 128, run(ids, num_experts, 128, "mosaic"))
