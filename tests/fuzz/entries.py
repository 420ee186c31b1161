"""The ways into the library that the fuzz takes, and what each of them loaded, in NumPy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moe_jax
from moe_jax import MoEConfig
from moe_jax._versions import Place
from moe_jax.loading import Checkpoint, ExpertReader
from moe_jax.quantization import QuantizedMatrix, dequantize_tensor
from tests.fuzz.bases import LAYER_KINDS, E, H, I
from tests.fuzz.models import MODEL_KINDS

KINDS = (*LAYER_KINDS, *MODEL_KINDS)
MODELS = ("model_tied", "model_fp8", "model_mesh", "model_deepseek")
_LAYERS = {"moe_deepseek": 1}
_AXES = {"mesh_experts": "expert", "mesh_tensor": "tensor", "model_mesh": "expert"}

_dequantized = jax.jit(dequantize_tensor)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What an entry made of a directory.

    module: the layer or model that can be reloaded, if any. layers: index -> (ExpertWeights, MoEConfig or None where
    config.json was not read). dense: name -> array. config: of a whole model.
    """

    module: Any
    layers: dict[int, tuple[Any, MoEConfig | None]]
    dense: dict[str, np.ndarray]
    config: Any = None


def load(directory, kind) -> Loaded:
    mesh = jax.make_mesh((2,), (_AXES[kind],), devices=jax.devices()[:2]) if kind in _AXES else None
    if kind == "gpt_oss":
        return Loaded(None, {0: (_read_gpt_oss(directory), None)}, {})
    if kind in MODELS:
        model = moe_jax.load_pretrained(directory, mesh=mesh, dtype=jnp.float32)
        layers = {
            index: (layer.mlp.experts.weights.get_value(), layer.mlp.experts.config)
            for index, layer in enumerate(model.layers)
            if hasattr(layer.mlp, "experts")
        }
        return Loaded(model, layers, _arrays(model.dense_modules()), model.config)
    layer = _LAYERS.get(kind, 0)
    block = moe_jax.load_moe(directory, layer=layer, mesh=mesh, dtype=jnp.float32)
    prefix, modules = f"model.layers.{layer}.mlp", {}
    modules[f"{prefix}.gate"] = block.router
    if block.experts.correction_bias is not None:
        modules[f"{prefix}.gate.e_score_correction_bias"] = Place(block.experts, "correction_bias")
    if block.shared_experts is not None:
        for name in ("gate_proj", "up_proj", "down_proj"):
            modules[f"{prefix}.shared_experts.{name}"] = getattr(block.shared_experts, name)
    weights = block.experts.weights.get_value()
    return Loaded(block.experts, {layer: (weights, block.experts.config)}, _arrays(modules))


def matrices(weights) -> dict[tuple[int, str], np.ndarray]:
    """{(expert, shard): float32 (n, k)} of a layer, and "bias", {(expert, shard): (n,)}."""
    w13, w2 = np.asarray(_dequantized(weights.w13)), np.asarray(_dequantized(weights.w2))
    found: dict[Any, Any] = {"bias": {}}
    for expert in range(E):
        found |= {(expert, "w1"): w13[expert, 0], (expert, "w3"): w13[expert, 1], (expert, "w2"): w2[expert]}
        if weights.w2_bias is not None:
            first, second = np.asarray(weights.w13_bias, np.float32), np.asarray(weights.w2_bias, np.float32)
            own = {(expert, "w1"): first[expert, 0], (expert, "w3"): first[expert, 1], (expert, "w2"): second[expert]}
            found["bias"] |= own
    return found


def _read_gpt_oss(directory):
    with Checkpoint(directory) as checkpoint:
        reader = ExpertReader(checkpoint)
        scheme = reader.stored_scheme(0)
        config = MoEConfig(E, 1, H, I, scheme=moe_jax.Scheme.parse(scheme), activation="swigluoai", has_bias=True)
        return reader.load(0, config)


def _arrays(modules) -> dict[str, np.ndarray]:
    found = {}
    for name, value in modules.items():
        if isinstance(value, Place):
            found[name] = value.variable
        else:
            own = {f"{name}.{word}": getattr(value, word, None) for word in ("weight", "bias")}
            found |= {key: variable for key, variable in own.items() if variable is not None}
    return {name: _real(variable.get_value()) for name, variable in found.items()}


def _real(value) -> np.ndarray:
    """float32; of a matrix that stays quantized (n, k)."""
    return np.asarray(_dequantized(value.tensor)[0] if isinstance(value, QuantizedMatrix) else value, np.float32)
