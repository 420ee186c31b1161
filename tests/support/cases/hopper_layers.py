"""Small layers for the Hopper kernels, and tracing for a GPU that is not here."""

import jax
import jax.numpy as jnp
from flax import nnx

import moe_jax

E, H, I, K = 6, 512, 256, 2  # noqa: E741


def on_hopper():
    """Trace for an H200 that is not here."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def make_layer(scheme, intermediate=I, **options):
    options = {"top_k": K, "scheme": scheme, "rngs": nnx.Rngs(0), **options}
    return moe_jax.FusedMoE(E, H, intermediate, **options)


def inputs(tokens, seed=1, experts=E):
    kx, kz = jax.random.split(jax.random.key(seed))
    return jax.random.normal(kx, (tokens, H), jnp.bfloat16), jax.random.normal(kz, (tokens, experts), jnp.float32)
