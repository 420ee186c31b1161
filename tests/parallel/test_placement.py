"""Placement and expert maps: the examples of vLLM's documentation of behaviour, and properties under random counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.parallel import (
    Placement,
    determine_expert_map,
    expert_map_text,
    local_expert_ids,
    physical_to_logical,
    routing_tables,
)
from tests.support.refusals import refuses

COUNTS = [(1, 1), (10, 4), (8, 8), (5, 8), (7, 2), (256, 6)]


def test_experts_of_each_rank():
    linear = [local_expert_ids(10, 4, rank).tolist() for rank in range(4)]
    assert linear == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    robin = [local_expert_ids(10, 4, rank, "round_robin").tolist() for rank in range(4)]
    assert robin == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]


def test_expert_map():
    count, expert_map = determine_expert_map(4, 1, 10, "round_robin")
    assert count == 3 and expert_map.tolist() == [-1, 0, -1, -1, -1, 1, -1, -1, -1, 2]
    assert expert_map_text(expert_map) == "0->1, 1->5, 2->9"
    assert expert_map_text([1, -1, 0, 2]) == "0->2, 1->0, 2->3"
    assert determine_expert_map(1, 0, 10) == (10, None)


def test_routing_tables():
    tables = routing_tables(10, 4, 1)
    assert tables.global_to_physical.tolist() == [0, 3, 6, 8, 1, 4, 7, 9, 2, 5]
    assert tables.physical_to_global.tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 3, 7]
    assert tables.local_global.tolist() == [1, 5, 9]
    assert {table.dtype for table in tables} == {np.dtype(np.int64)}


def test_redundant_copies_start_over():
    assert physical_to_logical(4, 6).tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
@pytest.mark.parametrize(("num_experts", "num_devices"), COUNTS)
@pytest.mark.parametrize("redundant", [0, 3])
def test_every_copy_has_one_slot(strategy, num_experts, num_devices, redundant):
    placement = Placement.create(num_experts, num_devices, strategy, num_redundant_experts=redundant)
    copies = num_experts + redundant
    assert placement.slots_per_device == -(-copies // num_devices)
    placed = []
    for device in range(num_devices):
        here = placement.experts_of(device)
        expected = physical_to_logical(num_experts, redundant)[local_expert_ids(copies, num_devices, device, strategy)]
        assert here[: expected.size].tolist() == expected.tolist() and (here[expected.size :] == -1).all()
        placed += expected.tolist()
    assert sorted(placed) == sorted(physical_to_logical(num_experts, redundant).tolist())
    for expert in range(num_experts):
        slots = placement.logical_to_physical[expert]
        count = placement.num_replicas[expert]
        assert (placement.physical_to_logical[slots[:count]] == expert).all() and (slots[count:] == -1).all()
        assert np.unique(slots[:count]).size == count == placed.count(expert)


def test_expert_map_of_a_placement():
    for strategy in ("linear", "round_robin"):
        placement = Placement.create(10, 4, strategy)
        for device in range(4):
            assert (placement.expert_map(device) == determine_expert_map(4, device, 10, strategy)[1]).all()
    twice_on_one_device = Placement.from_slots([1, 0, 1, 2], 3, 1)
    assert twice_on_one_device.expert_map(0).tolist() == [1, 0, 3]


def test_ids_reach_their_experts():
    rng = np.random.default_rng(0)
    placement = Placement.create(10, 4, "round_robin", num_redundant_experts=3)
    ids = rng.integers(-2, 12, (257, 3)).astype(np.int32)
    slots = np.asarray(placement.to_physical(jnp.asarray(ids)))
    is_expert = (ids >= 0) & (ids < 10)
    assert (placement.physical_to_logical[slots[is_expert]] == ids[is_expert]).all()
    assert (slots[~is_expert] == -1).all()
    owner, local = np.divmod(slots, placement.slots_per_device)
    for device in range(4):
        here = is_expert & (owner == device)
        assert here.any() and (placement.experts_of(device)[local[here]] == ids[here]).all()


@pytest.mark.parametrize(("copies", "top_k"), [(2, 8), (3, 1), (5, 2), (8, 8)])
@pytest.mark.sample(3)
def test_copies_share_the_load(copies, top_k):
    """Also among the pairs of one token and of neighbours: what vLLM's hash of the token alone does not do. Of rows in
    sequence, every second or seventh row, or one slot of top-k, no copy gets 25% more than its part.
    """
    placement = Placement.from_slots([0] * copies, 1, copies)
    slots = np.asarray(placement.to_physical(jnp.zeros((480, top_k), jnp.int32)))
    counts = np.bincount(slots.reshape(-1), minlength=copies)
    assert counts.max() - counts.min() <= 4
    window = slots.reshape(-1)[: 3 * copies]
    assert np.unique(window).size == copies
    part = np.asarray(placement.to_physical(jnp.zeros((80, top_k), jnp.int32), first_token=jnp.int32(400)))
    assert (part == slots[400:]).all()
    tokens = np.arange(4096)
    for columns, is_routed in ((1, tokens >= 0), (8, tokens % 2 == 1), (8, tokens % 7 == 3), (4, tokens < 400)):
        for column in {0, columns - 1}:
            ids = np.full((tokens.size, columns), -1, np.int32)
            ids[is_routed, column] = 0
            found = np.asarray(placement.to_physical(jnp.asarray(ids)))
            assert (found[ids < 0] == -1).all()
            load = np.bincount(found[ids == 0], minlength=copies)
            assert load.max() <= 1.25 * is_routed.sum() / copies + 1


def test_another_placement_compiles_nothing():
    traces = []

    @jax.jit
    def slots_of(placement, ids):
        traces.append(None)
        return placement.to_physical(ids)

    ids = jnp.asarray([[0, 1], [2, 3]])
    first = Placement.create(4, 2, num_redundant_experts=2)
    other = Placement.from_slots([3, 2, 1, 0, 3, 3], 4, 2, max_replicas=3)
    slots_of(first, ids)
    assert (other.physical_to_logical[np.asarray(slots_of(other, ids))] == np.asarray(ids)).all()
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Placement.create(4, 2, "random"), "placement='random', expected one of 'linear', 'round_robin'"),
        (lambda: Placement.create(0, 2), "num_experts=0"),
        (lambda: Placement.from_slots([0, 1, 2], 3, 2), "a multiple of 2 devices"),
        (lambda: Placement.from_slots([0, 1, 4, -1], 3, 2), "holds 4, expected ids from 0 to 2"),
        (lambda: Placement.from_slots([0, 1, 1, -1], 3, 2), "expert 2 has 0 slots, expected 1 to 2"),
        (lambda: Placement.from_slots([0, 0, 0, 1], 2, 2, max_replicas=2), "expert 0 has 3 slots, expected 1 to 2"),
        (lambda: local_expert_ids(4, 2, 2), "ep_rank=2"),
    ],
)
def test_refusals(make, message):
    refuses(ValueError, message.replace("(", r"\("), make)
