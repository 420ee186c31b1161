"""explain(): method, implementation, how it runs, what was skipped and what was substituted."""

import dataclasses

import jax
import pytest

from moe_jax.experts import explain
from moe_jax.experts._choice import order_of
from moe_jax.quantization import method_for
from tests.support.cases import experts as cases


def explained(config, num_tokens=256, platform="cpu"):
    return explain(config, method_for(config.scheme).abstract_weights(config), num_tokens, platform)


def test_names_the_layer_the_method_and_the_implementation():
    text = explained(
        cases.make_config("fp8_block", dtype="bfloat16", name="model.layers.3.mlp", num_experts=64, top_k=8)
    )
    assert text.splitlines() == [
        "model.layers.3.mlp: layer: 64 experts, top_k 8, hidden 152, intermediate 136, silu, 256 tokens on cpu",
        "method: fp8_block",
        "  weights: e4m3, one scale per block of 128 x 128",
        "  activations: quantized to e4m3 before both products, one scale per group of 128, computed from the rows of "
        "the call",
        "implementation: xla (order: xla)",
        "  tiles of 40 rows, one pass over the rows",
        "  products: values in float32, sums in float32",
    ]  # fmt: skip


def test_says_what_was_skipped_and_why():
    text = explained(cases.make_config(), platform="gpu")
    assert "implementation: xla (order: hopper, portable, xla)" in text
    assert "skipped: hopper: computes in bfloat16 or float16, the layer in float32" in text
    assert "skipped" not in explained(cases.make_config())


def test_says_when_nothing_runs():
    text = explained(cases.make_config(implementation=("hopper",)))
    assert "no implementation can run this layer (hopper: computes in bfloat16" in text
    assert "'portable', 'xla', 'reference'" in text
    with pytest.raises(ValueError, match="expected one or more of hopper, portable, xla, reference"):
        explained(cases.make_config(implementation=("cuda",)))


@pytest.mark.parametrize(
    ("scheme", "phrase"),
    [
        ("bf16", "activations: not quantized, computed in float32"),
        ("int8_w8a16", "activations: not quantized"),
        ("int8_w8a8", "quantized to int8 before both products, one scale per token, computed from the rows"),
        ("fp8_tensor_static", "one scale per tensor, fixed by the checkpoint"),
    ],
)
def test_says_whether_activations_are_really_quantized(scheme, phrase):
    assert phrase in explained(cases.make_config(scheme))


def test_notes():
    assert "a token's output depends on the tokens beside it" in explained(cases.make_config("fp8_tensor"))
    assert "two passes over the rows" in explained(cases.make_config("fp8_tensor"))
    assert "depends on the tokens" not in explained(cases.make_config("fp8_channel"))
    rounded = "weights stored in float32 are rounded to bfloat16"
    assert rounded in explained(cases.make_config(dtype="bfloat16"))
    assert rounded not in explained(cases.make_config(dtype="bfloat16", param_dtype="bfloat16"))
    assert "limit 2.0" in explained(cases.make_config(swiglu_limit=2.0))


def test_takes_arrays_and_the_default_platform():
    config = cases.make_config("int8_w8a8")
    weights = cases.make_weights(config)
    assert explain(config, weights, 7) == explained(config, 7, jax.default_backend())
    reference = dataclasses.replace(config, implementation=("reference",))
    assert "implementation: reference (order: reference)" in explain(reference, weights, 7)


def test_former_names_of_backends():
    """A layer of before may name "mosaic"; each backend is tried once."""
    config = cases.make_config("bf16", implementation=("mosaic", "xla", "hopper"))
    assert order_of(config, "gpu") == ("hopper", "xla")
    with pytest.raises(ValueError, match="expected one or more of hopper, portable, xla, reference"):
        order_of(cases.make_config("bf16", implementation=("Mosaic",)), "gpu")
