"""The logits of a checkpoint's model in float32: transformers on a CPU, with the real values of the experts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def last_logprobs(folder: Path, experts: Mapping[str, Sequence[Any]], prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """(prompts, vocabulary) float32, of the token that follows each prompt.

    folder: of one of the small Qwen3-MoE or gpt-oss checkpoints of these tests, whose tensors outside the experts are
    not quantized. experts: by the number of a layer, ``vllm_formats.Values``.
    """
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    tensors = {
        name: tensor.float()
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
        if ".mlp.experts." not in name
    }
    for layer, values in experts.items():
        of_experts = _gpt_oss if config.model_type == "gpt_oss" else _concatenated
        parts = of_experts(*(None if value is None else value.float().cpu() for value in values))
        tensors |= {f"model.layers.{layer}.mlp.experts.{name}": tensor for name, tensor in parts.items()}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(tensors)
    with torch.inference_mode():
        rows = [model(torch.tensor([list(prompt)])).logits[0, -1] for prompt in prompts]
    return torch.stack(rows).log_softmax(-1)


def _concatenated(w13: torch.Tensor, w2: torch.Tensor, *biases: None) -> dict[str, torch.Tensor]:
    return dict(gate_up_proj=w13.flatten(1, 2), down_proj=w2)


def _gpt_oss(
    w13: torch.Tensor, w2: torch.Tensor, w13_bias: torch.Tensor, w2_bias: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Matrices are transposed, gate and up are neighbours."""
    return dict(
        gate_up_proj=w13.permute(0, 3, 2, 1).flatten(2),
        gate_up_proj_bias=w13_bias.transpose(1, 2).flatten(1),
        down_proj=w2.transpose(1, 2),
        down_proj_bias=w2_bias,
    )
