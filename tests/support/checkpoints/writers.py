"""Checkpoints written by the real tools, for tests: transformers saves, compressed-tensors quantizes and decompresses.

transformers 5 holds experts fused, so compressed-tensors has no Linear to act on; we hang the tensors of the saved file
into a tree of ``torch.nn.Linear`` under their disk names and let compressed-tensors work on that tree.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.nvfp4 import base as nvfp4
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from loguru import logger
from safetensors.torch import load_file, save_file

logger.disable("compressed_tensors")  # one line per ragged block; ragged blocks are the point here

VOCAB = 96
SHARED = dict(
    vocab_size=VOCAB,
    hidden_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=64,
    num_experts_per_tok=2,
)
# 160 and 192 leave ragged 128 x 128 blocks on both axes
MODELS = {
    "qwen3_moe": (
        "Qwen3Moe",
        dict(num_experts=6, moe_intermediate_size=160, intermediate_size=96, norm_topk_prob=True),
    ),
    "mixtral": ("Mixtral", dict(num_local_experts=4, intermediate_size=160)),
}
# our schemes by compressed-tensors' names
PRESETS = {"fp8_tensor_static": "FP8", "fp8_channel": "FP8_DYNAMIC", "fp8_block": "FP8_BLOCK", "int8_w8a8": "W8A8"}
IGNORE = {"qwen3_moe": ["re:.*mlp.gate$", "lm_head"], "mixtral": ["re:.*block_sparse_moe.gate$", "lm_head"]}


def write_model(family: str, directory: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **config) -> None:
    """``save_random`` at this module's sizes."""
    name, options = MODELS[family]
    save_random(name, directory, dtype, seed, **SHARED | options | config)


def save_random(
    name: str,
    directory: Path,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    architecture: str = "CausalLM",
    **config,
):
    """Save transformers' ``<name>For<architecture>`` with random weights, and return the model."""
    torch.manual_seed(seed)
    cls = getattr(transformers, f"{name}For{architecture}")
    model = cls(cls.config_class(**config)).eval()
    randomize(model)
    model.to(dtype).save_pretrained(directory)
    return model


def randomize(model: torch.nn.Module) -> None:
    """Matrices that keep the size of what passes, so that a wrong expert shows; norms, biases and correction biases are
    random too, so that none can be forgotten."""
    buffers = [(name, value) for name, value in model.named_buffers() if "correction_bias" in name]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *buffers]:
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.3)


def preset(name: str) -> QuantizationScheme:
    """A compressed-tensors preset (FP8, FP8_DYNAMIC, FP8_BLOCK, W8A8 ...) applied to every Linear."""
    return QuantizationScheme(targets=["Linear"], **PRESET_SCHEMES[name])


def quantize_with_compressed_tensors(source: Path, target: Path, family: str, scheme: QuantizationScheme) -> Path:
    """``compress`` with one scheme for all but the router and the head."""
    return compress(source, target, {"group_0": scheme}, IGNORE[family])


def compress(
    source: Path,
    target: Path,
    groups: dict[str, QuantizationScheme],
    ignore: list[str],
    *,
    dtype: torch.dtype = torch.float32,
    calibrate: Callable[[torch.nn.Module], None] | None = None,
) -> Path:
    """Write ``target`` (compressed) and ``target``-decompressed (what compressed-tensors decompresses, float32).

    dtype: of the weights while they are quantized, which scales get too. calibrate: what fills the scales; without it
    static activation scales are distinct from Linear to Linear, and suit unit-variance inputs.
    Returns the directory of the decompressed model.
    """
    tensors = load_file(source / "model.safetensors")
    tree, rest = _linear_tree({name: value.to(dtype) for name, value in tensors.items()})
    apply_quantization_config(tree, QuantizationConfig(config_groups=groups, ignore=ignore))
    (calibrate or _calibrate)(tree)
    compressor = ModelCompressor.from_pretrained_model(tree)
    compressor.compress_model(tree)
    compressed = {name: value.contiguous() for name, value in tree.state_dict().items()}
    config_dict = json.loads((source / "config.json").read_text())

    target.mkdir(parents=True)
    save_file({**{k: tensors[k] for k in rest}, **_keep_dtype(compressed, tensors)}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config_dict))
    compressor.update_config(str(target))

    # It multiplies in the scales' dtype, and FP4 in bfloat16, otherwise, which rounds the product.
    for parameter in tree.parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    in_float32 = functools.partial(nvfp4.unpack_fp4_from_uint8, dtype=torch.float32)
    with mock.patch.object(nvfp4, "unpack_fp4_from_uint8", in_float32):
        compressor.decompress_model(tree)
    plain = target.with_name(target.name + "-decompressed")
    plain.mkdir()
    state = {name: value.float().contiguous() for name, value in tree.state_dict().items() if name in tensors}
    save_file(
        {**{k: v.float() for k, v in rest.items()}, **state}, plain / "model.safetensors", metadata={"format": "pt"}
    )
    (plain / "config.json").write_text(json.dumps({**config_dict, "dtype": "float32"}))
    return plain


def _keep_dtype(compressed, originals):
    """Unquantized Linears keep the file's own dtype; quantization ran in float32."""
    return {
        name: originals[name] if name in originals and value.dtype == torch.float32 else value
        for name, value in compressed.items()
    }


def _linear_tree(tensors):
    """Nested modules with a Linear for every 2-D ``X.weight`` but embeddings; returns (tree, the remaining tensors)."""
    tree, rest = torch.nn.Module(), {}
    for name, value in tensors.items():
        module_name, _, leaf = name.rpartition(".")
        if leaf != "weight" or value.ndim != 2 or "embed_tokens" in name:
            rest[name] = value
            continue
        linear = torch.nn.Linear(value.shape[1], value.shape[0], bias=False)
        linear.weight = torch.nn.Parameter(value.clone(), requires_grad=False)
        *parents, last = module_name.split(".")
        node = tree
        for part in parents:
            if not hasattr(node, part):
                node.add_module(part, torch.nn.Module())
            node = getattr(node, part)
        node.add_module(last, linear)
    return tree, rest


def _calibrate(tree) -> None:
    """Min-max weight scales as a writer's observer computes them; static input scales differ from Linear to Linear."""
    for index, module in enumerate(m for m in tree.modules() if getattr(m, "quantization_scheme", None)):
        calibrate_weight(module)
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.008 + 0.0001 * (index % 7))
        if hasattr(module, "input_global_scale"):
            module.input_global_scale.data.fill_(448 * 6 / (8 + index % 7))


def calibrate_weight(module: torch.nn.Module, global_scale: torch.Tensor | None = None) -> None:
    """Fill the weight scales of a Linear from the extremes of its weight. global_scale: another than its own."""
    args = module.quantization_scheme.weights
    if global_scale is None and hasattr(module, "weight_global_scale"):
        global_scale = weight_global_scale(module)
    if global_scale is not None:
        module.weight_global_scale.data.copy_(global_scale)
    scale, zero_point = calculate_qparams(*_ranges(module.weight.data, args), args, global_scale=global_scale)
    module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
    if not args.symmetric:
        module.weight_zero_point.data.copy_(zero_point.reshape(module.weight_zero_point.shape))


def weight_global_scale(module: torch.nn.Module) -> torch.Tensor:
    """What a Linear's own weight asks for."""
    return generate_gparam(module.weight.data.min(), module.weight.data.max())


def calibrate_inputs(module: torch.nn.Module, low: torch.Tensor, high: torch.Tensor) -> None:
    """Fill the static scales of a Linear's inputs, if it has any, from their extremes."""
    if hasattr(module, "input_scale"):
        scale, _ = calculate_qparams(low, high, module.quantization_scheme.input_activations)
        module.input_scale.data.copy_(scale)
    if hasattr(module, "input_global_scale"):
        module.input_global_scale.data.copy_(generate_gparam(low, high))


def _ranges(weight, args):
    strategy = args.strategy
    if strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if strategy == "block":
        rows, columns = args.block_structure
        n, k = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -k % columns, 0, -n % rows))
        blocks = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    if strategy in ("group", "tensor_group"):
        groups = weight.unflatten(-1, (-1, args.group_size))
        return groups.amin(-1), groups.amax(-1)
    raise NotImplementedError(strategy)


def drop_activation_quantization(directory: Path) -> None:
    """Make a compressed-tensors checkpoint weight-only by its config alone."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    path.write_text(json.dumps(config))


def as_native_fp8(source: Path, target: Path) -> None:
    """Rewrite a compressed-tensors FP8_BLOCK checkpoint in DeepSeek's layout: ``weight_scale_inv``, ``fp8`` config."""
    tensors = load_file(source / "model.safetensors")
    target.mkdir(parents=True)
    renamed = {name.replace("weight_scale", "weight_scale_inv"): value for name, value in tensors.items()}
    save_file(renamed, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (target / "config.json").write_text(json.dumps(config))


def as_fused(source: Path, target: Path) -> None:
    """Rewrite a checkpoint with fused experts."""
    target.mkdir(parents=True)
    save_file(fused(load_file(source / "model.safetensors")), target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Per-expert weights as transformers 5 holds them: gate_up_proj (E, 2I, H) and down_proj (E, H, I)."""
    result, parts = {}, {}
    for name, value in tensors.items():
        head, found, tail = name.partition(".experts.")
        if not found:
            result[name] = value
            continue
        expert, projection, _ = tail.split(".")
        role = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(projection, projection)
        parts.setdefault(head, {}).setdefault(role, {})[int(expert)] = value
    for head, roles in parts.items():
        stacked = {role: torch.stack([found[e] for e in range(len(found))]) for role, found in roles.items()}
        result[f"{head}.experts.gate_up_proj"] = torch.cat([stacked["gate_proj"], stacked["up_proj"]], dim=1)
        result[f"{head}.experts.down_proj"] = stacked["down_proj"]
    return result
