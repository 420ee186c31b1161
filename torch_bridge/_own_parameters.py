"""Checkpoint tensors into parameters that a method made by itself, by the attributes that vLLM's loader reads."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

from moe_jax import weight_loader
from moe_jax.loading import Target
from moe_jax.quantization import LeafSpec
from torch_bridge._moe_config import FusedMoEConfig

# vLLM's methods whose checkpoints are (out, in) where their parameters, marked ``is_transposed``, are (in, out). The
# tensors of every other method lie as its parameters do.
_TURNS_TENSORS = (
    "CompressedTensorsWNA16MarlinMoEMethod",
    "CompressedTensorsWNA16MoEMethod",
    "CompressedTensorsWNA16RDNA3MoEMethod",
    "CompressedTensorsW4A16FlydslMoEMethod",
)
_ANY_DTYPE = np.dtype(np.uint8)  # where a tensor goes does not depend on it


def load_into(
    parameters: Mapping[str, torch.Tensor],
    param: torch.Tensor,
    loaded: torch.Tensor,
    weight_name: str,
    shard_id: str | None,
    expert_id: int | None,
    *,
    moe: FusedMoEConfig,
    expert_map: np.ndarray | None,
    method: Any,
) -> bool:
    """Copy this rank's part of a tensor of the whole layer to its place; whether there is one.

    Args:
        parameters: of the module, by name.
        param: one of them. What is read on it: ``quant_method`` ("tensor", "channel", "group" or "block") on scales and
            zero points, ``is_transposed``, ``load_full_w2``.
        loaded: of one expert, or of all with the expert axis first.
        weight_name: for errors. shard_id, expert_id: "w1", "w3" or "w2" of a global expert; neither for a tensor that
            fills the parameter from its start, as vLLM's gpt-oss loads them.
        moe: sizes and ranks of the layer. expert_map: (P,), global to local expert; None when all are local.
        method: the quantization method of the module.

    Raises ValueError for a shape, shard or kind that does not fit.
    """
    name = next((name for name, own in parameters.items() if own is param), None)
    if name is None:
        raise ValueError(
            f"{weight_name}: a parameter of shape {tuple(param.shape)} does not belong to the module, which has "
            f"{', '.join(parameters)}"
        )
    if not shard_id and expert_id is None:
        part = param.data[tuple(slice(0, size) for size in loaded.shape)]
        if part.shape != loaded.shape:
            raise ValueError(f"{weight_name}: expected shape at most {tuple(param.shape)}, found {tuple(loaded.shape)}")
        part.copy_(loaded)
        return True
    kind, is_transposed = _kind_of(param, name, method), getattr(param, "is_transposed", False)
    if kind == "weight_shape":  # the last projection's stays, as in vLLM; nothing reads it
        local = expert_id if expert_map is None else int(expert_map[expert_id])
        if local is not None and local >= 0:
            param.data[local] = loaded
        return local is not None and local >= 0
    parallel, is_padded = moe.moe_parallel_config, moe.hidden_dim != moe.hidden_dim_unpadded
    is_padded |= moe.intermediate_size_per_partition != moe.intermediate_size_per_partition_unpadded
    targets, used = weight_loader(
        {name: LeafSpec(tuple(param.shape), _ANY_DTYPE, kind)},
        name,
        loaded,
        weight_name,
        shard_id or "",
        expert_id,
        True,
        is_act_and_mul=moe.is_act_and_mul,
        tp_rank=parallel.tp_rank,
        tp_size=parallel.tp_size,
        expert_map=expert_map,
        is_transposed=is_transposed,
        transpose_loaded=is_transposed and type(method).__name__ not in _TURNS_TENSORS,
        load_full_w2=getattr(param, "load_full_w2", False),
        scale_extent=(1, 1),  # the method's own shapes say how many scales a rank has
        allow_padding=is_padded,
        keeps_all_experts=kind == "input_scale" and bool(getattr(method, "use_global_sf", False)),
    )
    for target in cast(tuple[Target, ...], targets):
        value = loaded.transpose(-1, -2) if target.transpose else loaded
        value, place = value.reshape(target.shape)[target.source], param.data[target.index]
        if target.is_common and kind == "input_scale" and ((place != 1) & ((place - value).abs() > 1e-5)).any():
            raise ValueError(f"{weight_name}: input scales of w1 and w3 must be equal, found {place} and {value}")
        place.copy_(value)
    return bool(used)


def _kind_of(param: torch.Tensor, name: str, method: Any) -> str:
    """The kind of a parameter by the words of its name, as vLLM's loader tells them apart."""
    for word in ("input_scale", "g_idx", "weight_shape"):
        if word in name:
            return word
    stated = getattr(param, "quant_method", "of no kind")
    if "ModelOpt" in type(method).__name__ and "weight_scale" in name and stated != "block":
        # They say nothing on their parameters.
        has_both = method.uses_weight_scale_2_pattern()
        return "tensor" if not has_both or "weight_scale_2" in name else "group"
    if any(word in name for word in ("scale", "zero", "offset")):
        return stated
    return "bias" if name.endswith("_bias") else "weight"
