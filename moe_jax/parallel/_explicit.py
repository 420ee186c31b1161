"""Arrays that the caller has split over a mesh with Explicit axes: inside of a call the axes are Auto, and XLA
partitions it as it does under ``jax.jit`` with Auto axes."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from moe_jax._typing import Size


def lies_on_explicit_axes(tree: Any) -> bool:
    """Whether an array of the tree does."""
    return any(isinstance(leaf, jax.Array) and _explicit_axes(leaf) for leaf in jax.tree.leaves(tree))


@functools.partial(jax.jit, static_argnums=0)
def in_auto_axes(function: Callable[..., Any], x: Any, args: Any) -> Any:
    """``function(x, **args)``. Outputs of as many rows as x (T, H) are split along them like x; all others are whole.

    args: at least one array of x and args lies on a mesh with Explicit axes.
    """
    first = next(leaf for leaf in jax.tree.leaves((x, args)) if _explicit_axes(leaf))
    mesh = jax.typeof(first).sharding.mesh
    rows = jax.typeof(x).sharding.spec[:1] if _explicit_axes(x) else ()

    def sharding(output: Any) -> NamedSharding:
        is_split = output.ndim > 0 and output.shape[0] == x.shape[0]
        return NamedSharding(mesh, PartitionSpec(*rows) if is_split else PartitionSpec())

    outputs = jax.tree.map(sharding, jax.eval_shape(lambda x, args: function(x, **args), *_without_mesh((x, args))))
    run: Any = jax.sharding.auto_axes(
        lambda x, args: function(x, **args), axes=_explicit_axes(first), out_sharding=outputs
    )
    return run(x, args)


def gathered(array: jax.Array) -> jax.Array:
    """An array whole on every device of the mesh whose Explicit axes split it; any other array as it is."""
    if not _explicit_axes(array):
        return array
    return jax.sharding.reshard(array, NamedSharding(jax.typeof(array).sharding.mesh, PartitionSpec()))


def ready_to_split(array: jax.Array, axis: int, sizes: tuple[Size, ...]) -> jax.Array:
    """An array whose axis is to become axes of these sizes: whole along it where its devices do not divide the first
    size above 1, else as it is."""
    if not _explicit_axes(array):
        return array
    sharding = jax.typeof(array).sharding
    spec = [*sharding.spec, *[None] * (array.ndim - len(sharding.spec))]
    names = (spec[axis],) if isinstance(spec[axis], str) else spec[axis] or ()
    if next((size for size in sizes if size > 1), 0) % math.prod(sharding.mesh.shape[name] for name in names) == 0:
        return array
    spec[axis] = None
    return jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def _explicit_axes(array: Any) -> tuple[str, ...]:
    mesh = jax.typeof(array).sharding.mesh
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in pairs if kind == AxisType.Explicit)


def _without_mesh(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
