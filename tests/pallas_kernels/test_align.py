"""align: the reference and the Hopper kernel against a loop over experts, refusals, lowering for CUDA.

The layout contract is that of tile_checks.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.align import AlignConfig, AlignDesc, TileMap, align, config_error, kernel_sm90, row_capacity
from pallas_kernels.align.config import choose_config
from tests.support.cases.hopper_layers import on_hopper
from tests.support.kernels import tile_checks
from tests.support.kernels.case import launches
from tests.support.kernels.cases import align_cases
from tests.support.kernels.in_lockstep import Memory, simt_of
from tests.support.kernels.tile_checks import check_tiles, check_unpermuted_tiles
from tests.support.refusals import refuses

RNG = np.random.default_rng(0)
ROUTINGS = tile_checks.ROUTINGS | {
    "one expert takes all": (np.full((90, 2), 3), 5),
    "single pair": (np.array([[0]]), 1),
    "many": (RNG.integers(-3, 260, (1000, 8)), 257),
}


FEW = [name for name, (ids, _) in ROUTINGS.items() if len(ids) <= 8]


def run(ids, num_experts, block_m, implementation, config=None, offset=None, unpermuted=False, stable=False):
    options = dict(implementation=implementation, config=config, unpermuted=unpermuted, stable=stable)
    call = jax.jit(lambda ids, offset: align(ids, num_experts, block_m, group_offset=offset, **options))
    return call(jnp.asarray(ids, jnp.int32), None if offset is None else jnp.int32(offset))


def as_wide(ids):
    """ids as 64-bit words; every ninth is moved by a multiple of 2**32, and not routed any more. With what is left."""
    moved = np.random.default_rng(0).random(ids.shape) < 1 / 9
    beyond = np.random.default_rng(1).choice([-(2**62), -(2**32), 2**32, 2**40], ids.shape)
    wide = np.where(moved, ids + beyond, ids).astype(np.int64)
    return wide.view(np.int32).reshape(*ids.shape, 2), np.where(moved, -1, ids)


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
@pytest.mark.sample(4)
def test_reference(routing, block_m):
    ids, num_experts = ROUTINGS[routing]
    check_tiles(ids, num_experts, block_m, run(ids, num_experts, block_m, "reference"))


@pytest.mark.parametrize("routing", FEW)
def test_wide_ids(routing):
    check_wide(routing, "reference")


def check_wide(routing, implementation):
    ids, num_experts = ROUTINGS[routing]
    wide, left = as_wide(ids)
    check_tiles(left, num_experts, 16, run(wide, num_experts, 16, implementation))
    shifted, left = as_wide(ids + 3)
    local = np.where(left >= 3, left - 3, -1)
    shard = run(shifted, num_experts, 8, implementation, offset=3, unpermuted=len(ids) <= 8)
    (check_unpermuted_tiles if len(ids) <= 8 else check_tiles)(local, num_experts, 8, shard)


def check_unpermuted(routing, implementation):
    ids, num_experts = ROUTINGS[routing]
    for block_m in (8, len(ids)):
        check_unpermuted_tiles(
            ids, num_experts, block_m, run(ids, num_experts, block_m, implementation, unpermuted=True)
        )
    shard = run(ids + 3, num_experts, 8, implementation, offset=3, unpermuted=True)
    check_unpermuted_tiles(ids, num_experts, 8, shard)


@pytest.mark.parametrize("routing", FEW)
def test_unpermuted(routing):
    check_unpermuted(routing, "reference")


def check_stable(implementation, ids, num_experts, block_m, given=None, **options):
    """Each expert's rows follow each other in the order of the pairs; all else is as without. given: what stands for
    ids in the call."""
    found = run(ids if given is None else given, num_experts, block_m, implementation, stable=True, **options)
    local = np.asarray(ids, np.int64) - options.get("offset", 0)
    check_tiles(np.where((local >= 0) & (local < num_experts), local, -1), num_experts, block_m, found)
    next_row, tiles = {}, 0
    for e in range(num_experts):
        next_row[e] = tiles * block_m
        tiles += -(-int((local == e).sum()) // block_m)
    rows = np.asarray(found.row_of).reshape(-1)
    for pair, e in enumerate(local.reshape(-1)):
        if e in next_row:
            assert rows[pair] == next_row[e], pair
            next_row[e] += 1


@pytest.mark.parametrize("block_m", [1, 16])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.sample(4)
def test_stable(routing, block_m):
    check_stable("reference", *ROUTINGS[routing], block_m)


def check_stable_shards_and_wide_ids(implementation):
    ids = np.concatenate([RNG.integers(0, 20, (600, 3)), [[-1, 20, 2**31 - 1], [-(2**31) + 5, 19, 0]]])
    check_stable(implementation, ids, 5, 16, offset=5)
    wide, left = as_wide(ids)
    check_stable(implementation, left, 20, 8, given=wide)


def test_stable_shards_and_wide_ids():
    check_stable_shards_and_wide_ids("reference")


@pytest.mark.parametrize("pairs", [0, 127, 128, 129, 4096, 4097, 131_072, 140_001])
def test_stable_sizes(pairs):
    """To the last pair of a block, of a table of blocks and of a table of these, and one more."""
    check_stable("reference", np.random.default_rng(pairs).integers(-1, 4, (pairs, 1)), 3, 64)


def test_stable_is_computed_by_xla_and_changes_nothing_for_unpermuted_tokens():
    ids = jnp.zeros((4, 2), jnp.int32)
    with on_hopper():
        counts = [
            launches(lambda ids, options=options: align(ids, 3, 16, implementation="hopper", **options), ids)
            for options in (dict(), dict(stable=True), dict(stable=True, unpermuted=True))
        ]
    assert counts == [1, 0, 1]
    found = run(np.array([[1, 0], [2, 2]]), 3, 8, "reference", unpermuted=True, stable=True)
    check_unpermuted_tiles(np.array([[1, 0], [2, 2]]), 3, 8, found)


def test_wrong_calls():
    ids = jnp.zeros((4, 2), jnp.int32)
    refuses(ValueError, "4 tokens in tiles of block_m=3 rows", align, ids, 3, 3, unpermuted=True)
    refuses(ValueError, r"topk_ids is int32\(4,\)", align, ids[:, 0], 3, 16)
    refuses(ValueError, r"topk_ids is int32\(4, 2, 1\)", align, ids[..., None], 3, 16)
    refuses(ValueError, "topk_ids is int16", align, ids.astype(jnp.int16), 3, 16)
    refuses(ValueError, "block_m=0", align, ids, 3, 0)
    with pytest.raises(ValueError, match=r"group_offset is int32\(1,\), expected int32 \(\)"):
        align(ids, 3, 16, group_offset=jnp.zeros(1, jnp.int32))
    refuses(ValueError, "stable=True takes no config", align, ids, 3, 16, stable=True, config=AlignConfig(1))
    refuses(NotImplementedError, "hopper: needs a Hopper GPU", align, ids, 3, 16, implementation="mosaic")


def test_config_error():
    desc = AlignDesc(8, 4, 16, 64)
    assert config_error(desc, AlignConfig(1)) is None
    assert "1 to 8" in config_error(desc, AlignConfig(9))
    assert "num_ctas=65: 1 to 64" in config_error(desc, AlignConfig(1, 65))
    assert "one CTA knows" in config_error(AlignDesc(8, 4, 16, 64, top_k=2), AlignConfig(1, 2))
    assert "nothing to align" in config_error(AlignDesc(0, 4, 16, 0), AlignConfig(1))
    assert "1 to 1024" in config_error(AlignDesc(8, 2000, 16, 64), AlignConfig(1))


@pytest.mark.parametrize("offset", [None, 5])
@pytest.mark.parametrize(
    ("num_warpgroups", "num_ctas", "are_wide"),
    [(1, 1, False), (2, 1, False), (2, 1, True), (1, 5, False), (1, 5, True), (2, 3, False)],
)
def test_kernels_in_lockstep(monkeypatch, num_warpgroups, num_ctas, are_wide, offset):
    """The kernels' own statements, one CTA after the other: each pair and tile is handled by exactly one CTA."""
    ids = np.random.default_rng(2).integers(-3, 150, (700, 3)).astype(np.int32)
    given, ids = as_wide(ids) if are_wide else (ids, ids)
    desc = AlignDesc(
        ids.size, 131, 16, row_capacity(ids.size, 131, 16), has_offset=offset is not None, are_wide=are_wide
    )
    config = AlignConfig(num_warpgroups, num_ctas)
    monkeypatch.setattr(kernel_sm90, "simt", simt_of(128 * num_warpgroups))
    monkeypatch.setattr(kernel_sm90.mosaic, "begin", lambda: None)
    operands = [Memory(given.size, given.reshape(-1)), *([] if offset is None else [Memory(1, [offset])])]
    outputs = [Memory(out.shape[0]) for out in kernel_sm90.align_outputs(desc)]

    def launch(body, *refs, names):
        for index in range(num_ctas):
            monkeypatch.setattr(kernel_sm90.lax, "axis_index", lambda name, index=index: jnp.int32(index))
            body(desc, config, *refs, **{name: Memory(256) for name in names})

    with jax.disable_jit():
        if num_ctas == 1:
            launch(kernel_sm90._align, *operands, *outputs, names=("counts", "ends", "sums"))
        else:
            between = [Memory(ids.size), Memory(num_ctas * 131)]
            launch(kernel_sm90._ranks, *operands, *between, names=("counts",))
            launch(kernel_sm90._rows, *between, *operands, *outputs, names=("counts", "ends", "sums", "before"))
    assert all(out.is_written.all() for out in outputs)
    local = ids - (offset or 0)
    found = TileMap(**{name: out.values for name, out in zip(desc.outputs, outputs, strict=True)})
    found = dataclasses.replace(found, row_of=found.row_of.reshape(ids.shape))
    check_tiles(np.where((local >= 0) & (local < 131), local, -1), 131, 16, found)


@pytest.mark.parametrize("tokens", [1, 16, 40])
@pytest.mark.sample(2)
def test_unpermuted_in_lockstep(monkeypatch, tokens):
    """Tokens that name an expert twice, and more than there are bits."""
    ids = np.random.default_rng(2).integers(-2, 30, (tokens, 4)).astype(np.int32)
    desc = AlignDesc(ids.size, 28, 40, row_capacity(ids.size, 28, 40), top_k=4)
    monkeypatch.setattr(kernel_sm90, "simt", simt_of(128))
    monkeypatch.setattr(kernel_sm90.mosaic, "begin", lambda: None)
    outputs = [Memory(out.shape[0]) for out in kernel_sm90.align_outputs(desc)]
    scratch = {name: Memory(128) for name in kernel_sm90.align_scratch(desc)}
    with jax.disable_jit():
        kernel_sm90._align(desc, AlignConfig(1), Memory(ids.size, ids.reshape(-1)), *outputs, **scratch)
    assert all(out.is_written.all() for out in outputs)
    found = TileMap(**{name: out.values for name, out in zip(desc.outputs, outputs, strict=True)})
    found = dataclasses.replace(found, row_of=found.row_of.reshape(ids.shape))
    check_unpermuted_tiles(ids, 28, 40, found)


@pytest.mark.parametrize("case", align_cases(), ids=lambda case: case.name)
@pytest.mark.sample(3)
def test_lowers_for_cuda(case):
    assert case.launches() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("block_m", [1, 64])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_gpu(routing, block_m):
    ids, num_experts = ROUTINGS[routing]
    for config in (None, AlignConfig(1), AlignConfig(8), AlignConfig(1, 3), AlignConfig(4, 32), AlignConfig(2, 64)):
        check_tiles(ids, num_experts, block_m, run(ids, num_experts, block_m, "hopper", config))


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ROUTINGS)
def test_gpu_wide_ids(routing):
    check_wide(routing, "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "num_experts"), [((8192, 8), 256), ((16384, 2), 8), ((1, 8), 512), ((4097, 4), 1000)]
)
def test_gpu_sizes(shape, num_experts):
    ids = np.random.default_rng(1).integers(0, num_experts, shape)
    check_tiles(ids, num_experts, 128, run(ids, num_experts, 128, "hopper"))


@pytest.mark.gpu
def test_gpu_stable():
    check_stable_shards_and_wide_ids("hopper")
    for shape, num_experts in (((16384, 8), 256), ((4097, 4), 1000)):
        ids = np.random.default_rng(1).integers(-1, num_experts, shape)
        check_stable("hopper", ids, num_experts, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("routing", FEW)
def test_gpu_unpermuted(routing):
    check_unpermuted(routing, "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", [1, 128, 1000])
def test_gpu_pairs_shared_by_ctas(num_experts):
    """As many as a layer of 8192 tokens has, and one more; all to one expert; a shard whose offset is on the device."""
    rng = np.random.default_rng(3)
    for ids in (rng.integers(-1, num_experts, (65536, 1)), rng.integers(0, num_experts + 9, (65537, 1))):
        assert choose_config(AlignDesc(ids.size, num_experts, 128, 0)).num_ctas > 1
        for repeat in range(3):
            check_tiles(ids, num_experts, 128, run(ids + repeat, num_experts, 128, "hopper", offset=repeat))
    ids = np.full((65536, 1), num_experts - 1)
    check_tiles(ids, num_experts, 128, run(ids, num_experts, 128, "hopper"))


@pytest.mark.gpu
def test_gpu_shards_of_experts():
    check_shards("hopper")
