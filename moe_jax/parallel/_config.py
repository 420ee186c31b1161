"""``ParallelConfig``: the mesh of one layer and what its axes mean."""

import dataclasses

import jax
from jax.sharding import AxisType, Mesh

from moe_jax._arguments import check_booleans

DISPATCHES = ("replicate", "all_gather", "all_to_all", "ragged_all_to_all", "nvlink_dispatch")
_OLD_NAMES = {"push": "nvlink_dispatch"}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """Which mesh axis splits what. The caller names the axes and combines them freely.

    Args:
        mesh: of any shape, with Auto or Explicit axes. Axes that no argument names hold copies.
        expert_axis: name of the axis that splits the experts; None splits nothing, as for the other axes.
        tensor_axis: name of the axis that splits I inside every expert.
        data_axis: name of the axis that splits the tokens. It may be the expert axis.
        sequence_axis: name of the axis that splits the tokens between layers. It may be the expert axis or the tensor
            axis. The devices of the tensor axis then hold different tokens and gather them for this layer.
        dispatch: how tokens reach their experts, one of ``DISPATCHES``; None chooses by the number of tokens.
        reduce_results: sum the partial results of the expert and tensor axes. False returns them one by one.
        reduce_dtype: dtype in which partial sums travel and are added, "float32" or "bfloat16". bfloat16 halves the
            bytes of replicate's psum, of all_gather's psum_scatter and of the tensor axis. Every partial sum is then
            rounded once more.
    """

    mesh: Mesh
    expert_axis: str | None = None
    tensor_axis: str | None = None
    data_axis: str | None = None
    sequence_axis: str | None = None
    dispatch: str | None = None
    reduce_results: bool = True
    reduce_dtype: str = "float32"

    def __post_init__(self) -> None:
        check_booleans(self)
        if not isinstance(self.mesh, Mesh):
            raise TypeError(f"mesh has type {type(self.mesh).__name__}, expected jax.sharding.Mesh")
        names = {field: getattr(self, field) for field in ("expert_axis", "tensor_axis", "data_axis", "sequence_axis")}
        given = {field: axis for field, axis in names.items() if axis is not None}
        for field, axis in given.items():
            if axis not in self.mesh.axis_names:
                raise ValueError(f"{field}={axis!r} is no axis of the mesh, which has {tuple(self.mesh.shape.items())}")
        if not given:
            raise ValueError(
                f"mesh={dict(self.mesh.shape)} is given without a meaning; name its axes with {', '.join(names)}"
            )
        for first, second in (("expert", "tensor"), ("data", "tensor"), ("data", "sequence")):
            axis = names[f"{first}_axis"]
            if axis is not None and axis == names[f"{second}_axis"]:
                raise ValueError(f"{first}_axis and {second}_axis are both {axis!r}, expected different axes")
        object.__setattr__(self, "dispatch", _OLD_NAMES.get(str(self.dispatch), self.dispatch))
        if self.dispatch is not None and self.dispatch not in DISPATCHES:
            raise ValueError(f"dispatch={self.dispatch!r}, expected None or one of {', '.join(map(repr, DISPATCHES))}")
        if self.reduce_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"reduce_dtype={self.reduce_dtype!r}, expected 'float32' or 'bfloat16'")
        if not self.reduce_results and self.dispatch not in (None, "replicate"):
            raise ValueError(f"reduce_results=False leaves sums to the caller, dispatch={self.dispatch!r} makes them")
        if not self.reduce_results and self.gathers_tokens:
            raise ValueError(
                "reduce_results=False leaves sums to the caller, sequence_axis = tensor_axis scatters them"
            )

    def size(self, axis: str | None) -> int:
        """Devices along an axis; 1 for None."""
        return 1 if axis is None else self.mesh.shape[axis]

    @property
    def expert_size(self) -> int:
        return self.size(self.expert_axis)

    @property
    def tensor_size(self) -> int:
        return self.size(self.tensor_axis)

    @property
    def gathers_tokens(self) -> bool:
        """Whether the devices of the tensor axis hold different tokens between layers."""
        return self.sequence_axis is not None and self.sequence_axis == self.tensor_axis

    @property
    def is_explicit(self) -> bool:
        return AxisType.Explicit in self.mesh.axis_types

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @property
    def used_axes(self) -> tuple[str, ...]:
        """All axes with a meaning, in the order of the mesh."""
        named = {self.expert_axis, self.tensor_axis, self.data_axis, self.sequence_axis}
        return tuple(str(axis) for axis in self.mesh.axis_names if axis in named)

    def token_axes(self, dispatch: str) -> tuple[str, ...]:
        """Axes that split the tokens of a call on entry and exit."""
        named = (self.data_axis, self.sequence_axis)
        axes: list[str] = [axis for axis in named if axis is not None and axis != self.expert_axis]
        if dispatch != "replicate" and self.expert_axis is not None:
            axes.append(self.expert_axis)
        return tuple(axes)

    def __repr__(self) -> str:
        parts = {"expert": self.expert_axis, "tensor": self.tensor_axis, "data": self.data_axis}
        parts |= {"sequence": self.sequence_axis}
        axes = ", ".join(f"{part} {axis!r}: {self.size(axis)}" for part, axis in parts.items() if axis is not None)
        sums = f"reduce_results={self.reduce_results}, reduce_dtype={self.reduce_dtype!r}"
        return f"ParallelConfig({axes}, dispatch={self.dispatch!r}, {sums})"
