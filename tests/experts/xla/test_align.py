"""align (spec 2.12) against a loop over experts.

Contract: rows of expert e are contiguous, start at a multiple of tile, ascend in (token, slot); gaps and the tail of
row_token hold T; ids outside [0, E) own no row (row_of -1) and no tile.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.experts._sort import sort_by_expert
from moe_jax.experts.xla._align import align
from pallas_kernels.align import row_capacity
from tests.support.kernels.tile_checks import ROUTINGS
from tests.support.refusals import refuses


def align_numpy(ids, num_experts, tile):
    """Plain version: walk the experts, append their pairs in order, pad. Returns the five fields, without the tail."""
    num_tokens, top_k = ids.shape
    row_token, row_of, sizes, tile_expert = [], np.full((num_tokens, top_k), -1), [], []
    for e in range(num_experts):
        pairs = [(t, k) for t in range(num_tokens) for k in range(top_k) if ids[t, k] == e]
        for t, k in pairs:
            row_of[t, k] = len(row_token)
            row_token.append(t)
        sizes.append(len(pairs))
        while len(row_token) % tile:
            row_token.append(num_tokens)
        tile_expert += [e] * (len(row_token) // tile - len(tile_expert))
    return row_token, row_of, sizes, tile_expert


jit_align = jax.jit(align, static_argnums=(1, 2))


def check(ids, num_experts, tile):
    ids = np.asarray(ids, np.int32)
    a = jax.tree.map(np.asarray, jit_align(jnp.asarray(ids), num_experts, tile))
    row_token, row_of, sizes, tile_expert = align_numpy(ids, num_experts, tile)
    capacity = row_capacity(ids.size, num_experts, tile)
    assert len(row_token) <= capacity and capacity % tile == 0
    assert a.row_token.shape == (capacity,) and a.tile_expert.shape == (capacity // tile,)
    assert a.num_tiles == len(tile_expert)
    np.testing.assert_array_equal(a.row_token, row_token + [ids.shape[0]] * (capacity - len(row_token)))
    np.testing.assert_array_equal(a.tile_expert, tile_expert + [-1] * (capacity // tile - len(tile_expert)))
    np.testing.assert_array_equal(a.row_of, row_of)
    np.testing.assert_array_equal(a.group_sizes, sizes)
    assert all(leaf.dtype == np.int32 for leaf in jax.tree.leaves(a))
    return a


HOSTILE = ROUTINGS | {
    "one expert takes all": (np.full((9, 2), 3), 5),
    "single token": (np.array([[4, 0, 2]]), 6),
    "no tokens": (np.zeros((0, 4), int), 3),
    "one expert in all": (np.zeros((5, 1), int), 1),
}


@pytest.mark.parametrize("tile", [1, 2, 16])
@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.sample(6)
def test_against_loop(case, tile):
    check(*HOSTILE[case], tile)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_property(data):
    # Few shapes, so that few programs are compiled.
    num_tokens, top_k, num_experts, tile = data.draw(st.sampled_from([(5, 2, 3, 4), (8, 1, 8, 2), (3, 4, 2, 8)]))
    ids = data.draw(
        st.lists(st.integers(-2, num_experts + 1), min_size=num_tokens * top_k, max_size=num_tokens * top_k)
    )
    check(np.reshape(ids, (num_tokens, top_k)), num_experts, tile)


def test_capacity_is_reached():
    # Every expert in use wastes tile - 1 rows: the bound is tight when T*K <= E, and within a tile otherwise.
    assert check(np.arange(6).reshape(3, 2), 8, 4).num_tiles == row_capacity(3 * 2, 8, 4) // 4 == 6
    assert check(np.array([[0, 0], [0, 0], [0, 1]]), 2, 4).num_tiles == 3
    assert row_capacity(3 * 2, 2, 4) == 12
    assert row_capacity(0, 64, 16) == 0


def test_wide_ids_use_the_two_operand_sort():
    # Ids and positions do not fit one 32-bit word together: same answer, still stable.
    expert = jnp.array([5, 0, 5, 2**31 - 2, 0, 5], jnp.int32)
    wide = sort_by_expert(expert, 2**31 - 1)
    narrow = sort_by_expert(jnp.where(expert > 5, 6, expert), 6)
    np.testing.assert_array_equal(wide[0], [0, 0, 5, 5, 5, 2**31 - 2])
    np.testing.assert_array_equal(wide[1], narrow[1])


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int16])
@pytest.mark.sample(2)
def test_narrow_ids(dtype):
    assert align(jnp.array([[3, 0], [-1, 3]], dtype), 300, 1).row_of.tolist() == [[1, 0], [-1, 2]]


def test_vmap_over_layers_or_shards():
    ids = jnp.asarray(np.random.default_rng(1).integers(-1, 6, (3, 8, 2)), jnp.int32)
    stacked = jax.vmap(lambda i: align(i, 5, 4))(ids)
    for n in range(3):
        for got, want in zip(jax.tree.leaves(stacked), jax.tree.leaves(align(ids[n], 5, 4)), strict=True):
            np.testing.assert_array_equal(got[n], want)


@pytest.mark.parametrize(("num_experts", "tile"), [(0, 1), (4, 0), (4, -2)])
def test_refuses_empty_sizes(num_experts, tile):
    refuses(ValueError, "at least 1", align, jnp.zeros((2, 2), jnp.int32), num_experts, tile)
