"""``EplbState``: how busy the experts of a model were, recorded on the device, over a sliding window of steps."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from moe_jax._arguments import check_array, integer
from moe_jax._pytrees import pytree
from moe_jax._typing import Array, Float, Int, Leaf, Shaped
from moe_jax.parallel._placement import Placement


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class EplbState:
    """Load of every expert in every MoE layer, as a pytree that the caller threads through ``jax.jit``.

    Every method returns a new state, and none but ``placement`` reads a value back, so recording never waits for the
    device. Donate the state where it is updated: the window is then written in place.

    Example:
        >>> import jax.numpy as jnp
        >>> from moe_jax.parallel import EplbState, Placement
        >>> state = EplbState.create(2, Placement.create(4, 1, num_redundant_experts=2), window_size=10)
        >>> state = state.record(jnp.array([[3, 0, 0, 0, 2, 0], [1, 1, 1, 1, 0, 0]])).next_step()
        >>> state.load().tolist()
        [[5, 0, 0, 0], [1, 1, 1, 1]]

    Attributes:
        physical_to_logical: (layers, S) int32, the logical expert in each slot, -1 in an empty one.
        window: (window_size, layers, L) int32, tokens per logical expert in the last steps. Kept by logical expert, so
            that a placement that changes on the way leaves it true. 1000 steps of 58 layers of 256 experts are 59 MB.
        pass_load: (layers, L) int32, what the current step has recorded so far.
        step: () int32, steps that went into the window.
        num_devices: devices of the expert axis; static.
    """

    physical_to_logical: Leaf
    window: Leaf
    pass_load: Leaf
    step: Leaf
    num_devices: int = dataclasses.field(metadata=dict(static=True))

    @classmethod
    def create(
        cls,
        num_layers: int,
        placement: Placement,
        *,
        window_size: int = 1000,
        mesh: Any = None,
    ) -> "EplbState":
        """A state without load of ``num_layers`` layers, all placed alike, that remembers ``window_size`` steps.

        mesh: of the layers, a ``Mesh`` or their ``ParallelConfig``. The state then lies on it as a step leaves it, and
        the first step compiles the only program; without a mesh the second one compiles another.
        """
        num_layers = integer("num_layers", num_layers, minimum=1)
        window_size = integer("window_size", window_size, minimum=1)
        num_experts = placement.num_experts
        slots = np.tile(np.asarray(placement.physical_to_logical), (num_layers, 1))
        window = np.zeros((window_size, num_layers, num_experts), np.int32)
        pass_load, step = np.zeros((num_layers, num_experts), np.int32), np.zeros((), np.int32)
        return cls(*_placed((slots, window, pass_load, step), mesh), num_devices=placement.num_devices)

    @property
    def num_layers(self) -> int:
        return self.physical_to_logical.shape[0]

    @property
    def num_experts(self) -> int:
        """L, logical."""
        return self.pass_load.shape[1]

    @property
    def num_slots(self) -> int:
        """S, physical."""
        return self.physical_to_logical.shape[1]

    def record(self, load: Int[Array, "..."], layer: Leaf | int | None = None) -> "EplbState":
        """Add the rows that each slot served, ``MoEStats.load``, to the current step.

        load: (layers, S) of all layers, or (S,) of the one ``layer`` (int, or () int32 inside a scan). May be called
        any number of times in a step: micro-batches add up. Raises ValueError for another shape.
        """
        expected = (self.num_layers, self.num_slots)[0 if layer is None else 1 :]
        check_array("load", load, jnp.integer, f"{expected}")
        if load.shape != expected:
            raise ValueError(f"load has shape {load.shape}, expected {expected}: MoEStats.load, one number per slot")
        layers = jnp.arange(self.num_layers)[:, None] if layer is None else layer
        experts = self.physical_to_logical if layer is None else self.physical_to_logical[layer]
        experts = jnp.where(experts < 0, self.num_experts, experts)
        added = self.pass_load.at[layers, experts].add(jnp.asarray(load).astype(jnp.int32), mode="drop")
        return dataclasses.replace(self, pass_load=added)

    def next_step(self, *, is_dummy: Leaf | bool = False) -> "EplbState":
        """Move the current step into the window, over the oldest one. is_dummy (bool or () bool): drop it instead."""
        is_real = jnp.logical_not(is_dummy)
        at = self.step % self.window.shape[0]
        written = jnp.where(is_real, self.pass_load, self.window[at])
        return dataclasses.replace(
            self,
            window=self.window.at[at].set(written),
            pass_load=jnp.zeros_like(self.pass_load),
            step=self.step + is_real.astype(jnp.int32),
        )

    def load(self) -> Int[Array, "layers L"]:
        """Tokens per logical expert in the window, (layers, L) int32."""
        return self.window.sum(axis=0, dtype=jnp.int32)

    def reset(self) -> "EplbState":
        """The same placement without any load."""
        zeros = jax.tree.map(jnp.zeros_like, (self.window, self.pass_load, self.step))
        return dataclasses.replace(self, window=zeros[0], pass_load=zeros[1], step=zeros[2])

    def with_devices(self, placement: Placement, *, mesh: Any = None) -> "EplbState":
        """The state after a mesh change: all layers in this placement, with the load they had. Host only.

        mesh: the new one, as in ``create``.
        """
        if placement.num_experts != self.num_experts:
            raise ValueError(f"placement is of {placement.num_experts} experts, expected {self.num_experts}")
        slots = np.tile(np.asarray(placement.physical_to_logical), (self.num_layers, 1))
        load = map(np.asarray, (self.window, self.pass_load, self.step))
        return type(self)(*_placed((slots, *load), mesh), num_devices=placement.num_devices)

    def placement(self, layer: int) -> Placement:
        """Where the experts of one layer lie; host only."""
        return Placement.from_slots(np.asarray(self.physical_to_logical[layer]), self.num_experts, self.num_devices)

    def with_placement(self, layer: int, placement: Placement) -> "EplbState":
        """The state after the experts of one layer have moved; its load stays. Host only, with a few bytes to copy.

        Raises ValueError for other counts of experts, slots or devices.
        """
        found = (placement.num_experts, placement.num_slots, placement.num_devices)
        expected = (self.num_experts, self.num_slots, self.num_devices)
        if found != expected:
            raise ValueError(f"placement has (experts, slots, devices) = {found}, expected {expected}")
        slots = np.array(self.physical_to_logical)
        slots[layer] = placement.physical_to_logical
        sharding = self.physical_to_logical.sharding
        is_spread = isinstance(sharding, NamedSharding)
        return dataclasses.replace(
            self, physical_to_logical=_whole(slots, sharding) if is_spread else jnp.asarray(slots)
        )


def _placed(leaves: tuple[np.ndarray, ...], mesh: Any) -> list[jax.Array]:
    """Whole on every device of a mesh, under the names that programs give their outputs: Explicit axes are written out
    for every dimension. jit compiles by names."""
    if mesh is None:
        return [jnp.asarray(leaf) for leaf in leaves]
    mesh = getattr(mesh, "mesh", mesh)
    is_explicit = AxisType.Explicit in mesh.axis_types
    specs = [PartitionSpec(*[None] * leaf.ndim) if is_explicit else PartitionSpec() for leaf in leaves]
    return [_whole(leaf, NamedSharding(mesh, spec)) for leaf, spec in zip(leaves, specs, strict=True)]


def _whole(leaf: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Every process brings its own copy of the same values."""
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: np.asarray(leaf[index]))


def balancedness(load: Shaped[Array, "layers S"], num_devices: int) -> Float[Array, ""]:
    """Mean over maximum of the load of devices, each summed over the layers: 1 is even, 1 / num_devices the worst.

    load: (layers, S) tokens per slot, ``MoEStats.load``. Returns () float32, 0 when nothing was recorded.
    """
    per_device = jnp.asarray(load).reshape(load.shape[0], num_devices, -1).sum(axis=-1).astype(jnp.float32)
    peak = per_device.max(axis=1).sum()
    return jnp.where(peak > 0, per_device.mean(axis=1).sum() / jnp.where(peak > 0, peak, 1.0), 0.0)
