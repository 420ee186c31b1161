"""nvlink_dispatch: placing rows against NumPy, refusals, lowering for CUDA. The exchange is in tests/parallel.

Layout contract: scales lie row by row, (rows,) or (rows, groups), while they travel, and (rows,) or (groups, rows) once
they are in expert order, as the grouped GEMM reads them.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from pallas_kernels.nvlink_dispatch import (
    DispatchedRows,
    ExchangeConfig,
    ExchangeDesc,
    combine_rows,
    config_error,
    dispatch_rows,
    place_rows,
)
from pallas_kernels.nvlink_dispatch.config import PlaceDesc, choose_combine_config, choose_dispatch_config, place_error
from pallas_kernels.nvlink_dispatch.dispatch_sm90 import dispatch_sm90
from pallas_kernels.quantize_and_permute import quantize_and_permute
from tests.support.kernels import nvlink_rehearsal
from tests.support.kernels.cases import nvlink_dispatch_cases
from tests.support.kernels.nvlink_slots import make_slots
from tests.support.refusals import refuses

DESC = ExchangeDesc((("e", 4),), "e", 16, 7168, 8, 32, "bfloat16", "e4m3_group")


@pytest.mark.parametrize("quantization", ["e4m3_row", "e4m3_group", "int8_row"])
def test_placed_rows_are_those_of_quantize_and_permute(quantization):
    """Quantized first and placed later, bit for bit: the scales' layout included."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((9, 640)), jnp.bfloat16)
    rows = rng.permutation(40)[:27].reshape(9, 3)
    row_of = jnp.asarray(np.where(rng.random(rows.shape) < 0.7, rows, -1), jnp.int32)
    options: dict[str, Any] = dict(quantization=quantization, implementation="reference")
    codes, scales = quantize_and_permute(x, **options)
    placed = place_rows(codes, scales.T, row_of, 40, implementation="reference")
    expected = quantize_and_permute(x, row_of, 40, **options)
    for found, wanted in zip(placed, expected, strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "groups"), [(7168, 56), (2048, 16), (2880, 0)])
def test_place_on_the_gpu(width, groups):
    rng = np.random.default_rng(1)
    codes = jnp.asarray(rng.integers(-127, 128, (300, width)), jnp.int8)
    scales = jnp.asarray(rng.random((300, groups) if groups else 300), jnp.float32)
    rows = rng.permutation(2500)[:2400].reshape(300, 8)
    row_of = np.where(rng.random(rows.shape) < 0.3, rows, -1).astype(np.int32)
    found, wanted = (
        place_rows(codes, scales, jnp.asarray(row_of), 2500, implementation=name) for name in ("hopper", "reference")
    )
    used = row_of[row_of >= 0]
    np.testing.assert_array_equal(np.asarray(found[0])[used], np.asarray(wanted[0])[used])
    np.testing.assert_array_equal(np.asarray(found[1])[..., used], np.asarray(wanted[1])[..., used])


REHEARSALS = [
    (4, 13, 1024, 4, 3, "none", "random"),
    (4, 13, 1024, 4, 3, "e4m3_row", "holes"),
    (2, 16, 7168, 8, 32, "e4m3_group", "random"),
    (4, 5, 2048, 8, 16, "e4m3_group_ue8m0", "idle"),
    (4, 5, 2880, 4, 8, "int8_row", "last"),
    (8, 7, 512, 2, 4, "e4m3_group", "first"),
    (2, 1, 512, 2, 2, "e4m3_group", "none"),
    (2, 900, 2048, 8, 16, "e4m3_group", "holes"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", REHEARSALS, ids=lambda case: "-".join(map(str, case)))
def test_exchange_rehearsed_on_one_gpu(case):
    """The kernels' bodies, devices played by parts of one GPU: every row where it belongs, whatever the routing."""
    size, tokens, width, top_k, per_device, quantization, routing = case
    slots = make_slots(routing, size, tokens, size * per_device, top_k)
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.standard_normal((size, tokens, width)), jnp.bfloat16)
    desc = ExchangeDesc((("e", size),), "e", tokens, width, top_k, per_device, "bfloat16", quantization)
    config = choose_dispatch_config(desc, 132 // size)
    codes, scales, came, *_ = jax.jit(functools.partial(nvlink_rehearsal.dispatch, desc, config))(x, jnp.asarray(slots))
    whole = x.reshape(-1, width)
    wanted, wanted_scales = quantize_and_permute(whole, quantization=quantization, implementation="reference")
    assert (np.asarray(came) == slots.reshape(-1, top_k)).all()
    for device in range(size):
        is_sent = ((slots >= 0) & (slots // per_device == device)).any(axis=-1).reshape(-1)
        found, expected = (np.asarray(a).astype(np.float32)[is_sent] for a in (codes[device], wanted))
        step = {"none": 0.0, "int8": 1.0, "e4m3": 0.126}[quantization.partition("_")[0]]
        off = np.abs(found - expected)
        assert (off <= np.maximum(step * np.abs(expected), step / 64)).all() if step < 1 else off.max(initial=0) <= 1
        assert not is_sent.any() or (off > 0).mean() < 0.01
        if scales is not None:
            own = np.asarray(scales[device])[is_sent]
            np.testing.assert_allclose(own, np.asarray(wanted_scales).T[is_sent], rtol=3e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("sum_dtype", [None, "bfloat16", "float32"])
@pytest.mark.parametrize("case", REHEARSALS, ids=lambda case: "-".join(map(str, case)))
def test_return_rehearsed_on_one_gpu(case, sum_dtype):
    """Into the mailboxes of a dispatch: rows, or the sums of each device, in the order of the reference."""
    size, tokens, width, top_k, per_device, _, routing = case
    slots = make_slots(routing, size, tokens, size * per_device, top_k)
    rng = np.random.default_rng(5)
    num_rows = size * tokens * top_k + 8
    rows = jnp.asarray(rng.standard_normal((size, num_rows, width)), jnp.bfloat16)
    places = np.stack([rng.permutation(num_rows)[:-8].reshape(-1, top_k) for _ in range(size)])
    flat = slots.reshape(-1, top_k)
    here = (flat >= 0) & (flat // per_device == np.arange(size)[:, None, None])
    row_of = np.where(here, places, -1).astype(np.int32)
    weights = rng.random(slots.shape).astype(np.float32)
    desc = ExchangeDesc((("e", size),), "e", tokens, width, top_k, per_device, "bfloat16", sum_dtype=sum_dtype)
    there, back = choose_dispatch_config(desc, 132 // size), choose_combine_config(desc, 132 // size)

    @jax.jit
    def run(rows, row_of, slots, weights):
        x = jnp.zeros((size, tokens, width), jnp.bfloat16)
        told = None if sum_dtype is None else weights
        *_, came_weights, mailbox, table = nvlink_rehearsal.dispatch(desc, there, x, slots, told)
        factors = weights if sum_dtype is None else came_weights
        return nvlink_rehearsal.combine(desc, back, rows, row_of, slots, factors, mailbox, table)

    y = np.asarray(run(rows, jnp.asarray(row_of), jnp.asarray(slots), jnp.asarray(weights))).reshape(-1, width)
    owner = np.where(flat >= 0, flat // per_device, 0)
    values = np.asarray(rows).astype(np.float32)
    sums = np.zeros((size, *y.shape), np.float32)
    expected = np.zeros_like(y)
    for j in range(top_k):
        term = (
            values[owner[:, j], places[owner[:, j], np.arange(len(flat)), j]] * weights.reshape(-1, top_k)[:, j, None]
        )
        expected += np.where(flat[:, j, None] >= 0, term, 0.0)
        for device in range(size):
            sums[device] += np.where((flat[:, j, None] >= 0) & (owner[:, j, None] == device), term, 0.0)
    if sum_dtype is not None:
        expected = np.asarray(jnp.asarray(sums).astype(sum_dtype).astype(jnp.float32)).sum(axis=0)
    # A product added without a rounding in between may fall on the other side of a bfloat16.
    step = 2.0**-7 if sum_dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(y, expected, rtol=step, atol=step)
    if sum_dtype == "bfloat16":
        assert (np.abs(y - expected) > 1e-5).mean() < 0.01
    again = run(rows, jnp.asarray(row_of), jnp.asarray(slots), jnp.asarray(weights))
    np.testing.assert_array_equal(np.asarray(again).reshape(-1, width), y)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(mesh=(("e", 1),)), "1 devices along axis 'e': 2 to 8"),
        (dict(mesh=(("e", 16),)), "16 devices"),
        (dict(num_tokens=0), "no tokens"),
        (dict(dtype="int8"), "tokens are int8"),
        (dict(width=640), "H=640: groups of 128"),
        (dict(width=100, quantization="none"), "each of 128 threads"),
        (dict(row_dtype="int8"), "rows are int8"),
        (dict(sum_dtype="int8"), "sums are int8"),
        (dict(num_tokens=1 << 20), "more elements than 32 bits count"),
    ],
)
def test_what_the_kernels_refuse(changes, reason):
    assert config_error(DESC, ExchangeConfig(4), 132) is None
    assert reason in config_error(dataclasses.replace(DESC, **changes), ExchangeConfig(4), 132)


def test_configs():
    for tokens, sum_dtype in itertools.product((1, 16, 4096), (None, "bfloat16")):
        desc = dataclasses.replace(DESC, num_tokens=tokens, sum_dtype=sum_dtype)
        for choose in (choose_dispatch_config, choose_combine_config):
            assert config_error(desc, choose(desc, 132), 132) is None
    assert "resident" in str(config_error(DESC, ExchangeConfig(529), 132))
    assert "multiple of 4" in str(place_error(PlaceDesc(4, 8, 640, 2, 5)))


def test_refused_calls():
    x, slots = jnp.zeros((4, 512)), jnp.zeros((4, 2), jnp.int32)
    where: dict[str, Any] = dict(axis="e", slots_per_device=2)
    refuses(ValueError, "is no axis of the mesh", dispatch_rows, x, slots, **where)
    refuses(ValueError, r"expected \(T, H\), \(T, top_k\)", dispatch_rows, x, slots[:3], **where)
    refuses(TypeError, "slots is float32", dispatch_rows, x, slots.astype(jnp.float32), **where)
    refuses(ValueError, "quantization='fp4' is not one of", dispatch_rows, x, slots, quantization="fp4", **where)
    refuses(ValueError, "expected 8 bits", place_rows, x, jnp.zeros(4), slots, 8)
    refuses(ValueError, "expected float32", place_rows, x.astype(jnp.int8), jnp.zeros((3, 4)), slots, 8)
    mesh = jax.make_mesh((2,), ("e",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec("e")

    arrived = DispatchedRows(x, None, slots)
    weights, row_of = jnp.zeros((4, 2)), jnp.zeros((8, 2), jnp.int32)

    def combine(rows, row_of, slots, weights, **options):
        call = functools.partial(combine_rows, arrived=arrived, **where | options)
        over = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)
        return over(rows, row_of, slots, weights)

    refuses(ValueError, "row_of is int32", combine, x, slots, slots, weights)
    with pytest.raises(ValueError, match="dispatch_rows was called with another"):
        combine(x, row_of, slots, weights, sum_dtype="bfloat16")
    refuses(NotImplementedError, "there is no mailbox", combine, x, row_of, slots, weights, implementation="hopper")

    def dispatch(x, slots, weights, **options):
        call = functools.partial(dispatch_rows, **where | options)
        return jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)(x, slots, weights)

    refuses(ValueError, "weights are given where each device returns one sum", dispatch, x, slots, weights)
    refuses(ValueError, "weights is float32", dispatch, x, slots, weights[:, :1], sum_dtype="bfloat16")


@pytest.mark.parametrize("case", list(nvlink_dispatch_cases()), ids=lambda case: case.name)
@pytest.mark.sample(3)
def test_lowers_for_cuda(case):
    if case.mesh:
        names, sizes = zip(*case.mesh, strict=True)
        devices = jax.devices()[: case.num_devices]
        function, arguments = case.over(jax.make_mesh(sizes, names, (AxisType.Auto,) * len(names), devices=devices))
    else:
        function, arguments = case.function, [jax.ShapeDtypeStruct(*shape) for shape in case.shapes]
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu_v2") == 1
    # Else XLA makes one call of two with equal operands: two layers of the same tokens then share a mailbox.
    assert ("has_side_effect = true" in lowered.as_text()) == bool(case.mesh)


def test_former_names():
    from pallas_kernels import push

    new = (DispatchedRows, ExchangeConfig, ExchangeDesc, combine_rows, config_error, place_rows, dispatch_rows)
    assert [getattr(push, name) for name in push.__all__] == list(new)


def test_a_batch_of_exchanges_is_refused():
    """Pallas would make one launch of it, which hangs, or reads rows that are not there."""
    mesh = jax.make_mesh((4,), ("e",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    desc = dataclasses.replace(DESC, sum_dtype=None)
    spec = jax.sharding.PartitionSpec("e")
    first = lambda x, slots: dispatch_sm90(desc, ExchangeConfig(4))(x, slots)[0]  # noqa: E731
    exchange = jax.shard_map(first, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((2, 4 * desc.num_tokens, desc.width), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((4 * desc.padded_pairs,), jnp.int32)
    with pytest.raises(NotImplementedError, match="no jax.vmap over an exchange"):
        jax.eval_shape(jax.vmap(exchange, in_axes=(0, None)), x, slots)
