"""A kernel as it is lowered and compiled without a GPU."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

Shape = tuple[tuple[int, ...], str]


def launches(function: Callable[..., Any], *arguments: Any) -> int:
    """How many Hopper kernels the program of ``function`` for CUDA launches; needs no GPU."""
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("mosaic_gpu_v2")


@dataclasses.dataclass(frozen=True)
class Case:
    """name; function of ``shapes``' arrays; instruction: the wgmma in its SASS, None for a row kernel.

    mesh: (axis, size) of the devices that run it together, each with arrays of these shapes.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[Shape, ...]
    instruction: str | None = None
    mesh: tuple[tuple[str, int], ...] = ()

    @property
    def num_devices(self) -> int:
        return math.prod(size for _, size in self.mesh)

    def traced(self) -> jax.stages.Traced:
        """The function of one device on arrays of its shapes."""
        return jax.jit(self.function).trace(*[jax.ShapeDtypeStruct(*shape) for shape in self.shapes])

    def lowered(self) -> str:
        """The text for CUDA; needs no GPU."""
        return self.traced().lower(lowering_platforms=("cuda",)).as_text()

    def launches(self) -> int:
        """Kernels in that text."""
        return self.lowered().count("mosaic_gpu_v2")

    def over(self, mesh: jax.sharding.Mesh) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
        """The function on all devices of a mesh, and its arguments."""
        spec = jax.sharding.PartitionSpec(mesh.axis_names)
        sharding = jax.sharding.NamedSharding(mesh, spec)
        shapes = [((self.num_devices * shape[0], *shape[1:]), dtype) for shape, dtype in self.shapes]
        function = jax.shard_map(self.function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return function, [jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes]
