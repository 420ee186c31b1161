"""Programs exported for any number of tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

from moe_jax import FusedMoE, fused_moe
from moe_jax.experts.hopper._kernel_layout import to_kernel_layout
from moe_jax.quantization import SCHEMES
from tests.support.cases import experts as cases
from tests.support.cases.hopper_layers import on_hopper


def symbolic(config):
    """x (t, H) and logits (t, E) of any number of tokens t."""
    (t,) = export.symbolic_shape("t")
    return tuple(jax.ShapeDtypeStruct((t, n), jnp.float32) for n in (config.hidden_size, config.num_experts))


def inputs(tokens, config):
    logits = np.random.default_rng(tokens).standard_normal((tokens, config.num_experts))
    return cases.make_tokens(tokens, config), jnp.asarray(logits, jnp.float32)


def structs(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.sample(9)
def test_any_number_of_tokens(scheme):
    """What a program for that number gives, whose tiles are others; on a way through bytes."""
    config = cases.make_config(scheme, has_bias=True)
    leaves, structure = jax.tree.flatten(cases.make_stored_weights(config))
    call = jax.jit(lambda x, logits, leaves: fused_moe(x, logits, structure.unflatten(leaves), config))
    exported = export.deserialize(export.export(call)(*symbolic(config), structs(leaves)).serialize())
    for tokens in (1, 7, 300):
        x, logits = inputs(tokens, config)
        found = np.asarray(exported.call(x, logits, leaves))
        np.testing.assert_allclose(found, np.asarray(call(x, logits, leaves)), rtol=0, atol=1e-6 * np.abs(found).max())


def test_a_layer():
    layer = FusedMoE(6, 64, 32, top_k=2, rngs=nnx.Rngs(0))
    exported = export.export(jax.jit(lambda x, logits: layer(x, logits)))(*symbolic(layer.config))
    x, logits = inputs(11, layer.config)
    np.testing.assert_array_equal(exported.call(x, logits), layer(x, logits))


def test_kernels_refuse_it_by_name():
    config = cases.make_config("w4a16_g128", dtype="bfloat16", implementation=("hopper",))
    weights = structs(to_kernel_layout(cases.make_stored_weights(config), config))
    call = jax.jit(functools.partial(fused_moe, config=config))
    with on_hopper(), pytest.raises(NotImplementedError, match="one number of tokens, found the symbolic t"):
        call.trace(*symbolic(config), weights)
