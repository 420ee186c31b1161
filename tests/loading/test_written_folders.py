"""Folders of a bf16 model as transformers and compressed-tensors write them: their own decompression is the judge."""

import json
from unittest import mock

import jax.numpy as jnp
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

import moe_jax
import torch_bridge
from tests.support.checkpoints import writers
from tests.support.checkpoints.expert_tensors import matrices_of
from tests.support.checkpoints.vllm_formats import NOT_CONVERTED
from tests.support.checkpoints.written import WRITTEN, write

SIZES = dict(num_experts=3, top_k=2, hidden=256, intermediate=256, layers=2, vocabulary=96)
PREFIX = "model.layers.1.mlp.experts."


def assert_values(weights, w13, w2):
    for (expert, name), matrix in matrices_of(weights).items():
        expected = w2[expert] if name == "down_proj" else w13[expert, int(name == "up_proj")]
        assert matrix.tobytes() == expected.numpy().tobytes(), (expert, name)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.sample(3)
def test_layers_have_the_values_that_were_written(tmp_path, name):
    """By moe_jax from the folder, and by the torch bridge from the names of the file and its quantization_config."""
    folder = tmp_path / "model"
    w13, w2, _, _ = write(folder, name, **SIZES)["1"]
    assert_values(moe_jax.load_moe(folder, layer=1, dtype=jnp.float32).experts.weights.get_value(), w13, w2)
    stated = json.loads((folder / "config.json").read_text()).get("quantization_config")
    sizes = [SIZES[size] for size in ("num_experts", "top_k", "hidden", "intermediate")]
    layer = torch_bridge.FusedMoE(*sizes, torch.bfloat16, quant_config=stated, prefix=PREFIX.rstrip("."))
    tensors = load_file(folder / "model.safetensors")
    layer.load_weights([(key, tensor) for key, tensor in tensors.items() if key.startswith(PREFIX)])
    layer.process_weights_after_loading()
    assert_values(layer.expert_weights, w13, w2)


def test_fp8_that_transformers_writes(tmp_path):
    """Weights for each expert, and one tensor of scales for all of them, as transformers 5.23 names a quantized model.

    transformers asks for a GPU before it quantizes, though it then needs none.
    """
    sizes = dict(hidden_size=256, moe_intermediate_size=256, intermediate_size=256)
    writers.write_model("qwen3_moe", tmp_path / "bf16", **sizes)
    config = FineGrainedFP8Config(modules_to_not_convert=NOT_CONVERTED)
    with mock.patch.object(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None):
        quantized = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", quantization_config=config)
        quantized.save_pretrained(tmp_path / "fp8")
    experts = quantized.model.layers[1].mlp.experts
    codes = experts.gate_up_proj.float(), experts.down_proj.float()
    scales = experts.gate_up_proj_scale_inv, experts.down_proj_scale_inv
    gate_up, down = (
        code * scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
        for code, scale in zip(codes, scales, strict=True)
    )
    block = moe_jax.load_moe(tmp_path / "fp8", layer=1, dtype=jnp.float32)
    assert block.experts.weights.get_value().w13.data.dtype == jnp.float8_e4m3fn
    assert_values(block.experts.weights.get_value(), gate_up.unflatten(1, (2, -1)).detach(), down.detach())
