"""FP8 activations for weight-only schemes of 4 bits: names, what is computed, the Hopper path, what explain says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_jax import Scheme, fused_experts
from moe_jax.experts._backend import Problem
from moe_jax.experts._choice import BACKENDS
from moe_jax.experts._explain import explain
from moe_jax.experts.hopper import _experts as hopper_experts
from moe_jax.experts.hopper._kernel_layout import kernel_format, to_kernel_layout, to_plain_layout
from moe_jax.quantization import method_for
from tests.support.cases import experts as cases
from tests.support.cases.hopper_layers import on_hopper
from tests.support.kernels.case import launches
from tests.support.oracles.layer_judge import assert_layer_close
from tests.support.refusals import refuses

SCHEMES = ("w4a16_g128_approximate_fp8", "mxfp4_a16_approximate_fp8", "nvfp4_a16_approximate_fp8")


def make(scheme, dtype="bfloat16", **options):
    """(config, weights, weights as the kernels read them)."""
    sizes = dict(hidden_size=160, intermediate_size=96) | options
    config = cases.make_config(scheme, dtype=dtype, **sizes)
    weights = cases.make_weights(config)
    return config, weights, to_kernel_layout(weights, config)


@pytest.mark.parametrize("name", [*SCHEMES, "w3a16_channel_asym_approximate_fp8", "nvfp4_a16_modelopt_approximate_fp8"])
def test_names(name):
    scheme = Scheme.parse(name)
    assert scheme.name == name
    assert scheme.weights == Scheme.parse(name.removesuffix("_approximate_fp8")).weights
    assert Scheme.parse(Scheme("", scheme.weights, scheme.activations)).name == name
    assert Scheme.parse("W4A16_approximate_fp8").name == "w4a16_g128_approximate_fp8"


def test_int4_computes_what_w4a8_fp8_does_under_another_name():
    approximate, own = Scheme.parse("w4a16_g128_approximate_fp8"), Scheme.parse("w4a8_fp8")
    assert approximate.weights == own.weights and approximate != own
    assert kernel_format(approximate, "bfloat16") == kernel_format(own, "bfloat16")


def test_refusals():
    with pytest.raises(ValueError, match="goes with weight-only schemes such as 'mxfp4_a16', found 'nvfp4'"):
        Scheme.parse("nvfp4_approximate_fp8")
    refuses(ValueError, "found 'bf16'", Scheme.parse, "bf16_approximate_fp8")
    refuses(NotImplementedError, "mxfp8_a16: weights of 8 bits", Scheme.parse, "mxfp8_a16_approximate_fp8")
    refuses(ValueError, "unknown scheme 'mxfp5_a16'", Scheme.parse, "mxfp5_a16_approximate_fp8")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_against_float64(scheme):
    """xla, and the Hopper path on the references of its kernels."""
    config, weights, packed = make(scheme)
    x, (p, ids) = cases.make_tokens(19, config, dtype="bfloat16"), cases.make_routing(19)
    assert_layer_close(fused_experts(x, p, ids, weights, config), x, p, ids, weights, config, kernels=False)
    run = jax.jit(functools.partial(hopper_experts.forward, config, kernels="reference"))
    p = jnp.where((ids >= 0) & (ids < config.num_experts), p, 0.0)
    assert_layer_close(run(x, p, ids, packed), x, p, ids, weights, config)


def test_weights_come_back_from_their_packed_layout():
    config, weights, packed = make("mxfp4_a16_approximate_fp8")
    jax.tree.map(np.testing.assert_array_equal, to_plain_layout(packed), weights)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_explain_names_it(scheme):
    config, weights, _ = make(scheme)
    text = explain(config, weights, 16, platform="cpu")
    assert f"method: {scheme}" in text and "activations: approximated in e4m3" in text
    assert "note: approximate: the checkpoint leaves activations in 16 bits" in text
    assert "approximate" not in explain(*make("w4a8_fp8")[:2], 16, platform="cpu")


def test_explain_of_the_hopper_path():
    def text(scheme, **sizes):
        config = cases.make_config(scheme, dtype="bfloat16", **(dict(hidden_size=512, intermediate_size=256) | sizes))
        packed = jax.eval_shape(
            lambda w: to_kernel_layout(w, config), method_for(config.scheme).abstract_weights(config)
        )
        with on_hopper():
            return "\n".join(BACKENDS["hopper"].describe(Problem(config, packed, 16, "gpu")))

    assert "exact down to 2**-11 of their channel's largest" in text("mxfp4_a16_approximate_fp8")
    assert "rows: rounded by XLA" in text("nvfp4_a16_approximate_fp8")
    assert "XLA" not in text("nvfp4_dynamic").partition("GEMM 1")[2]
    assert "hidden rows: rounded and moved by XLA, since the kernel refuses H=128" in text(
        "mxfp4", intermediate_size=128
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_lowers_for_hopper(scheme):
    config = cases.make_config(scheme, dtype="bfloat16", hidden_size=512, intermediate_size=256)
    packed = jax.eval_shape(lambda w: to_kernel_layout(w, config), method_for(config.scheme).abstract_weights(config))
    x = jax.ShapeDtypeStruct((16, 512), jnp.bfloat16)
    slots = [jax.ShapeDtypeStruct((16, config.top_k), dtype) for dtype in (jnp.float32, jnp.int32)]
    with on_hopper():
        found = launches(functools.partial(hopper_experts.forward, config), x, *slots, packed)
    assert found == (5 if scheme.startswith("nvfp4") else 6)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 33, 700])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_on_gpu(scheme, tokens):
    config, weights, packed = make(scheme, hidden_size=544, intermediate_size=288, implementation=("hopper",))
    x, (p, ids) = cases.make_tokens(tokens, config, dtype="bfloat16"), cases.make_routing(tokens)
    run = jax.jit(functools.partial(moe_jax.fused_experts, config=config))
    y = np.asarray(run(x, p, ids, packed))
    assert_layer_close(y, x, p, ids, weights, config, on_gpu=True)
    np.testing.assert_array_equal(np.asarray(run(x, p, ids, packed)), y)
