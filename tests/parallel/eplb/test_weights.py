"""Moving experts: every leaf of every scheme and layout, as bits, on one device and between eight; the same outputs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax import Scheme, fused_moe
from moe_jax.experts.hopper._kernel_layout import in_kernel_layout, to_kernel_layout
from moe_jax.parallel import Placement, move_experts, place_experts
from moe_jax.parallel.eplb import _weights as eplb_weights
from moe_jax.parallel.eplb._weights import exchange_tables, source_slots
from moe_jax.quantization import SCHEMES
from tests.support.cases import experts as cases
from tests.support.refusals import refuses

S, E = 8, cases.E
# Between them: scales of matrices and groups, global and input scales, zero points, packed words and nibbles.
QUICK = ("fp8_tensor_static", "w4a16_g32_asym", "nvfp4")


def random_slots(seed, num_experts=E, num_slots=S):
    rng = np.random.default_rng(seed)
    extra = rng.integers(0, num_experts, num_slots - num_experts)
    return rng.permutation(np.concatenate([np.arange(num_experts), extra])).astype(np.int32)


def placements(num_devices=1, seed=0):
    """The initial placement of E experts in S slots, and another one."""
    old = Placement.create(E, num_devices, num_redundant_experts=S - E)
    return old, Placement.from_slots(random_slots(seed), E, num_devices)


def bits(leaf):
    return np.atleast_1d(leaf).view(np.uint8)


def assert_same_bits(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(bits(a), bits(b))


def by_hand(weights, slots):
    """NumPy: slot s holds what expert slots[s] had."""
    return jax.tree.map(lambda leaf: np.asarray(leaf) if leaf.ndim == 0 else np.asarray(leaf)[slots], weights)


# -- one device -------------------------------------------------------------------------------------------------------


def check_moves(scheme):
    config = cases.make_config(scheme, has_bias=True)
    weights = cases.make_stored_weights(config)
    old, new = placements()
    placed = place_experts(weights, old)
    assert_same_bits(placed, by_hand(weights, old.physical_to_logical))
    moved = move_experts(placed, old, new)
    assert_same_bits(moved, by_hand(weights, new.physical_to_logical))

    x = cases.make_tokens(33, config)
    logits = jnp.asarray(np.random.default_rng(3).standard_normal((33, E)), jnp.float32)
    mask = jnp.arange(33) % 7 != 3
    run = jax.jit(lambda w, p: fused_moe(x, logits, w, config, placement=p, token_mask=mask, return_stats=True))
    (before, stats), (after, new_stats) = run(placed, old), run(moved, new)
    np.testing.assert_array_equal(before, after)
    assert run._cache_size() == 1
    np.testing.assert_array_equal(stats.topk_ids, new_stats.topk_ids)  # logical ids know nothing of slots
    assert (run(placed, new)[0] != before).any()  # maps without weights would show
    if scheme != "fp8_tensor_static":
        return
    alone = fused_moe(x, logits, weights, config, token_mask=mask)  # by expert, without slots and copies
    np.testing.assert_allclose(after, alone, rtol=2e-5, atol=2e-5 * np.abs(alone).max())


@pytest.mark.parametrize("scheme", QUICK)
@pytest.mark.sample(3)
def test_outputs_are_the_same_bits(scheme):
    check_moves(scheme)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name not in QUICK])
def test_outputs_are_the_same_bits_for_the_other_schemes(scheme):
    check_moves(scheme)


def test_act_order():
    weights = dataclasses.replace(SCHEMES["w4a16_g32_asym"].weights, actorder=True)
    check_moves(Scheme("w4a16_act_order", weights))


def test_kernel_layouts_move():
    """Blocks that a Hopper kernel reads, with the expert axis in front, are leaves like others."""
    config = cases.make_config("w4a16_g32_asym", dtype="bfloat16")
    packed = to_kernel_layout(cases.make_weights(config), config)
    assert in_kernel_layout(packed)
    old, new = placements()
    moved = move_experts(place_experts(packed, old), old, new)
    assert_same_bits(moved, by_hand(packed, new.physical_to_logical))
    assert jax.tree.structure(moved) == jax.tree.structure(packed)


def test_layers_of_slots_must_fit():
    old, new = placements()
    refuses(ValueError, r"shape \(7, 2\), expected 8 slots", move_experts, {"a": jnp.zeros((7, 2))}, old, new)
    refuses(ValueError, r"shape \(8, 2\), expected 5 experts", place_experts, {"a": jnp.zeros((8, 2))}, old)
    for other, what in (
        (Placement.create(E, 1), "num_slots=5, the old one 8"),
        (Placement.create(E, 2, num_redundant_experts=3), "num_devices=2, the old one 1"),
        (Placement.create(4, 1, num_redundant_experts=4), "num_experts=4, the old one 5"),
    ):
        refuses(ValueError, what, move_experts, {}, old, other)


def test_empty_slots():
    uneven = Placement.create(E, 2)  # 3 and 2 experts: the last slot is empty
    leaf = jnp.arange(1.0, 1 + E)
    np.testing.assert_array_equal(place_experts(leaf, uneven), [1, 2, 3, 4, 5, 0])
    swapped = Placement.from_slots(np.array([4, 3, -1, 0, 2, 1]), E, 2)
    moved = move_experts(place_experts(leaf, uneven), uneven, swapped)
    np.testing.assert_array_equal(np.asarray(moved)[[0, 1, 3, 4, 5]], [5, 4, 1, 3, 2])


# -- which copy is read, and by whom ----------------------------------------------------------------------------------


def test_sources_stay_as_close_as_they_can():
    """The slot itself, then the device, then the copies of other devices in turn."""
    old = Placement.from_slots(np.array([0, 1, 2, 0, 3, 4, 1, 2]), 5, 4)
    new = Placement.from_slots(np.array([0, 3, 0, 2, 4, 3, 0, 1]), 5, 4)
    assert source_slots(old, new).tolist() == [0, 4, 3, 2, 5, 4, 0, 6]


@pytest.mark.parametrize("seed", range(5))
def test_exchange_tables_describe_the_gather(seed):
    """The tables, carried out in NumPy, are ``slots[source]``; a device asks for an expert once."""
    num_devices, per_device = 4, 3
    source = np.random.default_rng(seed).integers(0, 12, 12).astype(np.int32)
    send, take = exchange_tables(source, num_devices)
    slots = 100 + np.arange(12).reshape(num_devices, per_device)
    for device in range(num_devices):
        arrived = [slots[sender][send[sender, device]] for sender in range(num_devices)]
        pool = np.concatenate([slots[device], *arrived])
        np.testing.assert_array_equal(pool[take[device]], 100 + source[device * per_device :][:per_device])
    assert send.shape[2] in (1, 2, 4)
    pairs = {(s // per_device, d // per_device, s) for d, s in enumerate(source) if s // per_device != d // per_device}
    most = max(sum(p[:2] == (a, b) for p in pairs) for a in range(4) for b in range(4))
    assert most <= send.shape[2] < 2 * most


def test_nothing_is_sent_when_experts_stay_on_their_device():
    send, take = exchange_tables(np.array([1, 0, 3, 3], np.int32), 2)
    assert send.shape == (2, 2, 0) and take.tolist() == [[1, 0], [1, 1]]


# -- eight devices ----------------------------------------------------------------------------------------------------

LAYOUTS = [
    ((8,), ("experts",), P("experts"), AxisType.Auto),
    ((4, 2), ("ep", "tp"), P("ep", None, "tp"), AxisType.Auto),
    ((2, 4), ("tp", "ep"), P("ep", "tp"), AxisType.Explicit),
]


@pytest.mark.parametrize(("shape", "names", "spec", "axis_type"), LAYOUTS, ids=str)
@pytest.mark.sample(3)
def test_over_a_mesh(shape, names, spec, axis_type, monkeypatch):
    """Bits of every width, NaNs with payload among them, with leaves split in other axes too and sent in pieces."""
    monkeypatch.setattr(eplb_weights, "_PIECE_BYTES", 64)
    mesh = jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape))
    rng = np.random.default_rng(0)
    num_slots, num_experts = 16, 11
    raw = rng.integers(0, 256, (num_slots, 4, 8 * 4), np.uint8)
    dtypes = ("float8_e4m3fn", "bfloat16", "float32")
    host = {dtype: raw.view(jnp.dtype(dtype)) for dtype in dtypes}
    tree = {dtype: jax.device_put(leaf, NamedSharding(mesh, spec)) for dtype, leaf in host.items()}
    tree["scalar"] = jnp.float32(3)
    devices = mesh.shape[spec[0]]
    old = Placement.from_slots(random_slots(1, num_experts, num_slots), num_experts, devices)
    widths = set()
    before = eplb_weights._exchange._cache_size()
    for seed in range(2, 5):
        new = Placement.from_slots(random_slots(seed, num_experts, num_slots), num_experts, devices)
        source = source_slots(old, new)
        widths.add(exchange_tables(source, devices)[0].shape[2])
        moved = move_experts(tree, old, new)
        for dtype in dtypes:
            np.testing.assert_array_equal(bits(moved[dtype]), bits(host[dtype][source]))
            assert moved[dtype].sharding.is_equivalent_to(tree[dtype].sharding, 3)
        assert (np.asarray(old.physical_to_logical)[source] == new.physical_to_logical).all()
    assert eplb_weights._exchange._cache_size() - before == len(dtypes) * len(widths)
