"""Integer checkpoints of compressed-tensors, from file to logits: transformers runs on what it decompresses itself."""

import functools

import pytest
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize

from tests.support.oracles.emulated_models import (
    assert_logits,
    assert_logits_with_quantized_activations,
    logits_of,
    plain_model,
    quantized_qwen3,
)

# The presets' groups of 128 do not divide 192 and 160 columns.
WEIGHT_ONLY = ("W4A16", "W4A16_ASYM", "W3A16", "W8A16")
ACTIVATIONS = ("W4A8", "W4AFP8")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return quantized_qwen3(tmp_path_factory, group_size=32)


@pytest.mark.parametrize("preset", WEIGHT_ONLY)
@pytest.mark.sample(4)
def test_logits_weight_only(checkpoints, tmp_path, preset):
    checkpoint = checkpoints(preset)
    assert_logits(tmp_path, checkpoint, logits_of(plain_model(checkpoint)))


@pytest.mark.parametrize("preset", ACTIVATIONS)
@pytest.mark.sample(2)
def test_logits_with_quantized_activations(checkpoints, tmp_path, preset):
    """Inputs of every Linear and the experts' intermediates pass compressed-tensors' own fake_quantize."""
    assert_logits_with_quantized_activations(tmp_path, checkpoints(preset), functools.partial(_fake, preset))


def _fake(preset, x, *, stored):
    """One row (1, K); the scales are those of the kernels, amax / 127 and amax / 448."""
    del stored
    kind, top = ("float", 448) if preset == "W4AFP8" else ("int", 127)
    args = QuantizationArgs(num_bits=8, type=kind, strategy="channel", symmetric=True)
    return fake_quantize(x, x.abs().amax(1, keepdim=True) / top, None, args)
