"""Checkpoint leaves in torch's memory -> the weights that the kernels read, in that same memory where sizes agree.

A few experts at a time: ``moe_jax`` says what becomes of their leaves, torch computes it (``_evaluate``), and the
result takes the place of what it was made from.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch

from moe_jax import ExpertWeights, MoEConfig
from moe_jax.quantization import check_codes, check_groups, check_scale_values, method_for
from torch_bridge._tensors import numpy_dtype, to_numpy, torch_dtype
from torch_bridge.launch._evaluate import Evaluator
from torch_bridge.launch._gpu import Gpu
from torch_bridge.launch._kernel_experts import abstract_weights, as_kernels_read
from torch_bridge.launch._programs import struct

# Of (name, first, last): a checkpoint leaf of these experts, in the shape and dtype of ``MoEMethod.create_weights``.
ReadLeaf = Callable[[str, int, int], torch.Tensor]
_ELEMENTS_AT_ONCE = 1 << 25


def load_weights(
    config: MoEConfig,
    read: ReadLeaf,
    gpu: Gpu,
    *,
    memory: Mapping[str, torch.Tensor],
    online: bool = False,
) -> ExpertWeights:
    """The weights in the layout of ``abstract_weights``; leaves are tensors.

    Args:
        config: of the experts that are here.
        read: views or copies of leaves. Static input scales are those of all experts, repeated.
        memory: where a result goes that has the bytes of a tensor here, by the names of ``destination_names``: the
            tensor that it is made from, or the one of an earlier load. Others get memory of their own.
        online: leaves are full-precision weights, under "w13", "w2" and the biases' names, which are quantized.

    Raises:
        ValueError: a scale that is NaN, infinite, or negative where that can only be damage, a code of more bits
            than the scheme has, or a group of columns that does not exist; nothing is written then.
    """
    total = config.num_experts
    if not online:
        check_values(config, read)
    wanted = abstract_weights(config, gpu)
    sources = ("w13", "w2") if online else tuple(method_for(config.scheme).create_weights(config))
    if online and config.has_bias:
        sources += ("w13_bias", "w2_bias")
    device = read(sources[0], 0, 1).device
    leaves, structure = jax.tree.flatten(wanted)
    names = destination_names(wanted)
    results = [_destination(leaf, memory.get(name), device) for name, leaf in zip(names, leaves, strict=True)]
    size = max(1, min(total, _ELEMENTS_AT_ONCE // (3 * config.hidden_size * config.intermediate_size)))
    for first in range(0, total, size):
        last = min(first + size, total)
        found = {name: read(name, first, last) for name in sources}
        made = jax.tree.leaves(_evaluator(_part(config, last - first), gpu, online, _signature(found))(found))
        for result, part in zip(results, made, strict=True):
            place = result[first:last] if result.ndim else result
            if place.data_ptr() != part.data_ptr() or place.stride() != part.stride():
                shares = place.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
                place.copy_(part.clone() if shares else part)  # the same elements in another order
    return jax.tree.unflatten(structure, results)


def destination_names(weights: ExpertWeights) -> list[str]:
    """A name for each leaf: "w13_data", "w13_scale", ..., "w2_bias"."""
    paths = jax.tree_util.tree_flatten_with_path(weights)[0]
    return ["_".join(key.name for key in path) for path, _ in paths]


def check_values(config: MoEConfig, read: ReadLeaf) -> None:
    """Refuse codes, scales and groups of columns as ``MoEMethod.process_weights_after_loading`` does. The extremes of
    codes and scales are taken on the device that they are on.
    """
    method, fmt = method_for(config.scheme), config.scheme.weights
    where = f"{config.name}: " if config.name else ""
    shards = ("w1", "w3")[: config.num_projections]
    for name, spec in method.create_weights(config).items():
        if spec.kind == "g_idx" and fmt is not None:  # kernels read scales by them
            groups = to_numpy(read(name, 0, config.num_experts))
            check_groups(groups, where + name, fmt=fmt, grouped=spec.shape[-1])
            continue
        check: Callable[..., None]
        if (rule := method.scale_rule(name, spec)) is not None:
            check = functools.partial(check_scale_values, **rule)
        elif spec.kind == "weight" and fmt is not None and not fmt.holds_all_codes:
            check = functools.partial(check_codes, fmt=fmt)
        else:
            continue
        leaf, projections = read(name, 0, config.num_experts), ("w2",) if name.startswith("w2_") else shards
        values = leaf if leaf.dtype in (torch.uint8, torch.int8) else leaf.float()
        extremes = np.stack([to_numpy(extreme) for extreme in torch.aminmax(values)])
        try:
            check(extremes, where + name, ())
        except ValueError:
            check(to_numpy(leaf), where + name, projections)


def _destination(leaf: Any, memory: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    dtype = torch_dtype(leaf.dtype)
    if memory is not None and memory.is_contiguous() and memory.nbytes == leaf.size * leaf.dtype.itemsize:
        if memory.shape[:1] == leaf.shape[:1] or not leaf.shape:
            return memory.detach().reshape(-1).view(dtype).reshape(leaf.shape)
    return torch.empty(leaf.shape, dtype=dtype, device=device)


def _part(config: MoEConfig, count: int) -> MoEConfig:
    return dataclasses.replace(config, num_experts=count, name="")


def _signature(leaves: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    return tuple((name, tuple(leaf.shape), leaf.dtype) for name, leaf in sorted(leaves.items()))


@functools.lru_cache(maxsize=64)
def _evaluator(config: MoEConfig, gpu: Gpu, online: bool, signature: tuple[Any, ...]) -> Evaluator:
    structs = {name: struct(shape, numpy_dtype(dtype)) for name, shape, dtype in signature}

    def run(leaves: dict[str, Any]) -> ExpertWeights:
        if online:
            biases = (leaves.pop("w13_bias"), leaves.pop("w2_bias")) if config.has_bias else None
            leaves = method_for(config.scheme).quantize_leaves(leaves["w13"], leaves["w2"], biases, config)
        return as_kernels_read(config, leaves)

    with gpu.tracing():
        return Evaluator(run, structs)
