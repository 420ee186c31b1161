"""The xla implementation on a GPU, where layers run that no Hopper kernel takes: every scheme against NumPy float64.

    JAX_PLATFORMS=cuda python -m pytest -m gpu tests/experts/xla/test_experts_gpu.py

With XLA's autotuning and without (XLA_FLAGS=--xla_gpu_autotune_level=0), which chooses other kernels.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax import fused_experts
from moe_jax.experts.xla import _experts
from moe_jax.experts.xla._batches import Batches
from moe_jax.quantization import SCHEMES, fake_quantize
from moe_jax.routing import route
from tests.support.cases.experts import make_call, make_config
from tests.support.oracles.layer_judge import LayerJudge, assert_layer_close

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [2, 37, 300])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_against_numpy(scheme, tokens):
    config = make_config(scheme, has_bias=True, hidden_size=256, intermediate_size=384, implementation=("xla",))
    x, p, ids, weights = make_call(config, tokens)
    y = jax.jit(fused_experts, static_argnums=4)(x, p, ids, weights, config)
    assert_layer_close(y, x, p, ids, weights, config, kernels=False, on_gpu=True)


@pytest.mark.parametrize("scheme", ["int8_w8a8", "fp8_channel", "w4a16_g128"])
def test_weights_and_routing_may_be_constants(scheme):
    """XLA then knows how often the loop over tiles runs, and evaluates its indices."""
    config = make_config(scheme, hidden_size=256, intermediate_size=384, implementation=("xla",))
    x, p, ids, weights = make_call(config, 12)
    y = jax.jit(lambda x: fused_experts(x, p, ids, weights, config))(x)
    assert_layer_close(y, x, p, ids, weights, config, kernels=False, on_gpu=True)


# Rows of a call in batches of experts, in one batch and in many; the first two kinds, forced.
WAYS = {
    "pairs": Batches("pairs"),
    "experts": Batches("experts", 64, 5),
    "one at a time": Batches("experts", 32, 1),
    "further batches": Batches("experts", 8, 5),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_way_against_numpy(scheme, way, monkeypatch):
    config = make_config(scheme, has_bias=True, hidden_size=256, intermediate_size=384, implementation=("xla",))
    x, p, ids, weights = make_call(config, 37)
    monkeypatch.setattr(_experts, "plan_batches", lambda *arguments: WAYS[way])
    jax.clear_caches()  # equal layers are traced once
    y = jax.jit(fused_experts, static_argnums=4)(x, p, ids, weights, config)
    assert_layer_close(y, x, p, ids, weights, config, kernels=False, on_gpu=True)


@pytest.mark.parametrize("tokens", [2, 300])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scheme", [name for name in SCHEMES if SCHEMES[name].activations is None])
def test_layers_of_16_bits(scheme, dtype, tokens):
    """Weights of both products and hidden values are rounded to 16 bits, and the output; nothing else is."""
    config = make_config(
        scheme, dtype=dtype, param_dtype=dtype, hidden_size=256, intermediate_size=384, implementation=("xla",)
    )
    x, p, ids, weights = make_call(config, tokens, dtype=dtype)
    y = jax.jit(fused_experts, static_argnums=4)(x, p, ids, weights, config)
    found = LayerJudge(x, p, ids, weights, config, kernels=False, on_gpu=True).find(y)
    assert found.error.max() <= 4 * float(jnp.finfo(dtype).eps) / 2


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if SCHEMES[name].activations is not None])
def test_quantized_layers_of_16_bits(scheme):
    """Beside the same layer in tiles one after another, by the table of tolerances."""
    config = make_config(
        scheme,
        dtype="bfloat16",
        param_dtype="bfloat16",
        hidden_size=256,
        intermediate_size=384,
        implementation=("xla",),
    )
    x, p, ids, weights = make_call(config, 300, dtype="bfloat16")
    run = jax.jit(fused_experts, static_argnums=4)
    in_tiles = dataclasses.replace(config, pinned_tokens=300)
    y, expected = (np.asarray(run(x, p, ids, weights, one), np.float32) for one in (config, in_tiles))
    size = np.maximum(np.sqrt((expected**2).mean(1)), 1e-6)
    error = np.sqrt(((y - expected) ** 2).mean(1)) / size
    assert np.median(error) <= 0.01 and error.max() <= 0.09


def test_quantized_activations_have_few_values():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 4096)), jnp.float32)
    for scheme in ("fp8_channel", "fp8_block", "mxfp8"):
        rounded = np.asarray(jax.jit(fake_quantize, static_argnums=1)(x, SCHEMES[scheme].activations))
        exact = np.asarray(x)
        assert 0.01 < np.abs(rounded / exact - 1).mean() < 0.04  # a quarter of a step of 1/8 to 1/16 on average


def test_router_logits_are_rounded():
    z = jnp.asarray(np.random.default_rng(4).standard_normal((64, 8)), jnp.float32)
    for dtype in ("bfloat16", "float16"):
        config, narrow = (make_config(num_experts=8, router_logits_dtype=one) for one in (dtype, None))
        found = jax.jit(lambda z, c=config: route(z, c))(z)
        expected = jax.jit(lambda z, c=narrow: route(z, c))(z.astype(dtype).astype(jnp.float32))
        np.testing.assert_array_equal(found.topk_ids, expected.topk_ids)
        np.testing.assert_array_equal(found.topk_weights, expected.topk_weights)
