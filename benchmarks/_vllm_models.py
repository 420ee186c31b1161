"""Models for vLLM's engine with random weights: configs on disk, and weights drawn before they are processed."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints.vllm_formats import FORMATS

_COMMON = dict(
    hidden_act="silu",
    max_position_embeddings=32768,
    torch_dtype="bfloat16",
    attention_dropout=0.0,
    initializer_range=0.02,
    use_cache=True,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
)
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _COMMON
    | dict(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        attention_bias=False,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
    ),
    "gpt-oss-120b": _COMMON
    | dict(
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        hidden_size=2880,
        intermediate_size=2880,
        num_local_experts=128,
        num_experts_per_tok=4,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=201088,
        attention_bias=True,
        rms_norm_eps=1e-5,
        rope_theta=150000,
        sliding_window=128,
        swiglu_limit=7.0,
        rope_scaling=dict(
            rope_type="yarn",
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=4096,
        ),
    ),
}
# Formats of MODELS -> quantization_config; attention stays in 16 bits on both sides.
QUANTIZATION: dict[str, Any] = {
    "bf16": None,
    "fp8_channel": FORMATS["ct_fp8_channel"].config,
    "fp8_block": FORMATS["fp8_block"].config,
    "w4a16_g128": FORMATS["ct_w4a16_g128"].config,
    "mxfp4": dict(
        quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router"]
    ),
}


def write_config(folder: Path, sizes: dict[str, Any], quantization: Any, layers: int) -> None:
    """config.json of a model, and nothing else: its weights are drawn in memory."""
    sizes = sizes | dict(num_hidden_layers=layers)
    if sizes["model_type"] == "gpt_oss":
        kinds = ("sliding_attention", "full_attention")
        sizes["layer_types"] = [kinds[i % 2] for i in range(layers)]
    if quantization is not None:
        sizes["quantization_config"] = quantization
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes))


def draw_weights(model: torch.nn.Module, *_: Any, **__: Any) -> None:
    """In place of vLLM's dummy weights, the same tiny numbers in every layer: what a checkpoint might hold."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    for name, tensor in model.state_dict().items():
        if not tensor.is_cuda or "cos_sin" in name:
            continue
        if "g_idx" in name or "weight_shape" in name:
            tensor.zero_()
        elif "scale" in name:
            if tensor.dtype == torch.uint8:
                tensor.random_(118, 122, generator=generator)
            else:
                tensor.fill_(1 / 480 if "weight_packed" in name else 1 / 4800)
        elif "norm" in name:
            tensor.fill_(1.0)
        elif tensor.dtype == torch.uint8:
            tensor.random_(0, 255, generator=generator)
        elif tensor.dtype == torch.int32:
            tensor.random_(-(1 << 31), (1 << 31) - 1, generator=generator)
        else:
            _draw(tensor, generator, 1.0 if "embed" in name or tensor.dim() < 2 else tensor.shape[-1] ** -0.5)


def _draw(tensor: torch.Tensor, generator: torch.Generator, size: float) -> None:
    flat = tensor.reshape(-1)
    if tensor.dtype == torch.float8_e4m3fn:
        size = 100.0
    for start in range(0, flat.numel(), 1 << 27):
        part = flat[start : start + (1 << 27)]
        part.copy_((torch.randn(part.numel(), device=part.device, generator=generator) * size).to(part.dtype))
