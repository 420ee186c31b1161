"""NVFP4 and MX checkpoints of compressed-tensors, from file to logits: its own decompression is the judge."""

import functools
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import moe_jax
import moe_jax.inspection
from tests.support.checkpoints.expert_tensors import matrices_of
from tests.support.oracles.emulated_models import (
    assert_logits,
    assert_logits_with_quantized_activations,
    logits_of,
    plain_model,
    quantized_qwen3,
)
from tests.support.oracles.layer_judge import assert_layer_close

PRESETS = ("NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "MXFP8")
WEIGHT_ONLY = ("NVFP4A16", "MXFP4A16")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return quantized_qwen3(tmp_path_factory)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.sample(3)
def test_weights_equal_their_decompression_bit_for_bit(checkpoints, preset):
    checkpoint = checkpoints(preset)
    plain = load_file(checkpoint.with_name(f"{preset}-decompressed") / "model.safetensors")
    block = moe_jax.load_moe(checkpoint, layer=0, dtype=jnp.float32)
    weights = block.experts.weights.get_value()
    for (expert, name), matrix in matrices_of(weights).items():
        assert matrix.tobytes() == plain[f"model.layers.0.mlp.experts.{expert}.{name}.weight"].numpy().tobytes()
    if preset.startswith("NVFP4"):
        scales = np.asarray(weights.w13.global_scale)
        assert (scales[:, 0] != scales[:, 1]).all(), "gate and up must differ to tell whose scale is used"


@pytest.mark.parametrize("preset", WEIGHT_ONLY)
@pytest.mark.sample(2)
def test_logits_of_weight_only_checkpoints(checkpoints, tmp_path, preset):
    checkpoint = checkpoints(preset)
    assert_logits(tmp_path, checkpoint, logits_of(plain_model(checkpoint)))


@pytest.mark.parametrize("preset", ["NVFP4", "MXFP4", "MXFP8"])
@pytest.mark.sample(3)
def test_logits_with_quantized_activations(checkpoints, tmp_path, preset):
    """Inputs of every Linear and the experts' intermediates pass a torch emulation of the format."""
    scales = ("input_global_scale", min) if preset == "NVFP4" else None
    emulated = functools.partial(fake, preset)
    assert_logits_with_quantized_activations(tmp_path, checkpoints(preset), emulated, scales=scales)


@pytest.mark.parametrize("preset", ["NVFP4", "MXFP4", "MXFP8"])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.sample(6)
def test_layers_against_float64(checkpoints, preset, implementation):
    block = moe_jax.load_moe(checkpoints(preset), layer=0, dtype=jnp.float32, implementation=implementation)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((9, 192)).astype(np.float32)
    p, ids = rng.uniform(0.1, 1, (9, 2)).astype(np.float32), rng.integers(-1, 6, (9, 2)).astype(np.int32)
    weights, config = block.experts.weights.get_value(), block.experts.config
    actual = moe_jax.fused_experts(jnp.asarray(x), jnp.asarray(p), jnp.asarray(ids), weights, config)
    assert_layer_close(actual, x, p, ids, weights, config, kernels=False)


def fake(preset, x, *, stored):
    """One row through compressed-tensors' scales and rounding; NVFP4's block scale as spec 8.7.3 computes it."""
    from compressed_tensors.quantization.utils import fp4_utils, generate_mx_scales

    groups = x.reshape(-1, 16 if preset == "NVFP4" else 32)
    amax = groups.abs().amax(1, keepdim=True)
    if preset == "NVFP4":
        global_scale = stored
        block = (global_scale * (amax * torch.tensor(1 / 6))).clamp(0, 448).to(torch.float8_e4m3fn).float()
        values = (groups * (global_scale / block)).clamp(-6, 6)
        return (fp4_utils.cast_to_fp4(values.clone()) * (block / global_scale)).reshape(x.shape)
    scale = 2.0 ** (generate_mx_scales(amax, 8 if preset == "MXFP8" else 4) - 127)
    if preset == "MXFP8":
        return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).reshape(x.shape)
    return (fp4_utils.cast_to_fp4((groups / scale).clamp(-6, 6)) * scale).reshape(x.shape)


@pytest.mark.parametrize(("quantize", "name"), [("nvfp4", "nvfp4_dynamic"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp8")])
@pytest.mark.sample(3)
def test_full_precision_is_quantized_while_loading(checkpoints, quantize, name):
    """Without calibration, nvfp4 computes the activations' global scales itself. The error is that of the format."""
    source = checkpoints("NVFP4A16").with_name("qwen3_moe-bf16")
    block = moe_jax.load_moe(source, layer=0, dtype=jnp.float32, quantize=quantize)
    plain = moe_jax.load_moe(source, layer=0, dtype=jnp.float32)
    assert block.experts.config.scheme.name == name
    x = jnp.asarray(np.random.default_rng(4).standard_normal((16, 192)), jnp.float32)
    expected = np.asarray(plain(x))
    error = np.linalg.norm(np.asarray(block(x)) - expected) / np.linalg.norm(expected)
    low, high = {"nvfp4": (0.05, 0.3), "mxfp4": (0.1, 0.4), "mxfp8": (0.01, 0.1)}[quantize]
    assert low < error < high


def test_inspect_reads_fp4_checkpoints(checkpoints, tmp_path):
    report = moe_jax.inspection.inspect_checkpoint(checkpoints("NVFP4"))
    assert [run.scheme for run in report.expert_runs] == ["nvfp4"] and not report.problems
    assert "the global scale fixed by the checkpoint" in report.render()
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoints("MXFP4"), damaged)
    stored = load_file(damaged / "model.safetensors")
    stored["model.layers.0.mlp.experts.2.up_proj.weight_scale"][3, 1] = 255
    save_file(stored, damaged / "model.safetensors")
    assert any(
        "2.up_proj.weight_scale" in problem for problem in moe_jax.inspection.inspect_checkpoint(damaged).problems
    )
