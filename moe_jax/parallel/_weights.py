"""Expert weights over a mesh: which axis of each leaf is split by what, the padding that makes all shares equal, and
how a device's share is made.

Placed weights have the slots of a ``Placement`` as their first axis, split over the expert axis, and I rounded up so
that each device of the tensor axis has a whole number of groups, blocks and packed words, and of the rows that the
backend reads which is tried first. Padding is zero bytes: its rows of w13 are zeros through their scales, so hidden
activations there are zero, and its columns of w2 multiply these.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from moe_jax._config import MoEConfig
from moe_jax._typing import ArrayArg, Leaf
from moe_jax.experts._choice import first_choice, layout_owner
from moe_jax.parallel._config import ParallelConfig
from moe_jax.parallel._placement import Placement
from moe_jax.quantization import ExpertWeights, LowRank, QuantizedTensor, Scheme, Strategy, method_for

_LEAVES = ("data", "scale", "zero_point", "global_scale", "g_idx")  # of a tensor, but for the input scale


def tensor_axes(weights: ExpertWeights) -> ExpertWeights:
    """The axis of every leaf that counts I, which tensor parallelism splits; -1 for a leaf that has none.

    weights: leaves may be anything. Returns the same structure; ``input_scale`` has no expert axis either.
    """
    return _axes(weights, counts_hidden=False)


def _axes(weights: ExpertWeights, *, counts_hidden: bool) -> ExpertWeights:
    """The axis of every leaf that counts H, else I; -1 for a leaf that has none."""

    def of(tensor: QuantizedTensor, is_w2: bool) -> QuantizedTensor:
        def axis_of(field: str) -> int | None:
            if tensor.layout.is_plain:
                return _plain_axis(tensor, field, lead=1 if is_w2 else 2, counts_columns=is_w2 != counts_hidden)
            return None if counts_hidden else layout_owner(tensor.layout).shard_axis(tensor, field, is_w2)

        axes = {field: axis_of(field) for field in _LEAVES if getattr(tensor, field) is not None}
        found = {field: -1 if axis is None else axis for field, axis in axes.items()}
        return dataclasses.replace(tensor, **found, input_scale=None if tensor.input_scale is None else -1)

    axes = dataclasses.replace(
        weights,
        w13=of(weights.w13, is_w2=False),
        w2=of(weights.w2, is_w2=True),
        w13_bias=None if weights.w13_bias is None else -1 if counts_hidden else 2,
        w2_bias=None if weights.w2_bias is None else 1 if counts_hidden else -1,
    )
    return axes.adapted(
        None if weights.w13_lora is None else _lora_axes(2, counts_columns=counts_hidden),
        None if weights.w2_lora is None else _lora_axes(1, counts_columns=not counts_hidden),
    )


def _lora_axes(lead: int, *, counts_columns: bool) -> LowRank:
    """The axis of every leaf that counts the columns of the matrix, which ``a`` has, else its rows, which ``b`` has."""
    axes: Any = dict(a=lead + 1, b=-1) if counts_columns else dict(a=-1, b=lead)
    return LowRank(**axes, scale=cast(Leaf, -1))


def _plain_axis(tensor: QuantizedTensor, field: str, *, lead: int, counts_columns: bool) -> int | None:
    """The axis of a leaf in layout "plain" that counts the columns of a matrix, else its rows; None: no such axis.

    lead: axes before the matrix. Scales and zero points of a whole matrix have neither; those of rows have no columns.
    """
    fmt = tensor.fmt
    if field == "g_idx":
        return 1 if counts_columns else None
    if field == "data" or fmt is None:
        return lead + counts_columns
    if field == "global_scale":
        return None
    if counts_columns:
        return lead + 1 if fmt.strategy in (Strategy.GROUP, Strategy.BLOCK) and not fmt.actorder else None
    return None if fmt.strategy is Strategy.TENSOR else lead


def partition_specs(weights: ExpertWeights, parallel: ParallelConfig) -> ExpertWeights:
    """A ``PartitionSpec`` for every leaf of placed weights, in any layout."""
    return leaf_specs(weights, logical_spec(parallel))


def logical_spec(parallel: ParallelConfig) -> PartitionSpec:
    """How a layer over a mesh splits its experts, H and I."""
    return PartitionSpec(parallel.expert_axis, None, parallel.tensor_axis)


def leaf_specs(weights: ExpertWeights, spec: PartitionSpec) -> ExpertWeights:
    """A ``PartitionSpec`` for every leaf, in any layout. spec: of experts, H and I."""
    experts, hidden, intermediate = spec

    def of_leaf(leaf: Leaf, hidden_axis: int, intermediate_axis: int) -> PartitionSpec:
        if not leaf.shape:  # an input scale, common to all experts
            return PartitionSpec()
        axes: list[Any] = [experts] + [None] * (len(leaf.shape) - 1)
        if hidden_axis >= 0:
            axes[hidden_axis] = hidden
        if intermediate_axis >= 0:
            axes[intermediate_axis] = intermediate
        return PartitionSpec(*axes)

    return jax.tree.map(of_leaf, weights, _axes(weights, counts_hidden=True), tensor_axes(weights))


def shardings(weights: ExpertWeights, parallel: ParallelConfig) -> ExpertWeights:
    """``partition_specs`` on the mesh."""
    specs = partition_specs(weights, parallel)
    return jax.tree.map(lambda _, spec: NamedSharding(parallel.mesh, spec), weights, specs)


def intermediate_unit(scheme: Scheme) -> int:
    """Each device's part of I must be a multiple of this: of whole groups, blocks and packed words."""
    weights, activations = scheme.weights, scheme.activations
    sizes = [1 if activations is None else activations.group_size or 1]
    if weights is not None:
        sizes += [weights.pack_extent, *(weights.block_shape or ())]
        if not weights.actorder:
            sizes.append(weights.group_size or 1)
    return math.lcm(*sizes)


def padded_intermediate(config: MoEConfig, parallel: ParallelConfig) -> int:
    """I of placed weights: the next multiple of as many units as the tensor axis has devices; I itself where nothing is
    split.
    """
    if parallel.tensor_size == 1:
        return config.intermediate_size
    unit = first_choice(config, parallel.platform).intermediate_unit(config)
    step = parallel.tensor_size * math.lcm(intermediate_unit(config.scheme), unit)
    return -(-config.intermediate_size // step) * step


def placed_config(config: MoEConfig, placement: Placement, parallel: ParallelConfig) -> MoEConfig:
    """The config of placed weights: slots for experts, I with its padding."""
    return dataclasses.replace(
        config,
        num_experts=placement.num_slots,
        intermediate_size=padded_intermediate(config, parallel),
    )


def share_config(config: MoEConfig, placement: Placement, parallel: ParallelConfig) -> MoEConfig:
    """The config of one device's share."""
    placed = placed_config(config, placement, parallel)
    return dataclasses.replace(
        placed,
        num_experts=placement.slots_per_device,
        intermediate_size=placed.intermediate_size // parallel.tensor_size,
    )


def abstract_placed_weights(config: MoEConfig, placement: Placement, parallel: ParallelConfig) -> ExpertWeights:
    """Placed weights as ShapeDtypeStructs with their shardings."""
    weights = method_for(config.scheme).abstract_weights(placed_config(config, placement, parallel))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        weights,
        shardings(weights, parallel),
    )


def abstract_share(config: MoEConfig, placement: Placement, parallel: ParallelConfig) -> ExpertWeights:
    """What one device holds of placed weights, as ShapeDtypeStructs."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype),
        abstract_placed_weights(config, placement, parallel),
    )


def place_weights(
    weights: ExpertWeights, config: MoEConfig, placement: Placement, parallel: ParallelConfig
) -> ExpertWeights:
    """All experts of a layer, (E, ...) in layout "plain" -> placed weights on the mesh.

    Shares are cut on the host, one after another; no device holds more than its own. Tracers are cut in the trace.
    """
    target = abstract_placed_weights(config, placement, parallel)
    is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(weights))
    slots = placement.physical_to_logical

    def place(leaf: Leaf, wanted: Leaf) -> Leaf:
        if not wanted.shape:
            return leaf if is_traced else jax.device_put(np.asarray(leaf), wanted.sharding)
        if is_traced:
            return jax.lax.with_sharding_constraint(in_slots(jnp, leaf, slots, wanted.shape), wanted.sharding)
        host = np.asarray(leaf)

        def share(index: Any) -> np.ndarray:
            shape = tuple(len(range(*i.indices(n))) for i, n in zip(index, wanted.shape, strict=True))
            part = host[:, *(slice(i.start, i.stop) for i in index[1:])]
            return in_slots(np, part, np.asarray(slots)[index[0]], shape)

        return jax.make_array_from_callback(wanted.shape, wanted.sharding, share)

    return _map_leaves(place, target, weights, target)


def _map_leaves(function: Callable[..., Any], like: Any, *trees: Any) -> Any:
    """``jax.tree.map`` over trees that differ in static metadata, the number of columns of a packed matrix; the result
    has that of ``like``."""
    leaves = zip(*map(jax.tree.leaves, trees), strict=True)
    return jax.tree.structure(like).unflatten([function(*parts) for parts in leaves])


def all_experts(weights: ExpertWeights, config: MoEConfig, placement: Placement) -> ExpertWeights:
    """Inverse of ``place_weights``, on the host: placed weights in layout "plain" -> all experts in their order."""
    plain = method_for(config.scheme).abstract_weights(config)
    return _map_leaves(lambda wanted, leaf: out_of_slots(leaf, placement, wanted.shape), plain, plain, weights)


def out_of_slots(leaf: Leaf, placement: Placement, shape: tuple[int, ...]) -> Any:
    """Inverse of ``in_slots`` with NumPy. shape: of all experts; () for what they share."""
    rows = np.asarray(leaf)
    if not shape:
        return rows
    held = np.asarray(placement.physical_to_logical).tolist()
    slots = [held.index(expert) for expert in range(placement.num_experts)]
    return rows[slots][tuple(slice(0, size) for size in shape)]


def cut_expert(
    weights: ExpertWeights, is_used: ArrayArg, rank: ArrayArg | int, own: MoEConfig, parallel: ParallelConfig
) -> ExpertWeights:
    """One expert, (1, ...) in layout "plain" -> the part of I that a device of the tensor axis holds, in a trace.

    is_used: () bool, False for zeros, as an empty slot has them. rank: on the tensor axis. own: the config of a share.
    """
    target = method_for(own.scheme).abstract_weights(dataclasses.replace(own, num_experts=1))
    slot = jnp.where(jnp.asarray(is_used), 0, -1)[None]

    def cut(wanted: Leaf, leaf: ArrayArg, axis: int) -> Any:
        if axis < 0:
            return in_slots(jnp, leaf, slot, wanted.shape)
        size = wanted.shape[axis]
        padded = (*wanted.shape[:axis], size * parallel.tensor_size, *wanted.shape[axis + 1 :])
        return jax.lax.dynamic_slice_in_dim(in_slots(jnp, leaf, slot, padded), rank * size, size, axis)

    return _map_leaves(cut, target, target, weights, tensor_axes(target))


def in_slots(module: Any, leaf: ArrayArg, slots: ArrayArg, shape: tuple[int, ...]) -> Any:
    """Rows of ``leaf`` for slots, zeros in empty ones and in the padding of the other axes. module: np or jnp."""
    rows = leaf[module.maximum(slots, 0)]
    is_used = (slots >= 0).reshape(-1, *(1,) * (rows.ndim - 1))
    rows = module.where(is_used, rows, module.zeros((), rows.dtype))
    return module.pad(rows, [(0, wanted - found) for wanted, found in zip(shape, rows.shape, strict=True)])


def assemble(
    config: MoEConfig,
    placement: Placement,
    parallel: ParallelConfig,
    read: Callable[[int, int], ExpertWeights],
) -> ExpertWeights:
    """Placed weights out of shares: ``read(expert rank, tensor rank)`` is asked once for each share that a device of
    this process holds, and its NumPy or JAX arrays go to those devices before the next one is read.

    Works under ``jax.distributed``, where a process has only its own shares.
    """
    target = abstract_placed_weights(config, placement, parallel)
    structure = jax.tree.structure(target)
    wanted = jax.tree.leaves(target)
    by_share: dict[tuple[int, int], list[Any]] = {}
    for device, ranks in device_ranks(parallel).items():
        if device.process_index == jax.process_index():
            by_share.setdefault(ranks, []).append(device)
    pieces: list[list[jax.Array]] = [[] for _ in wanted]
    for (expert_rank, tensor_rank), devices in sorted(by_share.items()):
        with jax.default_device(devices[0]):
            leaves = jax.tree.leaves(read(expert_rank, tensor_rank))
        for leaf, piece in zip(leaves, pieces, strict=True):
            piece += [jax.device_put(leaf, device) for device in devices]
        jax.block_until_ready([piece[-1] for piece in pieces])
    arrays = [
        jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, piece)
        for leaf, piece in zip(wanted, pieces, strict=True)
    ]
    return structure.unflatten(arrays)


def is_placed(weights: ExpertWeights, parallel: ParallelConfig | None) -> bool:
    """Whether all leaves lie on the mesh, as ``place_weights`` and ``assemble`` leave them."""
    return parallel is not None and all(
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, Tracer)
        and isinstance(leaf.sharding, NamedSharding)
        and leaf.sharding.mesh == parallel.mesh
        for leaf in jax.tree.leaves(weights)
    )


def replace_experts(
    weights: ExpertWeights, experts: Sequence[int], new: ExpertWeights, placement: Placement
) -> ExpertWeights:
    """Placed weights with all copies of some experts replaced; each device changes what it holds.

    new: those experts in the order of ``experts``, in layout "plain".
    """
    held = np.asarray(placement.physical_to_logical)
    slots = np.flatnonzero(np.isin(held, experts))
    order = {expert: place for place, expert in enumerate(experts)}
    source = np.asarray([order[expert] for expert in held[slots].tolist()])

    def replace(leaf: jax.Array, fresh: Leaf) -> jax.Array:
        rows = in_slots(np, np.asarray(fresh), source, (slots.size, *leaf.shape[1:]))
        pieces = []
        for shard in leaf.addressable_shards:
            first, last, _ = shard.index[0].indices(leaf.shape[0])
            is_here = (slots >= first) & (slots < last)
            part = rows[is_here][:, *shard.index[1:]]
            pieces.append(shard.data.at[slots[is_here] - first].set(jax.device_put(part, shard.device)))
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, pieces)

    return _map_leaves(replace, weights, weights, new)


def device_ranks(parallel: ParallelConfig) -> dict[Any, tuple[int, int]]:
    """(rank on the expert axis, rank on the tensor axis) of every device of the mesh."""
    names = parallel.mesh.axis_names

    def rank(index: tuple[int, ...], axis: str | None) -> int:
        return 0 if axis is None else index[names.index(axis)]

    return {
        device: (rank(index, parallel.expert_axis), rank(index, parallel.tensor_axis))
        for index, device in np.ndenumerate(parallel.mesh.devices)
    }
