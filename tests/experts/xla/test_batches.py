"""How the xla backend runs on a GPU, many experts at once, here on the CPU: every scheme against NumPy float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax import fused_experts
from moe_jax.experts import explain
from moe_jax.experts.xla import _batches, _experts
from moe_jax.experts.xla._batches import Batches, plan_batches
from moe_jax.experts.xla._experts import plan_call
from moe_jax.experts.xla._grouped_gemm import plan_gpu_product
from moe_jax.quantization import SCHEMES
from tests.support.cases.experts import E, K, make_call, make_config
from tests.support.kernels.traces import equations
from tests.support.oracles.layer_judge import LayerJudge, assert_layer_close

# All experts at once; one at a time; with rows that follow in a second batch, and in many.
EXPERTS = [Batches("experts", 64, E), Batches("experts", 32, 1), Batches("experts", 8, E), Batches("experts", 3, 1)]
ALL = [Batches("pairs"), *EXPERTS]  # a sweep's `sample` shares no factor with their number, so that each has its turn


@functools.partial(jax.jit, static_argnums=0)
def _run(plan, x, p, ids, weights):
    p = jnp.where((ids < 0) | (ids >= weights.num_experts), 0.0, p)
    return _experts._weighted_sum(plan, x, p, weights, ids)


def _plan(config, batches, platform="gpu"):
    """The plan of a call whose kind of batches is ``batches``."""
    tokens = 1 if batches.kind == "pairs" else 100
    return dataclasses.replace(plan_call(config, config.scheme, tokens, K, platform), batches=batches)


@pytest.mark.parametrize("batches", ALL, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.sample(13)
def test_against_numpy(scheme, batches):
    config = make_config(scheme, has_bias=True)
    x, p, ids, weights = make_call(config, 37)
    assert_layer_close(
        _run(_plan(config, batches), x, p, ids, weights), x, p, ids, weights, config, kernels=False, on_gpu=True
    )


@pytest.mark.parametrize("batches", ALL, ids=str)
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.sample(3)
def test_few_tokens(tokens, batches):
    config = make_config("w4a16_g128")
    x, p, ids, weights = make_call(config, tokens)
    assert_layer_close(_run(_plan(config, batches), x, p, ids, weights), x, p, ids, weights, config, kernels=False)


@pytest.mark.parametrize("batches", EXPERTS, ids=str)
@pytest.mark.parametrize("ids", [[[1, 1]] * 20, [[-1, E]] * 20, [[4, 0]] * 19 + [[-1, 2]]])
@pytest.mark.sample(5)
def test_one_expert_may_have_all_rows_or_none(ids, batches):
    """An expert that a token names twice has more rows than there are tokens."""
    config = make_config("bf16")
    x, p, _, weights = make_call(config, 20)
    p, ids = jnp.abs(jnp.nan_to_num(p, nan=0.5)), jnp.asarray(ids, jnp.int32)
    assert_layer_close(_run(_plan(config, batches), x, p, ids, weights), x, p, ids, weights, config, kernels=False)


@pytest.mark.parametrize("batches", ALL, ids=str)
@pytest.mark.parametrize("scheme", ["bf16", "w4a16_g128", "nvfp4_a16", "fp8_channel_a16", "int8_w8a16"])
@pytest.mark.sample(6)
def test_16_bits_round_once(scheme, batches):
    """In layers of 16 bits weights and hidden values are rounded to it, and sums are not.

    Weights of both products and hidden values: three roundings, each of u / sqrt(3) of a row where u is half an ulp of
    1, so u in all; a row of 152 values whose hidden ones differ in size has up to 3.5 times as much.
    """
    for dtype, bound in (("bfloat16", 3.5 * 2.0**-9), ("float16", 3.5 * 2.0**-12)):
        config = make_config(scheme, dtype=dtype)
        x, p, ids, weights = make_call(config, 37, dtype=dtype)
        y = _run(_plan(config, batches), x, p, ids, weights)
        found = LayerJudge(x, p, ids, weights, config, kernels=False).find(y)
        assert found.error.max() <= bound


@pytest.mark.parametrize("batches", ALL, ids=str)
@pytest.mark.sample(2)
def test_a_nan_stays_in_its_token(batches):
    config = make_config("fp8_channel")
    x, p, ids, weights = make_call(config, 37)
    ids = jnp.clip(ids, 0, E - 1)
    p, x = jnp.nan_to_num(p), x.at[9].set(jnp.nan)
    y = np.asarray(_run(_plan(config, batches), x, p, ids, weights))
    assert np.isnan(y[9]).all() and np.isfinite(np.delete(y, 9, 0)).all()


@pytest.mark.parametrize("batches", ALL[:3], ids=str)
@pytest.mark.sample(2)
def test_gradients_are_those_of_tiles(batches):
    config = make_config("bf16", has_bias=True)
    x, p, ids, weights = make_call(config, 12)

    def loss(plan, x, p, weights):
        return jnp.sum(jnp.sin(_run(plan, x, p, ids, weights)))

    tiles = plan_call(config, config.scheme, 12, K, "cpu")
    p = jnp.nan_to_num(p)
    found, expected = (jax.grad(loss, (1, 2, 3))(plan, x, p, weights) for plan in (_plan(config, batches), tiles))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), found, expected)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.sample(2)
def test_no_weights_in_float32(scheme):
    """In bfloat16 layers no product takes a float32 operand, nor one of integers; pairs have no dot at all."""
    config = make_config(scheme, dtype="bfloat16")
    call = make_call(config, 37, dtype="bfloat16")  # outside of a trace: weights of cases are kept
    for batches, dots in ((EXPERTS[0], True), (ALL[0], False)):
        jaxpr = jax.make_jaxpr(functools.partial(_run, _plan(config, batches)))(*call)
        found = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
        assert bool(found) is dots
        assert {str(v.aval.dtype) for e in found for v in e.invars} <= {"bfloat16"}
        assert all(e.outvars[0].aval.dtype == jnp.float32 for e in found)


def test_float32_stays_float32():
    for scheme in SCHEMES.values():
        product = plan_gpu_product(scheme.weights, scheme.activations, jnp.float32)
        assert product == _experts.plan_product(scheme.weights, scheme.activations, jnp.float32)


def test_which_calls_run_how(monkeypatch):
    config = make_config("fp8_channel", num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768)

    def of(tokens, **changes):
        return plan_batches(dataclasses.replace(config, **changes), config.scheme, tokens, 8, 2)

    assert of(16) == Batches("pairs")
    wide = of(17)
    assert wide.kind == "experts" and wide.experts == 128 and wide.rows >= 4 * 17 * 8 // 128
    many = of(8192)
    assert many.rows >= 512 and 128 % many.experts == 0
    own = 2 * 2 * 2048 * 768 + many.rows * (6 * 2048 + 14 * 768 - 2 * 768)
    assert many.experts * own <= _batches.TEMPORARY_BYTES
    monkeypatch.setattr(_batches, "TEMPORARY_BYTES", 1)
    assert of(8192).experts == 1
    assert of(0) is None and of(64, pinned_tokens=64) is None


def test_explain_names_them():
    config = make_config("w4a16_g128", dtype="bfloat16", implementation=("xla",))
    weights = make_call(config, 4)[3]
    on_gpu = [explain(config, weights, tokens, platform="gpu") for tokens in (2, 64)]
    assert "every pair of a token and an expert in one launch" in on_gpu[0]
    assert "batches of 5 experts with up to 64 rows each" in on_gpu[1] and "values in bfloat16" in on_gpu[1]
    assert "tiles of" in explain(config, weights, 64, platform="cpu")


def test_the_backend_of_the_process_decides(monkeypatch):
    config = make_config("nvfp4", implementation=("xla",))
    x, p, ids, weights = make_call(config, 37)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jaxpr = jax.make_jaxpr(lambda *args: fused_experts(*args, config))(x, p, ids, weights)
    shapes = [e.invars[0].aval.shape for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    assert shapes and all(len(shape) == 3 for shape in shapes)
