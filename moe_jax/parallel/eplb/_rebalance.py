"""``rebalance``: from recorded load to new placements, to be taken over layer by layer while the model serves."""

import dataclasses
from typing import Any

import jax
import numpy as np

from moe_jax._arguments import check_not_traced, integer
from moe_jax._versions import Place, changing, install
from moe_jax.parallel._placement import Placement
from moe_jax.parallel.eplb._policy import keep_slots, rebalance_experts, share_of_slots, spread_copies
from moe_jax.parallel.eplb._state import EplbState
from moe_jax.parallel.eplb._weights import move_experts

_ROUNDING = 1e-9  # sums of the same loads in another order are no gain


@dataclasses.dataclass(frozen=True)
class EplbPlan:
    """New placements of the layers that gain by one. All NumPy, on the host.

    Balancedness is the mean over the maximum of the load of devices, 1 for a layer without load. It is computed from
    the load of the window, as if copies of an expert had shared it evenly.

    Args:
        physical_to_logical: (layers, S) int32; equal to the state's in the layers that stay as they are.
        layers: those that change, in order.
        balancedness_before: (layers,) float64, under the old placement.
        balancedness_after: (layers,) float64, under the new placement.
    """

    physical_to_logical: np.ndarray
    layers: tuple[int, ...]
    balancedness_before: np.ndarray
    balancedness_after: np.ndarray
    num_experts: int
    num_devices: int

    def placement(self, layer: int) -> Placement:
        """The new placement of one layer."""
        return Placement.from_slots(self.physical_to_logical[layer], self.num_experts, self.num_devices)

    def apply(self, layer: int, module: Any, state: EplbState) -> EplbState:
        """Take over the plan for one layer; returns the state that knows of it.

        Args:
            layer: one of ``layers``, as the state counts them.
            module: the ``FusedMoE`` of this layer. ``rearrange_expert_weights`` changes it, and raises its errors.
            state: the state to update.
        """
        placement = self.placement(layer)
        state = state.with_placement(layer, placement)
        rearrange_expert_weights(module, placement)
        return state


def rearrange_expert_weights(module: Any, placement: Placement) -> None:
    """Move the experts of a layer that serves: weights, scales, biases and maps, all at once, and compile nothing anew.

    The layer computes what it computed before, but a dispatch that adds partial sums of devices may add them in another
    order. New arrays, one layer's worth, are made beside the old ones and installed together. Calls under way keep the
    old ones.

    Args:
        module: a ``FusedMoE`` over a mesh with ``enable_eplb``.
        placement: other slots for the same experts, with as many slots and devices.

    Raises:
        ValueError: a layer without placement or weights, or a placement that does not fit. The layer stays as it is.
        TypeError: a call inside ``jax.jit``.
    """
    check_not_traced("rearrange_expert_weights", module)
    with changing():
        _rearrange(module, placement)


def _rearrange(module: Any, placement: Placement) -> None:
    if module.placement is None:
        raise ValueError(f"{module!r} has no slots to move experts between; build it with mesh= and enable_eplb=True")
    if getattr(module, "lora", None) is not None:
        raise NotImplementedError(f"{module!r} has an adapter, which does not move with its experts; merge it first")
    weights, old = module.weights.get_value(), module.placement.get_value()
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(weights)):
        raise ValueError(f"{module!r} has no weights yet; load them first")
    columns = old.logical_to_physical.shape[1]
    new = Placement.from_slots(
        placement.physical_to_logical, placement.num_experts, placement.num_devices, max_replicas=columns
    )
    moved = move_experts(weights, old, new)
    install([(Place(module, "weights"), moved), (Place(module, "placement"), new)])


def rebalance(
    state: EplbState,
    *,
    num_nodes: int = 1,
    num_groups: int = 1,
    min_gain: float | int = 0.02,
    spread: bool = True,
    load: Any = None,
) -> EplbPlan:
    """Choose placements under which the load of the state's window spreads evenly over the devices.

    Reads the window, which waits for the device: call it between steps, every few thousand (``is_rebalance_due``). Then
    take the plan over one layer at a time, with as many steps in between as you like::

        plan = rebalance(state)
        for layer in plan.layers:
            state = plan.apply(layer, modules[layer], state)

    Args:
        num_nodes, num_groups: as in ``rebalance_experts``: with groups that divide over the nodes, a group's experts
            stay on one node.
        min_gain: how much a layer's balancedness (0 to 1) must grow for it to change; less is the noise of the window.
            With 0 a layer changes when it gets better at all; none ever gets worse, and a layer without load stays.
        spread: avoid two copies of an expert on one device, where that costs no balance.
        load: (layers, L) numbers to go by instead of the window's.

    Raises:
        ValueError: sizes that do not divide; load that is negative or not finite.
    """
    load = np.asarray(state.load() if load is None else load, np.float64)
    if load.shape != (state.num_layers, state.num_experts):
        raise ValueError(f"load has shape {load.shape}, expected {(state.num_layers, state.num_experts)}")
    sizes = dict(num_devices=state.num_devices, num_nodes=num_nodes, num_groups=num_groups)
    old = np.asarray(state.physical_to_logical)
    new = rebalance_experts(load, state.num_slots, **sizes)
    if spread:
        new = spread_copies(new, load, **sizes)
    new = keep_slots(new, old, state.num_devices)
    before, after = (_balancedness(slots, load, state.num_devices) for slots in (old, new))
    is_better = after > before + max(min_gain, _ROUNDING)
    return EplbPlan(
        physical_to_logical=np.where(is_better[:, None], new, old),
        layers=tuple(np.flatnonzero(is_better).tolist()),
        balancedness_before=before,
        balancedness_after=np.where(is_better, after, before),
        num_experts=state.num_experts,
        num_devices=state.num_devices,
    )


def is_rebalance_due(step: int, interval: int = 3000) -> bool:
    """Whether to rebalance after ``step`` steps of serving: every ``interval``, first after a quarter of it."""
    step = integer("step", step, minimum=0)
    interval = integer("interval", interval, minimum=1)
    first = max(interval // 4, 1)
    return step >= first and (step - first) % interval == 0


def _balancedness(slots: np.ndarray, load: np.ndarray, num_devices: int) -> np.ndarray:
    """(layers,) mean over maximum of the load of devices; 1 where there is none."""
    per_device = share_of_slots(slots, load).reshape(len(load), num_devices, -1).sum(axis=2)
    peak = per_device.max(axis=1)
    return np.divide(per_device.mean(axis=1), peak, out=np.ones(len(load)), where=peak > 0)
