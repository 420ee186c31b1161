"""ModelOpt containers: bytes laid out as formats.md 6 states, config.json and hf_quant_config.json."""

import json

import ml_dtypes
import numpy as np
import pytest

from moe_jax import MoEConfig, Scheme
from moe_jax.loading import CheckpointError, QuantizationConfig, load_layer
from moe_jax.quantization import dequantize_tensor
from tests.support.checkpoints.expert_tensors import matrices_of, write_checkpoint
from tests.support.refusals import refuses

E, H, I = 3, 64, 48  # noqa: E741
PROJECTIONS = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E4M3 = ml_dtypes.float8_e4m3fn
F = np.float32


def name_of(expert, projection, leaf):
    return f"model.layers.0.mlp.experts.{expert}.{projection}.{leaf}"


def nvfp4_tensors(has_inputs=True):
    rng = np.random.default_rng(0)
    found = {}
    for expert in range(E):
        for projection, (n, k) in PROJECTIONS.items():
            of = lambda leaf, e=expert, p=projection: name_of(e, p, leaf)  # noqa: E731
            found[of("weight")] = rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
            found[of("weight_scale")] = rng.uniform(1, 448, (n, k // 16)).astype(E4M3)
            found[of("weight_scale_2")] = np.array(rng.uniform(1e-5, 1e-3), F)
            if has_inputs:
                found[of("input_scale")] = np.array(rng.uniform(1e-4, 1e-2), F)
    return found


def fp8_tensors():
    rng = np.random.default_rng(1)
    found = {}
    for expert in range(E):
        for projection, shape in PROJECTIONS.items():
            found[name_of(expert, projection, "weight")] = rng.standard_normal(shape).astype(E4M3)
            for leaf in ("weight_scale", "input_scale"):
                found[name_of(expert, projection, leaf)] = np.array(rng.uniform(1e-3, 1e-1), F)
    return found


def write(directory, tensors, stated, own_file=False):
    config = {"model_type": "qwen3_moe"}
    if own_file:
        (directory / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": stated}))
    else:
        config["quantization_config"] = {"quant_method": "modelopt", **stated}
    return write_checkpoint(directory, config, tensors)


def load(checkpoint, scheme):
    with checkpoint:
        return load_layer(checkpoint, 0, MoEConfig(E, 2, H, I, scheme=Scheme.parse(scheme)))


@pytest.mark.parametrize("own_file", [False, True], ids=["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4"])
@pytest.mark.sample(2)
def test_nvfp4_multiplies_by_both_scales(tmp_path, algorithm, own_file):
    stored = nvfp4_tensors(has_inputs=algorithm == "NVFP4")
    stated = {"quant_algo": algorithm, "group_size": 16, "exclude_modules": ["lm_head", "model.layers.*.mlp.gate"]}
    scheme = {"NVFP4": "nvfp4_modelopt", "W4A16_NVFP4": "nvfp4_a16_modelopt"}[algorithm]
    weights = load(write(tmp_path, stored, stated, own_file), scheme)
    for place, matrix in matrices_of(weights).items():
        data, scale, scale_2 = (stored[name_of(*place, leaf)] for leaf in LEAVES)
        codes = np.stack([data & 15, data >> 4], -1).reshape(data.shape[0], -1)
        expected = E2M1[codes] * np.repeat(scale.astype(F) * scale_2, 16, axis=1)
        assert matrix.tobytes() == expected.tobytes()
    if algorithm == "NVFP4":
        inputs = {p: [stored[name_of(e, p, "input_scale")] for e in range(E)] for p in PROJECTIONS}
        assert float(weights.w13.input_scale) == max(inputs["gate_proj"] + inputs["up_proj"])
        assert float(weights.w2.input_scale) == max(inputs["down_proj"])


LEAVES = ("weight", "weight_scale", "weight_scale_2")


def test_fp8(tmp_path):
    stored = fp8_tensors()
    weights = load(write(tmp_path, stored, {"quant_algo": "FP8", "kv_cache_quant_algo": None}), "fp8_tensor_static")
    up = stored[name_of(2, "up_proj", "weight")].astype(F) * stored[name_of(2, "up_proj", "weight_scale")]
    assert (np.asarray(dequantize_tensor(weights.w13))[2, 1] == up).all()


def test_a_missing_input_scale_is_named(tmp_path):
    stored = nvfp4_tensors()
    del stored[name_of(1, "up_proj", "input_scale")]
    with pytest.raises(CheckpointError, match="missing: up_proj.input_scale of expert 1"):
        load(write(tmp_path, stored, {"quant_algo": "NVFP4"}), "nvfp4_modelopt")


EXPERT = "model.layers.1.mlp.experts.3.gate_proj"


def scheme_name(stated, module):
    config = {"quantization_config": {"quant_method": "modelopt", **stated}}
    scheme = QuantizationConfig.from_config(config).scheme_for(module)
    return scheme and scheme.name


def test_modules_left_out_are_shell_patterns():
    stated = {"quant_algo": "NVFP4", "exclude_modules": ["lm_head", "model.layers.0*", "*.self_attn*", "router"]}
    assert scheme_name(stated, EXPERT) == "nvfp4_modelopt"
    for module in ("lm_head", EXPERT.replace("layers.1", "layers.0"), "model.layers.1.self_attn.q_proj"):
        assert scheme_name(stated, module) is None
    assert scheme_name({"quant_algo": "NVFP4", "ignore": ["*.experts.3.*"]}, EXPERT) is None


def test_mixed_precision_lists_its_modules():
    layers = {
        "model.layers.1.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.1.self_attn.q_proj": {"quant_algo": "FP8"},
    }
    stated = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert scheme_name(stated, EXPERT) == "nvfp4_modelopt"
    assert scheme_name(stated, "model.layers.1.self_attn.q_proj") == "fp8_tensor_static"
    assert scheme_name(stated, "model.layers.0.self_attn.q_proj") is None


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"quant_algo": "W4A16_AWQ"}, "quant_algo 'W4A16_AWQ' of ModelOpt is not supported"),
        ({}, "quant_algo None"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size of NVFP4 is 32, expected 16"),
        ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers is None"),
        ({"quant_algo": "FP8", "ignore": "lm_head"}, "expected a list of strings"),
    ],
)
def test_what_is_not_understood_is_refused(stated, message):
    refuses(CheckpointError, message, scheme_name, stated, EXPERT)
