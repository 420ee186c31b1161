"""fused_experts and fused_moe against NumPy float64, both implementations, row by row: formats and routing."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax import Scheme
from moe_jax.activations import ACTIVATIONS
from moe_jax.experts import MoEStats, fused_experts, fused_moe
from moe_jax.experts._reference import Reference
from moe_jax.quantization import SCHEMES
from moe_jax.routing import RoutingParams
from tests.support.cases import experts as cases
from tests.support.oracles.experts import experts_numpy
from tests.support.oracles.layer_judge import assert_layer_close
from tests.support.oracles.tolerances import assert_rows_close, tolerance
from tests.support.refusals import refuses

NUM_TOKENS = 21
GATED = [name for name in ACTIVATIONS if not name.endswith("_no_mul") and name != "relu2"]
NOT_GATED = ["silu", "gelu", "gelu_tanh", "relu2"]
PARAMETERS = {
    "silu": {"swiglu_limit": 0.7},
    "swigluoai_uninterleave": {"swiglu_limit": 0.9, "swiglu_alpha": 1.3, "swiglu_beta": 0.5},
}


def every_scheme_pairwise():
    """Each scheme with and without gate, bias and weight on input (all pairs), activations in turn."""
    rows = [(True, True, False), (True, False, True), (False, True, True), (False, False, False)]
    names = {True: itertools.cycle(GATED), False: itertools.cycle(NOT_GATED)}
    # One number per element and a float32 scale; packed integers and microscaling have tests of their own.
    plain = [name for name in SCHEMES if name.startswith(("bf16", "fp8_", "int8_"))]
    for turn, scheme in enumerate((*plain, "fp8_block_16x32")):
        for is_gated, has_bias, on_input in rows if scheme == "bf16" else rows[turn % 2 :: 2]:
            yield scheme, is_gated, has_bias, on_input, next(names[is_gated])


def scheme_of(name):
    if name == "fp8_block_16x32":
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}
    return name


@pytest.mark.parametrize(("scheme", "is_gated", "has_bias", "on_input", "activation"), every_scheme_pairwise())
@pytest.mark.sample(10)
def test_against_numpy(scheme, is_gated, has_bias, on_input, activation):
    top_k = 1 if on_input else cases.K
    config = cases.make_config(
        scheme_of(scheme),
        top_k=top_k,
        is_act_and_mul=is_gated,
        has_bias=has_bias,
        apply_router_weight_on_input=on_input,
        activation=activation,
        **(PARAMETERS.get(activation, {}) if is_gated else {}),
    )
    x, p, ids, weights = cases.make_call(config, NUM_TOKENS)
    for name in ("reference", "xla"):
        y = cases.jitted(fused_experts, dataclasses.replace(config, implementation=(name,)))(x, p, ids, weights)
        assert y.dtype == x.dtype
        assert_layer_close(y, x, p, ids, weights, config, kernels=False)


def test_the_implementation_rounds_a_sum_that_nothing_follows(monkeypatch):
    """Beside a shared output it is added up in float32 first."""
    asked, run = [], Reference.run

    def recorded(self, x, topk_weights, topk_ids, weights, config, out_dtype=jnp.float32):
        asked.append(jnp.dtype(out_dtype).name)
        return run(self, x, topk_weights, topk_ids, weights, config, out_dtype)

    monkeypatch.setattr(Reference, "run", recorded)
    config = cases.make_config("bf16", implementation=("reference",))
    x, p, ids, weights = cases.make_call(config, 3)
    x = x.astype(jnp.bfloat16)
    logits = jnp.zeros((3, config.num_experts))
    for y in (
        fused_experts(x, p, ids, weights, config),
        fused_moe(x, logits, weights, config),
        fused_moe(x, logits, weights, config, shared_output=x),
    ):
        assert y.dtype == x.dtype == jnp.bfloat16
    assert asked == ["bfloat16", "bfloat16", "float32"]


def test_every_gated_activation_is_covered():
    covered = {(row[1], row[4]) for row in every_scheme_pairwise()}
    assert covered == {(True, name) for name in GATED} | {(False, name) for name in NOT_GATED}


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ("bf16", "bfloat16"),
        ("fp8_tensor", "bfloat16"),
        ("fp8_block_a16", "bfloat16"),
        ("int8_w8a16", "bfloat16"),
        ("bf16", "float16"),
        ("int8_w8a8", "float16"),
    ],
)
@pytest.mark.sample(6)
def test_16_bit_compute(scheme, dtype):
    config = cases.make_config(scheme, dtype=dtype, param_dtype=dtype, has_bias=True, implementation=("xla",))
    x, p, ids, weights = cases.make_call(config, NUM_TOKENS, dtype=dtype)
    y = cases.jitted(fused_experts, config)(x, p, ids, weights)
    assert y.dtype == dtype
    assert_rows_close(y, experts_numpy(x, p, ids, weights, config), tolerance(config.scheme, dtype), experts=ids)


def test_float32_compute_rounds_no_weight():
    # bfloat16 storage and float32 compute: a bfloat16 rounding anywhere would show 2^-8, not 64 float32 ulps.
    config = cases.make_config("bf16", param_dtype="bfloat16", implementation=("xla",))
    x, p, ids, weights = cases.make_call(config, NUM_TOKENS)
    y = cases.jitted(fused_experts, config)(x, p, ids, weights)
    assert_rows_close(y, experts_numpy(x, p, ids, weights, config), tolerance("bf16", "float32"), experts=ids)


ROUTINGS = {
    "one expert takes all": np.full((9, 2), 3),
    "only the last expert": np.full((9, 2), cases.E - 1),
    "no token has an expert": np.full((9, 2), -1),
    "ids past the end": np.array([[cases.E, 2**31 - 1], [-7, 0]] * 4 + [[1, cases.E + 1]]),
    "an expert twice in a token": np.array([[2, 2]] * 5 + [[2, 1]] * 4),
    "one row per expert": np.stack([np.arange(9) % cases.E, np.full(9, -1)], axis=1),
    "descending": np.stack([cases.E - 1 - np.arange(9) % cases.E, np.arange(9)[::-1] % cases.E], axis=1),
}


@pytest.mark.parametrize("scheme", ["bf16", "fp8_tensor"])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.sample(4)
def test_hostile_routing(scheme, implementation):
    config = cases.make_config(scheme, has_bias=True, implementation=(implementation,))
    weights = cases.make_weights(config)
    x = cases.make_tokens(9, config)
    p = jnp.asarray(np.random.default_rng(5).uniform(0.2, 1.0, (9, 2)), jnp.float32)
    run = cases.jitted(fused_experts, config)
    for name, ids in ROUTINGS.items():
        ids = jnp.asarray(ids, jnp.int32)
        y = np.asarray(run(x, p, ids, weights))
        assert_layer_close(y, x, p, ids, weights, config, kernels=False)
        is_idle = ((ids < 0) | (ids >= cases.E)).all(axis=1)
        assert not y[is_idle].any(), name


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("num_tokens", [0, 1, 2])
@pytest.mark.sample(4)
def test_few_tokens(num_tokens, implementation):
    config = cases.make_config("int8_w8a8", implementation=(implementation,))
    weights = cases.make_weights(config)
    x = jnp.asarray(np.random.default_rng(3).standard_normal((num_tokens, cases.H)), jnp.float32)
    p = jnp.full((num_tokens, 2), 0.5)
    ids = jnp.asarray(np.array([[4, 0], [4, 4]])[:num_tokens], jnp.int32)
    y = cases.jitted(fused_experts, config)(x, p, ids, weights)
    assert_layer_close(y, x, p, ids, weights, config, kernels=False)


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (40, 3)])
@pytest.mark.sample(2)
def test_expert_counts(num_experts, top_k):
    config = cases.make_config(num_experts=num_experts, top_k=top_k, hidden_size=7, intermediate_size=5)
    weights = cases.make_weights(config)
    x = cases.make_tokens(6, config)
    p, ids = (
        cases.make_routing(6, top_k, num_experts) if num_experts > 1 else (jnp.ones((6, 1)), jnp.zeros((6, 1), int))
    )
    y = cases.jitted(fused_experts, config)(x, p, ids, weights)
    assert_rows_close(y, experts_numpy(x, p, ids, weights, config), tolerance("bf16", "float32"), experts=ids)


@pytest.mark.parametrize("scheme", ["bf16", "fp8_tensor", "fp8_block"])
@pytest.mark.sample(3)
def test_masked_tokens_are_zero_and_change_nothing(scheme):
    config = cases.make_config(scheme, has_bias=True)
    weights = cases.make_weights(config)
    x = np.asarray(cases.make_tokens(NUM_TOKENS, config))
    p, ids = cases.make_routing(NUM_TOKENS)
    mask = np.random.default_rng(6).random(NUM_TOKENS) < 0.6
    poisoned = np.where(mask[:, None], x, np.nan)
    run = cases.jitted(fused_experts, config)
    y = np.asarray(run(jnp.asarray(poisoned), p, ids, weights, token_mask=jnp.asarray(mask)))
    assert not y[~mask].any()
    assert_layer_close(y, x, p, np.where(mask[:, None], ids, -1), weights, config, kernels=False)
    large = run(jnp.asarray(np.where(mask[:, None], x, 1e30)), p, ids, weights, token_mask=jnp.asarray(mask))
    np.testing.assert_array_equal(y, large)


@pytest.mark.parametrize("scheme", ["bf16", "fp8_tensor_static", "fp8_block", "int8_w8a8"])
@pytest.mark.sample(4)
def test_a_token_does_not_depend_on_the_others(scheme):
    config = cases.make_config(scheme, dtype="bfloat16", implementation=("xla",))
    x, p, ids, weights = cases.make_call(config, NUM_TOKENS)
    run = cases.jitted(fused_experts, config)
    y = np.asarray(run(x, p, ids, weights))
    np.testing.assert_array_equal(y, run(x, p, ids, weights))
    keep = np.arange(NUM_TOKENS) % 3 == 0
    other_ids = jnp.where(keep[:, None], ids, (ids + 2) % cases.E)
    other_x = jnp.where(keep[:, None], x, 1000.0 - x)
    np.testing.assert_array_equal(y[keep], np.asarray(run(other_x, p, other_ids, weights))[keep])


def test_nan_stays_in_its_token():
    config = cases.make_config("fp8_channel", implementation=("xla",))
    x, p, ids, weights = cases.make_call(config, NUM_TOKENS)
    run = cases.jitted(fused_experts, config)
    y, poisoned = np.asarray(run(x, p, ids, weights)), np.asarray(run(x.at[1, 3].set(jnp.nan), p, ids, weights))
    assert np.isnan(poisoned[1]).all()
    np.testing.assert_array_equal(np.delete(poisoned, 1, axis=0), np.delete(y, 1, axis=0))


# -- fused_moe --------------------------------------------------------------------------------------------------------


def softmax_top_k(logits, top_k):
    score = np.exp(logits - logits.max(axis=1, keepdims=True))
    score /= score.sum(axis=1, keepdims=True)
    ids = np.argsort(-score, axis=1, kind="stable")[:, :top_k]
    return np.take_along_axis(score, ids, axis=1), ids


def test_fused_moe_routes_scales_and_reports():
    config = cases.make_config("fp8_channel", routed_scaling_factor=2.5, apply_routed_scale_to_output=True)
    weights = cases.make_weights(config)
    x = cases.make_tokens(NUM_TOKENS, config)
    logits = np.random.default_rng(7).standard_normal((NUM_TOKENS, cases.E)).astype(np.float32)
    mask = np.arange(NUM_TOKENS) % 4 != 1
    run = cases.jitted(functools.partial(fused_moe, return_stats=True), config)
    y, stats = run(x, logits, weights, token_mask=mask)
    p, ids = softmax_top_k(logits.astype(np.float64), cases.K)
    p /= p.sum(axis=1, keepdims=True)
    ids = np.where(mask[:, None], ids, -1)
    assert_layer_close(y, x, 2.5 * p, ids, weights, config, kernels=False)
    assert isinstance(stats, MoEStats)
    assert stats.load.dtype == stats.topk_ids.dtype == jnp.int32
    np.testing.assert_array_equal(stats.topk_ids, ids)
    np.testing.assert_array_equal(stats.load, np.bincount(ids[ids >= 0], minlength=cases.E))


@pytest.mark.parametrize("on_output", [False, True])
@pytest.mark.sample(2)
def test_zero_experts_add_their_share_of_x(on_output):
    config = cases.make_config(
        zero_expert_type="identity",
        routed_scaling_factor=1.5,
        renormalize=False,
        apply_routed_scale_to_output=on_output,
        top_k=3,
    )
    weights = cases.make_weights(config)
    x = cases.make_tokens(NUM_TOKENS, config)
    logits = np.random.default_rng(8).standard_normal((NUM_TOKENS, cases.E + 3)).astype(np.float32)
    bias = jnp.zeros(cases.E + 3)
    mask = np.arange(NUM_TOKENS) != 4
    x = x.at[4].set(jnp.nan)
    y = cases.jitted(fused_moe, config)(x, logits, weights, routing=RoutingParams(bias), token_mask=mask)
    p, ids = softmax_top_k(logits.astype(np.float64), 3)
    routed = experts_numpy(np.nan_to_num(x), p, np.where((ids < cases.E) & mask[:, None], ids, -1), weights, config)
    share = np.where((ids >= cases.E) & mask[:, None], p, 0).sum(axis=1, keepdims=True)
    expected = 1.5 * (routed + share * np.nan_to_num(np.asarray(x, np.float64)))
    assert (share > 0).any() and not np.asarray(y)[4].any()
    assert_rows_close(y, expected, tolerance("bf16", "float32"), experts=ids)


def test_one_rounding_to_the_dtype_of_x():
    config = cases.make_config("bf16", dtype="bfloat16", routed_scaling_factor=3.0, apply_routed_scale_to_output=True)
    weights = cases.make_weights(config)
    x = cases.make_tokens(NUM_TOKENS, config)
    logits = jnp.asarray(np.random.default_rng(9).standard_normal((NUM_TOKENS, cases.E)), jnp.float32)
    rounded = x.astype(jnp.bfloat16)
    y = cases.jitted(fused_moe, config)(rounded.astype(jnp.float32), logits, weights)
    narrow = cases.jitted(fused_moe, config)(rounded, logits, weights)
    np.testing.assert_array_equal(y.astype(jnp.bfloat16), narrow)


# -- what is refused --------------------------------------------------------------------------------------------------


def call(config=None, *, weights=None, x=None, ids=None, **options):
    config = config or cases.make_config()
    weights = weights or cases.make_weights(cases.make_config())
    x = jnp.zeros((3, cases.H)) if x is None else x
    ids = jnp.zeros((3, cases.K), jnp.int32) if ids is None else ids
    return fused_experts(x, jnp.ones(ids.shape), ids, weights, config, **options)


@pytest.mark.parametrize(
    ("error", "message", "make"),
    [
        (TypeError, "placement", lambda: call(placement=object())),
        (ValueError, r"x has shape \(3, 7\), expected \(T, 152\)", lambda: call(x=jnp.zeros((3, 7)))),
        (ValueError, "expected both \\(3, k\\)", lambda: call(ids=jnp.zeros((4, 2), jnp.int32))),
        (ValueError, "token_mask has shape", lambda: call(token_mask=jnp.ones(4, bool))),
        (ValueError, "scheme 'bf16', config says 'fp8_channel'", lambda: call(cases.make_config("fp8_channel"))),
        (ValueError, r"expected \(E, G, I, H\) = \(5, 1,", lambda: call(cases.make_config(is_act_and_mul=False))),
        (ValueError, "has_bias=True, weights hold no bias", lambda: call(cases.make_config(has_bias=True))),
        (ValueError, "one expert per token", lambda: call(cases.make_config(apply_router_weight_on_input=True))),
        (ValueError, "one or more of hopper, portable, xla", lambda: call(cases.make_config(implementation=("x",)))),
        (ValueError, "expected one or more of", lambda: call(cases.make_config(implementation=()))),
        (NotImplementedError, "hopper: computes in", lambda: call(cases.make_config(implementation=("hopper",)))),
        (TypeError, "x has dtype float8_e4m3fn", lambda: call(x=jnp.zeros((3, cases.H), jnp.float8_e4m3fn))),
        (TypeError, "topk_ids has dtype float32", lambda: call(ids=jnp.ones((3, 2)))),
        (TypeError, "topk_ids has dtype bool", lambda: call(ids=jnp.ones((3, 2), bool))),
    ],
)  # fmt: skip
def test_refusals(error, message, make):
    refuses(error, message, make)


def test_the_next_implementation_runs_when_one_cannot():
    config = cases.make_config(implementation=("hopper", "reference"))
    assert call(config, weights=cases.make_weights(cases.make_config())).shape == (3, cases.H)


def test_an_unknown_layout_is_refused_with_each_reason():
    weights = cases.make_weights(cases.make_config())
    packed = dataclasses.replace(weights.w13, layout=dataclasses.replace(weights.w13.layout, name="sm90"))
    config = cases.make_config(implementation=("xla", "reference"))
    with pytest.raises(NotImplementedError, match="xla: w13 is in layout 'sm90'.*; reference: w13 is in layout"):
        call(config, weights=dataclasses.replace(weights, w13=packed))


def test_schemes_compare_by_format_not_by_name():
    named = cases.make_config(Scheme("my name", SCHEMES["fp8_channel"].weights, SCHEMES["fp8_channel"].activations))
    weights = cases.make_weights(cases.make_config("fp8_channel"))
    assert jax.eval_shape(lambda w: call(named, weights=w), weights).shape == (3, cases.H)
