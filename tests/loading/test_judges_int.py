"""Integer checkpoints of compressed-tensors, from file to logits: transformers runs on what it decompresses itself."""

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize

from tests.loading.test_judges import assert_close_in_range, logits_of, plain_model, run_logits
from tests.support.checkpoints import writers

pytestmark = pytest.mark.usefixtures("quick_compilation")

# The presets' groups of 128 do not divide 192 and 160 columns.
WEIGHT_ONLY = ("W4A16", "W4A16_ASYM", "W3A16", "W8A16")
ACTIVATIONS = ("W4A8", "W4AFP8")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """directory(preset): a Qwen3-MoE of one layer that compressed-tensors quantized in groups of 32, made once."""
    root = tmp_path_factory.mktemp("integers")
    source = root / "qwen3_moe-bf16"
    writers.write_model("qwen3_moe", source, num_hidden_layers=1)

    def directory(preset):
        target = root / preset
        if not target.exists():
            scheme = writers.preset(preset).model_copy(deep=True)
            scheme.weights.group_size = 32
            writers.quantize_with_compressed_tensors(source, target, "qwen3_moe", scheme)
        return target

    return directory


@pytest.mark.parametrize("preset", WEIGHT_ONLY)
@pytest.mark.sample(4)
def test_logits_weight_only(checkpoints, tmp_path, preset):
    checkpoint = checkpoints(preset)
    assert_close_in_range(run_logits(tmp_path, checkpoint), logits_of(plain_model(checkpoint, "qwen3_moe")), 2e-3)


@pytest.mark.parametrize("preset", ACTIVATIONS)
@pytest.mark.sample(2)
def test_logits_with_quantized_activations(checkpoints, tmp_path, preset):
    """Expert inputs and intermediates pass compressed-tensors' own fake_quantize; attention stays unquantized."""
    checkpoint = checkpoints(preset)
    model = plain_model(checkpoint, "qwen3_moe")
    unquantized = logits_of(model)
    for decoder in model.model.layers:
        decoder.mlp.experts.forward = _emulated_forward(decoder.mlp.experts, preset)
    expected = logits_of(model)
    spread = expected.max() - expected.min()
    assert np.abs(expected - unquantized).max() > 1e-3 * spread, "the emulation quantizes nothing"
    assert_close_in_range(run_logits(tmp_path, checkpoint), expected, 2e-3)


def _emulated_forward(experts, preset):
    def forward(hidden, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden)
        for token in range(hidden.shape[0]):
            for slot in range(top_k_index.shape[1]):
                e = top_k_index[token, slot]
                gate, up = (_fake(hidden[token : token + 1], preset) @ experts.gate_up_proj[e].T).chunk(2, dim=-1)
                h = _fake(experts.act_fn(gate) * up, preset)
                out[token] += top_k_weights[token, slot] * (h @ experts.down_proj[e].T)[0]
        return out

    return forward


def _fake(x, preset):
    """One row (1, K); the scales are those of the kernels, amax / 127 and amax / 448."""
    kind, top = ("float", 448) if preset == "W4AFP8" else ("int", 127)
    args = QuantizationArgs(num_bits=8, type=kind, strategy="channel", symmetric=True)
    return fake_quantize(x, x.abs().amax(1, keepdim=True) / top, None, args)
