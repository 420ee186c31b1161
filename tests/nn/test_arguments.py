"""Arrays and numbers that a layer is built of and called with, and 64-bit numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.quantization import SCHEMES
from tests.support.refusals import refuses

CALIBRATED = ("fp8_tensor_static", "nvfp4", "nvfp4_modelopt")  # need a checkpoint


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name not in CALIBRATED])
@pytest.mark.sample(11)
def test_the_same_bits_with_64_bit_numbers(scheme):
    layer = moe_jax.FusedMoE(4, 256, 256, top_k=2, scheme=scheme, rngs=nnx.Rngs(0), dtype=jnp.float32)
    rng = np.random.default_rng(0)
    x, z = (jnp.asarray(rng.standard_normal((5, n), np.float32)) for n in (256, 4))
    expected = layer(x, z)
    with jax.enable_x64(True):
        found = layer(x, z)
    assert found.dtype == expected.dtype and np.asarray(found).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("scheme", ["int8_w8a8", "w4a8_int8_channel"])
def test_integer_products_with_64_bit_numbers(scheme):
    """Both have a branch for GPUs, whose result has to have the type of the other one."""
    test_the_same_bits_with_64_bit_numbers(scheme)


def test_float64_is_kept_or_refused():
    layer = moe_jax.FusedMoE(4, 32, 32, top_k=2, rngs=nnx.Rngs(0), dtype=jnp.float32)
    x, z = np.ones((3, 32)), jnp.zeros((3, 4), jnp.float32)
    message = "x has dtype float64, which JAX makes float32 unless jax_enable_x64 is set; cast it"
    for call in (layer, moe_jax.MoEBlock(layer, lambda x: z)):
        refuses(TypeError, message, call, x, *([z] if call is layer else []))
    with jax.enable_x64(True):
        assert layer(jnp.asarray(x), z).dtype == np.float64


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(per_expert_scale=np.array([1, np.nan, 1, 1]), custom_routing_function="gemma4"), "holds NaN or infinity"),
        (dict(per_expert_scale=np.array([1, 1, np.inf, 1]), custom_routing_function="gemma4"), "holds NaN or infinity"),
        (
            dict(hash_indices_table=np.zeros((0, 2), int)),
            r"\(0, 2\), expected integers of shape \(vocab, 2\) with a row",
        ),
        (dict(hash_indices_table=np.array([[0, 4]])), "holds 4, expected ids of experts from 0 to 3"),
        (dict(hash_indices_table=np.array([[0, -1]])), "holds -1, expected ids of experts from 0 to 3"),
    ],
)
def test_routing_arrays_are_checked(options, message):
    refuses(ValueError, message, moe_jax.FusedMoE, 4, 32, 32, top_k=2, **options)


@pytest.mark.parametrize("count", [-1, -8])
@pytest.mark.parametrize("enable_eplb", [False, True])
def test_fewer_than_no_redundant_experts(count, enable_eplb):
    mesh = jax.make_mesh((2,), ("expert",), devices=jax.devices()[:2])
    options = dict(mesh=mesh, expert_axis="expert", enable_eplb=enable_eplb, num_redundant_experts=count)
    with pytest.raises(ValueError, match=f"num_redundant_experts={count}, expected an integer >= 0"):
        moe_jax.FusedMoE(4, 32, 32, top_k=2, **options)
