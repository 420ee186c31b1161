"""compressed-tensors as judge: we read its files bit for bit, and quantize as it does where the rules agree."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize as judge_fake_quantize
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp
from loguru import logger

from moe_jax import MoEConfig
from moe_jax.quantization import SCHEMES, dequantize, dequantize_tensor, fake_quantize, method_for, quantize_weight

logger.disable("compressed_tensors")  # one line per ragged block

E, H, I = 2, 200, 160  # noqa: E741 - ragged 128 x 128 blocks in both directions
PRESETS = {"fp8_tensor_static": "FP8", "fp8_channel": "FP8_DYNAMIC", "fp8_block": "FP8_BLOCK", "int8_w8a8": "W8A8"}
FORMATS = {"fp8": "float-quantized", "int8": "int-quantized"}


def scheme_of(name):
    return QuantizationScheme(targets=["Linear"], **PRESET_SCHEMES[PRESETS[name]])


def compressor_of(name):
    return BaseCompressor.get_value_from_registry(FORMATS[name.partition("_")[0]])


def qparams(weight, args):
    """compressed-tensors' scale of a weight, one per extent."""
    match args.strategy:
        case "tensor":
            low, high = weight.min().reshape(1), weight.max().reshape(1)
        case "channel":
            low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        case "block":
            rows = [torch.stack([t.amin() for t in r.split(128, 1)]) for r in weight.split(128)]
            low = torch.stack(rows)
            high = torch.stack([torch.stack([t.amax() for t in r.split(128, 1)]) for r in weight.split(128)])
    return calculate_qparams(low, high, args)[0]


def bits(array):
    return np.asarray(array).view(np.uint8)


def as_numpy(tensor):
    """torch -> NumPy with ml_dtypes for what NumPy lacks."""
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def stack(files, key):
    """Leaves as a loader stacks them: w1 over w3 per expert."""
    first = [[as_numpy(files[e, p][key]) for p in ("w1", "w3")] for e in range(E)]
    return np.stack([np.concatenate(pair) for pair in first]), np.stack(
        [as_numpy(files[e, "w2"][key]) for e in range(E)]
    )


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.sample(2)
def test_reads_what_it_compressed(name, scale_dtype):
    """Its own decompression, run in float32, and ours: the same bits."""
    torch.manual_seed(0)
    scheme, compressor = scheme_of(name), compressor_of(name)
    files, plain = {}, {}
    for e in range(E):
        for projection, shape in (("w1", (I, H)), ("w3", (I, H)), ("w2", (H, I))):
            weight = torch.randn(shape) * 10.0 ** (-e)
            weight[3] = 0
            scale = qparams(weight, scheme.weights).to(scale_dtype)
            files[e, projection] = compressor.compress({"weight": weight, "weight_scale": scale.float()}, scheme)
            files[e, projection]["weight_scale"] = scale
            wide = {**files[e, projection], "weight_scale": scale.float()}
            plain[e, projection] = compressor.decompress(wide, scheme)["weight"].numpy()
    leaves = {}
    for key in ("weight", "weight_scale"):
        leaves[f"w13_{key}"], leaves[f"w2_{key}"] = stack(files, key)
    if name == "fp8_tensor_static":
        leaves["w13_input_scale"], leaves["w2_input_scale"] = (
            np.full((E, 2), 0.02, np.float32),
            np.full(E, 0.5, np.float32),
        )
    config = MoEConfig(E, 1, H, I, scheme=SCHEMES[name])
    weights = method_for(name).process_weights_after_loading(leaves, config)
    w13, w2 = dequantize_tensor(weights.w13), dequantize_tensor(weights.w2)
    for e in range(E):
        for ours, projection in ((w13[e, 0], "w1"), (w13[e, 1], "w3"), (w2[e], "w2")):
            assert plain[e, projection].dtype == np.float32
            np.testing.assert_array_equal(bits(ours), bits(plain[e, projection]))


@pytest.mark.parametrize("name", ["fp8_tensor_static", "fp8_channel", "fp8_block"])
@pytest.mark.sample(2)
def test_fp8_weights_are_quantized_as_it_does(name):
    """Equal scales. It divides by them, as we do per channel: equal codes. With a reciprocal a tie may flip."""
    torch.manual_seed(1)
    scheme = scheme_of(name)
    weight = torch.randn(I, H)
    scale = qparams(weight, scheme.weights)
    expected = compressor_of(name).compress({"weight": weight, "weight_scale": scale}, scheme)["weight"]
    data, our_scale = quantize_weight(jnp.asarray(weight.numpy()), SCHEMES[name].weights)
    np.testing.assert_array_equal(np.asarray(our_scale).reshape(scale.shape), scale.numpy())
    step = np.abs(bits(data).astype(int) - bits(as_numpy(expected)).astype(int))
    assert step.max() <= (0 if name == "fp8_channel" else 1) and (step > 0).mean() < 1e-3


def test_int8_minus_128_is_read():
    """Its int8 quantizer takes amax / 127.5 as scale and reaches -128; ours stays within 127, but reads that code."""
    scheme, compressor = scheme_of("int8_w8a8"), compressor_of("int8_w8a8")
    weight = -torch.linspace(1, 2, 64)[:, None] * torch.tensor([[1.0, 0.5, 0.1]])
    scale = qparams(weight, scheme.weights)
    np.testing.assert_array_equal(scale.numpy(), weight.abs().amax(1, keepdim=True).numpy() / np.float32(127.5))
    packed = {"weight": weight, "weight_scale": scale}
    stored = compressor.compress(packed, scheme)
    assert (stored["weight"] == -128).any()
    fmt = SCHEMES["int8_w8a8"].weights
    ours = dequantize(jnp.asarray(stored["weight"].numpy()), jnp.asarray(scale[:, 0].numpy()), fmt)
    np.testing.assert_array_equal(bits(ours), bits(compressor.decompress(stored, scheme)["weight"].numpy()))
    assert np.asarray(quantize_weight(jnp.asarray(weight.numpy()), fmt)[0]).min() == -127


@pytest.mark.parametrize("name", ["fp8_channel", "fp8_tensor", "fp8_block"])
@pytest.mark.sample(2)
def test_fp8_activations_are_quantized_as_it_does(name):
    """3-D inputs, since its per-token simulation takes one scale for a whole 2-D input."""
    torch.manual_seed(2)
    x = torch.randn(3, 17, 256) * torch.logspace(-2, 2, 17)[:, None]
    activations = {
        "fp8_channel": dict(strategy="token"),
        "fp8_tensor": dict(strategy="tensor"),
        "fp8_block": dict(strategy="group", group_size=128),
    }[name]
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, dynamic=True, **activations)
    scale, zero_point = compute_dynamic_scales_and_zp(x, args, torch.nn.Module())
    expected = judge_fake_quantize(x, scale, zero_point, args).numpy()
    ours = np.asarray(fake_quantize(jnp.asarray(x.numpy()), SCHEMES[name].activations))
    if name == "fp8_channel":
        np.testing.assert_array_equal(ours, expected)
        return
    # Scales differ by an ulp (amax / 448, amax * (1 / 448)), or it divides where we multiply: a few ties flip.
    relative = np.abs(ours - expected) / np.maximum(np.abs(expected), 1e-9)
    assert (relative > 1e-6).mean() < 1e-3 and relative.max() <= 1 / 8 + 1e-6


def test_static_activations_are_quantized_as_it_does():
    torch.manual_seed(3)
    x, scale = torch.randn(64, 256) * 3, torch.tensor([0.015625])  # a power of two: reciprocal and division agree
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="tensor")
    assert (x.abs() > 448 * scale).any(), "some values must saturate"
    expected = judge_fake_quantize(x, scale, None, args).numpy()
    ours = fake_quantize(jnp.asarray(x.numpy()), SCHEMES["fp8_tensor_static"].activations, scale.numpy()[0])
    np.testing.assert_array_equal(ours, expected)
