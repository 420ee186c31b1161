"""Whole models as the libraries write them: transformers saves, compressed-tensors quantizes the experts and saves.

Weights are quantized in bf16, so scales have the dtype that llm-compressor leaves in the files of a bf16 model.

FP8 by transformers itself is not here. transformers 5.23 saves such a Qwen3-MoE with a weight for each expert and one
scale tensor for all of them (``mlp.experts.gate_up_proj_scale_inv``). vLLM 0.24 passes over that name and goes on with
scales of 1. Nor are the groups of 128 of W8A16 here: vLLM 0.24 refuses experts of 8 bits in groups, so W8A16 is per
channel.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

_CT = "CompressedTensors"


@dataclasses.dataclass(frozen=True)
class Written:
    """One way to write the model.

    Args:
        preset: compressed-tensors' name of the scheme; None for the bf16 model as transformers saves it.
        method: the name of vLLM's method class.
        activations: how far activations are rounded: 16 or 8 bits.
        rows: what rounds rows as the checkpoint says, in tests/support/vllm_layers.py, where vLLM leaves them in 16
            bits.
        weights: what differs from the preset's arguments of weights.
        stored_as: compressed-tensors' name of the format, where the one that it infers is not the one that vLLM reads.
    """

    preset: str | None
    method: str
    activations: int = 16
    rows: str | None = None
    weights: dict[str, Any] = dataclasses.field(default_factory=dict)
    stored_as: str | None = None
    config: None = None  # vLLM finds it in config.json


WRITTEN: dict[str, Written] = {
    "written_bf16": Written(None, "UnquantizedFusedMoEMethod"),
    "written_fp8": Written("FP8", _CT + "W8A8Fp8MoEMethod", 8),
    "written_fp8_dynamic": Written("FP8_DYNAMIC", _CT + "W8A8Fp8MoEMethod", 8),
    "written_fp8_block": Written("FP8_BLOCK", _CT + "W8A8Fp8MoEMethod", 8),
    "written_w8a8": Written("W8A8", _CT + "W8A8Int8MoEMethod", 8, rows="int8_rows"),
    "written_w4a16": Written("W4A16", _CT + "WNA16MarlinMoEMethod"),
    "written_w4a16_asym": Written("W4A16_ASYM", _CT + "WNA16MarlinMoEMethod"),
    "written_w8a16": Written("W8A16", _CT + "WNA16MarlinMoEMethod", weights=dict(strategy="channel", group_size=-1)),
    "written_w4afp8": Written("W4AFP8", _CT + "W4A8Fp8MoEMethod", 8, stored_as="pack-quantized"),
    "written_nvfp4": Written("NVFP4", _CT + "W4A4Nvfp4MoEMethod"),
    "written_nvfp4a16": Written("NVFP4A16", _CT + "W4A4Nvfp4MoEMethod"),
    "written_mxfp4": Written("MXFP4", _CT + "W4A4Mxfp4MoEMethod"),
    "written_mxfp8": Written("MXFP8", _CT + "W8A8Mxfp8MoEMethod"),
}


def write(
    folder: Path,
    name: str,
    *,
    num_experts: int = 8,
    top_k: int = 2,
    hidden: int = 512,
    intermediate: int = 256,
    layers: int = 2,
    vocabulary: int = 1024,
) -> dict[str, tuple[Any, ...]]:
    """A Qwen3-MoE into a new folder, the same one each time.

    Gives (w13 (E, 2, I, H), w2 (E, H, I), None, None) by layer: compressed-tensors' own decompression in float32.
    """
    import torch
    from compressed_tensors import CompressionFormat
    from compressed_tensors.quantization import QuantizationArgs
    from safetensors.torch import load_file

    from tests.support.checkpoints import writers
    from tests.support.checkpoints.vllm_formats import IGNORED

    form = WRITTEN[name]
    config: dict[str, Any] = dict(
        hidden_size=hidden,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=intermediate,
        intermediate_size=2 * hidden,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=vocabulary,
        num_hidden_layers=layers,
        max_position_embeddings=4096,
        norm_topk_prob=True,
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
        plain = source = Path(beside) / "source"
        writers.save_random("Qwen3Moe", source, torch.bfloat16, seed=sum(map(ord, name)), **config)
        if form.preset is not None:
            scheme = writers.preset(form.preset)
            scheme.weights = QuantizationArgs(**scheme.weights.model_dump() | form.weights)
            if form.stored_as is not None:
                scheme.format = CompressionFormat(form.stored_as)
            source = Path(beside) / "target"
            groups = {"group_0": scheme}
            plain = writers.compress(
                plain, source, groups, IGNORED, dtype=torch.bfloat16, calibrate=_calibrate_like_llm_compressor
            )
        values = load_file(plain / "model.safetensors")
        source.rename(folder)

    def stacked(layer: int, projection: str) -> torch.Tensor:
        prefix = f"model.layers.{layer}.mlp.experts."
        return torch.stack([values[f"{prefix}{e}.{projection}_proj.weight"].float() for e in range(num_experts)])

    return {
        str(layer): (
            torch.stack([stacked(layer, "gate"), stacked(layer, "up")], dim=1),
            stacked(layer, "down"),
            None,
            None,
        )
        for layer in range(layers)
    }


def _calibrate_like_llm_compressor(tree: Any) -> None:
    """Scales of weights from their extremes, scales of inputs from those of what a random batch brings to each expert.

    gate and up of an expert have one global scale, the smaller one, and one scale of inputs.
    """
    import torch

    from tests.support.checkpoints import writers

    generator = torch.Generator().manual_seed(0)
    for expert in [module for module in tree.modules() if hasattr(module, "down_proj")]:
        gate, up, down = expert.gate_proj, expert.up_proj, expert.down_proj
        x = torch.randn(512, gate.in_features, generator=generator, dtype=torch.float32)
        h = torch.nn.functional.silu(x @ gate.weight.float().T) * (x @ up.weight.float().T)
        for linears, inputs in (((gate, up), x), ((down,), h)):
            overall = min(map(writers.weight_global_scale, linears)) if hasattr(gate, "weight_global_scale") else None
            for linear in linears:
                writers.calibrate_weight(linear, overall)
                writers.calibrate_inputs(linear, inputs.min(), inputs.max())
