"""Cases shared by the routing tests: every router with its arrays and the arguments of its NumPy version."""

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax import MoEConfig, routing
from moe_jax.routing import RoutingParams, route
from tests.support.oracles import routing as ref

E, K = 16, 4
jit_route = jax.jit(route)


def config(num_experts=E, top_k=K, **kwargs):
    return MoEConfig(num_experts, top_k, hidden_size=8, intermediate_size=8, **kwargs)


def logits(tokens=6, width=E, seed=0):
    # Multiples of 1/8 give ties inside most rows; the offset keeps sums of two sigmoids from tying mathematically only.
    return (np.random.default_rng(seed).integers(-24, 24, (tokens, width)) / 8 + 0.3).astype(np.float32)


BIAS = np.random.default_rng(7).normal(size=E).astype(np.float32) / 4
GROUPS = dict(use_grouped_topk=True, num_expert_group=4, topk_group=2)
TABLE = np.random.default_rng(8).integers(0, E, (11, K)).astype(np.int32)
HASH = RoutingParams(hash_indices_table=jnp.asarray(TABLE))
TOKEN_IDS = jnp.array([3, 10, 0, 3, 7, 1], jnp.int32)

# name -> (config arguments, params, arguments of the NumPy version)
ROUTERS = {
    "plain": ({}, None, {}),
    "bias": ({}, RoutingParams(jnp.asarray(BIAS)), dict(bias=BIAS)),
    "grouped": (GROUPS, None, dict(groups=4, kept=2)),
    "grouped bias": (GROUPS, RoutingParams(jnp.asarray(BIAS)), dict(bias=BIAS, groups=4, kept=2)),
    "hash": ({}, HASH, {}),
}
MATRIX = [
    (router, scoring, renormalize)
    for router in ROUTERS
    for scoring in routing.SCORING_FUNCTIONS
    for renormalize in (True, False)
    if not (router.startswith("grouped") and scoring == "sqrtsoftplus")
]


def config_of(router, scoring, renormalize, factor=2.5, **more):
    fields = ROUTERS[router][0]
    return config(scoring_func=scoring, renormalize=renormalize, routed_scaling_factor=factor, **fields, **more)


def run_router(z, router, *args, **more):
    token_ids = TOKEN_IDS[: len(z)] if router == "hash" else None
    return jit_route(jnp.asarray(z), config_of(router, *args, **more), params=ROUTERS[router][1], token_ids=token_ids)


def expected_of(z, router, scoring, renormalize, factor=2.5):
    kwargs = dict(top_k=K, scoring=scoring, renormalize=renormalize, factor=factor, **ROUTERS[router][2])
    if router != "hash":
        return ref.rows(ref.route_row, z, **kwargs)
    pairs = [ref.route_row(row, table=TABLE[t], **kwargs) for row, t in zip(z, np.asarray(TOKEN_IDS), strict=False)]
    return np.array([w for w, _ in pairs]), np.array([i for _, i in pairs])


def check(r, weights, ids):
    assert r.topk_weights.dtype == jnp.float32 and r.topk_ids.dtype == jnp.int32
    np.testing.assert_array_equal(r.topk_ids, ids)
    np.testing.assert_allclose(r.topk_weights, weights, rtol=2e-6, atol=1e-12)
