"""Layers over the GPUs of one host, by the Hopper kernels: every dispatch, ragged_all_to_all included.

JAX_PLATFORMS=cuda python -m pytest -m multi_gpu tests/parallel/test_experts_gpu.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import moe_jax
from moe_jax.nn._lora import held_expert_lora
from moe_jax.parallel._config import DISPATCHES
from moe_jax.routing import route
from tests.support.oracles.layer_judge import assert_layer_close
from tests.support.oracles.tolerances import assert_rows_close, tolerance

pytestmark = pytest.mark.multi_gpu

E, K, H, I = 16, 4, 512, 256  # noqa: E741


def make_layer(scheme, mesh=None, **options):
    return moe_jax.FusedMoE(E, H, I, top_k=K, scheme=scheme, mesh=mesh, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("dispatch", [*DISPATCHES, None])
@pytest.mark.parametrize("scheme", ["bf16", "fp8_block", "fp8_channel", "w4a16_g128"])
@pytest.mark.parametrize("tokens", [3, 1024])
def test_every_dispatch_on_gpus(scheme, dispatch, tokens):
    size = len(jax.devices())
    mesh = jax.make_mesh((size,), ("e",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.standard_normal((tokens, H)), jnp.bfloat16)
    logits = rng.standard_normal((tokens, E)).astype(np.float32)
    logits[:, : K + 1] += 3.0  # most rows to the first device
    expected = jax.jit(lambda layer, x, z: layer(x, z))(make_layer(scheme), x, logits)
    layer = make_layer(scheme, mesh, expert_axis="e", dispatch=dispatch)
    assert "implementation: hopper" in layer.explain(tokens)
    if dispatch is None:
        assert f"dispatch: {'nvlink_dispatch' if tokens > 512 else 'replicate'}, since" in layer.explain(tokens)
    y = jax.jit(lambda layer, x, z: layer(x, z))(layer, x, logits)
    assert_rows_close(y, expected, tolerance(scheme, jnp.bfloat16))


@pytest.mark.parametrize("tokens", [3, 1024])
def test_gradients_on_gpus(tokens):
    """Through router, dispatch and experts, whatever kernels the call takes otherwise; around jit and inside."""
    mesh = jax.make_mesh((len(jax.devices()),), ("e",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.standard_normal((tokens, H)), jnp.bfloat16)
    router = jnp.asarray(rng.standard_normal((H, E)) * H**-0.5, jnp.float32)

    def gradients(layer, is_inside):
        def loss(x, router):
            return (layer(x, x.astype(jnp.float32) @ router).astype(jnp.float32) ** 2).sum()

        wrt = (0, 1)
        return (jax.jit(jax.grad(loss, wrt)) if is_inside else jax.grad(jax.jit(loss), wrt))(x, router)

    expected = gradients(make_layer("fp8_channel", implementation="xla"), True)
    layer = make_layer("fp8_channel", mesh, expert_axis="e")
    assert "implementation: hopper" in layer.explain(tokens)
    for is_inside in (True, False):
        for found, wanted in zip(gradients(layer, is_inside), expected, strict=True):
            assert_rows_close(found, wanted, tolerance("fp8_channel", jnp.bfloat16))


def test_tensor_and_expert_axes_on_gpus():
    shape = (2, 2) if len(jax.devices()) >= 4 else (1, 2)
    mesh = jax.make_mesh(shape, ("e", "t"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[: shape[0] * 2])
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, H)), jnp.bfloat16)
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((64, E)), jnp.float32)
    for scheme in ("bf16", "fp8_block", "w4a16_g128"):
        layer = make_layer(scheme, mesh, expert_axis="e", tensor_axis="t")
        assert_rows_close(layer(x, logits), make_layer(scheme)(x, logits), tolerance(scheme, jnp.bfloat16))


def with_several_adapters(layer):
    rng, ranks = np.random.default_rng(3), (16, 4, 8)
    rank = sum(ranks)
    shapes = dict(w13_a=(E, 1, rank, H), w13_b=(E, 2, I, rank), w2_a=(E, rank, I), w2_b=(E, H, rank))
    arrays = {name: jnp.asarray(rng.standard_normal(shape) * shape[-1] ** -0.5) for name, shape in shapes.items()}
    arrays = {name: array.astype(jnp.float32) for name, array in arrays.items()}
    placement = None if layer.placement is None else layer.placement.get_value()
    named: Any = dict(ranks=ranks, alphas=(32.0, 4.0, 8.0), names=("a", "b", "c"))
    layer.set_lora(held_expert_lora(arrays, layer.config, placement, layer.parallel, **named))
    return layer


@pytest.mark.parametrize("dispatch", ["replicate", "all_gather", "all_to_all", "ragged_all_to_all", None])
@pytest.mark.parametrize("scheme", ["bf16", "fp8_channel", "w4a16_g128"])
@pytest.mark.parametrize("tokens", [6, 1024])
def test_several_adapters_on_gpus(scheme, dispatch, tokens):
    """Chosen by token; the gradients of their B, where the dispatch has them."""
    mesh = jax.make_mesh((len(jax.devices()),), ("e",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(tokens)
    x, cotangent = (jnp.asarray(rng.standard_normal((tokens, H)), jnp.bfloat16) for _ in range(2))
    logits, choice = jnp.asarray(rng.standard_normal((tokens, E)), jnp.float32), rng.integers(-1, 3, tokens)
    many = with_several_adapters(make_layer(scheme, mesh, expert_axis="e", dispatch=dispatch))
    one = with_several_adapters(make_layer(scheme))
    assert "implementation: hopper" in many.explain(tokens)

    def loss(layer, choice):
        y = moe_jax.select_lora(layer, choice)(x, logits)
        return jnp.sum(y.astype(jnp.float32) * cotangent.astype(jnp.float32)), y

    forward = jax.jit(lambda layer, choice: loss(layer, choice)[1])
    want = forward(one, choice)
    assert_rows_close(forward(many, choice), want, tolerance(scheme, jnp.bfloat16))
    moved = np.abs(np.asarray(want - forward(one, np.full_like(choice, -1)), np.float32)).max(axis=1)
    assert ((moved > 0.02) == (choice >= 0)).all()
    if dispatch == "all_to_all" and tokens > 6 and len(jax.devices()) > 1:
        return  # rounds have no gradient where the dispatch is named
    wrt = nnx.DiffState(0, moe_jax.LoRAParam)
    gradients = nnx.jit(lambda layer, choice: nnx.grad(loss, argnums=wrt, has_aux=True)(layer, choice)[0])
    wanted, found = (gradients(layer, choice)["lora"] for layer in (one, many))
    for name in ("w13_b", "w2_b"):
        expected = np.asarray(wanted[name][...])
        assert_rows_close(
            np.asarray(found[name][...]), expected, tolerance("bf16", "bfloat16"), row_scale=np.abs(expected).max()
        )


@pytest.mark.parametrize("scheme", ["fp8_channel", "int8_w8a8", "fp8_tensor"])
def test_shards_padded_to_what_kernels_take(scheme):
    """A half of 1440 columns, like a quarter of gpt-oss' 2880: 720 bytes a row, which are padded to 736."""
    mesh = jax.make_mesh((2,), ("t",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    options = dict(top_k=K, scheme=scheme, rngs=nnx.Rngs(0), activation="swigluoai", has_bias=True)
    weights = moe_jax.FusedMoE(E, 2880, 1440, implementation="xla", **options).weights.get_value()
    layer = moe_jax.FusedMoE(E, 2880, 1440, mesh=mesh, tensor_axis="t", **options | dict(rngs=nnx.Rngs(0)))
    for tokens in (1, 64, 1000):
        assert "implementation: hopper" in layer.explain(tokens)
        x = jnp.asarray(np.random.default_rng(tokens).standard_normal((tokens, 2880)), jnp.bfloat16)
        logits = jnp.asarray(np.random.default_rng(1).standard_normal((tokens, E)), jnp.float32)
        y, routed = jax.jit(lambda layer, x, z: layer(x, z))(layer, x, logits), route(logits, layer.config)
        slots = routed.topk_weights, routed.topk_ids
        assert_layer_close(y, x, *slots, weights, layer.config, on_gpu=True, most=64)
