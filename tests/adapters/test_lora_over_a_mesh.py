"""Adapters of layers over meshes: values, gradients and training equal those of one device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import moe_jax
from moe_jax.nn._lora import held_expert_lora
from moe_jax.parallel import Placement, rearrange_expert_weights
from tests.support.cases.layers import E, H, I, inputs
from tests.support.cases.meshes import LAYOUTS, make_parallel
from tests.support.oracles.tolerances import assert_rows_close, tolerance
from tests.support.refusals import refuses

RANK = 4
NAMES = ("w13_a", "w13_b", "w2_a", "w2_b")
ADAPTERS = nnx.DiffState(0, moe_jax.LoRAParam)


def make_layer(scheme, parallel=None, *, share_a=False, **options) -> Any:
    """With B that is not zero, the same over every mesh."""
    layer: Any = moe_jax.FusedMoE(
        *(E, H, I), top_k=2, scheme=scheme, mesh=parallel, dtype=jnp.float32, rngs=nnx.Rngs(0), has_bias=True, **options
    )
    moe_jax.lora(layer, rank=RANK, alpha=8, share_a=share_a, rngs=nnx.Rngs(7))
    rng = np.random.default_rng(3)
    lead = 1 if share_a else E
    shapes = dict(w13_a=(lead, 1, RANK, H), w13_b=(E, 2, I, RANK), w2_a=(lead, RANK, I), w2_b=(E, H, RANK))
    arrays = {name: jnp.asarray(rng.standard_normal(shape) * 0.3, jnp.float32) for name, shape in shapes.items()}
    placement = None if parallel is None else layer.placement.get_value()
    layer.set_lora(held_expert_lora(arrays, layer.config, placement, layer.parallel, ranks=(RANK,), alphas=(8.0,)))
    return layer


def as_one_device_has_it(array, name, layer):
    """An array of an adapter over a mesh, by slot and padded -> by expert; what pads it is zero."""
    array = np.asarray(array)
    if layer.placement is None:
        return array
    slots = np.asarray(layer.placement.get_value().physical_to_logical)
    if array.shape[0] > 1:
        assert not array[slots < 0].any()
        array = array[[int(np.flatnonzero(slots == e)[0]) for e in range(E)]]
    axis = dict(w13_b=2, w2_a=2).get(name)
    if axis is not None:
        assert not np.take(array, range(I, array.shape[axis]), axis).any()
        array = np.take(array, range(I), axis)
    return array


OPTIONS = {"linear": {}, "shared": dict(share_a=True), "turns": dict(placement="round_robin")}
CASES = [
    pytest.param(layout, scheme, options, id=f"{name}-{scheme}-{layout}")
    for name, options in OPTIONS.items()
    for scheme in ("w4a16_g8", "int8_w8a8", "bf16")
    for layout in ("ep2-tp2", "ep4", "tp2", "dp2-ep4", "sp=tp2-ep2-dp2")
    if name != "turns" or "expert_axis" in LAYOUTS[layout][1]  # else there are no experts to spread
]


@pytest.mark.parametrize(("layout", "scheme", "options"), CASES)
@pytest.mark.sample(22)
def test_values_and_gradients(layout, scheme, options):
    x, z = inputs(16)
    cotangent = jnp.asarray(np.random.default_rng(8).standard_normal(x.shape), jnp.float32)
    one, many = (
        make_layer(scheme, share_a=options.get("share_a", False)),
        make_layer(scheme, make_parallel(layout), **options),
    )
    run = nnx.jit(
        nnx.value_and_grad(
            lambda layer, x: (jnp.sum(cotangent * (y := layer(x, z))), y), argnums=(ADAPTERS, 1), has_aux=True
        )
    )
    ((_, want), (wanted, want_x)), ((_, y), (found, dx)) = run(one, x), run(many, x)
    tol = tolerance(moe_jax.Scheme.parse(scheme), "float32")
    assert_rows_close(y, want, tol)
    tol = dataclasses.replace(tol, ulps=256.0)
    assert_rows_close(dx, want_x, tol, row_scale=float(np.abs(want_x).max()))
    for name in NAMES:
        expected, got = wanted["lora"][name][...], found["lora"][name][...]
        assert got.sharding == getattr(many.lora, name).get_value().sharding
        assert_rows_close(as_one_device_has_it(got, name, many), expected, tol, row_scale=float(np.abs(expected).max()))


def test_adapters_lie_with_their_experts():
    layer = make_layer("w4a16_g8", make_parallel("ep2-tp2"))
    specs = {name: tuple(getattr(layer.lora, name).get_value().sharding.spec) for name in NAMES}
    assert specs == dict(
        w13_a=("e", None, None, None), w13_b=("e", None, "t", None), w2_a=("e", None, "t"), w2_b=("e", None, None)
    )
    padded = layer.weights.get_value().intermediate_size
    assert layer.lora.w13_b.shape[2] == layer.lora.w2_a.shape[2] == padded


def test_training_keeps_the_sharding_and_what_pads():
    layer = make_layer("w4a16_g16", make_parallel("ep4-tp2"))
    before = {name: getattr(layer.lora, name).get_value() for name in NAMES}
    optimizer = nnx.Optimizer(layer, optax.adamw(1e-2), wrt=moe_jax.LoRAParam)
    x, z = inputs(16)

    @nnx.jit
    def step(layer, optimizer):
        loss, grads = nnx.value_and_grad(lambda layer: jnp.mean((layer(x, z) - 1) ** 2), argnums=ADAPTERS)(layer)
        optimizer.update(layer, grads)
        return loss

    with jax.numpy_dtype_promotion("standard"):
        losses = [float(step(layer, optimizer)) for _ in range(6)]
    assert losses[-1] < losses[0]
    for name, old in before.items():
        new = getattr(layer.lora, name).get_value()
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim)
        assert not np.array_equal(as_one_device_has_it(new, name, layer), as_one_device_has_it(old, name, layer))


def test_explicit_axes():
    one, many = make_layer("int8_w8a16"), make_layer("int8_w8a16", make_parallel("ep2-tp2", "Explicit"))
    x, z = inputs(16)
    assert_rows_close(many(x, z), one(x, z), tolerance("int8_w8a16", "float32"))


def test_explain_over_a_mesh():
    assert "adapters: rank 4 on w13 and rank 4 on w2" in make_layer("int8_w8a16", make_parallel("ep2-tp2")).explain(8)


def test_experts_that_move_are_refused():
    parallel = make_parallel("ep2")
    copies = dict(enable_eplb=True, num_redundant_experts=2)
    refuses(NotImplementedError, "redundant slots take no adapters", make_layer, "int8_w8a16", parallel, **copies)
    layer = make_layer("int8_w8a16", parallel, enable_eplb=True)
    other = Placement.from_slots(np.arange(E)[::-1].copy(), E, 2)
    refuses(NotImplementedError, "does not move with its experts", rearrange_expert_weights, layer, other)
