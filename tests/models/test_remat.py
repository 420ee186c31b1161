"""``remat=True``: the same values and gradients, and less kept between the passes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.models._compiled import merge_model, split_model
from tests.models.test_explicit_axes import split


def loss_of(leaves, structure, ids, remat):
    logits, stats = merge_model(structure, leaves)(ids, remat=remat, return_stats=True)
    return (jax.nn.log_softmax(logits) ** 2).mean() + stats.router_logits.mean()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one device", "explicit"])
def test_gradients_are_the_same(case, prompt, layout):
    model, ids = case("qwen3_tied_window").model, prompt(2, 40)
    model = split(nnx.merge(*nnx.split(model)))[0] if layout == "explicit" else model
    structure, leaves = split_model(model)
    moved = [index for index, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def loss(some, remat):
        held = dict(zip(moved, some, strict=True))
        return loss_of([held.get(i, leaf) for i, leaf in enumerate(leaves)], structure, ids, remat)

    some = [leaves[index] for index in moved]
    run = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    (plain, wanted), (value, found) = run(some, False), run(some, True)
    np.testing.assert_allclose(value, plain, rtol=1e-6)
    for want, got in zip(wanted, found, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


def test_less_is_kept(case, prompt):
    """Of a layer its input, (B, S, H); everything else that scales with the tokens belongs to the head and the loss."""
    ids = prompt(2, 40)
    structure, leaves = split_model(case("qwen3_tied_window").model)
    few, many = bytes_kept(structure, leaves, ids, True), bytes_kept(structure, leaves, ids, False)
    assert few < 0.25 * many


def bytes_kept(structure, leaves, ids, remat):
    """Residuals of the layers alone, the weights themselves left out."""

    def hidden(scale, leaves):
        scaled = [leaf * scale if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf for leaf in leaves]
        return merge_model(structure, scaled).hidden_states(ids, remat=remat)[0]

    pullback = jax.eval_shape(lambda leaves: jax.vjp(lambda x: hidden(x, leaves), jnp.ones(()))[1], leaves)
    shapes = {leaf.shape for leaf in leaves}
    return sum(leaf.size for leaf in jax.tree.leaves(pullback) if leaf.shape not in shapes)
