"""The layout contract of rows in expert order, checked by a loop over experts.

Expert e owns ceil(size / block_m) consecutive tiles, experts ascending; its rows are the first ``size`` rows of its
tiles, one for each pair that names it, in any order. Ids outside [0, E) own nothing. By token, an expert that a pair
names owns one tile, whose row t is token t's.
"""

import jax
import numpy as np

from pallas_kernels.align import row_capacity

# (ids, number of experts) that every alignment has to get right
ROUTINGS = {
    "random": (np.random.default_rng(0).integers(0, 5, (7, 3)), 5),
    "descending": (np.arange(12)[::-1].reshape(6, 2) % 5, 5),
    "nothing routed": (np.full((4, 2), -1), 3),
    "invalid mixed in": (np.array([[0, -1], [7, 2], [-5, 2**31 - 1], [2, 3]]), 3),
    "first and last expert empty": (np.array([[1, 2], [2, 1]]), 4),
    "expert repeated in a token": (np.array([[1, 1, 1], [0, 1, 0]]), 2),
    "more experts than pairs": (np.array([[100], [3]]), 128),
}


def check_tiles(ids, num_experts, block_m, found):
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


def check_unpermuted_tiles(ids, num_experts, block_m, found):
    ids, found = np.asarray(ids, np.int32), jax.tree.map(np.asarray, found)
    tiles = row_capacity(ids.size, num_experts, block_m) // block_m
    is_routed = (ids >= 0) & (ids < num_experts)
    sizes = np.bincount(ids[is_routed], minlength=num_experts)
    named = [e for e in range(num_experts) if sizes[e]]
    spare = tiles - len(named)
    assert spare >= 0
    row_of = [[named.index(e) * block_m + t if 0 <= e < num_experts else -1 for e in ids[t]] for t in range(len(ids))]
    np.testing.assert_array_equal(found.row_of, row_of)
    np.testing.assert_array_equal(found.group_sizes, sizes)
    np.testing.assert_array_equal(found.tile_expert, named + [-1] * spare)
    np.testing.assert_array_equal(found.tile_rows, [len(ids)] * len(named) + [0] * spare)
    bits = [sum({1 << min(t, 31) for t in range(len(ids)) if e in ids[t]}) for e in named]
    np.testing.assert_array_equal(found.tile_bits.view(np.uint32), bits + [0] * spare)
    np.testing.assert_array_equal(found.num_tiles, [len(named)])
    assert all(leaf.dtype == np.int32 for leaf in jax.tree.leaves(found))
