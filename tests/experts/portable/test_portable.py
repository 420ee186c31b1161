"""The portable backend without a GPU: its layers with the twin of its kernels, what it refuses, how it lowers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax import fused_experts
from moe_jax.experts._backend import Problem
from moe_jax.experts._choice import BACKENDS, choose, order_of, preferred_layout
from moe_jax.experts.hopper._kernel_backend import shared_config
from moe_jax.routing import route
from pallas_kernels.common.targets import Target
from tests.support.cases import experts as cases
from tests.support.cases.gpu_layers import KINDS, hostile_routings, layer
from tests.support.kernels.portable_twin import on_target
from tests.support.oracles.layer_judge import assert_layer_close

HOPPER, ADA, AMPERE = Target(9, 0), Target(8, 9), Target(8, 0)
SIZES = dict(hidden_size=128, intermediate_size=160)
PORTABLE = BACKENDS["portable"]


def check(scheme, tokens, target=HOPPER, dtype="bfloat16", **options):
    config, weights, packed = layer(scheme, dtype, implementation="portable", **(SIZES | options))
    x = cases.make_tokens(tokens, config, dtype=dtype)
    with on_target(target):
        call = jax.jit(functools.partial(fused_experts, config=config))
        for p, ids in hostile_routings(tokens, config):
            y = np.asarray(call(x, p, ids, packed))
            assert_layer_close(y, x, p, ids, weights, config)


@pytest.mark.sample(15)
@pytest.mark.parametrize("scheme", KINDS)
@pytest.mark.parametrize("tokens", [3, 37])
def test_layers(tokens, scheme):
    """Few tokens are not moved; more fill several tiles of an expert and leave others partly empty."""
    check(scheme, tokens, has_bias=tokens == 37)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["bf16", "int8_w8a8"])
def test_more_rows_than_a_tile(scheme):
    check(scheme, 400, hidden_size=128, intermediate_size=64)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_tensor_static", "w4a16_g128"])
def test_float16(scheme):
    check(scheme, 5, dtype="float16")


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "target"), [("bf16", ADA), ("w4a16_g128", AMPERE)])
def test_other_targets(scheme, target):
    check(scheme, 20, target)


@pytest.mark.slow
def test_group_scales_of_bfloat16_are_folded():
    check("w4a16_g128", 20, param_dtype="bfloat16")


@pytest.mark.slow
def test_act_order():
    check("w4a16_g64_actorder", 20)


@pytest.mark.sample(2)
@pytest.mark.parametrize("scheme", ["int8_w8a8", "bf16"])
def test_whole_layers(scheme):
    """From the router logits on, as with given routings by the same scores."""
    config, _, packed = layer(scheme, implementation="portable", **SIZES)
    x, logits = (
        cases.make_tokens(5, config, dtype="bfloat16"),
        jax.random.normal(jax.random.key(3), (5, config.num_experts)),
    )
    with on_target(HOPPER):
        assert PORTABLE.layer_refusal(config, (x, logits, packed, None, None, None)) is None
        y, ids, sizes = PORTABLE.run_layer(config, x, logits, packed, None, None, None)
        routed = route(logits, config)
        expected = fused_experts(x, routed.topk_weights, routed.topk_ids, packed, config)
    np.testing.assert_array_equal(ids, routed.topk_ids)
    np.testing.assert_array_equal(sizes, np.bincount(np.asarray(ids).ravel(), minlength=config.num_experts))
    np.testing.assert_allclose(np.asarray(y, np.float32), expected, rtol=2**-7, atol=1e-6)


def problem(scheme, tokens=16, **options):
    config, _, packed = layer(scheme, implementation="portable", **(SIZES | options))
    return Problem(config, packed, tokens, "gpu")


def test_refuses_by_name():
    with on_target(AMPERE):
        assert "sm_80 multiplies and converts none" in str(PORTABLE.refusal(problem("fp8_channel")))
        assert PORTABLE.refusal(problem("bf16")) is None
        assert PORTABLE.gradient_refusal(problem("bf16")) == "has no gradient"
    with on_target(HOPPER):
        assert PORTABLE.refusal(problem("fp8_channel")) is None
        wide = problem("bf16")
        wide = dataclasses.replace(wide, config=dataclasses.replace(wide.config, dtype="float32"))
        assert "computes in bfloat16 or float16" in str(PORTABLE.refusal(wide))
        erf = dataclasses.replace(problem("bf16").config, activation="gelu")
        assert "erf" in str(PORTABLE.refusal(dataclasses.replace(problem("bf16"), config=erf)))
        plain = Problem(problem("w4a16_g128").config, layer("w4a16_g128", **SIZES)[1], 16, "gpu")
        assert "in layout 'plain'" in str(PORTABLE.refusal(plain))
    reason = str(PORTABLE.refusal(problem("bf16")))
    is_old = jax.__version_info__ < (0, 11)
    assert ("plgpu.mma of jax 0.11" if is_old else "needs an NVIDIA GPU, the default backend is 'cpu'") in reason


def test_comes_after_hopper_and_before_xla():
    config = dataclasses.replace(problem("bf16").config, implementation=None)
    assert order_of(config, "gpu") == ("hopper", "portable", "xla")
    assert order_of(config, "cpu") == ("xla",)
    with on_target(ADA):
        chosen, skipped = choose(dataclasses.replace(problem("bf16"), config=config))
        assert chosen is PORTABLE and [name for name, _ in skipped] == ["hopper"]


def test_leaves_few_pairs_of_unquantized_weights_to_xla():
    """Unless it is named."""
    with on_target(ADA):
        for scheme, tokens, expected in (("bf16", 1, "xla"), ("bf16", 16, "portable"), ("int8_w8a8", 1, "portable")):
            named = problem(scheme, tokens)
            chosen, _ = choose(
                dataclasses.replace(named, config=dataclasses.replace(named.config, implementation=None))
            )
            assert chosen is BACKENDS[expected]
            assert choose(named)[0] is PORTABLE


def test_weights_lie_as_the_first_backend_that_runs_reads_them():
    for name, owner in (("w4a16_g128", PORTABLE), ("bf16", None), ("int8_w8a8", None)):
        config, weights, _ = layer(name, **SIZES)
        config = dataclasses.replace(config, implementation=None)
        with on_target(ADA):
            assert preferred_layout(config, weights, "gpu") is owner
        assert preferred_layout(config, weights, "gpu") is None


def test_says_how_it_runs():
    with on_target(ADA):
        few, many = (PORTABLE.describe(problem("int8_w8a8", tokens)) for tokens in (4, 4096))
    assert "by the kernel" in few[0] and "none are moved" in few[1]
    assert "16 x 2 x 128 tiles" in few[2] and "sm_89" in few[2]
    assert "128 x 2 x 64 tiles by mma.sync" in many[1] and "3 stages (97 KiB" in many[1]


@pytest.mark.slow
def test_gradients_are_those_of_a_later_backend():
    config, weights, _ = layer("bf16", implementation="portable", **SIZES)
    config = dataclasses.replace(config, implementation=("portable", "xla"))
    x, (p, ids) = cases.make_tokens(6, config, dtype="bfloat16"), cases.make_routing(6)

    def loss(x, config):
        return fused_experts(x, p, ids, weights, config).astype(jnp.float32).sum()

    with on_target(HOPPER):
        found = jax.grad(loss)(x, config)
        with pytest.raises(NotImplementedError, match="portable: has no gradient"):
            jax.grad(loss)(x, dataclasses.replace(config, implementation=("portable",)))
    expected = jax.grad(loss)(x, dataclasses.replace(config, implementation=("xla",)))
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


def test_config_is_shared_between_layers():
    config = problem("bf16").config
    assert shared_config(dataclasses.replace(config, name="a")) == shared_config(dataclasses.replace(config, name="b"))
