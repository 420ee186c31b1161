"""Small layers, inputs and checkpoint tensors for the tests of FusedMoE."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import moe_jax

E, H, I, K = 6, 32, 24, 2  # noqa: E741


def make_layer(scheme="fp8_channel", seed=0, dtype=jnp.float32, **options):
    return moe_jax.FusedMoE(E, H, I, top_k=K, scheme=scheme, dtype=dtype, rngs=nnx.Rngs(seed), **options)


def abstract_layer(scheme="bf16", **options):
    return moe_jax.FusedMoE(E, H, I, top_k=K, scheme=scheme, dtype=jnp.float32, **options)


def loaded_layer(pairs=None, scheme="bf16", **options):
    """An ``abstract_layer`` with the weights of pairs, ``checkpoint_pairs()`` if None."""
    layer = abstract_layer(scheme, **options)
    layer.load_weights(checkpoint_pairs() if pairs is None else pairs)
    layer.process_weights_after_loading()
    return layer


def inputs(tokens=7, seed=1, experts=E):
    kx, kz = jax.random.split(jax.random.key(seed))
    return jax.random.normal(kx, (tokens, H), jnp.float32), jax.random.normal(kz, (tokens, experts), jnp.float32)


def checkpoint_pairs(seed=0, dtype=jnp.bfloat16, prefix="model.layers.0.mlp.experts."):
    rng = np.random.default_rng(seed)
    for expert in range(E):
        for name, shape in (("gate_proj", (I, H)), ("up_proj", (I, H)), ("down_proj", (H, I))):
            value = rng.standard_normal(shape).astype(np.float32) * shape[1] ** -0.5
            yield f"{prefix}{expert}.{name}.weight", value.astype(dtype)


call = jax.jit(lambda layer, x, z: layer(x, z))
