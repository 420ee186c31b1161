"""Logits and MoE blocks against transformers running on the weights that compressed-tensors itself decompresses."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import moe_jax
from tests.support.checkpoints import writers
from tests.support.oracles.emulated_models import (
    assert_logits,
    assert_logits_with_quantized_activations,
    fake_quantized,
    logits_of,
    plain_model,
)

FAMILIES = ("qwen3_moe", "mixtral")


@pytest.fixture(scope="session")
def checkpoints(written):
    """directory(family, scheme): a checkpoint of the real writers; "plain" directories sit beside them."""

    def directory(family, scheme):
        base, _, spelling = scheme.partition("/")
        if spelling != "weight_only":
            return written(family, spelling or base)
        source = written(family, "bf16")
        target = source.with_name(f"{family}-{base}-weight_only")
        if not target.exists():
            writer_scheme = writers.preset(writers.PRESETS[base])
            # compressed-tensors packs weight-only int8 in words, so there the config alone says weight-only
            if base != "int8_w8a8":
                writer_scheme.input_activations = None
            writers.quantize_with_compressed_tensors(source, target, family, writer_scheme)
            if base == "int8_w8a8":
                writers.drop_activation_quantization(target)
        return target

    return directory


WEIGHT_ONLY = [
    "bf16",
    "bf16/fused",
    "fp8_tensor_static/weight_only",
    "fp8_channel/weight_only",
    "fp8_block/weight_only",
    "int8_w8a8/weight_only",
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
@pytest.mark.sample(11)
def test_logits_weight_only(checkpoints, tmp_path, family, scheme):
    checkpoint = checkpoints(family, scheme)
    assert_logits(tmp_path, checkpoint, logits_of(plain_model(checkpoint, family)))


ACTIVATIONS = ["fp8_tensor_static", "fp8_channel", "fp8_block", "fp8_block/native", "int8_w8a8"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", ACTIVATIONS)
@pytest.mark.sample(10)
def test_logits_with_quantized_activations(checkpoints, tmp_path, family, scheme):
    """Inputs of every Linear and the experts' intermediates pass compressed-tensors' own fake_quantize."""
    scales = ("input_scale", max) if scheme == "fp8_tensor_static" else None
    fake = functools.partial(fake_quantized, scheme.partition("/")[0])
    assert_logits_with_quantized_activations(tmp_path, checkpoints(family, scheme), fake, family, scales)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
@pytest.mark.sample(9)
def test_block_outputs(checkpoints, family, scheme):
    """Each layer's MoE block alone, so that an error in one layer is not diluted by the rest of the model."""
    checkpoint = checkpoints(family, scheme)
    model = plain_model(checkpoint, family)
    x = np.random.default_rng(3).standard_normal((1, 23, 192)).astype(np.float32)
    for layer, decoder in enumerate(model.model.layers):
        with torch.no_grad():
            expected = decoder.mlp(torch.tensor(x))[0].numpy()
        block = moe_jax.load_moe(checkpoint, layer=layer, dtype=jnp.float32)
        actual = np.asarray(block(jnp.asarray(x[0])))
        row_scale = np.abs(expected).max(axis=1)
        worst = (np.abs(actual - expected).max(axis=1) / row_scale).max()
        assert worst <= 2e-3, f"layer {layer}: a row differs by {worst:.2e} of its largest value"
