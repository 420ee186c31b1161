"""dispatch="nvlink_dispatch": the exchange against NumPy, the experts on rows that arrived, who is refused, lowering.

Layout contract: token t of device s is row s * T + t wherever it arrives; slot i is an expert of device
i // slots_per_device. On CPU devices the exchange runs as its reference, with XLA's collectives, and the experts with
the references of their kernels.
"""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from moe_jax.experts._choice import BACKENDS
from moe_jax.experts.hopper._experts import forward, forward_arrived
from moe_jax.experts.hopper._kernel_layout import to_kernel_layout
from moe_jax.parallel import ParallelConfig, Placement, fused_moe, place_weights
from moe_jax.parallel._choice import (
    FEW_TOKENS,
    choose_dispatch,
    describe_dispatch,
    dispatch_refusal,
    nvlink_refusal,
)
from moe_jax.parallel._dispatch import WAYS, Exchange, nvlink_dispatch
from pallas_kernels.common.targets import Target
from pallas_kernels.nvlink_dispatch import combine_rows, dispatch_rows
from tests.support.cases.experts import make_config, make_stored_weights
from tests.support.kernels.nvlink_slots import make_slots
from tests.support.kernels.portable_twin import on_target
from tests.support.oracles.tolerances import Tolerance, assert_rows_close, tolerance

KERNELS = ["reference", pytest.param("hopper", marks=pytest.mark.multi_gpu)]


def mesh_of(size):
    if len(jax.devices()) < size:
        pytest.skip(f"needs {size} devices")
    return jax.make_mesh((size,), ("e",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])


def over(size, function):
    """function of one device's shares, over ``size`` devices."""
    spec = PartitionSpec("e")
    return jax.jit(jax.shard_map(function, mesh=mesh_of(size), in_specs=spec, out_specs=spec, check_vma=False))


def slots_of_all(routing, size, tokens, num_slots, top_k, seed=0):
    """(size * tokens, top_k), as arrays over the mesh lie."""
    return make_slots(routing, size, tokens, num_slots, top_k, seed).reshape(-1, top_k)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("size", "routing", "sum_dtype"),
    [
        (2, "random", None),
        (4, "holes", "bfloat16"),
        (8, "idle", "float32"),
        (4, "first", None),
        (2, "none", "bfloat16"),
    ],
)
def test_every_row_arrives_and_comes_back(size, routing, sum_dtype, kernels):
    tokens, top_k, width, per_device = 5, 2, 512, 3
    slots = slots_of_all(routing, size, tokens, size * per_device, top_k)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((size * tokens, width)).astype(np.float32)
    weights = rng.random(slots.shape).astype(np.float32)
    where: dict[str, Any] = dict(axis="e", slots_per_device=per_device, implementation=kernels)

    def there_and_back(x, slots, weights):
        told = None if sum_dtype is None else weights
        arrived = dispatch_rows(x, slots, told, quantization="e4m3_group", sum_dtype=sum_dtype, **where)
        mine = arrived.slots - lax.axis_index("e") * per_device
        here = (mine >= 0) & (mine < per_device)
        values = arrived.codes.astype(jnp.float32) * jnp.repeat(arrived.scales, 128, axis=1)
        factor = (mine[..., None] + 1).astype(jnp.float32)  # of expert i of a device
        rows = (values[:, None] * factor).reshape(-1, width)
        row_of = jnp.where(here, jnp.arange(here.size, dtype=jnp.int32).reshape(here.shape), -1)
        y = combine_rows(rows, row_of, slots, weights, arrived, sum_dtype=sum_dtype, **where)
        return arrived.codes.astype(jnp.float32)[None], arrived.slots[None], y

    codes, all_slots, y = over(size, there_and_back)(x, slots, weights)
    np.testing.assert_array_equal(all_slots, np.broadcast_to(slots, (size, *slots.shape)))
    is_sent = ((slots[None] >= 0) & (slots[None] // per_device == np.arange(size)[:, None, None])).any(axis=2)
    assert np.isfinite(np.asarray(codes)[is_sent]).all()
    if kernels == "reference":  # which leaves NaN where no row was sent
        np.testing.assert_array_equal(np.isfinite(np.asarray(codes)).all(axis=2), is_sent)
    factor = np.where(slots >= 0, weights * (slots % per_device + 1), 0.0).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(y, x * factor, rtol=0.07, atol=2e-2)
    assert (np.asarray(y)[(slots < 0).all(axis=1)] == 0).all()


@pytest.mark.parametrize("kernels", KERNELS)
def test_rounds_back_to_back(kernels):
    """Each round routes anew what the last one gave; a row that a fast device stored too early would show."""
    size, tokens, top_k, width, per_device, rounds = 2, 40, 2, 512, 2, 12
    slots = np.stack([slots_of_all("holes", size, tokens, size * per_device, top_k, seed) for seed in range(rounds)], 1)
    x = np.random.default_rng(3).standard_normal((size * tokens, width)).astype(np.float32)
    where: dict[str, Any] = dict(axis="e", slots_per_device=per_device, implementation=kernels)

    def one_round(i, x, slots):
        own = lax.dynamic_index_in_dim(slots, i, 1, keepdims=False)
        arrived = dispatch_rows(x, own, **where)
        here = arrived.slots // per_device == lax.axis_index("e")
        row_of = jnp.where(here & (arrived.slots >= 0), jnp.arange(len(here), dtype=jnp.int32)[:, None], -1)
        ones = jnp.ones(own.shape, jnp.float32)
        return 0.5 * combine_rows(arrived.codes, row_of, own, ones, arrived, **where) + 0.5 * x

    y = over(size, lambda x, slots: lax.fori_loop(0, rounds, lambda i, x: one_round(i, x, slots), x))(x, slots)
    for i in range(rounds):
        served = (slots[:, i] >= 0).sum(axis=1, keepdims=True).astype(np.float32)
        x = np.float32(0.5) * served * x + np.float32(0.5) * x
    np.testing.assert_array_equal(np.asarray(y), x)


@pytest.mark.parametrize("kernels", KERNELS)
def test_two_exchanges_of_the_same_tokens(kernels):
    """Each has a mailbox: XLA must not make one dispatch of two with equal operands."""
    size, tokens, top_k, width, per_device = 2, 600, 2, 512, 2
    slots = slots_of_all("holes", size, tokens, size * per_device, top_k)
    x = np.random.default_rng(7).standard_normal((size * tokens, width)).astype(np.float32)
    where: dict[str, Any] = dict(axis="e", slots_per_device=per_device, implementation=kernels)

    def exchange(x, slots, factor):
        arrived = dispatch_rows(x, slots, **where)
        here = (arrived.slots >= 0) & (arrived.slots // per_device == lax.axis_index("e"))
        row_of = jnp.where(here, jnp.arange(len(here), dtype=jnp.int32)[:, None], -1)
        ones = jnp.ones(slots.shape, jnp.float32)
        return combine_rows(factor * arrived.codes, row_of, slots, ones, arrived, **where)

    found = over(size, lambda x, slots: [exchange(x, slots, factor) for factor in (1.0, 2.0, 4.0)])(x, slots)
    served = (slots >= 0).sum(axis=1, keepdims=True).astype(np.float32)
    for factor, y in zip((1.0, 2.0, 4.0), found, strict=True):
        np.testing.assert_array_equal(np.asarray(y), np.float32(factor) * served * x)


def layer(scheme, dtype="float32", **options):
    config = make_config(scheme, num_experts=8, top_k=3, hidden_size=512, intermediate_size=128, dtype=dtype, **options)
    weights = make_stored_weights(config)
    if not config.scheme.is_quantized:
        weights = jax.tree.map(lambda leaf: leaf.astype(config.dtype), weights)
    return config, weights


LAYERS = [
    ("bf16", 2, "random"),
    ("fp8_block", 4, "holes"),
    ("int8_w8a8", 8, "idle"),
    ("w4a8_int8", 2, "holes"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("fp8_channel", 2, "last"), ("fp8_tensor", 4, "first"), ("w4a16_g128", 4, "random"))
    ),
]


@pytest.mark.parametrize("sum_dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("scheme", "size", "routing"), LAYERS)
@pytest.mark.sample(3)
def test_experts_on_rows_that_arrived_equal_one_device(scheme, size, routing, sum_dtype, kernels="reference"):
    """Bit for bit where products are of 8 bits: rows are quantized by the same rule, and added in the same order. XLA's
    float32 sums of products that are not exact add up in another order where a device has fewer experts: those of 16
    bits, and of scaled blocks, which turns the last bit of one in ten thousand bfloat16 values of a row; bfloat16 sums
    are sums of sums.
    """
    config, weights = layer(scheme, "bfloat16")
    if scheme.startswith("w4"):
        weights = to_kernel_layout(weights, config)
    tokens, per_device = 6, config.num_experts // size
    slots = slots_of_all(routing, size, tokens, config.num_experts, config.top_k)
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.standard_normal((size * tokens, config.hidden_size)), jnp.bfloat16)
    topk_weights = jnp.asarray(np.where(slots >= 0, rng.random(slots.shape), 0.0), jnp.float32)
    plan = dataclasses.replace(config, pinned_tokens=32)
    expected = forward(plan, x, topk_weights, jnp.asarray(slots), weights, kernels=kernels)

    def one_device(x, slots, topk_weights, weights):
        own = dataclasses.replace(plan, call_axes=("e",))
        serve = lambda arrived, first, back: forward_arrived(own, arrived, first, weights, back, kernels=kernels)  # noqa: E731
        exchange = Exchange(
            axis="e",
            size=size,
            slots_per_device=per_device,
            round_axes=("e",),
            run=lambda *_: pytest.fail("rows of nvlink_dispatch are served as they arrived"),
            sum_dtype=jnp.dtype(sum_dtype),
            row_dtype=jnp.dtype("bfloat16"),
            is_one_round=False,
            serve=serve,
            quantization=BACKENDS["hopper"].arriving_quantization(weights),
            kernels="reference",
        )
        return nvlink_dispatch(x, topk_weights, slots, {}, exchange)

    y = over(size, one_device)(x, slots, topk_weights, weights)
    assert BACKENDS["hopper"].arriving_quantization(weights) == {
        "fp8_block": "e4m3_group",
        "fp8_channel": "e4m3_row",
        "int8_w8a8": "int8_row",
        "w4a8_int8": "int8_row",
    }.get(scheme, "none")
    differ = (np.asarray(y) != np.asarray(expected)).mean()
    if scheme in ("bf16", "w4a16_g128") or sum_dtype == "bfloat16":
        assert_rows_close(y, expected, tolerance(scheme, jnp.bfloat16))
    elif scheme == "fp8_block":
        assert_rows_close(y, expected, Tolerance(jnp.bfloat16, 1.0))
        assert differ < 1e-3
    else:
        assert differ == 0.0


@pytest.mark.parametrize(("scheme", "size"), [("int8_w8a8", 8), pytest.param("w4a16_g128", 4, marks=pytest.mark.slow)])
def test_portable_experts_on_rows_that_arrived_equal_one_device(scheme, size):
    """With the twin of the portable kernels in the place of the references."""
    with on_target(Target(9, 0)):
        test_experts_on_rows_that_arrived_equal_one_device(scheme, size, "holes", "float32", "portable")


def fake_devices(count, ids=None, kind="NVIDIA H200", capability="9.0", processes=1):
    return [
        types.SimpleNamespace(
            platform="gpu", device_kind=kind, compute_capability=capability, id=i, process_index=n % processes
        )
        for n, i in enumerate(ids or range(count))
    ]


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        (fake_devices(4), None),
        (
            fake_devices(4, capability="10.0", kind="NVIDIA B200"),
            "compute capability 9.0, the mesh is of 'NVIDIA B200'",
        ),
        (fake_devices(4, processes=2), "one process"),
        (fake_devices(2, ids=[1, 0]), "devices 0, 1, ... in this order, found [1, 0]"),
        (fake_devices(16), "joins 2 to 8 devices, the mesh has 16"),
    ],
)
def test_which_devices_exchange_over_nvlink(devices, reason):
    found = nvlink_refusal(devices)
    assert found is None if reason is None else reason in found


def test_explain_says_what_becomes_of_nvlink_dispatch():
    config = make_config("bf16", num_experts=8, top_k=2, hidden_size=64, intermediate_size=32)
    parallel = ParallelConfig(mesh_of(4), expert_axis="e")
    text = describe_dispatch(parallel, config, 5)
    assert text.startswith("dispatch: replicate, since")
    assert text.endswith("; not nvlink_dispatch, which stores over NVLink from Hopper GPUs, the mesh is of 'cpu'")
    assert "not nvlink_dispatch, which stores" in describe_dispatch(parallel, config, 5000)
    named = describe_dispatch(dataclasses.replace(parallel, dispatch="nvlink_dispatch"), config, 5)
    refusal = dispatch_refusal("nvlink_dispatch", parallel.mesh)
    assert named == f"dispatch: none, {refusal}" and "use 'all_gather'" in named
    assert dataclasses.replace(parallel, dispatch="push").dispatch == "nvlink_dispatch"  # its old name


def test_which_calls_take_it_by_default(monkeypatch):
    """On GPUs of one NVLink host: those of many tokens whose rows the kernels take, unless experts are elsewhere."""
    monkeypatch.setattr("moe_jax.parallel._choice.nvlink_refusal", lambda devices: None)
    parallel = ParallelConfig(mesh_of(4), expert_axis="e")
    wide, narrow = (
        make_config("bf16", num_experts=8, top_k=3, hidden_size=size, intermediate_size=32) for size in (512, 100)
    )
    assert choose_dispatch(parallel, wide, FEW_TOKENS) == "replicate"
    assert choose_dispatch(parallel, wide, FEW_TOKENS + 1) == "nvlink_dispatch"
    assert describe_dispatch(parallel, wide, 5000).startswith(
        "dispatch: nvlink_dispatch, since rows go over NVLink (all_gather where"
    )
    assert choose_dispatch(parallel, narrow, 5000) == "all_gather"
    assert "not nvlink_dispatch, which cannot run H=100: a row must give each of 128 threads" in describe_dispatch(
        parallel, narrow, 5000
    )
    # 32 bits count the elements that come back: top_k rows of a token, or one of each device, and of gathered tokens.
    many = 4 * ((1 << 31) // (512 * 3))
    assert choose_dispatch(parallel, wide, many) == "nvlink_dispatch"
    assert "more elements than 32 bits" in describe_dispatch(parallel, wide, many + 4)
    assert "more elements than 32 bits" in describe_dispatch(
        dataclasses.replace(parallel, reduce_dtype="bfloat16"), wide, many
    )
    mesh = jax.make_mesh((2, 2), ("e", "t"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    gathering = ParallelConfig(mesh, expert_axis="e", tensor_axis="t", sequence_axis="t")
    assert "more elements than 32 bits" in describe_dispatch(gathering, wide, many)

    weights = make_stored_weights(wide)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((FEW_TOKENS + 4, 512)), jnp.float32)
    logits = jnp.asarray(rng.standard_normal((FEW_TOKENS + 4, 8)), jnp.float32)
    config = dataclasses.replace(wide, dtype=jnp.dtype("float32"))
    placement = Placement.create(8, 4)
    placed = place_weights(weights, config, placement, parallel)

    def loss(x, config_of_mesh):
        return (fused_moe(x, logits, placed, config, config_of_mesh, placement=placement) ** 2).sum()

    gathered = dataclasses.replace(parallel, dispatch="all_gather")
    answers = [
        jax.jit(jax.value_and_grad(functools.partial(loss, config_of_mesh=way)))(x) for way in (parallel, gathered)
    ]
    for found, wanted in zip(*answers, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_batch_of_calls_does_not_take_it_by_default(monkeypatch):
    """One launch is one exchange. The experts are said to be in the Hopper kernels, and computed by XLA."""
    monkeypatch.setattr("moe_jax.parallel._choice.nvlink_refusal", lambda devices: None)
    monkeypatch.setattr("moe_jax.parallel._experts.choose", lambda problem: (BACKENDS["hopper"], ()))
    monkeypatch.setitem(WAYS, "nvlink_dispatch", lambda *arguments: jnp.nan * WAYS["all_gather"](*arguments))
    config, weights = layer("bf16")
    parallel, placement = ParallelConfig(mesh_of(2), expert_axis="e"), Placement.create(8, 2)
    placed = place_weights(weights, config, placement, parallel)
    rng = np.random.default_rng(6)
    x = jnp.asarray(rng.standard_normal((2, FEW_TOKENS + 2, 512)), jnp.float32)
    logits = jnp.asarray(rng.standard_normal((2, FEW_TOKENS + 2, 8)), jnp.float32)

    def spread(x, logits, dispatch=None):
        over_mesh = dataclasses.replace(parallel, dispatch=dispatch)
        return fused_moe(x, logits, placed, config, over_mesh, placement=placement)

    assert choose_dispatch(parallel, config, FEW_TOKENS + 2) == "nvlink_dispatch"
    wanted = np.stack([spread(*batch, "all_gather") for batch in zip(x, logits, strict=True)])
    for mapped in (jax.vmap(spread), jax.jit(jax.vmap(spread))):
        assert_rows_close(mapped(x, logits), wanted, tolerance("bf16", np.float32))
    with pytest.raises(NotImplementedError, match="dispatch='nvlink_dispatch' takes no jax.vmap; use jax.lax.map"):
        jax.vmap(functools.partial(spread, dispatch="nvlink_dispatch"))(x, logits)
