"""Tiny MoE checkpoints quantized by llm-compressor, with what a reader must make of them.

    python write.py OUT             (in the environment of requirements.txt; `make test-writers` does it)

For each family and scheme: OUT/<family>-<scheme>/ holds config.json and model.safetensors exactly as llm-compressor
saved them, and expected.npz: ``input_ids`` (S,), ``logits`` (S, vocab) float32 of transformers running on the
decompressed weights without activation quantization, and for every quantized Linear ``sha256:<module>``, the hash of
its little-endian float32 weight as compressed_tensors decompresses it in float32.
"""

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB, SEED = 64, 20
# 144 and 136 differ and leave ragged 128 x 128 blocks on both axes
COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=144,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    num_experts_per_tok=2,
)
FAMILIES = {
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**COMMON, num_experts=5, moe_intermediate_size=136, intermediate_size=136, norm_topk_prob=True),
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**COMMON, num_local_experts=4, intermediate_size=136)),
}
SCHEMES = {"fp8": "FP8", "fp8_dynamic": "FP8_DYNAMIC", "fp8_block": "FP8_BLOCK", "w8a8": "W8A8"}
IGNORE = ["lm_head", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$"]
PROMPT = [5, 17, 60, 3, 44, 44, 8, 61, 12, 30, 2]


def build(family: str, directory: Path) -> None:
    """A bfloat16 model with weights of unit gain, so that a wrong expert shows in the logits."""
    torch.manual_seed(SEED)
    cls, config = FAMILIES[family]
    model = cls(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.to(torch.bfloat16).save_pretrained(directory)


def quantize(source: Path, target: Path, preset: str) -> None:
    """llm-compressor's oneshot with random tokens for calibration; every expert sees all of them."""
    generator = torch.Generator().manual_seed(SEED)
    rows = torch.randint(0, VOCAB, (8, 32), generator=generator).tolist()
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * 32] * 8})
    oneshot(
        model=AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16),
        processor=tokenizer(),
        dataset=data,
        recipe=QuantizationModifier(targets="Linear", scheme=preset, ignore=IGNORE),
        num_calibration_samples=8,
        max_seq_length=32,
        shuffle_calibration_samples=False,
        output_dir=str(target),
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """oneshot wants one; the calibration data are ids already, so it is never used."""
    words = WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="t0", pad_token="t0")


def decompress(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint in float32: quantized Linears by compressed_tensors' own ``dequantize``."""
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    args = QuantizationArgs(**group["weights"])
    tensors = load_file(directory / "model.safetensors")
    plain = {}
    for name, value in tensors.items():
        if name.endswith(("_scale", "_zero_point")):
            continue
        scale = tensors.get(f"{name}_scale")
        if scale is not None:
            value = dequantize(value, scale.float(), args=args, dtype=torch.float32)
        plain[name] = value.float().contiguous()
    return plain


def expected(directory: Path) -> dict[str, np.ndarray]:
    """The contents of expected.npz. transformers loads the plain weights from a directory, like any checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    quantized = sorted(name.removesuffix("_scale") for name in tensors if name.endswith("weight_scale"))
    plain = decompress(directory)
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        save_file({hub_name(name): value for name, value in plain.items()}, Path(folder) / "model.safetensors")
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"] or info["unexpected_keys"]:
        raise RuntimeError(f"transformers did not take the decompressed weights: {info}")
    with torch.no_grad():
        logits = model.eval()(torch.tensor([PROMPT])).logits[0]
    hashes = {
        f"sha256:{name.removesuffix('.weight')}": np.array(hashlib.sha256(plain[name].numpy().tobytes()).hexdigest())
        for name in quantized
    }
    return {"input_ids": np.array(PROMPT, np.int32), "logits": logits.numpy(), **hashes}


def hub_name(name: str) -> str:
    """Mixtral's expert tensors under the names transformers reads; llm-compressor writes the other families' names."""
    if "block_sparse_moe" in name:
        for ours, theirs in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
            name = name.replace(ours, theirs)
    return name


def main(out: Path) -> None:
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "bf16"
            build(family, source)
            for scheme, preset in SCHEMES.items():
                raw, target = Path(folder) / scheme, out / f"{family}-{scheme}"
                quantize(source, raw, preset)
                target.mkdir(parents=True, exist_ok=True)
                for name in ("config.json", "model.safetensors"):
                    shutil.copyfile(raw / name, target / name)
                np.savez_compressed(target / "expected.npz", **expected(target))
                print(target.name, (target / "model.safetensors").stat().st_size)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
