"""Dense modules over a mesh: which axis of a weight is split, and calls that XLA partitions by it.

Attention is split by heads, feed-forward layers by their intermediate width, embedding and head by the vocabulary or
else by the hidden width. First weights are split by rows, second ones by columns, so one sum over the devices ends a
module. XLA makes the collectives out of the shardings. What a module means does not depend on them. What does not
divide is whole on every device.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moe_jax._typing import Array
from moe_jax.parallel import ParallelConfig
from moe_jax.parallel._logical import name_axes, state_axes
from moe_jax.quantization import QuantizedMatrix

WHOLE = -1  # in place of the axis that is split


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Partition:
    """axis: of the mesh, splits dense weights over ``parts`` devices. is_explicit: its type."""

    mesh: Mesh
    axis: str
    is_explicit: bool

    @classmethod
    def create(cls, parallel: ParallelConfig) -> "Partition | None":
        """By the tensor axis, without one by the expert axis; None where neither splits anything."""
        axis = next((a for a in (parallel.tensor_axis, parallel.expert_axis) if parallel.size(a) > 1), None)
        return None if axis is None else cls(parallel.mesh, axis, parallel.is_explicit)

    @property
    def parts(self) -> int:
        return self.mesh.shape[self.axis]

    def sharding(self, ndim: int, split: int) -> NamedSharding:
        """Of a parameter."""
        spec = [self.axis if axis == split else None for axis in range(ndim)]
        return NamedSharding(self.mesh, PartitionSpec() if split == WHOLE else PartitionSpec(*spec))


class Partitioned(nnx.Module):
    """A dense module that may lie on a mesh; ``partition`` says where, None for one device."""

    partition: Partition | None = None

    def logical_axes(self) -> Mapping[str, tuple[str | None, ...]]:
        """Attribute, a parameter or a Linear, -> logical names of the axes of its weight."""
        raise NotImplementedError

    def split_names(self, parts: int) -> Collection[str]:
        """Names of the axes that ``parts`` devices share."""
        raise NotImplementedError

    def splits(self, parts: int) -> dict[str, int]:
        """Attribute, a parameter or a Linear, -> the axis of its weight that ``parts`` devices share."""
        names = self.split_names(parts)
        axes = self.logical_axes().items()
        return {attribute: axis for attribute, own in axes for axis, name in enumerate(own) if name in names}

    def name_parameters(self) -> None:
        """Give the parameters of a new module their logical axes. A bias has that of its outputs."""
        for attribute, names in self.logical_axes().items():
            target = getattr(self, attribute)
            if isinstance(target, nnx.Variable):
                name_axes(target, names)
                continue
            name_axes(target.weight, names)
            if target.bias is not None:
                name_axes(target.bias, names[:1])


def spread_dense(root: nnx.Module, parallel: ParallelConfig) -> None:
    """Give the abstract dense parameters of a model or block their shardings; they are loaded into these."""
    partition = Partition.create(parallel)
    if partition is None:
        return
    for _, module in nnx.iter_modules(root):
        if not isinstance(module, Partitioned):
            continue
        module.partition = partition
        for name, split in module.splits(partition.parts).items():
            target = getattr(module, name)
            if isinstance(target, nnx.Variable):
                _lay_out(target, partition, split)
                continue
            _lay_out(target.weight, partition, split)
            if target.bias is not None and split == 0:  # that of a second weight is added to the sum
                _lay_out(target.bias, partition, 0)


def _lay_out(variable: nnx.Variable, partition: Partition, split: int) -> None:
    """Of a quantized matrix each leaf is split that divides; XLA computes the same whatever the others are."""
    state_axes(variable, tuple(partition.axis if axis == split else None for axis in range(len(variable.shape))))

    def laid_out(leaf: Any, axis: int) -> jax.ShapeDtypeStruct:
        is_split = axis != WHOLE and leaf.shape[axis] % partition.parts == 0
        sharding = partition.sharding(len(leaf.shape), axis if is_split else WHOLE)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    value = variable.get_value()
    axes = value.split_axes(split) if isinstance(value, QuantizedMatrix) else split
    variable.set_value(jax.tree.map(laid_out, value, axes))


def hold_lora(owner: nnx.Module, name: str, lora: Any) -> None:
    """Give a Linear of a dense module an adapter, whose arrays are split over the mesh as its weight is."""
    target = getattr(owner, name)
    if isinstance(owner, Partitioned):
        rows, columns = owner.logical_axes()[name]
        partition = owner.partition
        split = WHOLE if partition is None else owner.splits(partition.parts).get(name, WHOLE)
        for variable, names, axis in ((lora.a, (None, columns), 1), (lora.b, (rows, None), 0)):
            if partition is None:
                name_axes(variable, names)
                continue
            own = axis if axis == split else WHOLE
            state_axes(variable, tuple(partition.axis if own == place else None for place in range(2)))
            variable.set_value(jax.device_put(variable.get_value(), partition.sharding(2, own)))
    target.lora = lora


def partitioned(function: Callable[..., Any], module: Partitioned, outputs: Any, *args: Any) -> Any:
    """``function(module, *args)``, partitioned as the module's weights are.

    function: a method, by its class. args: pytrees of arrays; the first is an array of tokens, (..., H). outputs: in
    the structure of what the function returns, the axis of each array that stays split between devices, or ``WHOLE``.
    """
    partition = module.partition
    if partition is None:
        return function(module, *args)
    if partition.is_explicit:
        graphdef, state = nnx.split(module)
        splits, structure = jax.tree.flatten(outputs)
        return _in_auto_axes(function, graphdef, partition, tuple(splits), structure, state, args)
    return jax.tree.map(functools.partial(_constrained, partition=partition), function(module, *args), outputs)


def _constrained(array: Array, split: int, partition: Partition) -> Array:
    """An output where axes are Auto: the last axis is whole unless it is the split one, others are XLA's to choose."""
    if not isinstance(array, Tracer):
        return array
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * array.ndim
    spec[-1] = None
    if split != WHOLE:
        spec[split] = partition.axis
    return jax.lax.with_sharding_constraint(array, NamedSharding(partition.mesh, PartitionSpec(*spec)))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _in_auto_axes(function, graphdef, partition, splits, structure, state, args):
    """Under Explicit axes: inside, the partition's axis is Auto; outputs keep the layout of the tokens' first axis."""
    spec = jax.typeof(args[0]).sharding.spec
    lead = spec[0] if len(spec) > 1 and partition.axis not in _names(spec[0]) else None

    def sharding(split: int) -> NamedSharding:
        entries = [lead] if split == WHOLE else [lead, *[None] * (split - 1), partition.axis]
        return NamedSharding(partition.mesh, PartitionSpec(*entries))

    run: Any = jax.sharding.auto_axes(
        lambda state, args: function(nnx.merge(graphdef, state), *args),
        axes=partition.axis,
        out_sharding=structure.unflatten(map(sharding, splits)),
    )
    return run(state, args)


def whole(tree: Any, parallel: ParallelConfig | None) -> Any:
    """Traced arrays, whole on every device of a model's mesh."""
    if parallel is None:
        return tree
    sharding = NamedSharding(parallel.mesh, PartitionSpec())
    place = jax.sharding.reshard if parallel.is_explicit else jax.lax.with_sharding_constraint
    return jax.tree.map(lambda leaf: place(leaf, sharding), tree)


def on_mesh(tree: Any, parallel: ParallelConfig | None) -> Any:
    """Under Explicit axes ``whole`` of the arrays that lie on no mesh, since some operations want all operands on one;
    others, and all under Auto axes, as they are."""
    if parallel is None or not parallel.is_explicit:
        return tree

    def enter(leaf: Any) -> Any:
        return whole(leaf, parallel) if jax.typeof(leaf).sharding.mesh.empty else leaf

    return jax.tree.map(enter, tree)


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
