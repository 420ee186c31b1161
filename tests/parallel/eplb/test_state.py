"""Recorded load: on the device, by logical expert, over a window; plans made from it; copies that share a load."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.parallel import EplbState, Placement, balancedness, is_rebalance_due, rebalance
from moe_jax.parallel.eplb._policy import share_of_slots
from tests.support.refusals import refuses

LAYERS, E, S, DEVICES = 3, 6, 8, 4


def make_state(**options):
    return EplbState.create(LAYERS, Placement.create(E, DEVICES, num_redundant_experts=S - E), **options)


def logical(load, slots, num_experts=E):
    """(layers, S) load of slots -> (layers, num_experts), slot by slot."""
    found = np.zeros((len(load), num_experts), np.int64)
    for layer, row in enumerate(load):
        for slot, rows in enumerate(row):
            if slots[layer][slot] >= 0:
                found[layer, slots[layer][slot]] += rows
    return found


def random_load(seed):
    return np.random.default_rng(seed).integers(0, 50, (LAYERS, S)).astype(np.int32)


# -- recording --------------------------------------------------------------------------------------------------------


def test_window_slides():
    """The last four of six real steps, each of two micro-batches; dummy steps leave no trace."""
    slots = np.tile(np.arange(S) % E, (LAYERS, 1))

    @jax.jit
    def step(state, first, second, is_dummy):
        return state.record(first).record(second).next_step(is_dummy=is_dummy)

    state, steps = make_state(window_size=4), []
    for i in range(9):
        first, second, is_dummy = random_load(i), random_load(100 + i), i % 3 == 1
        state = step(state, first, second, is_dummy)
        steps += [] if is_dummy else [logical(first, slots) + logical(second, slots)]
    np.testing.assert_array_equal(state.load(), sum(steps[-4:]))
    assert int(state.step) == 6 and step._cache_size() == 1
    fresh = state.reset()
    assert not fresh.load().any() and int(fresh.step) == 0
    np.testing.assert_array_equal(fresh.physical_to_logical, state.physical_to_logical)


def test_layers_one_by_one_in_a_scan():
    load = random_load(0)

    def body(state, scanned):
        layer, of_layer = scanned
        return state.record(of_layer, layer), None

    state, _ = jax.lax.scan(body, make_state(window_size=2), (jnp.arange(LAYERS), jnp.asarray(load)))
    np.testing.assert_array_equal(state.pass_load, make_state(window_size=2).record(jnp.asarray(load)).pass_load)


def test_recording_reads_nothing_back():
    """Any transfer between host and device, which would wait for the device, is an error here."""
    step = jax.jit(lambda state, load: state.record(load).next_step(), donate_argnums=0)
    load = jax.device_put(random_load(0))
    state = step(make_state(window_size=3), load)
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            state = step(state, load)
    assert state.load().sum() == 3 * random_load(0).sum()


def test_load_is_kept_by_expert_across_moves():
    """What was counted in the slots of one placement still counts for its experts under the next."""
    state = make_state(window_size=5)
    before = random_load(1)
    state = state.record(jnp.asarray(before)).next_step()
    old = np.asarray(state.physical_to_logical)
    moved = Placement.from_slots(np.array([5, 4, 3, 2, 1, 0, 5, 5], np.int32), E, DEVICES)
    record = jax.jit(EplbState.record)
    record(state, jnp.asarray(before))
    state = state.with_placement(1, moved)
    after = random_load(2)
    state = record(state, jnp.asarray(after)).next_step()
    new = np.asarray(state.physical_to_logical)
    np.testing.assert_array_equal(new[1], moved.physical_to_logical)
    np.testing.assert_array_equal(new[[0, 2]], old[[0, 2]])
    np.testing.assert_array_equal(state.load(), logical(before, old) + logical(after, new))
    assert record._cache_size() == 1
    np.testing.assert_array_equal(state.placement(1).num_replicas, moved.num_replicas)


def test_empty_slots_count_for_nobody():
    state = EplbState.create(1, Placement.create(5, 2), window_size=1)  # the last of 6 slots is empty
    state = state.record(jnp.array([[1, 2, 3, 4, 5, 77]])).next_step()
    np.testing.assert_array_equal(state.load(), [[1, 2, 3, 4, 5]])


def test_balancedness():
    """Sum over layers of the mean over that of the maximum, as the formula says, and its limits."""
    load = random_load(3)
    per_device = load.reshape(LAYERS, DEVICES, -1).sum(axis=2)
    expected = per_device.mean(axis=1).sum() / per_device.max(axis=1).sum()
    np.testing.assert_allclose(balancedness(jnp.asarray(load), DEVICES), expected, rtol=1e-6)
    assert balancedness(jnp.ones((2, 8), jnp.int32), 4) == 1
    assert balancedness(jnp.eye(1, 8, dtype=jnp.int32), 4) == 0.25
    assert balancedness(jnp.zeros((2, 8), jnp.int32), 4) == 0


def test_state_refuses():
    state = make_state(window_size=1)
    refuses(ValueError, r"load has shape \(3, 6\), expected \(3, 8\)", state.record, jnp.zeros((LAYERS, E), jnp.int32))
    refuses(ValueError, r"load has shape \(3, 8\), expected \(8,\)", state.record, jnp.zeros((LAYERS, S), jnp.int32), 0)
    with pytest.raises(ValueError, match=r"\(6, 8, 2\), expected \(6, 8, 4\)"):
        state.with_placement(0, Placement.create(E, 2, num_redundant_experts=2))
    refuses(ValueError, "window_size=0", make_state, window_size=0)


# -- plans ------------------------------------------------------------------------------------------------------------


def skewed_state():
    """Layer 0 skewed, layer 1 even, layer 2 idle."""
    load = np.zeros((LAYERS, S), np.int32)
    load[0], load[1] = [400, 10, 10, 10, 10, 10, 400, 10], [20] * S
    return make_state(window_size=2).record(jnp.asarray(load)).next_step()


def test_plan_changes_only_what_gains():
    state = skewed_state()
    plan = rebalance(state)
    assert plan.layers == (0,)
    np.testing.assert_array_equal(plan.physical_to_logical[1:], state.physical_to_logical[1:])
    assert plan.balancedness_after[0] > plan.balancedness_before[0] + 0.2
    np.testing.assert_array_equal(plan.balancedness_after[1:], 1)
    devices = share_of_slots(plan.physical_to_logical, np.asarray(state.load(), float)).reshape(LAYERS, DEVICES, -1)
    found = devices.sum(axis=2).mean(axis=1)[0] / devices.sum(axis=2).max(axis=1)[0]
    np.testing.assert_allclose(plan.balancedness_after[0], found)
    assert rebalance(state, min_gain=0.9).layers == ()
    taken_over = state.with_placement(0, plan.placement(0))
    assert rebalance(taken_over).layers == ()


@pytest.mark.parametrize("sizes", [(4, 1, 1), (4, 2, 3), (4, 2, 2), (2, 2, 2), (8, 4, 2), (1, 1, 1)])
def test_no_layer_gets_worse_than_it_was(sizes):
    """Also where the greedy policy is worse than the linear placement, as it is for some of these loads."""
    num_devices, num_nodes, num_groups = sizes
    load = np.random.default_rng(sum(sizes)).integers(0, 60, (200, E))
    load = load * np.random.default_rng(7).integers(0, 2, load.shape)
    linear = Placement.create(E, num_devices, num_redundant_experts=S - E)
    state = EplbState.create(200, linear, window_size=1)
    plan = rebalance(state, num_nodes=num_nodes, num_groups=num_groups, load=load, min_gain=0)

    def peak(slots):
        return share_of_slots(slots, load.astype(float)).reshape(200, num_devices, -1).sum(axis=2).max(axis=1)

    assert (peak(plan.physical_to_logical) <= peak(np.asarray(state.physical_to_logical))).all()
    for layer in plan.layers:
        assert plan.placement(layer).num_replicas.sum() == S


def test_when_a_rebalance_is_due():
    due = [step for step in range(10_000) if is_rebalance_due(step)]
    assert due == [750, 3750, 6750, 9750]
    assert [step for step in range(6) if is_rebalance_due(step, 2)] == [1, 3, 5]
    assert make_state().window.shape[0] == 1000
