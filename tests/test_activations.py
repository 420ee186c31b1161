"""Expert activations against NumPy float64, torch, and the worked examples; names and parameters as vLLM has them.

Contract: h (..., G, I) with the gate at index 0 and up at index 1; float32 in, float32 out, whatever the input dtype.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental import pallas as pl

from moe_jax import FusedMoE, MoEConfig
from moe_jax.activations import (
    ACTIVATIONS,
    apply_activation,
    parse_activation,
    resolve_activation,
    split_halves,
    split_interleaved,
)
from pallas_kernels.common.activations import Activation
from tests.support.refusals import refuses

GATED = ("silu", "gelu", "gelu_tanh", "swigluoai", "swigluoai_uninterleave", "swiglustep")
NOT_GATED = ("silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul")
GATE, UP = [1.0, 8.0, -2.0], [2.0, -9.0, 0.5]


def config(activation, *, limit=None, alpha=None, beta=None, is_gated=None):
    if is_gated is None:
        is_gated = not activation.endswith("_no_mul")
    parameters = dict(swiglu_limit=limit, swiglu_alpha=alpha, swiglu_beta=beta)
    return MoEConfig(4, 1, 8, 8, activation=activation, is_act_and_mul=is_gated, **parameters)


def sigmoid(x):
    return np.exp(-np.logaddexp(0, -x))


def gated_numpy(name, g, u, limit=None, alpha=None, beta=None):
    """Second version in float64."""
    if name == "silu" and limit is None:
        return g * sigmoid(g) * u
    if name == "gelu":
        return 0.5 * g * (1 + np.vectorize(math.erf)(g / math.sqrt(2))) * u
    if name == "gelu_tanh":
        return 0.5 * g * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u
    defaults = {
        "silu": (None, 1, 0),
        "swigluoai": (7, 1.702, 1),
        "swigluoai_uninterleave": (None, 1, 0),
        "swiglustep": (7, 1, 0),
    }
    limit, alpha, beta = (d if v is None else v for v, d in zip((limit, alpha, beta), defaults[name], strict=True))
    if name == "swiglustep":
        return np.minimum(g * sigmoid(g), limit) * np.clip(u, -limit, limit)
    g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
    return g * sigmoid(alpha * g) * (u + beta)


def random_halves(seed=0, scale=6.0):
    return (np.random.default_rng(seed).normal(size=(5, 2, 33)) * scale).astype(np.float32)


jit_apply = jax.jit(apply_activation)


def check(actual, expected, gate, up=1.0):
    # A few ulp of the result, and two of |gate * up| for the forms that subtract close numbers (1 + erf).
    assert actual.dtype == jnp.float32
    np.testing.assert_array_less(abs(actual - expected), 4e-6 * abs(expected) + 2.4e-7 * abs(gate * up) + 1e-30)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("silu", {}),
        ("silu", dict(limit=3.0)),
        ("gelu", {}),
        ("gelu_tanh", {}),
        ("swigluoai", {}),
        ("swigluoai", dict(limit=2.5, alpha=1.1, beta=0.5)),
        ("swigluoai_uninterleave", dict(limit=4.0)),
        ("swigluoai_uninterleave", dict(limit=7.0, alpha=1.702, beta=1.0)),
        ("swiglustep", {}),
        ("swiglustep", dict(limit=2.0)),
    ],
)
def test_gated_against_numpy(name, parameters):
    h = random_halves()
    actual = jit_apply(jnp.asarray(h), config(name, **parameters))
    gate, up = h.astype(np.float64)[:, 0], h.astype(np.float64)[:, 1]
    check(actual, gated_numpy(name, gate, up, **parameters), gate, up)


@pytest.mark.parametrize("name", NOT_GATED)
def test_not_gated_against_numpy(name):
    h = random_halves(1)[:, :1]
    x = h.astype(np.float64)[:, 0]
    stem = name.removesuffix("_no_mul")
    expected = np.maximum(x, 0) ** 2 if stem == "relu2" else gated_numpy(stem, x, 1.0)
    check(jit_apply(jnp.asarray(h), config(name)), expected, x)
    # The flag says the same as the suffix.
    np.testing.assert_array_equal(jit_apply(jnp.asarray(h), config(stem, is_gated=False)), jit_apply(h, config(name)))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("silu", torch.nn.functional.silu),
        ("gelu", torch.nn.functional.gelu),
        ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        ("relu2", lambda x: torch.relu(x).square()),
    ],
)
def test_against_torch(name, function):
    h = random_halves(2)
    gate, up = (torch.from_numpy(a.astype(np.float64)) for a in (h[:, 0], h[:, 1]))
    if name != "relu2":
        check(jit_apply(jnp.asarray(h), config(name)), (function(gate) * up).numpy(), h[:, 0], h[:, 1])
    check(jit_apply(jnp.asarray(h[:, :1]), config(f"{name}_no_mul")), function(gate).numpy(), h[:, 0])


@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [
        ("silu", {}, [1.4621172, -71.975853, -0.1192029]),
        ("silu", dict(limit=7.0), [1.4621172, -48.9553604, -0.1192029]),
        ("swigluoai", {}, [2.5373874, -41.9997177, -0.0965121]),
        ("swigluoai_uninterleave", dict(limit=7.0, alpha=1.702, beta=1.0), [2.5373874, -41.9997177, -0.0965121]),
        ("swiglustep", {}, [1.4621172, -49.0, -0.1192029]),
        ("gelu", {}, [1.6826894, -72.0, -0.0227501]),
        ("gelu_tanh", {}, [1.6823840, -72.0, -0.0227011]),
    ],
)
def test_worked_examples(name, parameters, expected):
    h = jnp.array([GATE, UP])
    np.testing.assert_allclose(jit_apply(h, config(name, **parameters)), expected, rtol=2e-6, atol=1e-7)
    np.testing.assert_array_equal(jit_apply(h[:1], config("relu2_no_mul")), [1.0, 64.0, 0.0])


def test_halves_and_interleaved_columns():
    gate, up = jnp.array([GATE]), jnp.array([UP])
    halves = jnp.concatenate([gate, up], axis=-1)
    pairs = jnp.array([[1.0, 2.0, 8.0, -9.0, -2.0, 0.5]])
    np.testing.assert_array_equal(split_halves(halves), split_interleaved(pairs))
    y = apply_activation(split_interleaved(pairs), config("swigluoai"))
    np.testing.assert_allclose(y, [[2.5373874, -41.9997177, -0.0965121]], rtol=2e-6)


def test_codes_of_the_int8_cpu_kernel_follow_the_common_formulas():
    # Section 3.6: vLLM's W4A8-int8 kernel drops the clamp of swiglustep and reads swigluoai as split halves.
    h = jnp.array([GATE, UP])
    assert apply_activation(h, config("swiglustep"))[1] == -49.0  # unclamped would be -71.98
    np.testing.assert_allclose(apply_activation(h, config("swigluoai"))[1], -41.9997177, rtol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_inputs_are_computed_in_float32(dtype):
    h = jnp.asarray(random_halves(3, 1.0), dtype)
    np.testing.assert_array_equal(jit_apply(h, config("silu")), jit_apply(h.astype(jnp.float32), config("silu")))


@pytest.mark.parametrize("name", [*GATED, *NOT_GATED])
def test_extreme_values_and_gradients(name):
    # Large values neither overflow inside the formulas nor poison the derivative; NaN stays where it is.
    limit = 7.0 if name == "swigluoai_uninterleave" else None
    c = config(name, limit=limit)
    h = jnp.tile(jnp.array([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4, jnp.nan]), (2 if name in GATED else 1, 1))
    y = np.asarray(jit_apply(h, c))
    assert np.isfinite(y[:-1]).all() and np.isnan(y[-1])
    gradient = jax.jit(jax.grad(lambda h: apply_activation(h, c)[:-1].sum()))(h)
    assert np.isfinite(gradient[:, :-1]).all()
    single = jax.vmap(lambda column: apply_activation(column[:, None], c)[0])(h.T)
    np.testing.assert_allclose(single, y, rtol=1e-6)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "swigluoai", "swiglustep"])
def test_inside_a_kernel_body(name):
    activation = resolve_activation(config(name))
    h = jnp.asarray(random_halves(5)[:, :, :8])

    def body(gate, up, out):
        out[...] = activation(gate[...], up[...])

    out_shape = jax.ShapeDtypeStruct((5, 8), jnp.float32)
    y = pl.pallas_call(body, out_shape=out_shape, interpret=True)(h[:, 0], h[:, 1])
    np.testing.assert_allclose(y, apply_activation(h, config(name)), rtol=1e-5, atol=1e-7)


def test_resolved_parameters_are_static():
    swiglu = resolve_activation(config("swigluoai", limit=5.0))
    assert swiglu == Activation("swigluoai", limit=5.0, alpha=1.702, beta=1.0) and swiglu.is_gated
    assert hash(swiglu) == hash(Activation("swigluoai", limit=5.0, alpha=1.702, beta=1.0))


# -- names and parameters ----------------------------------------------------------------------------------------------


def test_every_name_parses():
    assert {*GATED, *NOT_GATED, "relu2"} == set(ACTIVATIONS)
    for name in (*GATED, *NOT_GATED):
        assert parse_activation(name) == name
        limit = 7.0 if name == "swigluoai_uninterleave" else None
        assert resolve_activation(config(name, limit=limit)).is_gated == (name in GATED)


@pytest.mark.parametrize(
    ("name", "is_gated", "canonical"),
    [
        ("gelu_pytorch_tanh", True, "gelu_tanh"),
        ("gelu_pytorch_tanh", False, "gelu_tanh_no_mul"),
        ("silu", False, "silu_no_mul"),
        ("gelu", False, "gelu_no_mul"),
        ("relu2", False, "relu2_no_mul"),
        ("silu_no_mul", False, "silu_no_mul"),
        ("relu2_no_mul", True, "relu2_no_mul"),  # the suffix decides
    ],
)
def test_aliases_and_gating(name, is_gated, canonical):
    assert parse_activation(name, is_gated=is_gated) == canonical


@pytest.mark.parametrize(("name", "is_gated"), [("silu", True), ("silu", False), ("silu_no_mul", True)])
def test_a_layer_is_gated_by_flag_and_suffix(name, is_gated):
    layer = FusedMoE(4, 8, 8, top_k=1, activation=name, is_act_and_mul=is_gated)
    expected = ("silu", 2) if name == "silu" and is_gated else ("silu_no_mul", 1)
    assert (layer.config.activation, layer.config.num_projections) == expected


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (dict(activation="swish"), "activation='swish', expected one of silu, .*gelu_pytorch_tanh"),
        (dict(activation="relu2"), "no gated form"),
        (dict(activation="swigluoai", is_gated=False), "exists gated only"),
        (dict(activation="silu_no_mul", is_gated=True), "is not gated; pass is_act_and_mul=False"),
        (dict(activation="swigluoai_uninterleave"), "needs swiglu_limit"),
        (dict(activation="swigluoai_uninterleave", limit=0.0), "swiglu_limit=0.0, expected a positive number"),
        (dict(activation="silu", limit=float("nan")), "expected a positive number"),
        (dict(activation="swigluoai", beta=float("inf")), "expected a finite number"),
    ],
)
def test_refusals(fields, match):
    refuses(ValueError, match, resolve_activation, config(**fields))


TAKES = {
    "silu": {"limit"},
    "swigluoai": {"limit", "alpha", "beta"},
    "swigluoai_uninterleave": {"limit", "alpha", "beta"},
    "swiglustep": {"limit"},
}


@pytest.mark.parametrize("parameter", ["limit", "alpha", "beta"])
@pytest.mark.parametrize("name", [*GATED, *NOT_GATED])
def test_a_parameter_changes_the_result_or_is_refused(name, parameter):
    h = jnp.asarray(random_halves(4)[:, : 2 if name in GATED else 1])
    base = {"limit": 7.0} if name == "swigluoai_uninterleave" else {}
    if parameter not in TAKES.get(name, ()):
        with pytest.raises(ValueError, match=f"'{name}' does not take swiglu_{parameter}=0.75"):
            apply_activation(h, config(name, **(base | {parameter: 0.75})))
        return
    changed = apply_activation(h, config(name, **(base | {parameter: 0.75})))
    assert not np.allclose(changed, apply_activation(h, config(name, **base)))


@pytest.mark.parametrize(("name", "projections"), [("silu", 1), ("silu_no_mul", 2)])
def test_number_of_projections_must_fit(name, projections):
    refuses(ValueError, r"expected \(\.\.\., ", apply_activation, jnp.zeros((3, projections, 4)), config(name))


def test_relu2_is_known_but_refused_when_applied_gated():
    assert "relu2" in ACTIVATIONS
    refuses(ValueError, "relu2_no_mul", apply_activation, jnp.zeros((3, 2, 4)), config("relu2"))
