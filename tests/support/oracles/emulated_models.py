"""Logits of whole checkpoints: transformers on the weights that compressed-tensors decompresses, and the command's own.

Where activations are quantized, the input of each Linear of the experts passes a rule first; attention stays as it is.
"""

import functools

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moe_jax import cli
from tests.support.checkpoints import writers

PROMPT = [5, 17, 90, 3, 44, 44, 8, 61, 12, 70, 2]


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


def assert_logits_with_quantized_activations(tmp_path, checkpoint, fake, family="qwen3_moe"):
    """fake: (row (1, K), layer, whether it is of the hidden product) -> the row as its format holds it."""
    model = plain_model(checkpoint, family)
    unquantized = logits_of(model)
    for layer, decoder in enumerate(model.model.layers):
        decoder.mlp.experts.forward = _emulated_forward(decoder.mlp.experts, functools.partial(fake, layer=layer))
    expected = logits_of(model)
    assert np.abs(expected - unquantized).max() > 1e-3 * np.ptp(expected), "the emulation quantizes nothing"
    assert_logits(tmp_path, checkpoint, expected)


def _emulated_forward(experts, fake):
    def forward(hidden, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden)
        for token, slot in np.ndindex(*top_k_index.shape):
            e = top_k_index[token, slot]
            x = fake(hidden[token : token + 1], is_hidden=False)
            gate, up = (x @ experts.gate_up_proj[e].T).chunk(2, dim=-1)
            h = fake(experts.act_fn(gate) * up, is_hidden=True)
            out[token] += top_k_weights[token, slot] * (h @ experts.down_proj[e].T)[0]
        return out

    return forward


def input_scales(checkpoint, suffix, choose):
    """layer -> [of inputs, of hidden values]: what ``choose(one, other)`` leaves of its experts' stored numbers."""
    found = {}
    for name, value in load_file(checkpoint / "model.safetensors").items():
        if ".experts." in name and name.endswith(suffix):
            layer, is_hidden = int(name.split(".")[2]), ".w2." in name or ".down_proj." in name
            pair = found.setdefault(layer, [None, None])
            pair[is_hidden] = value.item() if pair[is_hidden] is None else choose(pair[is_hidden], value.item())
    return found
