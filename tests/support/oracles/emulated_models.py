"""Logits of whole checkpoints: transformers on the weights that compressed-tensors decompresses, and the command's own.

Where activations are quantized, the input of each Linear of the experts and of attention passes a rule first.
"""

import functools

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moe_jax import cli
from tests.support.checkpoints import writers

PROMPT = [5, 17, 50, 3, 44, 44, 8, 61, 12, 30, 2]


def quantized_qwen3(tmp_path_factory, group_size=None):
    """directory(preset): a Qwen3-MoE of one layer that compressed-tensors quantized, made once."""
    root = tmp_path_factory.mktemp("quantized")
    source = root / "qwen3_moe-bf16"
    writers.write_model("qwen3_moe", source, num_hidden_layers=1)

    def directory(preset):
        target = root / preset
        if not target.exists():
            scheme = writers.preset(preset).model_copy(deep=True)
            if group_size is not None:
                scheme.weights.group_size = group_size
            writers.quantize_with_compressed_tensors(source, target, "qwen3_moe", scheme)
        return target

    return directory


def plain_model(checkpoint, family="qwen3_moe"):
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


def assert_logits(tmp_path, checkpoint, expected, fraction=2e-3):
    """The command's logits within a fraction of the expected ones' range."""
    actual = run_logits(tmp_path, checkpoint)
    assert actual.shape == expected.shape and actual.dtype == np.float32
    worst = np.abs(actual - expected).max() / np.ptp(expected)
    assert worst <= fraction, f"max abs difference is {worst:.2e} of the logit range, allowed {fraction:.0e}"


def assert_logits_with_quantized_activations(tmp_path, checkpoint, fake, family="qwen3_moe", scales=None):
    """fake: (row (1, K), the number that the file stores for the Linear's inputs, None without ``scales``) -> the row
    as its format holds it. scales: (suffix of these numbers, which of two the experts of a layer share)."""
    model = plain_model(checkpoint, family)
    unquantized, tensors = logits_of(model), load_file(checkpoint / "model.safetensors")
    of_experts = {} if scales is None else _input_scales(tensors, *scales)
    for layer, decoder in enumerate(model.model.layers):
        stored = of_experts.get(layer, (None, None))
        rules = [functools.partial(fake, stored=stored[is_hidden]) for is_hidden in (False, True)]
        decoder.mlp.experts.forward = _emulated_forward(decoder.mlp.experts, *rules)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            module = f"model.layers.{layer}.self_attn.{name}"
            assert f"{module}.weight_scale" in tensors or f"{module}.weight_scale_inv" in tensors
            own = None if scales is None else tensors[f"{module}.{scales[0]}"].item()
            hook = _quantizes_input(functools.partial(fake, stored=own))
            getattr(decoder.self_attn, name).register_forward_pre_hook(hook)
    expected = logits_of(model)
    assert np.abs(expected - unquantized).max() > 1e-3 * np.ptp(expected), "the emulation quantizes nothing"
    assert_logits(tmp_path, checkpoint, expected)


def fake_quantized(scheme, x, *, stored):
    """compressed-tensors' fake_quantize of one row (1, K).

    Dynamic scales follow the kernels' rule (amax / 448, amax / 127); compressed-tensors' simulation of int8 uses 127.5
    and one scale for a whole 2-D input, so the scale is computed here and only applied by compressed-tensors.
    """
    if scheme == "int8_w8a8":
        args = QuantizationArgs(num_bits=8, type="int", strategy="channel", symmetric=True)
        scale = x.abs().amax(1, keepdim=True) / 127
    elif scheme == "fp8_channel":
        args = QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
        scale = x.abs().amax(1, keepdim=True) / 448
    elif scheme == "fp8_tensor_static":
        args = QuantizationArgs(num_bits=8, type="float", strategy="tensor", symmetric=True)
        scale = torch.tensor([stored])
    elif scheme == "fp8_block":
        args = QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
        return torch.cat(
            [fake_quantize(c, c.abs().amax(1, keepdim=True) / 448, None, args) for c in x.split(128, 1)], 1
        )
    return fake_quantize(x, scale, None, args)


def _quantizes_input(fake):
    def hook(module, inputs):
        (x,) = inputs
        rows = x.reshape(-1, x.shape[-1])
        return torch.cat([fake(row[None]) for row in rows]).reshape(x.shape)

    return hook


def _emulated_forward(experts, fake_input, fake_hidden):
    def forward(hidden, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden)
        for token, slot in np.ndindex(*top_k_index.shape):
            e = top_k_index[token, slot]
            x = fake_input(hidden[token : token + 1])
            gate, up = (x @ experts.gate_up_proj[e].T).chunk(2, dim=-1)
            h = fake_hidden(experts.act_fn(gate) * up)
            out[token] += top_k_weights[token, slot] * (h @ experts.down_proj[e].T)[0]
        return out

    return forward


def _input_scales(tensors, suffix, choose):
    """layer -> [of inputs, of hidden values]: what ``choose(one, other)`` leaves of its experts' stored numbers."""
    found = {}
    for name, value in tensors.items():
        if ".experts." in name and name.endswith(suffix):
            layer, is_hidden = int(name.split(".")[2]), ".w2." in name or ".down_proj." in name
            pair = found.setdefault(layer, [None, None])
            pair[is_hidden] = value.item() if pair[is_hidden] is None else choose(pair[is_hidden], value.item())
    return found
