"""Routed experts recorded and replayed: ids of the record, weights of the logits at hand, bit for bit when equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.routing import RoutedExperts, RoutingParams
from tests.support.cases.routing import ROUTERS, TOKEN_IDS, E, K, config, config_of, jit_route, logits, run_router

CASES = [
    ("plain", "softmax", True),
    ("plain", "softmax", False),
    ("plain", "sigmoid", True),
    ("bias", "sqrtsoftplus", True),
    ("grouped", "softmax", True),
    ("grouped bias", "sigmoid", True),
    ("hash", "sigmoid", False),
]


def replay(z, ids, router, scoring, renormalize, **more):
    c = config_of(router, scoring, renormalize)
    token_ids = TOKEN_IDS[: len(z)] if router == "hash" else None
    return jit_route(jnp.asarray(z), c, params=ROUTERS[router][1], token_ids=token_ids, replayed_ids=ids, **more)


def weights_float64(z, ids, scoring, renormalize, factor=2.5):
    z = np.asarray(z, np.float64)
    score = {
        "softmax": np.exp(z) / np.exp(z).sum(axis=1, keepdims=True),
        "sigmoid": 1 / (1 + np.exp(-z)),
        "sqrtsoftplus": np.sqrt(np.log1p(np.exp(z))),
    }[scoring]
    weights = np.where(ids >= 0, np.take_along_axis(score, np.maximum(ids, 0), axis=1), 0.0)
    return factor * (weights / weights.sum(axis=1, keepdims=True) if renormalize else weights)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sample(2)
def test_replay(case):
    z, other = logits(), logits(seed=5)
    chosen = run_router(z, *case)
    same = replay(z, chosen.topk_ids, *case)
    np.testing.assert_array_equal(same.topk_ids, chosen.topk_ids)
    np.testing.assert_array_equal(same.topk_weights, chosen.topk_weights)

    # Other logits would choose otherwise; the record holds, and an expert that was none stays none.
    ids = np.array(chosen.topk_ids)
    assert case[0] == "hash" or (np.asarray(run_router(other, *case).topk_ids) != ids).any()
    ids[1, 2], ids[4, 0] = -1, E + 3
    later = replay(other, jnp.asarray(ids), *case)
    ids[4, 0] = -1
    np.testing.assert_array_equal(later.topk_ids, ids)
    np.testing.assert_allclose(later.topk_weights, weights_float64(other, ids, *case[1:]), rtol=2e-6)


def test_masked_tokens_and_rows_without_experts():
    z = logits()
    mask = jnp.arange(6) != 2
    chosen = jit_route(jnp.asarray(z), config(), token_mask=mask)
    assert (chosen.topk_ids[2] == -1).all()
    again = jit_route(jnp.asarray(z), config(), replayed_ids=chosen.topk_ids)
    np.testing.assert_array_equal(again.topk_weights, chosen.topk_weights)
    np.testing.assert_array_equal(again.topk_ids, chosen.topk_ids)
    masked = replay(z, run_router(z, "plain", "softmax", True).topk_ids, "plain", "softmax", True, token_mask=mask)
    assert (masked.topk_ids[2] == -1).all() and (masked.topk_weights[2] == 0).all()


def test_gradient_reaches_the_logits_of_replayed_experts():
    z, ids = jnp.asarray(logits()), jnp.array([[0, 3, 5, 7]] * 6, jnp.int16)
    grad = jax.grad(lambda z: jit_route(z, config(), replayed_ids=ids).topk_weights[:, 0].sum())(z)
    assert (np.asarray(grad)[:, [0, 3, 5, 7]] != 0).all() and (np.asarray(grad)[:, [1, 2, 4]] == 0).all()


def test_record_of_several_calls():
    """Tokens arrive in pieces, layer by layer, inside jit with traced positions; int16, and what is too much is cut."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, E, (5, 2, K)).astype(np.int32)
    record = jax.jit(RoutedExperts.record, donate_argnums=0)
    routed = RoutedExperts.create(5, 2, E, K)
    assert routed.ids.dtype == jnp.int16 and (routed.ids == -1).all()
    for layer in range(2):
        for first in (0, 3):  # the second piece is one row longer than the room that is left
            piece = np.concatenate([ids[first : first + 3, layer], np.full((first // 3, K), 99)]).astype(np.int32)
            routed = record(routed, jnp.asarray(piece), layer, first)
    np.testing.assert_array_equal(routed.of_layer(1), ids[:, 1])
    np.testing.assert_array_equal(routed.ids, ids)
    assert RoutedExperts.create(1, 1, 40_000, 1).ids.dtype == jnp.int32
    with pytest.raises(ValueError, match=r"topk_ids has shape \(5, 2\), expected \(T, 4\)"):
        routed.record(jnp.zeros((5, 2), jnp.int32), 0)


def test_refuses():
    z, ids = jnp.asarray(logits()), jnp.zeros((6, K), jnp.int32)
    with pytest.raises(ValueError, match=r"replayed_ids has shape \(6, 3\), expected \(6, 4\)"):
        jit_route(z, config(), replayed_ids=ids[:, :3])
    with pytest.raises(TypeError, match="replayed_ids has dtype float32"):
        jit_route(z, config(), replayed_ids=ids.astype(jnp.float32))
    with pytest.raises(ValueError, match="custom_routing_function: .* fused_experts"):
        jit_route(z, config(top_k=1, custom_routing_function="llama4"), replayed_ids=ids[:, :1])
    bias = RoutingParams(jnp.zeros(E + 2))
    with pytest.raises(ValueError, match="zero_expert_type"):
        jit_route(jnp.zeros((6, E + 2)), config(zero_expert_type="identity"), params=bias, replayed_ids=ids)
