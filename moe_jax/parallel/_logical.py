"""Logical axes: names that say what an axis of a weight counts, whatever mesh it may lie on.

They are the ``out_sharding`` metadata of Variables, in the way of Flax. ``nnx.logical_axis_rules`` maps them to axes of
a mesh, and ``nnx.get_named_sharding``, ``nnx.get_partition_spec``, ``nnx.eval_shape`` and ``nnx.get_abstract_model``
read them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import NamedSharding, PartitionSpec

EXPERT, EMBED, MLP = "expert", "embed", "mlp"  # E, H and I
HEADS, KV_HEADS, VOCAB = "heads", "kv_heads", "vocab"


class LogicalAxes(tuple[str | None, ...]):
    """Names of axes, None for one without a name.

    Iterating leaves out what splits nothing, as None: a name that no rule in effect maps and that is no axis of the
    mesh of ``jax.set_mesh``. Flax would take it for an axis of any mesh.
    """

    def __iter__(self) -> Iterator[str | None]:
        known = {name for name, _ in get_logical_axis_rules()} | set(jax.sharding.get_abstract_mesh().axis_names)
        return (name if name in known else None for name in super().__iter__())


class TreeVariable(nnx.Variable[Any]):
    """A Variable of several arrays that Flax's sharding functions treat like one.

    They make one ``PartitionSpec``, or one ``ShapeDtypeStruct`` with a sharding, of its ``out_sharding``. Each leaf
    gets its part of it, by ``leaf_specs``. An axis that does not divide is whole where the mesh is known.
    """

    def leaf_specs(self, value: Any, spec: PartitionSpec) -> Any:
        """The spec of each leaf. spec: of the axes that ``out_sharding`` names."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the axes that ``out_sharding`` names."""
        return getattr(self.get_raw_value(), "shape", ())

    @property
    def dtype(self) -> Any:
        return jax.tree.leaves(self.get_raw_value())[0].dtype

    def replace(self, value: Any, **updates: Any) -> nnx.Variable[Any]:
        return super().replace(self._of_leaves(value), **updates)

    def set_value(self, value: Any, **options: Any) -> None:
        super().set_value(self._of_leaves(value), **options)

    def _of_leaves(self, value: Any) -> Any:
        own = self.get_raw_value()
        if isinstance(value, PartitionSpec):
            return _fitting(own, self.leaf_specs(own, value), jax.sharding.get_abstract_mesh())
        if not isinstance(value, jax.ShapeDtypeStruct) or not isinstance(value.sharding, NamedSharding):
            return value
        mesh = value.sharding.mesh
        specs = _fitting(own, self.leaf_specs(own, value.sharding.spec), mesh)

        def struct(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

        return jax.tree.map(struct, own, specs)


class _Unboxed:
    """Tells ``nnx.bridge`` that Linen holds a value of several arrays bare: its boxes have one spec for all of them."""

    @staticmethod
    def from_nnx_metadata(metadata: dict[str, Any]) -> Any:
        return metadata["value"]


def name_axes(variable: nnx.Variable[Any], names: Sequence[str | None]) -> None:
    """Name the axes of a new Variable. Where a mesh of Auto axes is set, its arrays are split by them at once, as Flax
    does it. Under Explicit axes they stay whole.
    """
    state_axes(variable, LogicalAxes(names))
    value, mesh = variable.get_value(), jax.sharding.get_abstract_mesh()
    is_auto = not mesh.empty and mesh.are_all_axes_auto
    if not is_auto or not nnx.using_eager_sharding() or isinstance(jax.tree.leaves(value)[0], jax.ShapeDtypeStruct):
        return
    specs = nnx.get_partition_spec(variable).get_raw_value()
    if not isinstance(variable, TreeVariable):
        specs = _fitting(value, specs, mesh)
    if any(entry is not None for spec in jax.tree.leaves(specs) for entry in spec):
        variable.set_value(jax.tree.map(jax.lax.with_sharding_constraint, value, specs))


def state_axes(variable: nnx.Variable[Any], axes: tuple[Any, ...]) -> None:
    """Say by which axes of a mesh, or by which logical ones, a Variable's value is split."""
    if isinstance(variable, TreeVariable):
        variable.set_metadata(linen_meta_type=_Unboxed)
    # Flax would want a mesh for each Variable that is made with these, such as those of an optimizer.
    variable.set_metadata(out_sharding=axes, eager_sharding=False)


def _fitting(leaves: Any, specs: Any, mesh: Any) -> Any:
    """The specs without what does not divide on this mesh; all of them where it is empty."""

    def parts(entry: Any) -> int:
        names = (entry,) if isinstance(entry, str) else entry or ()
        size = 1
        for name in names:
            size *= mesh.shape.get(name, 1)
        return size

    def fitting(leaf: Any, spec: PartitionSpec) -> PartitionSpec:
        pairs = zip(leaf.shape, spec, strict=False)
        return PartitionSpec(*(None if size % parts(entry) else entry for size, entry in pairs))

    return specs if mesh.empty else jax.tree.map(fitting, leaves, specs)
