"""Models for vLLM's engine with random weights: configs on disk, and weights drawn before they are processed."""

import json
import weakref
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints.vllm_formats import FORMATS


def _with_attention(form: str, ignored: str) -> dict[str, Any]:
    """The config of checkpoints as they are published: attention is quantized too, but no router and no head."""
    config = FORMATS[form].config
    return config | {ignored: [name for name in config[ignored] if "self_attn" not in name]}


# Formats -> quantization_config; but for "_dense", attention stays in 16 bits on both sides.
QUANTIZATION: dict[str, Any] = {
    "bf16": None,
    "fp8_channel": FORMATS["ct_fp8_channel"].config,
    "fp8_channel_dense": _with_attention("ct_fp8_channel", "ignore"),
    "fp8_block": FORMATS["fp8_block"].config,
    "fp8_block_dense": _with_attention("fp8_block", "modules_to_not_convert"),
    "w4a16_g128": FORMATS["ct_w4a16_g128"].config,
    "mxfp4": dict(
        quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router"]
    ),
}


_drawn: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


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
    """In place of vLLM's dummy weights, the same tiny numbers in every layer: what a checkpoint might hold.

    vLLM's loader calls this for the model and then for each module of it, which it then leaves as it is: the names of a
    module alone do not say what it is, and all matrices would begin with the same numbers.
    """
    if model in _drawn:
        return
    _drawn.update(model.modules())
    first = next(model.parameters(), None)
    if first is None:
        raise ValueError(f"a {type(model).__name__} without parameters has no weights to draw")
    device = first.device
    generator = torch.Generator(device=device).manual_seed(0)
    for name, tensor in model.state_dict().items():
        if tensor.device != device or "cos_sin" in name:
            continue
        if "g_idx" in name or "weight_shape" in name:
            tensor.zero_()
        elif "scale" in name:
            if tensor.dtype == torch.uint8:
                tensor.random_(118, 122, generator=generator)
            else:
                tensor.fill_(1 / 480 if "weight_packed" in name else 1 / 4800)
        elif "bias" in name:  # small: with larger ones all tokens are routed to the same experts
            _draw(tensor, generator, 0.01)
        elif "norm" in name:
            tensor.fill_(1.0)
        elif tensor.dtype == torch.uint8:
            tensor.random_(0, 255, generator=generator)
        elif tensor.dtype == torch.int32:
            tensor.random_(-(1 << 31), (1 << 31) - 1, generator=generator)
        else:
            _draw(tensor, generator, 1.0 if "embed" in name or tensor.dim() < 2 else tensor.shape[-1] ** -0.5)


def _draw(tensor: torch.Tensor, generator: torch.Generator, size: float) -> None:
    flat = tensor.reshape(-1)  # a copy of a tensor that is not contiguous
    largest = float("inf")
    if tensor.dtype == torch.float8_e4m3fn:
        size, largest = 100.0, 448.0  # torch casts anything above to NaN
    for start in range(0, flat.numel(), 1 << 27):
        part = flat[start : start + (1 << 27)]
        drawn = torch.randn(part.numel(), device=part.device, generator=generator) * size
        part.copy_(drawn.clamp_(-largest, largest).to(part.dtype))
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))
