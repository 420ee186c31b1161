"""Checkpoints on disk: reading files, understanding names and quantization configs, filling the leaves of a layer."""

from moe_jax.loading._errors import CheckpointError
from moe_jax.loading.config._quantization_config import QuantizationConfig
from moe_jax.loading.files._checkpoint import Checkpoint
from moe_jax.loading.files._gptq_awq import as_packed, packed_pairs
from moe_jax.loading.files._hub import checkpoint_directory
from moe_jax.loading.files._safetensors import SafetensorsFile, TensorInfo, save_safetensors
from moe_jax.loading.layer._layer_loader import ExpertStream, LayerLoader, LoadReport
from moe_jax.loading.layer._names import (
    ExpertNames,
    ExpertTensor,
    layer_of,
    make_expert_params_mapping,
)
from moe_jax.loading.layer._reader import ExpertReader, load_layer, stream_layers
from moe_jax.loading.layer._weight_loader import Shard, Target, weight_loader

Placement = Target  # its former name

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ExpertNames",
    "ExpertReader",
    "ExpertStream",
    "ExpertTensor",
    "LayerLoader",
    "LoadReport",
    "Placement",
    "QuantizationConfig",
    "SafetensorsFile",
    "Shard",
    "Target",
    "TensorInfo",
    "as_packed",
    "checkpoint_directory",
    "layer_of",
    "load_layer",
    "make_expert_params_mapping",
    "packed_pairs",
    "save_safetensors",
    "stream_layers",
    "weight_loader",
]
