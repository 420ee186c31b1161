"""Each family in a quantization that its users have: the output equals transformers' with the decompressed weights.

Weights are loaded without quantizing activations here, so that the comparison is one of weights; what the arithmetic of
activations does is the business of test_judges.py.
"""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from safetensors.torch import load_file

from moe_jax.inspection import inspect_checkpoint
from moe_jax.loading import CheckpointError
from moe_jax.quantization import dequantize_tensor
from tests.support.cases.families import FAMILIES, as_mxfp4, assert_rows_close, edit, load, tokens, unfused
from tests.support.cases.models import without_quantized_inputs
from tests.support.checkpoints import writers
from tests.support.refusals import refuses

PLAIN = ["re:.*gate$", "re:.*router.*", "re:.*self_attn.*", "re:.*linear_attn.*", "lm_head"]
NO_SHARED = [*PLAIN, "re:.*shared_expert.*"]
DENSE_SCHEMES = {"fp8_channel": "fp8_channel_a16", "fp8_block": "fp8_block_a16", "int8_w8a8": "int8_w8a16"}


def group(preset, *targets):
    """A preset of compressed-tensors for some modules; groups of 16, since the layers are narrow."""
    scheme = QuantizationScheme(targets=list(targets or ["Linear"]), **PRESET_SCHEMES[preset]).model_copy(deep=True)
    if scheme.weights.group_size == 128:
        scheme.weights.group_size = 16
    return scheme


def write_per_expert(name, directory):
    """The checkpoint with a matrix for each expert and projection, which is what quantizing tools need."""
    layers = FAMILIES[name].write(directory).model.layers
    if FAMILIES[name].is_fused:
        edit(directory, lambda tensors: unfused(name, tensors))
    return layers


def check_layer(name, directory, decompressed, layers, scheme):
    """The last layer's output, and the scheme that a plain load takes from the file."""
    tensors, x, index = load_file(decompressed / "model.safetensors"), tokens(), FAMILIES[name].moe_layers[-1]
    expected = FAMILIES[name].output(FAMILIES[name].with_tensors(layers[index], index, tensors), x)
    block = load(directory, index, quantize=DENSE_SCHEMES.get(scheme))
    assert_rows_close(block(jnp.asarray(x)), expected)
    assert load(directory, FAMILIES[name].moe_layers[0]).experts.config.scheme.name == scheme


@pytest.mark.parametrize(
    "name, preset, ignore, scheme",
    [
        ("qwen2_moe", "FP8_DYNAMIC", NO_SHARED, "fp8_channel"),
        ("llama4_text", "FP8_DYNAMIC", PLAIN, "fp8_channel"),
        ("glm4_moe", "FP8_DYNAMIC", PLAIN, "fp8_channel"),
        ("gpt_oss", "W4A16", PLAIN, "w4a16_g16"),
        pytest.param("granitemoe", "FP8_DYNAMIC", PLAIN, "fp8_channel", marks=pytest.mark.slow),
        ("olmoe", "W8A8", PLAIN, "int8_w8a8"),
        pytest.param("deepseek_v2", "W4A16", NO_SHARED, "w4a16_g16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sample(5)
def test_compressed_tensors(tmp_path, name, preset, ignore, scheme):
    """Shared experts are quantized where the config does not leave them out; routers and their gates never are."""
    source, target = tmp_path / "source", tmp_path / "target"
    layers = write_per_expert(name, source)
    decompressed = writers.compress(source, target, {"group_0": group(preset)}, ignore)
    stored = load_file(target / "model.safetensors")
    shared = [key for key in stored if ".shared_expert" in key and key.endswith("weight_scale")]
    assert bool(shared) == (ignore is PLAIN and name in ("llama4_text", "glm4_moe"))
    check_layer(name, target, decompressed, layers, scheme)
    assert inspect_checkpoint(target).problems == ()


@pytest.mark.parametrize("name, listed", [("deepseek_v3", None), ("qwen3_next", ["mlp.gate", "shared_expert_gate"])])
@pytest.mark.sample(2)
def test_native_fp8_blocks(tmp_path, name, listed):
    """DeepSeek lists nothing, Qwen lists what stays in 16 bits and stores its scales in bfloat16."""
    source, compressed, target = (tmp_path / word for word in ("source", "compressed", "target"))
    layers = write_per_expert(name, source)
    decompressed = writers.compress(source, compressed, {"group_0": group("FP8_BLOCK")}, PLAIN)
    writers.as_native_fp8(compressed, target)
    if listed:
        stated = json.loads((target / "config.json").read_text())["quantization_config"]
        prefixes = [f"model.layers.{layer}.mlp." for layer in FAMILIES[name].moe_layers]
        entries = ["lm_head", *(p + entry.removeprefix("mlp.") for p in prefixes for entry in listed)]
        edit(target, _scales_in_bfloat16, quantization_config=stated | {"modules_to_not_convert": entries})
        decompressed = _rescaled(target, decompressed)
    check_layer(name, target, decompressed, layers, "fp8_block")


def _scales_in_bfloat16(tensors):
    return {n: v.to(torch.bfloat16) if n.endswith("scale_inv") else v for n, v in tensors.items()}


def _rescaled(target, decompressed):
    """The decompressed model for scales that were rounded; a block of 128 covers each of these small matrices."""
    stored = load_file(target / "model.safetensors")

    def multiply(tensors):
        scale = "{}_scale_inv"
        return {
            n: stored[n].float() * stored[scale.format(n)].float() if scale.format(n) in stored else v
            for n, v in tensors.items()
        }

    edit(decompressed, multiply)
    return decompressed


def test_granite_as_older_writers_number_it(tmp_path):
    """``input_linear.<e>`` holds gate and up of one expert, with one scale per row."""
    source, target = tmp_path / "source", tmp_path / "target"
    layers = write_per_expert("granitemoe", source)
    decompressed = writers.compress(source, target, {"group_0": group("FP8_DYNAMIC")}, PLAIN)

    def number_last(tensors):
        result = {}
        for name, value in tensors.items():
            found = re.fullmatch(r"(.*\.)experts\.(\d+)\.(\w+)\.(.*)", name)
            if found is None:
                result[name] = value
            elif found[3] == "down_proj":
                result[f"{found[1]}output_linear.{found[2]}.{found[4]}"] = value
            elif found[3] == "gate_proj":
                up = tensors[name.replace("gate_proj", "up_proj")]
                stacked = torch.cat([value.view(torch.uint8), up.view(torch.uint8)]).view(value.dtype)
                result[f"{found[1]}input_linear.{found[2]}.{found[4]}"] = stacked
        return result

    edit(target, number_last)
    check_layer("granitemoe", target, decompressed, layers, "fp8_channel")


def test_gpt_oss_mxfp4(tmp_path):
    """Blocks, scales and biases with gate and up in alternating rows; router and the rest in 16 bits."""
    name, width = "gpt_oss", 64
    model = FAMILIES[name].write(tmp_path, hidden_size=width)
    as_mxfp4(tmp_path, model)
    x = tokens(width=width)
    block = load(tmp_path, 1)
    assert block.experts.config.scheme.name == "mxfp4_a16"
    assert_rows_close(block(jnp.asarray(x)), FAMILIES[name].output(model.model.layers[1], x))
    report = inspect_checkpoint(tmp_path)
    assert report.problems == () and report.expert_runs[0].scheme == "mxfp4_a16"


@pytest.mark.parametrize("method", ["fbgemm_fp8", "modelopt"])
def test_llama4_fp8_fused(tmp_path, method):
    """As Meta and NVIDIA publish it: all experts in one tensor, (E, in, out), scales per output or one for all."""
    name = "llama4_text"
    layers = FAMILIES[name].write(tmp_path).model.layers
    shared = [f"model.layers.{index}.feed_forward.shared_expert" for index in (1, 3)]
    rng = np.random.default_rng(0)

    def quantize(tensors):
        result = {key: value for key, value in tensors.items() if ".experts." not in key}
        for index in FAMILIES[name].moe_layers:
            for projection in ("gate_up_proj", "down_proj"):
                prefix = f"model.layers.{index}.feed_forward.experts.{projection}"
                experts, _, outputs = tensors[prefix].shape
                if method == "modelopt":
                    scale = torch.tensor(rng.uniform(0.001, 0.01), dtype=torch.float32)
                    result |= {f"{prefix}_weight_scale": scale, f"{prefix}_input_scale": scale * 2}
                else:
                    scale = torch.tensor(rng.uniform(0.001, 0.01, (experts, 1, outputs)), dtype=torch.float32)
                    is_down = projection == "down_proj"  # whose scale transformers keeps the other way round
                    result[f"{prefix}_scale"] = scale.transpose(1, 2) if is_down else scale
                codes = (tensors[prefix] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
                result[prefix] = codes
                getattr(layers[index].feed_forward.experts, projection).data = codes.float() * scale
        return result

    stated = {
        "fbgemm_fp8": {"quant_method": "fbgemm_fp8", "modules_to_not_convert": [*shared, "lm_head", "*.self_attn"]},
        "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [*shared, "lm_head", "*.self_attn*"]},
    }[method]
    dense = ["model.layers.0.feed_forward", "model.layers.2.feed_forward"]
    stated[next(key for key, value in stated.items() if isinstance(value, list))] += dense
    edit(tmp_path, quantize, quantization_config=stated)
    x = tokens()
    for index in FAMILIES[name].moe_layers:
        if method == "fbgemm_fp8" and index == 3:
            block = load(tmp_path, index, quantize="fp8_channel_a16")
            assert_rows_close(block(jnp.asarray(x)), FAMILIES[name].output(layers[index], x))
        weights, experts = load(tmp_path, index).experts.weights.get_value(), layers[index].feed_forward.experts
        w13 = experts.gate_up_proj.data.transpose(1, 2).unflatten(1, (2, -1)).numpy()
        assert np.array_equal(dequantize_tensor(weights.w13), w13)
        assert np.array_equal(dequantize_tensor(weights.w2), experts.down_proj.data.transpose(1, 2).numpy())
    assert inspect_checkpoint(tmp_path).problems == ()


EXPERTS_0 = r"re:.*layers\.0\.mlp\.experts\..*"
EXPERTS_2 = r"re:.*layers\.2\.mlp\.experts\.\d+\.(gate|up|down)_proj$"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Qwen2-MoE with a scheme per layer, another for shared experts, and exceptions by name and by regex."""
    root = tmp_path_factory.mktemp("mixed")
    layers = FAMILIES["qwen2_moe"].write(root / "source").model.layers
    groups = {
        "first": group("FP8_DYNAMIC", EXPERTS_0),
        "last": group("W4A16", EXPERTS_2),
        "shared": group("W8A8", r"re:.*shared_expert\.(gate|up)_proj$", "model.layers.0.mlp.shared_expert.down_proj"),
    }
    ignore = ["re:.*mlp.gate$", "re:.*shared_expert_gate$", "model.layers.2.mlp.shared_expert.up_proj"]
    return root / "target", writers.compress(root / "source", root / "target", groups, ignore), layers


def test_mixed_precision(mixed):
    directory, decompressed, layers = mixed
    stored = load_file(directory / "model.safetensors")
    shared = {key.removeprefix("model.layers.") for key in stored if "shared_expert." in key and "_scale" in key}
    assert shared == {f"{p}_proj.weight_scale" for p in ("0.mlp.shared_expert.gate", "0.mlp.shared_expert.up")} | {
        "0.mlp.shared_expert.down_proj.weight_scale",
        "2.mlp.shared_expert.gate_proj.weight_scale",
    }
    tensors, x = load_file(decompressed / "model.safetensors"), tokens()
    family = FAMILIES["qwen2_moe"]
    for index, scheme in ((0, "fp8_channel"), (2, "w4a16_g16")):
        expected = family.output(family.with_tensors(layers[index], index, tensors), x)
        block = without_quantized_inputs(load(directory, index, quantize=DENSE_SCHEMES.get(scheme)))
        assert_rows_close(block(jnp.asarray(x)), expected)
    report = inspect_checkpoint(directory)
    assert report.problems == () and {run.layers: run.scheme for run in report.expert_runs} == {
        (0,): "fp8_channel",
        (2,): "w4a16_g16",
    }


def group_of(config, target):
    return next(found for found in config["config_groups"].values() if target in found["targets"])


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda c: c["ignore"].append("model.layers.0.mlp.experts.3.up_proj"), "0.mlp.experts.3.up_proj"),
        (lambda c: group_of(c, EXPERTS_0).update(targets=[EXPERTS_0[:-2] + "[0-4].*"]), "0.mlp.experts.5"),
        (lambda c: group_of(c, EXPERTS_2)["targets"].append("re:.*layers.0.*experts.1.*"), "0.mlp.experts.1"),
    ],
)
def test_a_config_that_no_longer_fits_is_refused(mixed, tmp_path, change, words):
    """An expert left out, forgotten, or given to another group: the file still has it in the first group's scheme."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").symlink_to(mixed[0] / "model.safetensors")
    config = json.loads((mixed[0] / "config.json").read_text())
    change(config["quantization_config"])
    (directory / "config.json").write_text(json.dumps(config))
    refuses(CheckpointError, f"module model.layers.{re.escape(words)}|experts of a layer", load, directory, 0)
