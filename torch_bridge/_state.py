"""Leaves of a layer as torch tensors under vLLM's names: what parameters show and what a state dict holds.

Processed weights keep the bits of the checkpoint, so their leaves are views: (E, G, I, ...) of a JAX array is (E, 2I,
...) of a parameter. What copies: leaves in a kernel's own layout, and w13 of gpt-oss, which vLLM keeps interleaved.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import torch

from moe_jax import ExpertWeights, MoEConfig
from moe_jax.experts._choice import plain_layout
from moe_jax.quantization import LeafSpec, method_for
from torch_bridge._tensors import to_torch

_FIELDS = {
    "weight": "data",
    "weight_packed": "data",
    "weight_scale": "scale",
    "weight_global_scale": "global_scale",
    "weight_scale_2": "global_scale",
    "weight_zero_point": "zero_point",
    "weight_g_idx": "g_idx",
    "input_scale": "input_scale",
    "input_global_scale": "input_scale",
}


def stored_leaves(weights: ExpertWeights, config: MoEConfig) -> dict[str, torch.Tensor]:
    """The leaves of ``create_weights`` from processed weights, the inverse of processing; views of plain ones.

    An input scale, of which processing keeps one for all experts, stands in every place.
    """
    specs = method_for(config.scheme).create_weights(config)
    weights = plain_layout(weights)
    return {name: _leaf(weights, name, spec) for name, spec in specs.items()}


def _leaf(weights: ExpertWeights, name: str, spec: LeafSpec) -> torch.Tensor:
    prefix, _, suffix = name.partition("_")
    if suffix == "bias":
        array = getattr(weights, name)
    else:
        array = getattr(getattr(weights, prefix), _FIELDS[suffix])
        if spec.kind == "input_scale":
            array = jnp.broadcast_to(array, spec.shape)
    return to_torch(array).reshape(spec.shape)


def is_interleaved(config: MoEConfig) -> bool:
    """Whether vLLM keeps the rows of w13 as gate 0, up 0, gate 1, ...: gpt-oss, known by its activation."""
    return config.activation == "swigluoai" and config.is_act_and_mul


def interleaved(leaves: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """w13 leaves with the rows of gate and up alternating. What has one value for each is the same either way."""
    return {
        name: _alternating(leaf) if name.startswith("w13_") and not name.endswith("g_idx") else leaf
        for name, leaf in leaves.items()
    }


def _alternating(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.reshape(leaf.shape[0], 2, -1, *leaf.shape[2:]).transpose(1, 2).reshape(leaf.shape)
