"""route against a second version in NumPy float64 (routing_numpy.py), the worked examples, and hostile logits.

Contract: topk_weights (T, top_k) float32, topk_ids (T, top_k) int32; scores in float32; ties to the lower id; -1 with
weight 0 for what contributes nothing; the factor in the weights of every router.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax import routing
from moe_jax.routing import RoutingParams
from tests.support.cases.routing import (
    BIAS,
    MATRIX,
    ROUTERS,
    TOKEN_IDS,
    E,
    K,
    check,
    config,
    expected_of,
    jit_route,
    logits,
    run_router,
)
from tests.support.oracles import routing as ref

# -- every router, every score -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("router", "scoring", "renormalize"), MATRIX)
def test_matrix_against_numpy(router, scoring, renormalize):
    check(run_router(logits(), router, scoring, renormalize), *expected_of(logits(), router, scoring, renormalize))


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(router, tokens):
    r = run_router(logits(tokens), router, "sigmoid", True)
    assert r.topk_weights.shape == r.topk_ids.shape == (tokens, K)
    if tokens:
        check(r, *expected_of(logits(tokens), router, "sigmoid", True))


@pytest.mark.parametrize("router", ROUTERS)
def test_scaling_factor_can_be_left_to_the_output(router):
    # That the factor of 2.5 is in the weights of every router shows in the matrix above.
    left = run_router(logits(), router, "softmax", True, apply_routed_scale_to_output=True)
    check(left, *expected_of(logits(), router, "softmax", True, factor=1.0))


def test_worked_example_softmax():
    r = jit_route(jnp.array([[2.0, 1.0, 0.0, 1.0]]), config(4, 2))
    check(r, [[0.7310586, 0.2689414]], [[0, 1]])
    first_form = jit_route(jnp.array([[2.0, 1.0, 0.0, 1.0]]), config(4, 2, renormalize=False))
    np.testing.assert_allclose(first_form.topk_weights, [[0.534447, 0.196612]], atol=1e-6)


def test_worked_example_bias():
    params = RoutingParams(jnp.array([0.5, 0.0, 0.9, -0.6]))
    c = config(4, 2, scoring_func="sigmoid", routed_scaling_factor=2.5)
    check(jit_route(jnp.array([[0.0, 1.0, -1.0, 2.0]]), c, params=params), [[0.8743886, 1.6256115]], [[2, 0]])


@pytest.mark.parametrize(
    ("bias", "weights", "ids"),
    [
        (None, [0.4082394, 0.3774783, 0.2142822], [5, 1, 0]),
        ([0, 0, 0.3, 0.3, 0, -0.9, 0, 0], [0.3365293, 0.3009177, 0.3625529], [3, 2, 1]),
    ],
)
def test_worked_examples_grouped(bias, weights, ids):
    c = config(8, 3, scoring_func="sigmoid", use_grouped_topk=True, num_expert_group=4, topk_group=2)
    params = None if bias is None else RoutingParams(jnp.array(bias, jnp.float32))
    r = jit_route(jnp.array([[0, 2, 1, 1.5, -1, 3, 0.5, 0.4]], jnp.float32), c, params=params)
    np.testing.assert_array_equal(r.topk_ids, [ids])
    np.testing.assert_allclose(r.topk_weights, [weights], atol=3e-7)


def test_worked_example_sqrtsoftplus():
    r = jit_route(jnp.array([[0.0, 2.0, -1.0]]), config(3, 3, scoring_func="sqrtsoftplus", renormalize=False))
    check(r, [[1.4583992, 0.8325546, 0.5596979]], [[1, 0, 2]])
    wide = jnp.array([[25.0, 100.0, -16.0, -18.0, -60.0, -300.0]])
    r = jit_route(wide, config(6, 6, scoring_func="sqrtsoftplus", renormalize=False))
    np.testing.assert_allclose(r.topk_weights, ref.rows(ref.route_row, wide, top_k=6, scoring="sqrtsoftplus",
                                                        renormalize=False)[0], rtol=2e-6, atol=1e-30)  # fmt: skip


def test_second_form_orders_what_softmax_underflows():
    # softmax over all experts is [1, 0, 0] in float32; top-k of the logits still tells 0 from -900.
    r = jit_route(jnp.array([[1000.0, -900.0, 0.0]]), config(3, 2))
    check(r, [[1.0, 0.0]], [[0, 2]])


def test_softmax_of_selected_logits_is_the_cpu_helper():
    # Section 2.10: renormalize -> softmax over the selected logits; otherwise exp(logit - logsumexp(all)).
    z = logits().astype(np.float64)
    ids = np.array([ref.best(row, K) for row in z])
    chosen = np.take_along_axis(z, ids, 1)
    exps = np.exp(chosen - chosen.max(1, keepdims=True))
    check(jit_route(jnp.asarray(z, jnp.float32), config()), exps / exps.sum(1, keepdims=True), ids)
    log_total = np.log(np.exp(z).sum(1, keepdims=True))
    check(jit_route(jnp.asarray(z, jnp.float32), config(renormalize=False)), np.exp(chosen - log_total), ids)


@pytest.mark.parametrize("router", ROUTERS)
def test_sums_near_zero(router):
    # sigmoid(-60) = 9e-27: a plain router divides by the sum whatever it is, the others by at least 1e-20.
    z = np.full((6, E), -60.0, np.float32)
    r = run_router(z, router, "sigmoid", True, factor=1.0)
    check(r, *expected_of(z, router, "sigmoid", True, factor=1.0))
    assert np.allclose(r.topk_weights, 1 / K if router == "plain" else 8.756e-7, rtol=1e-3)


# -- ties, dtypes, values that are not finite --------------------------------------------------------------------------


@pytest.mark.parametrize("router", ["plain", "bias", "grouped", "grouped bias"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_equal_logits_go_to_the_lowest_ids(router, scoring):
    fields, params, kwargs = ROUTERS[router]
    if params is not None:
        params, kwargs = RoutingParams(jnp.zeros(E)), {**kwargs, "bias": np.zeros(E)}
    z = np.zeros((3, E), np.float32)
    z[1, 5:] = 1.0
    z[2, ::2] = -0.0  # equal to 0.0, so it ties
    r = jit_route(jnp.asarray(z), config(scoring_func=scoring, **fields), params=params)
    check(r, *ref.rows(ref.route_row, z, top_k=K, scoring=scoring, **kwargs))
    np.testing.assert_array_equal(r.topk_ids[0], [0, 1, 2, 3])
    np.testing.assert_array_equal(r.topk_ids[2], [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("router", "dtype"),
    [(r, jnp.bfloat16) for r in ("plain", "bias", "grouped", "grouped bias")] + [("plain", jnp.float16)],
)
def test_narrow_logits_are_scored_in_float32(router, dtype):
    z = jnp.asarray(np.random.default_rng(3).normal(size=(32, E)), dtype)
    fields, params, kwargs = ROUTERS[router]
    r = jit_route(z, config(scoring_func="sigmoid", **fields), params=params)
    check(r, *ref.rows(ref.route_row, z, top_k=K, scoring="sigmoid", **kwargs))


def test_router_logits_dtype_rounds_the_logits_first():
    z = jnp.asarray(np.random.default_rng(4).normal(size=(32, E)), jnp.float32)
    rounded = jit_route(z, config(router_logits_dtype=jnp.bfloat16))
    narrow = jit_route(z.astype(jnp.bfloat16), config())
    check(rounded, narrow.topk_weights, narrow.topk_ids)
    assert not np.array_equal(rounded.topk_weights, jit_route(z, config()).topk_weights)
    kept = jit_route(z, config(router_logits_dtype="float32"))
    np.testing.assert_array_equal(kept.topk_weights, jit_route(z, config()).topk_weights)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from([-2.0, -0.5, 0.0, -0.0, 0.25, 3.0]), min_size=E, max_size=E),
    st.sampled_from(["plain", "grouped"]),
)
def test_property_many_ties(row, router):
    z = np.array([row] * 6, np.float32)
    check(run_router(z, router, "sigmoid", True), *expected_of(z, router, "sigmoid", True))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(width=32), min_size=E, max_size=E), st.sampled_from(MATRIX))
def test_property_any_float(row, case):
    # Weights stay finite and not negative, ids in range and distinct, another token in the call is untouched.
    z = logits()
    z[2] = row
    r = run_router(z, *case)
    weights, ids = expected_of(logits(), *case)
    assert np.isfinite(r.topk_weights).all() and (np.asarray(r.topk_weights) >= 0).all()
    assert ((np.asarray(r.topk_ids) >= 0) & (np.asarray(r.topk_ids) < E)).all()
    assert case[0] == "hash" or all(len(set(row)) == K for row in np.asarray(r.topk_ids).tolist())
    others = np.arange(6) != 2
    np.testing.assert_array_equal(np.asarray(r.topk_ids)[others], ids[others])
    np.testing.assert_allclose(np.asarray(r.topk_weights)[others], weights[others], rtol=2e-6)


@pytest.mark.parametrize(("router", "scoring", "renormalize"), MATRIX)
def test_nan_and_infinite_logits_score_zero(router, scoring, renormalize):
    z = logits()
    z[1, 3], z[2, 5], z[3, :], z[4, 0] = np.nan, np.inf, np.nan, -np.inf
    if (router, scoring, renormalize) == ("plain", "softmax", True):
        z[5] = -np.inf  # no softmax exists; elsewhere the scores are plain zeros
    check(run_router(z, router, scoring, renormalize), *expected_of(z, router, scoring, renormalize))


@pytest.mark.parametrize("name", [None, "phi_sparsemixer", "gemma4", "interns1_pro"])
def test_nan_logits_in_a_large_batch(name):
    # The row maximum of XLA on the CPU (jax 0.10.2) loses NaN in arrays of some thousand elements.
    z = np.random.default_rng(1).normal(size=(300, 64)).astype(np.float32)
    is_hostile = np.arange(300) % 3 == 0
    z[is_hostile, np.arange(100) % 64] = np.nan
    for renormalize in (True, False) if name is None else (False,):
        r = jit_route(jnp.asarray(z), config(64, 2, renormalize=renormalize, custom_routing_function=name))
        clean = jit_route(jnp.nan_to_num(z), config(64, 2, renormalize=renormalize, custom_routing_function=name))
        np.testing.assert_array_equal(np.asarray(r.topk_weights)[is_hostile], 0.0)
        hostile = is_hostile[:, None]
        check(r, np.where(hostile, 0.0, clean.topk_weights), np.where(hostile, r.topk_ids, clean.topk_ids))
        assert ((np.asarray(r.topk_ids) >= 0) & (np.asarray(r.topk_ids) < 64)).all()


# -- hash, zero experts, masks -----------------------------------------------------------------------------------------


def test_hash_ids_outside_contribute_nothing():
    table = jnp.array([[0, 99], [-3, 2]], jnp.int16)
    c = config(E, 2, scoring_func="sqrtsoftplus", routed_scaling_factor=2.0)
    tokens = jnp.array([0, 1, 2, -1], jnp.int32)
    r = jit_route(jnp.asarray(logits(4)), c, params=RoutingParams(hash_indices_table=table), token_ids=tokens)
    np.testing.assert_array_equal(r.topk_ids, [[0, -1], [-1, 2], [-1, -1], [-1, -1]])
    np.testing.assert_allclose(r.topk_weights, [[2, 0], [0, 2], [0, 0], [0, 0]], rtol=1e-6)


def test_zero_experts_give_their_weight_to_the_token():
    z, bias = logits(6, E + 3), np.random.default_rng(9).normal(size=E + 3).astype(np.float32) / 8
    bias[E:] += 0.2
    c = config(zero_expert_type="identity", renormalize=False, routed_scaling_factor=6.0)
    mask = jnp.array([True] * 5 + [False])
    r = jit_route(jnp.asarray(z), c, params=RoutingParams(jnp.asarray(bias)), token_mask=mask)
    weights, ids = ref.rows(ref.route_row, z, top_k=K, renormalize=False, factor=6.0, bias=bias)
    is_zero = ids >= E
    assert is_zero[:5].any() and not is_zero[:5].all()
    weights[5], ids[5], is_zero[5] = 0, -1, False
    check(r, np.where(is_zero, 0, weights), np.where(is_zero, -1, ids))
    np.testing.assert_allclose(r.zero_expert_weight, np.where(is_zero, weights, 0).sum(1), rtol=2e-6)
    assert jit_route(jnp.asarray(logits()), config()).zero_expert_weight is None


@pytest.mark.parametrize("router", ROUTERS)
def test_masked_tokens_get_nothing_and_change_nothing(router):
    fields, params, _ = ROUTERS[router]
    z = logits()
    z[4] = np.nan
    mask = np.array([True, False, True, True, False, True])
    full = jit_route(jnp.asarray(z), config(**fields), params=params, token_ids=TOKEN_IDS)
    r = jit_route(jnp.asarray(z), config(**fields), params=params, token_ids=TOKEN_IDS, token_mask=jnp.asarray(mask))
    check(r, np.where(mask[:, None], full.topk_weights, 0), np.where(mask[:, None], full.topk_ids, -1))


# -- custom functions --------------------------------------------------------------------------------------------------


PRESET_CASES = [(name, flag) for name in routing.ROUTING_PRESETS for flag in (True, False)]
PRESET_CASES.remove(("phi_sparsemixer", True))  # refused, see test_refusals


@pytest.mark.parametrize(("name", "renormalize"), PRESET_CASES)
def test_presets(name, renormalize):
    # Close logits let the sparsemixer keep several experts.
    z, params, fields, kwargs, top_k = logits() / 16 + 3, None, {}, {}, K
    if name == "phi_sparsemixer":
        top_k = 2
    elif name == "gemma4":
        scale = np.linspace(0.5, 2, E).astype(np.float32)
        params, kwargs = RoutingParams(per_expert_scale=jnp.asarray(scale)), dict(scale=scale)
    elif name == "interns1_pro":
        fields, kwargs = dict(num_expert_group=2), dict(groups=2)
    c = config(E, top_k, renormalize=renormalize, custom_routing_function=name, routed_scaling_factor=1.5, **fields)
    weights, ids = ref.rows(getattr(ref, f"{name}_row"), z, top_k=top_k, renormalize=renormalize, **kwargs)
    check(jit_route(jnp.asarray(z), c, params=params), 1.5 * weights, ids)
    empty = jit_route(jnp.zeros((0, E)), c, params=params)
    assert empty.topk_ids.shape == (0, top_k)


@pytest.mark.parametrize("name", routing.ROUTING_PRESETS)
def test_presets_with_nan_logits(name):
    z = logits()
    z[0, 3], z[1, :], z[2, 0], z[2, 1:] = np.nan, np.nan, 2.0, -np.inf
    c = config(E, 2, renormalize=False, custom_routing_function=name)
    r = jit_route(jnp.asarray(z), c)
    assert np.isfinite(r.topk_weights).all() and (np.asarray(r.topk_weights)[1] == 0).all()
    assert r.topk_weights[2, 0] > 0.5


def test_sparsemixer_all_logits_zero():
    r = jit_route(jnp.zeros((1, 4)), config(4, 2, renormalize=False, custom_routing_function="phi_sparsemixer"))
    check(r, [[1 / 4, 1 / 3]], [[0, 1]])


# -- degenerate groups -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("groups", "bias"), [(16, None), (3, None), (5, BIAS)])
def test_invalid_grouping_routes_without_groups_and_keeps_the_rest(groups, bias):
    grouping = dict(use_grouped_topk=True, num_expert_group=groups, topk_group=1)
    c = config(scoring_func="sigmoid", renormalize=False, routed_scaling_factor=2.5, **grouping)
    params = None if bias is None else RoutingParams(jnp.asarray(bias))
    expected = ref.rows(ref.route_row, logits(), top_k=K, scoring="sigmoid", renormalize=False, factor=2.5, bias=bias)
    check(jit_route(jnp.asarray(logits()), c, params=params), *expected)


def test_one_group_equals_no_groups():
    grouping = dict(use_grouped_topk=True, num_expert_group=1, topk_group=1)
    z, params = jnp.asarray(logits()), RoutingParams(jnp.asarray(BIAS))
    r = jit_route(z, config(**grouping), params=params)
    flat = jit_route(z, config(), params=params)
    check(r, flat.topk_weights, flat.topk_ids)
