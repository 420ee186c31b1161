"""Auxiliary losses of routers, beside transformers' function and NumPy in float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import moe_jax
from moe_jax.experts import MoEStats
from tests.support.cases.layers import E, inputs, make_layer
from tests.support.cases.meshes import make_parallel
from tests.support.refusals import refuses

LAYERS, ROWS, LENGTH, TOP_K = 3, 2, 12, 2
TOKENS = ROWS * LENGTH


def stats_of_logits(logits, mask=None) -> MoEStats:
    """As models return them: the experts with the highest logits, -1 where the mask is False."""
    ids = jnp.argsort(-logits, axis=-1, stable=True)[..., :TOP_K].astype(jnp.int32)
    ids = ids if mask is None else jnp.where(mask[:, None], ids, -1)
    return MoEStats(jnp.zeros(E, jnp.int32), ids, logits)


@pytest.fixture
def logits():
    """Some experts are likelier than others, and layers differ."""
    rng = np.random.default_rng(0)
    lean = rng.standard_normal((LAYERS, 1, E)) * 2
    return jnp.asarray(rng.standard_normal((LAYERS, TOKENS, E)) + lean, jnp.float32)


@pytest.fixture
def mask():
    """Rows of different lengths, one of them padded within."""
    mask = np.ones((ROWS, LENGTH), bool)
    mask[0, :5] = mask[1, 7] = False
    return mask.reshape(-1)


def test_balance_is_that_of_transformers(logits, mask):
    """Value and gradient, of several layers, with padding and without."""
    balance = moe_jax.load_balancing_loss
    for own_mask in (None, mask):
        value, grad = jax.value_and_grad(lambda z, m=own_mask: balance(stats_of_logits(z, m)))(logits)
        torch_logits = torch.tensor(np.asarray(logits), dtype=torch.float64, requires_grad=True)
        torch_mask = None if own_mask is None else torch.tensor(own_mask).reshape(ROWS, LENGTH)
        want: Any = load_balancing_loss_func(tuple(torch_logits), E, TOP_K, torch_mask)
        want.backward()
        np.testing.assert_allclose(value, want.item(), rtol=1e-6)
        np.testing.assert_allclose(grad, torch_logits.grad, rtol=1e-4, atol=1e-8)
        assert value > 1.05 * TOP_K
        by_layer = [load_balancing_loss_func((layer,), E, TOP_K, torch_mask).item() for layer in torch_logits]
        found = moe_jax.load_balancing_loss(stats_of_logits(logits, own_mask), per_layer=True)
        np.testing.assert_allclose(found, np.mean(by_layer), rtol=1e-6)
        one = moe_jax.load_balancing_loss(stats_of_logits(logits[1], own_mask))
        np.testing.assert_allclose(one, by_layer[1], rtol=1e-6)
    assert not np.asarray(grad)[:, ~mask].any()


def test_z_loss_is_that_of_numpy(logits, mask):
    z = np.asarray(logits, np.float64)
    squares = np.log(np.exp(z).sum(axis=-1)) ** 2
    np.testing.assert_allclose(moe_jax.router_z_loss(stats_of_logits(logits)), squares.mean(), rtol=1e-6)
    loss = jax.value_and_grad(lambda z: moe_jax.router_z_loss(stats_of_logits(z, mask)))
    value, grad = loss(jnp.where(mask[:, None], logits, jnp.nan))
    np.testing.assert_allclose(value, squares[:, mask].mean(), rtol=1e-6)
    softmax = np.exp(z) / np.exp(z).sum(axis=-1, keepdims=True)
    want = 2 * np.sqrt(squares)[..., None] * np.sign(np.log(np.exp(z).sum(-1, keepdims=True))) * softmax
    np.testing.assert_allclose(grad, np.where(mask[:, None], want / (LAYERS * mask.sum()), 0), rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("scoring_func", ["sigmoid", "softmax"])
def test_balance_within_sequences_is_that_of_numpy(logits, mask, scoring_func):
    """Of DeepSeek's papers, sequence by sequence; a sequence without tokens counts for none."""
    mask = mask.reshape(ROWS, LENGTH)
    stats = stats_of_logits(logits, mask.reshape(-1))
    z = np.asarray(logits, np.float64).reshape(LAYERS, ROWS, LENGTH, E)
    score = 1 / (1 + np.exp(-z)) if scoring_func == "sigmoid" else np.exp(z)
    score = score / score.sum(axis=-1, keepdims=True)
    ids = np.asarray(stats.topk_ids).reshape(LAYERS, ROWS, LENGTH, TOP_K)
    losses = []
    for layer in range(LAYERS):
        for row in range(ROWS):
            real = mask[row]
            f = np.bincount(ids[layer, row, real].reshape(-1), minlength=E) * E / (TOP_K * real.sum())
            losses.append((f * score[layer, row, real].mean(axis=0)).sum())
    run = functools.partial(moe_jax.sequence_balance_loss, scoring_func=scoring_func)
    np.testing.assert_allclose(run(stats, ROWS), np.mean(losses), rtol=1e-6)
    padded = jnp.asarray([*mask.reshape(-1), *[False] * TOKENS])
    empty = stats_of_logits(jnp.concatenate([logits, logits], axis=1), padded)
    np.testing.assert_allclose(run(empty, 2 * ROWS), np.mean(losses), rtol=1e-6)


def test_even_routing_and_no_tokens():
    ids = jnp.asarray([[t % E, (t + 1) % E] for t in range(E)], jnp.int32)
    even = MoEStats(jnp.full(E, 2, jnp.int32), ids, jnp.zeros((E, E), jnp.float32))
    within = functools.partial(moe_jax.sequence_balance_loss, batch_size=1)
    np.testing.assert_allclose([moe_jax.load_balancing_loss(even), within(even)], [TOP_K, 1], rtol=1e-6)

    def of_nobody(logits, loss):
        return loss(MoEStats(even.load, jnp.full_like(ids, -1), logits))

    for loss in (moe_jax.load_balancing_loss, moe_jax.router_z_loss, within):
        value, grad = jax.value_and_grad(of_nobody)(even.router_logits, loss)
        assert value == 0 and not grad.any()


@pytest.mark.parametrize("layout", ["dp2-ep4", "ep2-tp2"])
@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.sample(4)
def test_over_a_mesh_means_are_of_all_devices(layout, is_eager):
    """Tokens of one device lean elsewhere than those of another."""
    x, z = inputs(16)
    z = z + jnp.where((jnp.arange(16)[:, None] < 8) == (jnp.arange(E) < E // 2), 3.0, 0.0)
    mask = jnp.arange(16) != 3

    def losses(z, layer):
        _, stats = layer(x, z, token_mask=mask, return_stats=True)
        return moe_jax.load_balancing_loss(stats) + 0.1 * moe_jax.router_z_loss(stats)

    run = jax.value_and_grad(losses)
    run = run if is_eager else jax.jit(run)
    one, many = run(z, make_layer("int8_w8a16")), run(z, make_layer("int8_w8a16", mesh=make_parallel(layout)))
    np.testing.assert_allclose(many[0], one[0], rtol=1e-6)
    np.testing.assert_allclose(many[1], one[1], rtol=1e-5, atol=1e-8)
    assert np.abs(one[1]).max() > 1e-3


def test_what_is_refused(logits):
    stats = stats_of_logits(logits)
    refuses(TypeError, "stats has type tuple, expected MoEStats", moe_jax.load_balancing_loss, (1, 2))
    bare = MoEStats(stats.load, stats.topk_ids)
    refuses(ValueError, "stats has no router_logits", moe_jax.router_z_loss, bare)
    short = MoEStats(stats.load, stats.topk_ids[:, :-1], stats.router_logits)
    refuses(ValueError, r"router_logits \(3, 24, 6\) and topk_ids \(3, 23, 2\)", moe_jax.load_balancing_loss, short)
    refuses(ValueError, "batch_size=5 does not divide the 24 tokens", moe_jax.sequence_balance_loss, stats, 5)
    refuses(ValueError, "scoring_func='tanh'", moe_jax.sequence_balance_loss, stats, 2, scoring_func="tanh")
    refuses(TypeError, "per_layer=1, expected True or False", moe_jax.load_balancing_loss, stats, per_layer=1)
