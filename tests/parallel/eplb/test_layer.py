"""Layers whose experts move while they serve, on eight devices: the same bits, no new programs, copies kept equal.

top_k is 2 where bits are compared: the sum of two numbers has one order, wherever they were computed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import moe_jax
from moe_jax.parallel import (
    EplbState,
    Placement,
    balancedness,
    logical_weights,
    rearrange_expert_weights,
    rebalance,
    transfer_experts,
)
from moe_jax.quantization import SCHEMES
from tests.support.cases import experts as cases
from tests.support.checkpoints.expert_tensors import INTER, plain_tensors
from tests.support.checkpoints.expert_tensors import E as FEW
from tests.support.checkpoints.expert_tensors import H as HIDDEN
from tests.support.refusals import refuses

E, H, I, T = 11, 64, 32, 40  # noqa: E741


@functools.cache
def make_mesh(*shape, axis_type="Auto"):
    names = ("e", "t")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(AxisType[axis_type],) * len(shape))


def make_layer(scheme="bf16", shape=(8,), axis_type="Auto", redundant=3, **options):
    """Random experts, in slots; E + redundant is rounded up to the devices."""
    options = dict(top_k=2, scheme=scheme, dtype=jnp.float32, param_dtype=jnp.float32) | options
    axes = dict(mesh=make_mesh(*shape, axis_type=axis_type), expert_axis="e", tensor_axis="t" if shape[1:] else None)
    layer = moe_jax.FusedMoE(E, H, I, enable_eplb=True, num_redundant_experts=redundant, **axes, **options)
    layer.set_weights(cases.make_stored_weights(layer.config))
    return layer


def make_tokens(seed=0):
    """x and logits that favour the first experts."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((T, H)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(rng.standard_normal((T, E)) - 0.7 * np.arange(E), jnp.float32)


def held(layer):
    """{slot: bytes of everything the expert there owns}, and the expert of each slot."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(layer.weights.get_value()) if leaf.ndim]
    slots = np.asarray(layer.placement.get_value().physical_to_logical)
    return [b"".join(leaf[slot].tobytes() for leaf in leaves) for slot in range(slots.size)], slots


def assert_copies_are_equal(layer):
    content, slots = held(layer)
    of_expert = {expert: content[slots.tolist().index(expert)] for expert in range(E)}
    assert len(set(of_expert.values())) == E and all(content[s] == of_expert[e] for s, e in enumerate(slots))


# -- serving ----------------------------------------------------------------------------------------------------------


def serve_and_move(scheme, shape, axis_type, dispatch):
    """Two layers, steps in between: load goes in, a plan comes out, layer after layer takes it over."""
    options = dict(has_bias=True, dispatch=dispatch)
    layers = [make_layer(scheme, shape, axis_type, **options) for _ in range(2)]
    x, logits = make_tokens()
    mask = jnp.arange(T) % 9 != 4

    @jax.jit
    def step(layers, state):
        outputs, loads = [], []
        for layer in layers:
            y, stats = layer(x, logits, token_mask=mask, return_stats=True)
            outputs, loads = [*outputs, y], [*loads, stats.load]
        return outputs, jnp.stack(loads), state.record(jnp.stack(loads)).next_step()

    state = EplbState.create(2, layers[0].placement.get_value(), window_size=8, mesh=layers[0].parallel)
    for _ in range(3):
        expected, load, state = step(layers, state)
    assert int(load.sum()) == 2 * 2 * int(mask.sum())
    plan = rebalance(state)
    assert plan.layers == (0, 1) and plan.physical_to_logical.shape == (2, 16)
    for layer in plan.layers:
        old, _ = held(layers[layer])
        state = plan.apply(layer, layers[layer], state)
        assert held(layers[layer])[0] != old
        assert_copies_are_equal(layers[layer])
        outputs, moved_load, state = step(layers, state)
        for y, y0 in zip(outputs, expected, strict=True):
            if len(shape) == 1 and dispatch == "all_to_all":  # the others add partial sums of devices
                np.testing.assert_array_equal(y, y0)
            else:
                np.testing.assert_allclose(y, y0, rtol=1e-5, atol=1e-5 * np.abs(y0).max())
    assert step._cache_size() == 1
    devices = shape[0]
    assert balancedness(moved_load, devices) > 1.2 * balancedness(load, devices)
    # By expert the load is the same in each of the five steps, whatever slots served it.
    np.testing.assert_array_equal(state.load() % 5, 0)
    np.testing.assert_array_equal(state.physical_to_logical, plan.physical_to_logical)


@pytest.mark.parametrize(
    "case",
    [
        ("fp8_tensor_static", (8,), "Auto", "all_to_all"),
        ("w4a16_g32_asym", (8,), "Explicit", "replicate"),
        ("nvfp4", (4, 2), "Auto", "all_gather"),
    ],
    ids=str,
)
@pytest.mark.sample(3)
def test_experts_move_while_layers_serve(case):
    serve_and_move(*case)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_on_eight_devices(scheme):
    number = list(SCHEMES).index(scheme)
    dispatch = ("replicate", "all_gather", "all_to_all")[number % 3]
    serve_and_move(scheme, (8,), ("Auto", "Explicit")[number // 3 % 2], dispatch)


def test_nothing_changes_when_a_move_is_refused():
    layer = make_layer()
    before, placement = layer.weights.get_value(), layer.placement.get_value()
    crowded = np.concatenate([np.arange(E), np.zeros(5)]).astype(np.int32)
    rearrange_expert_weights(layer, Placement.from_slots(crowded, E, 8))  # 6 copies of one expert fit
    rearrange_expert_weights(layer, placement)
    before = layer.weights.get_value()
    with pytest.raises(ValueError, match="num_slots=24, the old one 16"):
        rearrange_expert_weights(layer, Placement.from_slots(np.arange(24, dtype=np.int32) % E, E, 8, max_replicas=6))
    assert all(a is b for a, b in zip(jax.tree.leaves(layer.weights.get_value()), jax.tree.leaves(before), strict=True))
    alone = moe_jax.FusedMoE(E, H, I, top_k=2, rngs=nnx.Rngs(0))
    refuses(ValueError, "no slots .* enable_eplb=True", rearrange_expert_weights, alone, placement)
    abstract = moe_jax.FusedMoE(E, H, I, top_k=2, mesh=make_mesh(8), expert_axis="e", enable_eplb=True)
    refuses(ValueError, "no weights yet", rearrange_expert_weights, abstract, abstract.placement.get_value())
    refuses(TypeError, "inside jax.jit", jax.jit(lambda layer: rearrange_expert_weights(layer, placement)), layer)


def test_experts_of_others_are_never_read():
    """NaN in every expert that no token is sent to, data, scales and biases, and in every slot that serves none."""
    x, logits = make_tokens()
    logits = logits.at[:, 4:].set(-jnp.inf)
    for dispatch in ("replicate", "all_gather", "all_to_all"):
        layer, spoiled = (make_layer("fp8_channel", has_bias=True, dispatch=dispatch) for _ in range(2))
        expected, stats = layer(x, logits, return_stats=True)
        idle = np.flatnonzero(stats.load == 0)
        assert idle.size >= 8
        spoil = functools.partial(jax.tree.map, lambda leaf, idle=idle: leaf.at[idle].set(jnp.nan))
        spoiled.weights.set_value(spoil(spoiled.weights.get_value()))
        np.testing.assert_array_equal(spoiled(x, logits), expected)
        assert np.isnan(np.asarray(spoiled(x, make_tokens()[1]))).any()


# -- loading into copies ----------------------------------------------------------------------------------------------


def loaded(tensors, **options):
    layer = moe_jax.FusedMoE(FEW, HIDDEN, INTER, top_k=2, scheme="int8_w8a16", dtype=jnp.float32, **options)
    layer.load_weights(tensors.items())
    layer.process_weights_after_loading()
    return layer


def rows_of(layer, expert):
    slots = np.asarray(layer.placement.get_value().physical_to_logical)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(layer.weights.get_value())]
    return [[leaf[slot] for leaf in leaves] for slot in np.flatnonzero(slots == expert)]


def check_rows(layer, expert, tensors):
    copies, alone = rows_of(layer, expert), loaded(tensors).weights.get_value()
    expected = [np.asarray(leaf)[expert] for leaf in jax.tree.leaves(alone)]
    assert copies
    for copy in copies:
        for found, wanted in zip(copy, expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
    return len(copies)


def test_copies_are_loaded_and_reloaded():
    """Before and after a move; all experts and some; with vLLM's mapping for redundant experts."""
    first, second, third = (plain_tensors(seed=seed) for seed in range(3))
    mapping = moe_jax.make_expert_params_mapping(None, "gate_proj", "down_proj", "up_proj", 3, 5)
    spread = dict(mesh=make_mesh(4), expert_axis="e", enable_eplb=True, num_redundant_experts=5)
    layer = loaded(first, expert_mapping=mapping, **spread)
    assert [check_rows(layer, expert, first) for expert in range(3)] == [3, 3, 2]
    moved = Placement.from_slots(np.array([2, 2, 0, 1, 2, 2, 2, 2], np.int32), 3, 4)
    rearrange_expert_weights(layer, moved)
    assert [check_rows(layer, expert, first) for expert in range(3)] == [1, 1, 6]
    layer.reload_weights(second.items())
    assert [check_rows(layer, expert, second) for expert in range(3)] == [1, 1, 6]
    only_two = {name: tensor for name, tensor in third.items() if ".experts.2." in name}
    layer.reload_weights(only_two.items(), experts=[2])
    assert [check_rows(layer, e, tensors) for e, tensors in enumerate((second, second, third))] == [1, 1, 6]
    np.testing.assert_array_equal(layer.placement.get_value().physical_to_logical, moved.physical_to_logical)


def test_slots_that_would_be_empty_take_copies():
    layer = make_layer(redundant=0)
    placement = layer.placement.get_value()
    assert placement.num_slots == 16 and (placement.physical_to_logical >= 0).all()
    np.testing.assert_array_equal(placement.num_replicas, [2] * 5 + [1] * 6)


# -- another mesh -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "target"), [((8,), (2, 2)), ((2,), (8,)), ((8,), None)])
@pytest.mark.sample(3)
def test_experts_move_to_another_mesh(shape, target):
    """Fewer devices, with tensor parallelism as well, more devices, no mesh at all: the same experts and load."""
    source = make_layer("w4a16_g32_asym", shape, has_bias=True)
    num_slots = source.placement.get_value().num_slots
    slots = np.random.default_rng(0).permutation(np.arange(num_slots) % E).astype(np.int32)
    rearrange_expert_weights(source, Placement.from_slots(slots, E, shape[0]))
    x, logits = make_tokens()
    expected, stats = source(x, logits, return_stats=True)
    assert_same = functools.partial(jax.tree.map, np.testing.assert_array_equal)
    assert_same(logical_weights(source), cases.make_stored_weights(source.config))
    state = EplbState.create(1, source.placement.get_value(), window_size=2).record(stats.load[None]).next_step()

    if target is None:
        other = moe_jax.FusedMoE(
            E, H, I, top_k=2, scheme="w4a16_g32_asym", has_bias=True, dtype=jnp.float32, param_dtype=jnp.float32
        )
    else:
        other = make_layer("w4a16_g32_asym", target, redundant=1, has_bias=True)
        other.set_weights(jax.tree.map(jnp.zeros_like, cases.make_stored_weights(other.config)))
    transfer_experts(source, other)
    y = other(jnp.asarray(np.asarray(x)), jnp.asarray(np.asarray(logits)))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    assert_same(logical_weights(other), logical_weights(source))
    if target is None:
        return
    resized = state.with_devices(other.placement.get_value(), mesh=other.parallel)
    assert resized.window.sharding.mesh == other.parallel.mesh
    np.testing.assert_array_equal(resized.load(), state.load())
    plan = rebalance(resized)
    resized = plan.apply(0, other, resized)
    assert (resized.num_devices, resized.num_slots) == {(2, 2): (2, 12), (8,): (8, 16)}[target]
    np.testing.assert_allclose(other(x, logits), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_transfer_refuses_another_layer():
    refuses(ValueError, "the layers differ", transfer_experts, make_layer(), make_layer("fp8_channel"))


# -- replay -----------------------------------------------------------------------------------------------------------


def test_recorded_experts_replay_to_the_bit():
    """Ids are logical: a run recorded before a move replays after it, and on one device. One expert a token, since
    programs that XLA compiled apart may round a sum of products apart."""
    layer = make_layer("fp8_channel", top_k=1, scoring_func="sigmoid", renormalize=False)
    x, logits = make_tokens()
    y, stats = jax.jit(lambda layer, z: layer(x, z, return_stats=True))(layer, logits)
    run = jax.jit(lambda layer, z, ids: layer(x, z, replayed_ids=ids, return_stats=True))
    record = stats.topk_ids.astype(jnp.int16)
    np.testing.assert_array_equal(run(layer, logits, record)[0], y)
    state = EplbState.create(1, layer.placement.get_value(), window_size=1).record(stats.load[None]).next_step()
    rebalance(state).apply(0, layer, state)
    np.testing.assert_array_equal(run(layer, logits, record)[0], y)
    assert run._cache_size() == 1

    other = -logits
    later, later_stats = run(layer, other, record)
    np.testing.assert_array_equal(later_stats.topk_ids, stats.topk_ids)
    factor = jax.nn.sigmoid(jnp.take_along_axis(other, stats.topk_ids, 1))
    factor /= jax.nn.sigmoid(jnp.take_along_axis(logits, stats.topk_ids, 1))
    np.testing.assert_allclose(later, y * factor, rtol=1e-5, atol=1e-6)
    assert (np.asarray(layer(x, other, return_stats=True)[1].topk_ids) != np.asarray(stats.topk_ids)).any()
    weights, ids = cases.make_stored_weights(layer.config), jnp.asarray(np.asarray(record))
    alone = moe_jax.fused_moe(x, logits, weights, layer.config, replayed_ids=ids)
    np.testing.assert_allclose(alone, y, rtol=1e-5, atol=1e-5 * np.abs(y).max())
    block = moe_jax.MoEBlock(layer, lambda x: other)
    np.testing.assert_allclose(block(x, replayed_ids=record), later, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"replayed_ids has shape \(1, 40\), expected \(40, 1\)"):
        layer(x, logits, replayed_ids=record.T)
