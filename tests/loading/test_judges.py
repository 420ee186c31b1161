"""Logits and MoE blocks against transformers running on the weights that compressed-tensors itself decompresses."""

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from transformers import AutoModelForCausalLM

import moe_jax
from moe_jax import cli
from tests.support.checkpoints import writers

pytestmark = pytest.mark.usefixtures("quick_compilation")

FAMILIES = ("qwen3_moe", "mixtral")
PRESETS = {"fp8_tensor_static": "FP8", "fp8_channel": "FP8_DYNAMIC", "fp8_block": "FP8_BLOCK", "int8_w8a8": "W8A8"}
PROMPT = [5, 17, 90, 3, 44, 44, 8, 61, 12, 70, 2]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """directory(family, scheme): a checkpoint of the real writers, made once; "plain" directories sit beside them."""
    root = tmp_path_factory.mktemp("judges")

    def directory(family, scheme):
        source = root / f"{family}-bf16"
        if not source.exists():
            writers.write_model(family, source)
        if scheme == "bf16":
            return source
        base, _, spelling = scheme.partition("/")
        target = root / f"{family}-{scheme.replace('/', '-')}"
        if target.exists():
            return target
        if base == "bf16":
            writers.as_fused(source, target)
        elif spelling == "native":
            writers.as_native_fp8(directory(family, base), target)
        else:
            writer_scheme = writers.preset(PRESETS[base])
            # compressed-tensors packs weight-only int8 in words, so there the config alone says weight-only
            if spelling == "weight_only" and base != "int8_w8a8":
                writer_scheme.input_activations = None
            writers.quantize_with_compressed_tensors(source, target, family, writer_scheme)
            if spelling == "weight_only" and base == "int8_w8a8":
                writers.drop_activation_quantization(target)
        return target

    return directory


def plain_model(checkpoint, family):
    """transformers in float32 on the decompressed weights."""
    plain = checkpoint.with_name(checkpoint.name.replace("-native", "") + "-decompressed")
    source = plain if plain.exists() else checkpoint.with_name(f"{family}-bf16")
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()


def logits_of(model):
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0].numpy()


def run_logits(tmp_path, checkpoint):
    """Float32 logits through the command's entry point."""
    out = tmp_path / "logits.npy"
    ids = ",".join(map(str, PROMPT))
    args = ["run", "--model", str(checkpoint), "--input-ids", ids, "--max-new-tokens", "0", "--dtype", "float32"]
    assert cli.main([*args, "--logits-out", str(out)]) == 0
    return np.load(out)


def assert_close_in_range(actual, expected, fraction):
    assert actual.shape == expected.shape and actual.dtype == np.float32
    spread = expected.max() - expected.min()
    worst = np.abs(actual - expected).max() / spread
    assert worst <= fraction, f"max abs difference is {worst:.2e} of the logit range, allowed {fraction:.0e}"


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
    assert_close_in_range(run_logits(tmp_path, checkpoint), logits_of(plain_model(checkpoint, family)), 2e-3)


ACTIVATIONS = ["fp8_tensor_static", "fp8_channel", "fp8_block", "fp8_block/native", "int8_w8a8"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", ACTIVATIONS)
@pytest.mark.sample(10)
def test_logits_with_quantized_activations(checkpoints, tmp_path, family, scheme):
    """Expert inputs and intermediates pass compressed-tensors' own fake_quantize; attention stays unquantized."""
    checkpoint = checkpoints(family, scheme)
    model = plain_model(checkpoint, family)
    emulate_activation_quantization(model, checkpoint, scheme.partition("/")[0])
    expected = logits_of(model)
    unquantized = logits_of(plain_model(checkpoint, family))
    spread = expected.max() - expected.min()
    assert np.abs(expected - unquantized).max() > 1e-3 * spread, "the emulation quantizes nothing"
    assert_close_in_range(run_logits(tmp_path, checkpoint), expected, 2e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
@pytest.mark.sample(9)
def test_block_outputs(checkpoints, family, scheme):
    """Each layer's MoE block alone, so that an error in one layer is not diluted by the rest of the model."""
    import jax.numpy as jnp

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


def emulate_activation_quantization(model, checkpoint, scheme):
    """Replace the experts' forward by one that fake-quantizes the input of each Linear.

    Dynamic scales follow the kernels' rule (amax / 448, amax / 127); compressed-tensors' simulation of int8 uses 127.5
    and one scale for a whole 2-D input, so the scale is computed here and only applied by compressed-tensors.
    """
    from safetensors.torch import load_file

    stored = load_file(checkpoint / "model.safetensors")
    for layer, decoder in enumerate(model.model.layers):
        static = None
        if scheme == "fp8_tensor_static":
            scales = {k: v.item() for k, v in stored.items() if f"layers.{layer}." in k and k.endswith("input_scale")}
            scales = {k: v for k, v in scales.items() if ".experts." in k}
            down = [v for k, v in scales.items() if ".w2." in k or ".down_proj." in k]
            up = [v for k, v in scales.items() if not (".w2." in k or ".down_proj." in k)]
            static = (max(up), max(down))
        experts = decoder.mlp.experts
        experts.forward = _emulated_forward(experts, scheme, static)


def _emulated_forward(experts, scheme, static):
    def forward(hidden, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden)
        for token in range(hidden.shape[0]):
            for slot in range(top_k_index.shape[1]):
                e = top_k_index[token, slot]
                x = _fake(hidden[token : token + 1], scheme, static and static[0])
                gate, up = (x @ experts.gate_up_proj[e].T).chunk(2, dim=-1)
                h = _fake(experts.act_fn(gate) * up, scheme, static and static[1])
                out[token] += top_k_weights[token, slot] * (h @ experts.down_proj[e].T)[0]
        return out

    return forward


def _fake(x, scheme, static_scale):
    """compressed-tensors' fake_quantize of one row (1, K)."""
    if scheme == "int8_w8a8":
        args = QuantizationArgs(num_bits=8, type="int", strategy="channel", symmetric=True)
        scale = x.abs().amax(1, keepdim=True) / 127
    elif scheme == "fp8_channel":
        args = QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
        scale = x.abs().amax(1, keepdim=True) / 448
    elif scheme == "fp8_tensor_static":
        args = QuantizationArgs(num_bits=8, type="float", strategy="tensor", symmetric=True)
        scale = torch.tensor([static_scale])
    elif scheme == "fp8_block":
        args = QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
        return torch.cat(
            [fake_quantize(c, c.abs().amax(1, keepdim=True) / 448, None, args) for c in x.split(128, 1)], 1
        )
    return fake_quantize(x, scale, None, args)
