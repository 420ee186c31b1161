"""What routing refuses and how it says so, custom functions, routing kinds, simulated routing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax import routing
from moe_jax.routing import RoutingKind, RoutingParams, route, routing_kind, simulate_routing, validate_routing
from tests.support.cases.routing import GROUPS, HASH, TABLE, TOKEN_IDS, E, K, check, config, jit_route, logits

# -- custom functions --------------------------------------------------------------------------------------------------


def backwards(hidden_states, gating_output, topk, renormalize):
    assert gating_output.dtype == jnp.float32 and hidden_states.shape == (3, 8) and renormalize is False
    ids = jnp.broadcast_to(jnp.arange(topk, dtype=jnp.int8)[::-1], (3, topk))
    return ids.astype(jnp.bfloat16), ids


def test_custom_function_contract():
    c = config(custom_routing_function=backwards, renormalize=False)
    r = jit_route(jnp.zeros((3, E), jnp.bfloat16), c, hidden_states=jnp.zeros((3, 8), jnp.bfloat16))
    check(r, [[3, 2, 1, 0]] * 3, [[3, 2, 1, 0]] * 3)


@pytest.mark.parametrize(
    ("result", "error", "match"),
    [
        (lambda z: z, TypeError, r"pair \(weights, ids\)"),
        (lambda z: (z, z[:, :K]), ValueError, r"weights from custom_routing_function has shape \(6, 16\), expected"),
        (lambda z: (z[:, :K], z[:, :1]), ValueError, "ids from custom_routing_function"),
    ],
)  # fmt: skip
def test_custom_function_results_are_checked(result, error, match):
    def custom(hidden_states, gating_output, topk, renormalize):
        return result(gating_output)

    with pytest.raises(error, match=match):
        route(jnp.asarray(logits()), config(custom_routing_function=custom))


# -- refusals, kinds, simulation ---------------------------------------------------------------------------------------

HAS_BIAS, HAS_TABLE = dict(has_correction_bias=True), dict(has_hash_table=True)


@pytest.mark.parametrize(
    ("fields", "known", "match"),
    [
        (dict(scoring_func="tanh"), {}, "softmax, sigmoid, sqrtsoftplus"),
        (dict(top_k=17), {}, "top_k=17 exceeds the 16"),
        (dict(top_k=0), {}, "at least 1"),
        (dict(routed_scaling_factor=float("nan")), {}, "must be finite"),
        (dict(apply_router_weight_on_input=True), {}, "needs top_k=1"),
        (dict(router_logits_dtype=jnp.int32), {}, "router_logits_dtype=int32"),
        (dict(use_grouped_topk=True), {}, "needs num_expert_group and topk_group, found None and None"),
        (dict(use_grouped_topk=True, num_expert_group=4), {}, "found 4 and None"),
        (dict(use_grouped_topk=True, num_expert_group=4, topk_group=5), {}, "topk_group=5"),
        (dict(use_grouped_topk=True, num_expert_group=0, topk_group=0), {}, "topk_group=0"),
        (dict(use_grouped_topk=True, num_expert_group=4, topk_group=True), {}, "topk_group=True, expected an integer"),
        (dict(use_grouped_topk=True, num_expert_group=8, topk_group=1), {}, "exceeds the 2 experts of topk_group=1"),
        (dict(GROUPS, custom_routing_function="llama4"), {}, "both choose the experts"),
        (dict(GROUPS, scoring_func="sqrtsoftplus"), {}, "'softmax' or 'sigmoid'"),
        (dict(GROUPS, num_expert_group=16), HAS_BIAS, "fewer than two"),
        (GROUPS, HAS_TABLE, "both choose the experts"),
        (dict(custom_routing_function="llama5"), {}, "llama4, cohere2, phi_sparsemixer, gemma4, interns1_pro"),
        (dict(custom_routing_function="llama4"), HAS_BIAS, "does not see e_score_correction_bias"),
        (dict(custom_routing_function="llama4"), HAS_TABLE, "does not see hash_indices_table"),
        ({}, HAS_BIAS | HAS_TABLE, "e_score_correction_bias steers a choice by scores, so it would have no effect"),
        (dict(custom_routing_function="phi_sparsemixer", top_k=2), {}, "needs top_k=2 and renormalize=False"),
        (dict(custom_routing_function="phi_sparsemixer", renormalize=False), {}, "found top_k=4"),
        (dict(custom_routing_function="interns1_pro", num_expert_group=3), {}, "multiples of num_expert_group=3"),
        (dict(zero_expert_type="copy"), {}, "expected None or one of identity"),
        (dict(zero_expert_type="identity", **GROUPS), {}, "cannot be combined with use_grouped_topk"),
        (dict(zero_expert_type="identity"), dict(has_correction_bias=False), "needs e_score_correction_bias"),
        (dict(zero_expert_type="identity"), dict(num_logits=16), "expected more than num_experts=16"),
        ({}, dict(num_logits=17), "17 columns, expected num_experts=16"),
    ],
)  # fmt: skip
def test_refusals(fields, known, match):
    with pytest.raises(ValueError, match=match):
        validate_routing(config(**fields), **known)


def test_zero_experts_widen_the_choice():
    validate_routing(config(2, 4, zero_expert_type="identity"), has_correction_bias=True)
    validate_routing(config(2, 4, zero_expert_type="identity"), 5, has_correction_bias=True)
    with pytest.raises(ValueError, match="top_k=4 exceeds the 3"):
        validate_routing(config(2, 4, zero_expert_type="identity"), 3, has_correction_bias=True)


@pytest.mark.parametrize(
    ("params", "more", "match"),
    [
        (RoutingParams(jnp.zeros(E + 1)), {}, r"e_score_correction_bias has shape \(17,\), expected \(16,\)"),
        (HASH, {}, "pass token_ids"),
        (RoutingParams(hash_indices_table=jnp.asarray(TABLE[:, :3])), dict(token_ids=TOKEN_IDS), r"expected \(11, 4\)"),
        # the annotations, which the test run checks, see this one first
        (HASH, dict(token_ids=TOKEN_IDS[:2]), "token_ids has shape|'token_ids'"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit(params, more, match):
    with pytest.raises((ValueError, TypeError), match=match):
        route(jnp.asarray(logits()), config(), params=params, **more)


def test_routing_kind_numbers():
    # vLLM's numbers; other tools exchange them.
    assert {kind.name: kind.value for kind in RoutingKind} == {
        "SOFTMAX_TOPK": 0, "TOPK_SOFTMAX": 1, "DEEPSEEK_V3": 2, "LLAMA4": 3, "SOFTMAX_TOPK_RENORMALIZE": 4,
        "RAW_TOPK": 5, "SIGMOID_RENORMALIZE": 6, "MINIMAX_M2": 7, "SIGMOID": 8, "UNSPECIFIED": 9, "DEEPSEEK_V4": 100,
        "CUSTOM": 101, "SIMULATED": 102,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "bias", "kind"),
    [
        ({}, False, 4),
        (dict(renormalize=False), False, 0),
        (dict(scoring_func="sigmoid"), False, 6),
        (dict(scoring_func="sigmoid", renormalize=False), False, 8),
        (dict(scoring_func="sqrtsoftplus"), False, 100),
        (dict(scoring_func="sqrtsoftplus", renormalize=False), True, 9),
        (dict(scoring_func="sigmoid", **GROUPS), True, 2),
        (dict(scoring_func="sigmoid", **GROUPS, renormalize=False), True, 9),
        (dict(scoring_func="sigmoid"), True, 7),
        (dict(scoring_func="sigmoid", routed_scaling_factor=2.5), True, 9),
        ({}, True, 9),
        (dict(custom_routing_function="llama4"), False, 3),
        (dict(custom_routing_function=routing.llama4), False, 3),
        (dict(custom_routing_function="cohere2"), False, 101),
        (dict(custom_routing_function=backwards), False, 101),
    ],
)
def test_routing_kind(fields, bias, kind):
    assert routing_kind(config(**fields), has_correction_bias=bias) == kind


@pytest.mark.parametrize("strategy", routing.SIMULATION_STRATEGIES)
def test_simulated_routing(strategy, key):
    simulate = jax.jit(simulate_routing, static_argnums=(0, 2, 3, 4))
    r = simulate(strategy, key, 4000, 8, 2)
    counts = np.bincount(np.asarray(r.topk_ids).ravel(), minlength=8) / 8000
    assert counts.size == 8 and r.topk_weights.dtype == jnp.float32 and r.topk_ids.dtype == jnp.int32
    if strategy == "uniform":
        np.testing.assert_allclose(counts, 1 / 8, atol=0.02)
        np.testing.assert_array_equal(r.topk_weights, 1.0)
    else:
        # P(id <= 1) = P(normal < logit(2/8)) = 0.136; the middle is crowded.
        assert abs(counts[:2].sum() - 0.136) < 0.02 and counts[3] > 2 * counts[0]
        np.testing.assert_allclose(r.topk_weights.sum(1), 1.0, rtol=1e-5)
    again = simulate(strategy, key, 4000, 8, 2)
    np.testing.assert_array_equal(r.topk_ids, again.topk_ids)
    with pytest.raises(ValueError, match="uniform, normal"):
        simulate_routing("zipf", key, 1, 8, 2)
