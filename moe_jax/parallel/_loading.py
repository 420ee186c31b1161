"""A layer's experts out of a checkpoint onto a mesh: each device gets its share, and only its share is read.

Tensors of other devices' experts are not opened, scales included; the exception is one number for each expert where
activations have one calibrated scale for all experts. Of its own experts a device reads only its part of I where every
expert has tensors of its own and these are kept as they are. Experts that are quantized on the way, that are stored all
in one tensor, or whose columns lie in an order of their own (act-order) are read whole and cut then.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax._config import MoEConfig
from moe_jax._typing import AnyArray, Leaf
from moe_jax.loading import CheckpointError, ExpertNames, ExpertReader, QuantizationConfig, TensorInfo
from moe_jax.loading._errors import listed
from moe_jax.loading.files._checkpoint import Checkpoint, CheckpointLike, TensorSource
from moe_jax.loading.layer._bitpacked import check_weight_shape
from moe_jax.loading.layer._names import ExpertTensor, is_expert_name, layer_of
from moe_jax.loading.layer._weight_loader import RULES
from moe_jax.parallel._config import ParallelConfig
from moe_jax.parallel._placement import Placement
from moe_jax.parallel._weights import abstract_share, assemble, in_slots, share_config, tensor_axes
from moe_jax.quantization import ExpertWeights, check_scale_values, common_input_scale, method_for


class ShardedExpertReader:
    """``ExpertReader`` for layers over a mesh: ``load`` returns placed weights.

    source: a ``Checkpoint`` or what has its ``names``, ``info`` and ``read``. The other arguments are those of
    ``ExpertReader``. peak_staged_bytes: the most bytes that were staged on the host at a time: one device's share.
    """

    def __init__(self, source: CheckpointLike, *, quantization: QuantizationConfig, names: ExpertNames):
        self._source, self._quantization, self._names = source, quantization, names
        self.peak_staged_bytes = 0

    def load(self, layer: int, config: MoEConfig, placement: Placement, parallel: ParallelConfig) -> ExpertWeights:
        """Placed weights of one layer; under ``jax.distributed`` a process reads what its own devices hold.

        config: its scheme is how the weights come out. Raises as ``ExpertReader.load``.
        """
        tensors = self._tensors(layer, config)
        count = config.num_experts
        if surplus := [
            name for name, tensor in tensors.items() if tensor.expert is not None and tensor.expert >= count
        ]:
            raise CheckpointError(
                f"{self._source.directory}: unexpected: {listed(surplus)}; layer {layer} has {count} experts"
            )
        own, target = share_config(config, placement, parallel), abstract_share(config, placement, parallel)
        is_kept = self._reader(self._source).stored_scheme(layer) is not None or not config.scheme.is_quantized
        cuts = None
        if parallel.tensor_size > 1 and is_kept and isinstance(self._source, Checkpoint):
            cuts = _cuts(tensors, self._source, config, own)
        whole: dict[int, ExpertWeights] = {}

        def read(expert_rank: int, tensor_rank: int) -> ExpertWeights:
            slots = placement.experts_of(expert_rank)
            ids = np.unique(slots[slots >= 0]).tolist()
            if not ids:
                return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), target)
            if cuts is not None:
                self._check_shapes(tensors, ids, config)
                of_rank = {name: cut.of_rank(tensor_rank) for name, cut in cuts.items()}
                share = _Share(self._source, tensors, ids, of_rank)
                wanted = dataclasses.replace(own, num_experts=config.num_experts)
                return _placed_share(self._load(share, layer, wanted, ids), ids, slots, target, 0)
            if expert_rank not in whole:
                whole.clear()
                whole[expert_rank] = self._load(_Share(self._source, tensors, ids, {}), layer, config, ids)
            return _placed_share(whole[expert_rank], ids, slots, target, tensor_rank)

        scales = self._input_scales(tensors, config)
        return assemble(config, placement, parallel, lambda *ranks: _with_input_scales(read(*ranks), scales))

    def _tensors(self, layer: int, config: MoEConfig) -> dict[str, ExpertTensor]:
        """The layer's expert tensors by name. Raises CheckpointError for a name that cannot be read."""
        names, found = dataclasses.replace(self._names, is_gated=config.is_act_and_mul), {}
        for name in self._source.names:
            if is_expert_name(name) and layer_of(name) == layer:
                try:
                    tensor = names.parse(name)
                except ValueError as error:
                    raise CheckpointError(f"{self._source.info(name).file}: tensor {error}") from None
                if tensor is not None:
                    found[name] = tensor
        return found

    def _check_shapes(self, tensors: dict[str, ExpertTensor], ids: Sequence[int], config: MoEConfig) -> None:
        """What ``weight_shape`` says of whole matrices, which a reader of parts cannot compare."""
        seen = set()
        for name, tensor in tensors.items():
            if tensor.suffix == "weight_shape" and tensor.expert in ids:
                if (tensor.expert, tensor.shards) in seen:
                    raise CheckpointError(f"{self._source.directory}: duplicate: {name}")
                seen.add((tensor.expert, tensor.shards))
                try:
                    check_weight_shape(tensor, self._source.read(name), config)
                except ValueError as error:
                    raise CheckpointError(f"{self._source.info(name).file}: tensor {error}") from None

    def _reader(self, source: TensorSource) -> ExpertReader:
        return ExpertReader(source, quantization=self._quantization, names=self._names)

    def _load(self, share: "_Share", layer: int, config: MoEConfig, ids: Sequence[int]) -> ExpertWeights:
        """The experts ``ids`` in their order."""
        reader = self._reader(share)
        try:
            if share.is_fused:
                return reader.load(layer, dataclasses.replace(config, num_experts=len(ids)))
            return reader.load(layer, config, experts=ids)
        finally:
            self.peak_staged_bytes = max(self.peak_staged_bytes, reader.peak_staged_bytes)

    def _input_scales(self, tensors: dict[str, ExpertTensor], config: MoEConfig) -> dict[str, Leaf]:
        """Leaf prefix -> () float32, the input scale that all experts of the layer share; empty where there is none."""
        activations = config.scheme.activations
        if activations is None or not activations.needs_input_scale:
            return {}
        suffix, scales = activations.input_scale_leaf, {}
        for prefix in ("w13", "w2"):
            label = f"{prefix}_{suffix}"
            found = [name for name, tensor in tensors.items() if tensor.leaf == label]
            values = np.concatenate(
                [np.zeros(0, np.float32)]
                + [np.asarray(self._source.read(name)).reshape(-1).astype(np.float32) for name in found]
            )
            if activations.global_scale == "divides":
                values = np.where(np.isposinf(values), np.float32(1), values)
            if values.size:
                check_scale_values(values, label, (), is_divisor=activations.global_scale == "divides")
                scales[prefix] = common_input_scale(values, activations, label)
        return scales


@dataclasses.dataclass(frozen=True)
class _Cut:
    """One device's part of a tensor along an axis: ``size`` of its ``total`` entries, from ``start`` on.

    What reaches past the end is padding.
    """

    axis: int
    size: int
    total: int
    start: int = 0

    def of_rank(self, rank: int) -> "_Cut":
        return dataclasses.replace(self, start=min(rank * self.size, self.total))


def _cuts(
    tensors: dict[str, ExpertTensor], source: CheckpointLike, config: MoEConfig, own: MoEConfig
) -> dict[str, _Cut] | None:
    """How each tensor of a layer is cut for tensor parallelism; None when a tensor cannot be cut as it is stored."""
    weights = config.scheme.weights
    if weights is not None and weights.actorder:
        return None
    method, cuts = method_for(config.scheme), {}
    specs, own_specs = method.create_weights(config), method.create_weights(own)
    for name, tensor in tensors.items():
        if tensor.suffix == "weight_shape" and "w2_weight_packed" in specs:
            continue
        if tensor.expert is None or len(tensor.shards) > 1 or tensor.leaf not in specs:
            return None
        spec, is_w13 = specs[tensor.leaf], tensor.leaf.startswith("w13")
        axis = RULES[spec.kind].w13_tp_axis if is_w13 else RULES[spec.kind].w2_tp_axis
        if axis is None:
            continue
        projections = config.num_projections if is_w13 and axis == 0 else 1
        total, size = (s[tensor.leaf].shape[1 + axis] // projections for s in (specs, own_specs))
        shape = source.info(name).shape
        if len(shape) <= axis or shape[axis] != total:
            return None
        cuts[name] = _Cut(axis, size, total)
    return cuts


class _Share:
    """A checkpoint as the devices of one share see it: some experts of one layer, each tensor cut.

    ids: the experts, ascending. cuts: by name; tensors without one are whole.
    """

    def __init__(
        self, source: CheckpointLike, tensors: dict[str, ExpertTensor], ids: Sequence[int], cuts: dict[str, _Cut]
    ):
        self._source, self._cuts, self._ids = source, cuts, list(ids)
        self.directory, self.config = source.directory, getattr(source, "config", {})
        self._fused = {name for name, tensor in tensors.items() if tensor.expert is None}
        self.is_fused = bool(self._fused)
        is_mixed = self.is_fused and len(self._fused) < len(tensors)
        if is_mixed:
            raise NotImplementedError(
                f"{self.directory}: some tensors hold one expert and others, such as {min(self._fused)}, all of them; "
                "such a layer cannot be loaded onto a mesh, load it with mesh=None"
            )
        chosen = set(ids)
        self.names = tuple(
            name
            for name, tensor in tensors.items()
            if (tensor.expert is None or tensor.expert in chosen)
            and not (cuts and tensor.suffix == "weight_shape")  # says what the whole matrix is
        )

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def info(self, name: str) -> TensorInfo:
        info = self._source.info(name)
        shape = list(info.shape)
        if self._holds_experts(name, info):
            shape[0] = len(self._ids)
        if name in self._cuts:
            shape[self._cuts[name].axis] = self._cuts[name].size
        return info._replace(shape=tuple(shape))

    def read(self, name: str) -> np.ndarray:
        info, first, last = self._source.info(name), self._ids[0], self._ids[-1] + 1
        if self._holds_experts(name, info):
            if last - first == len(self._ids):
                return self._source.read(name, slice(first, last))
            return np.concatenate([self._source.read(name, slice(i, i + 1)) for i in self._ids])
        cut = self._cuts.get(name)
        if cut is None:
            return self._source.read(name)
        part = slice(cut.start, min(cut.start + cut.size, cut.total))
        array = self._source.read(name, part) if cut.axis == 0 else self._source.read(name, None, part)
        short = cut.size - array.shape[cut.axis]
        if not short:
            return array
        return np.pad(array, [(0, short if axis == cut.axis else 0) for axis in range(array.ndim)])

    def _holds_experts(self, name: str, info: TensorInfo) -> bool:
        return name in self._fused and len(info.shape) > 1


def _placed_share(
    weights: ExpertWeights, ids: Sequence[int], slots: np.ndarray, target: ExpertWeights, tensor_rank: int
) -> ExpertWeights:
    """A share with the shapes of ``target``: the experts ``ids`` in its slots, and of I the part of ``tensor_rank``.

    weights: all of I, or that part already, with rank 0. What reaches past the end of I is zeros.
    """
    order = np.where(slots >= 0, np.searchsorted(ids, slots), -1)

    def place(leaf: AnyArray, wanted: Leaf, axis: int) -> AnyArray:
        if not leaf.shape:
            return leaf
        start = min(tensor_rank * wanted.shape[axis], leaf.shape[axis]) if axis >= 0 else 0
        if start == 0 and leaf.shape == wanted.shape and (order == np.arange(order.size)).all():
            return leaf
        on_cpu = isinstance(leaf, np.ndarray) or next(iter(leaf.devices())).platform == "cpu"
        leaf = np.asarray(leaf) if on_cpu else leaf
        if axis >= 0:
            leaf = leaf[(*(slice(None),) * axis, slice(start, start + wanted.shape[axis]))]
        return in_slots(np if on_cpu else jnp, leaf, order, wanted.shape)

    leaves = zip(*map(jax.tree.leaves, (weights, target, tensor_axes(target))), strict=True)
    return jax.tree.structure(target).unflatten([place(*parts) for parts in leaves])


def _with_input_scales(weights: ExpertWeights, scales: dict[str, Leaf]) -> ExpertWeights:
    changes = {
        prefix: dataclasses.replace(getattr(weights, prefix), input_scale=scale) for prefix, scale in scales.items()
    }
    return dataclasses.replace(weights, **changes)
