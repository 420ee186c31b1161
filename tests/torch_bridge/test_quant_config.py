"""``FusedMoEQuantConfig`` of a processed layer: what vLLM's methods of the same formats tell their kernels."""

import numpy as np
import pytest
import torch

import torch_bridge
from tests.support.cases.torch_bridge import E, H, I, bits, bridge_layer, loaded_bridge, plain_arrays, stored_arrays

FP8 = torch.float8_e4m3fn
# scheme -> dtypes of activations and weights, per token?, per channel?, block, flags that are set; by vLLM's builders
CONFIGS = {
    "fp8_tensor_static": (FP8, FP8, False, False, None, "use_fp8_w8a8"),
    "fp8_channel": (FP8, FP8, True, True, None, "use_fp8_w8a8"),
    "fp8_block": (FP8, FP8, False, False, [128, 128], "use_fp8_w8a8"),
    "fp8_channel_a16": (None, FP8, False, False, None, "use_fp8_w8a16"),
    "int8_w8a16": (None, torch.int8, False, False, None, "use_int8_w8a16"),
    "int8_w8a8": (torch.int8, torch.int8, True, False, None, "use_int8_w8a8"),
    "w4a16_g32_asym": (None, "int4", False, False, [0, 32], "use_int4_w4a16"),
    "w8a16_channel": (None, torch.int8, False, False, [0, -1], "use_int8_w8a16"),
    "w4a8_int8": (None, None, False, False, [1, 128], None),
    "nvfp4": ("nvfp4", "nvfp4", False, False, None, "use_nvfp4_w4a4"),
    "nvfp4_a16": (None, "nvfp4", False, False, None, "use_nvfp4_w4a16"),
    "mxfp4": ("mxfp4", "mxfp4", False, False, None, "use_mxfp4_w4a4"),
    "mxfp4_a16": (None, "mxfp4", False, False, None, "use_mxfp4_w4a16"),
    "mxfp8": ("mxfp8", "mxfp8", False, False, [1, 32], None),
}
FLAGS = {flags for *_, flags in CONFIGS.values() if flags}
GROUPS = {"fp8_block": (128, 128), "w4a16_g32_asym": (1, 32), "w4a8_int8": (1, 128), "mxfp8": (1, 32)} | dict.fromkeys(
    ("nvfp4", "nvfp4_a16"), (1, 16)
) | dict.fromkeys(("mxfp4", "mxfp4_a16"), (1, 32))  # fmt: skip


def stacked(arrays, prefix, suffix, axis=0):
    """One leaf of all experts as vLLM's parameter stacks it, gate rows first."""
    shards = ("w2",) if prefix == "w2" else ("w1", "w3")
    parts = [[np.atleast_1d(arrays[e, shard, suffix]) for shard in shards] for e in range(E)]
    return np.stack([np.concatenate(part, axis=axis) for part in parts])


@pytest.mark.parametrize("scheme", CONFIGS)
def test_dtypes_granularity_and_scales(scheme):
    """M188, M232: what the layer's kernels would be told; scales bit for bit those of the checkpoint."""
    arrays = stored_arrays(scheme)
    layer = loaded_bridge(scheme, arrays)
    config, (*stated, flag) = layer.quant_method.moe_quant_config, CONFIGS[scheme]
    found = config.quant_dtype, config.weight_quant_dtype, config.per_act_token_quant, config.per_out_ch_quant
    assert [*found, config.block_shape] == stated
    assert {name for name in FLAGS if getattr(config, name)} == ({flag} if flag else set())
    for number, prefix, n, k in ((1, "w13", 2 * I, H), (2, "w2", H, I)):
        scale = getattr(config, f"w{number}_scale")
        rows, columns = GROUPS.get(scheme, (1, k))
        expected = stacked(arrays, prefix, "weight_scale")
        if scheme != "fp8_tensor_static":
            assert scale.shape == (E, n // rows, k // columns)
        else:  # random scales of gate and up differ, which vLLM requantizes away
            assert scale.shape == ((E, 2) if prefix == "w13" else (E,))
            expected = expected.reshape(scale.shape)
        assert bits(scale) == bits(
            expected.astype(scale.float().numpy().dtype) if scale.element_size() == 4 else expected
        )
        zero_point = getattr(config, f"w{number}_zp")
        is_asymmetric = scheme.endswith("_asym")
        assert (
            zero_point is None
            if not is_asymmetric
            else bits(zero_point) == bits(stacked(arrays, prefix, "weight_zero_point"))
        )
    assert config.w1_bias is None and config.w2_bias is None


def test_static_scales_of_fp8():
    """M185: a1_scale and a2_scale are numbers, the largest of all experts and of gate and up."""
    arrays = dict(stored_arrays("fp8_tensor_static"))
    for expert in range(E):  # the pairs of gate and up that vLLM expects
        arrays[expert, "w3", "weight_scale"] = arrays[expert, "w1", "weight_scale"]
    config = loaded_bridge("fp8_tensor_static", arrays).quant_method.moe_quant_config
    for found, prefix in ((config.a1_scale, "w13"), (config.a2_scale, "w2")):
        assert found.shape == () and found == stacked(arrays, prefix, "input_scale").max()
    assert config.w1_scale.shape == (E,) and config.is_per_tensor
    assert [float(s) for s in config.w1_scale] == [arrays[e, "w1", "weight_scale"] for e in range(E)]
    assert config.a1_gscale is None and config.g1_alphas is None


@pytest.mark.parametrize("scheme", ["nvfp4", "nvfp4_modelopt", "nvfp4_a16", "nvfp4_a16_modelopt", "nvfp4_dynamic"])
def test_factors_of_nvfp4(scheme):
    """M150, M232: g_alphas = weight_scale_2 x input_scale, a_gscale = 1 / input_scale, whatever the file divides by."""
    arrays, divides = dict(stored_arrays(scheme)), "modelopt" not in scheme
    weight, inputs = ("weight_global_scale", "input_global_scale") if divides else ("weight_scale_2", "input_scale")
    for expert in range(E):
        arrays[expert, "w3", weight] = arrays[expert, "w1", weight]
    config = loaded_bridge(scheme, arrays).quant_method.moe_quant_config
    has_inputs = scheme in ("nvfp4", "nvfp4_modelopt")
    for number, prefix in ((1, "w13"), (2, "w2")):
        stored = stacked(arrays, prefix, weight)[:, 0].astype(np.float64)
        scale_2, input_scale = (1 / stored if divides else stored), 1.0
        gscale = getattr(config, f"a{number}_gscale")
        if has_inputs:
            all_inputs = stacked(arrays, prefix, inputs).astype(np.float64)
            input_scale = 1 / all_inputs.min() if divides else all_inputs.max()
            np.testing.assert_allclose(gscale, 1 / input_scale, rtol=2e-7)
        assert has_inputs == (gscale is not None)
        alphas = getattr(config, f"g{number}_alphas")
        assert alphas.shape == (E,) and alphas.dtype == torch.float32
        np.testing.assert_allclose(alphas, scale_2 * input_scale, rtol=3e-7)
        assert getattr(config, f"a{number}_scale") is None


def test_biases_clamps_and_unquantized_layers():
    """M27: biases are (E, 2I) and (E, H); an unquantized layer has a config too, which says so."""
    arrays = plain_arrays(bias=True)
    options = dict(has_bias=True, activation="swigluoai_uninterleave", swiglu_limit=7.0, swiglu_alpha=1.5)
    for layer in (
        loaded_bridge("fp8_channel", arrays, online=True, **options),
        loaded_bridge("bf16", arrays, **options),
    ):
        config = layer.quant_method.moe_quant_config
        assert bits(config.w1_bias) == bits(stacked(arrays, "w13", "bias"))
        assert bits(config.w2_bias) == bits(stacked(arrays, "w2", "bias"))
        assert (config.gemm1_clamp_limit, config.gemm1_alpha, config.gemm1_beta) == (7.0, 1.5, None)
    assert config.quant_dtype is config.weight_quant_dtype is config.w1_scale is None and not config.is_quantized


def test_axes_are_those_of_the_parameters():
    """M35, M198: int8 (E, 2I); Marlin's scales and zero points (E, groups, 2I)."""
    int8 = bridge_layer(torch_bridge.Int8OnlineMoEMethod())
    int8.load_weights([(f"experts.{name}", leaf) for name, leaf in full_precision().items()])
    config = int8.quant_method.moe_quant_config
    assert config.w1_scale.shape == (E, 2 * I) and config.w2_scale.shape == (E, H)
    group = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
    marlin = loaded_bridge(
        torch_bridge.CompressedTensorsWNA16MarlinMoEMethod(group, None), stored_arrays("w4a16_g32_asym")
    )
    config = marlin.quant_method.moe_quant_config
    assert config.w1_scale.shape == (E, H // 32, 2 * I) and config.w2_zp.shape == (E, I // 32, H // 8)
    assert bits(config.w1_scale.transpose(1, 2)) == bits(
        stacked(stored_arrays("w4a16_g32_asym"), "w13", "weight_scale").astype(np.float32)
    )


def full_precision():
    arrays = plain_arrays()
    return {
        "gate_up_proj": torch.from_numpy(stacked(arrays, "w13", "weight").astype(np.float32)).bfloat16(),
        "down_proj": torch.from_numpy(stacked(arrays, "w2", "weight").astype(np.float32)).bfloat16(),
    }


def test_config_of_flags():
    """What a method of one's own makes, by vLLM's rules."""
    make, scale = torch_bridge.FusedMoEQuantConfig.make, torch.ones(E, 2 * I, 1)
    config = make(FP8, per_act_token_quant=True, per_out_ch_quant=True, w1_scale=scale)
    assert config.w1_scale is scale and config.weight_quant_dtype == FP8 and config.is_per_act_token
    assert make("nvfp4").is_per_tensor and make(torch.int8, block_shape=[128, 64]).block_shape == [128, 64]
    assert make(weight_dtype="int4").use_int4_w4a16 and not make().is_quantized
    with pytest.raises(ValueError, match="excludes per_act_token_quant"):
        make(FP8, True, block_shape=[128, 128])
