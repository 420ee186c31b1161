"""FP8 containers beside compressed-tensors' own: AutoFP8, fbgemm and DeepSeek's power-of-two activation scales."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from moe_jax import MoEConfig, Scheme
from moe_jax.loading import Checkpoint, load_layer
from moe_jax.quantization import dequantize_tensor, quantize_activations

E, H, I = 2, 48, 32  # noqa: E741
PROJECTIONS = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
E4M3 = ml_dtypes.float8_e4m3fn
F = np.float32

CONTAINERS = {
    "AutoFP8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8_tensor", lambda n: ()),
    "AutoFP8 static": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        "fp8_tensor_static",
        lambda n: (1,),
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "fp8_channel_ub1200", lambda n: (n, 1)),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_weights_of_a_container(tmp_path, container):
    stated, name, scale_shape = CONTAINERS[container]
    rng = np.random.default_rng(0)
    stored = {}
    for expert in range(E):
        for projection, (n, k) in PROJECTIONS.items():
            prefix = f"model.layers.0.mlp.experts.{expert}.{projection}"
            stored[f"{prefix}.weight"] = rng.standard_normal((n, k)).astype(E4M3)
            stored[f"{prefix}.weight_scale"] = np.asarray(rng.uniform(0.01, 1, scale_shape(n)), F)
            if name == "fp8_tensor_static":
                stored[f"{prefix}.input_scale"] = np.asarray(rng.uniform(0.01, 1, (1,)), F)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "quantization_config": stated}))
    save_file(stored, tmp_path / "model.safetensors")
    scheme = Scheme.parse(stated)
    assert scheme.name == name
    with Checkpoint(tmp_path) as checkpoint:
        weights = load_layer(checkpoint, 0, MoEConfig(E, 2, H, I, scheme=scheme))
    prefix = "model.layers.0.mlp.experts.1.up_proj"
    expected = stored[f"{prefix}.weight"].astype(F) * stored[f"{prefix}.weight_scale"]
    assert np.asarray(dequantize_tensor(weights.w13))[1, 1].tobytes() == expected.tobytes()


def test_activations_beyond_the_bound_saturate():
    fmt = Scheme.parse(CONTAINERS["fbgemm"][0]).activations
    x = np.array([[3000.0, -600.0, 1.0], [10.0, 5.0, 1.0], [np.inf, 1.0, 1.0]], F)
    codes, scale = quantize_activations(jnp.asarray(x), fmt)
    assert np.asarray(scale)[:2].tolist() == [F(1200) / F(448), F(10) / F(448)] and np.isinf(scale[2])
    assert np.asarray(codes).astype(F)[:2, :2].tolist() == [[448, -224], [448, 224]]


def test_deepseek_rounds_activation_scales_up():
    stated = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    scheme = Scheme.parse(stated)
    assert scheme.name == "fp8_block_ue8m0" and scheme.weights == Scheme.parse("fp8_block").weights
    _, scale = quantize_activations(jnp.full((1, 128), 3.0, jnp.float32), scheme.activations)
    assert np.asarray(scale).tolist() == [[2.0**-7]]  # 3 / 448 lies between 2**-8 and 2**-7
