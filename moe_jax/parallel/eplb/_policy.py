"""Which expert sits in which slot: the balancing policy of DeepSeek's EPLB, hierarchical and global, in NumPy.

Everything here runs on the host for all layers of a model at once, (layers, ...) arrays in and out, and is
deterministic: equal loads go to the lower id. A slot p of P lies on device ``p // (P / num_devices)``.
"""

from typing import Any

import numpy as np

from moe_jax._typing import ArrayArg


def rebalance_experts(
    load: ArrayArg,
    num_physical_experts: int,
    *,
    num_devices: int,
    num_nodes: int = 1,
    num_groups: int = 1,
    previous: Any = None,
) -> np.ndarray:
    """A logical expert for every physical slot, such that devices carry about equal load.

    With groups that divide over the nodes, the experts of a group stay on one node (hierarchical); otherwise nodes and
    groups do not count (global). Busy experts get the spare slots one by one, always the one whose copies carry most.

    Args:
        load: (layers, E) finite numbers >= 0, tokens per logical expert.
        num_physical_experts: P >= E slots; divides by num_devices.
        num_devices: devices of the expert axis. num_nodes: hosts they spread over; divides num_devices.
        num_groups: expert groups of the router (``num_expert_group``); divides E.
        previous: (layers, P) the placement before. Experts that stay on their device then keep their slot.

    Returns:
        physical_to_logical (layers, P) int32. Every logical expert has a slot.

    Raises:
        ValueError: sizes that do not divide, fewer slots than experts, loads that are negative or not finite.
    """
    load = checked_load(load)
    num_layers, num_experts = load.shape
    check_sizes(num_experts, num_physical_experts, num_devices, num_nodes, num_groups)
    if num_groups % num_nodes:
        num_groups, num_nodes = 1, 1
    node_of_group, rank_in_node = balanced_packing(load.reshape(num_layers, num_groups, -1).sum(-1), num_nodes)
    # Experts renumbered such that those of a node lie side by side.
    group_place = node_of_group * (num_groups // num_nodes) + rank_in_node
    group_size = num_experts // num_groups
    place = (group_place[:, :, None] * group_size + np.arange(group_size)).reshape(num_layers, -1)
    expert_at = np.argsort(place, axis=1, kind="stable")
    node_load = np.take_along_axis(load, expert_at, 1).reshape(num_layers * num_nodes, -1)

    copies, count = replicate_experts(node_load, num_physical_experts // num_nodes)
    share = np.take_along_axis(node_load / count, copies, 1)
    device, rank_on_device = balanced_packing(share, num_devices // num_nodes)
    slot = device * (num_physical_experts // num_devices) + rank_on_device
    in_node = np.take_along_axis(copies, np.argsort(slot, axis=1, kind="stable"), 1)

    first = np.arange(num_nodes)[:, None] * (num_experts // num_nodes)
    placed = (in_node.reshape(num_layers, num_nodes, -1) + first).reshape(num_layers, num_physical_experts)
    physical_to_logical = np.take_along_axis(expert_at, placed, 1).astype(np.int32)
    if previous is None:
        return physical_to_logical
    return keep_slots(physical_to_logical, np.asarray(previous), num_devices)


def balanced_packing(weight: np.ndarray, num_packs: int) -> tuple[np.ndarray, np.ndarray]:
    """Put items into packs of equal count: heaviest first, each into the lightest pack that has room.

    weight: (X, n), n a multiple of num_packs. Returns (pack, rank inside the pack), both (X, n).
    """
    rows, n = weight.shape
    pack, rank = np.empty((rows, n), np.int64), np.empty((rows, n), np.int64)
    room = n // num_packs
    if room == 1:
        pack[:], rank[:] = np.arange(n), 0
        return pack, rank
    carried, filled = np.zeros((rows, num_packs)), np.zeros((rows, num_packs), np.int64)
    row = np.arange(rows)
    for item in np.argsort(-weight, axis=1, kind="stable").T:
        lightest = np.where(filled < room, carried, np.inf).argmin(axis=1)
        pack[row, item], rank[row, item] = lightest, filled[row, lightest]
        carried[row, lightest] += weight[row, item]
        filled[row, lightest] += 1
    return pack, rank


def replicate_experts(weight: np.ndarray, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Give every spare slot to the expert whose copies carry most each.

    weight: (X, n), num_slots >= n. Returns the expert of each slot, (X, num_slots), the first n being themselves, and
    the copies of each expert, (X, n).
    """
    rows, n = weight.shape
    expert = np.empty((rows, num_slots), np.int64)
    expert[:, :n] = np.arange(n)
    count = np.ones((rows, n), np.int64)
    row = np.arange(rows)
    for slot in range(n, num_slots):
        busiest = (weight / count).argmax(axis=1)
        expert[:, slot] = busiest
        count[row, busiest] += 1
    return expert, count


def keep_slots(physical_to_logical: np.ndarray, previous: np.ndarray, num_devices: int) -> np.ndarray:
    """The same experts on the same devices, in the slots that they had before where they had one there.

    Both (layers, P). Newcomers take the free slots in order. Nothing changes when the slots differ in number.
    """
    if previous.shape != physical_to_logical.shape:
        return physical_to_logical
    kept = np.empty_like(physical_to_logical)
    shape = (-1, physical_to_logical.shape[1] // num_devices)
    for new, old, out in zip(*(a.reshape(shape) for a in (physical_to_logical, previous, kept)), strict=True):
        waiting, free = list(new), []
        for slot, expert in enumerate(old):
            if expert in waiting:
                waiting.remove(expert)
                out[slot] = expert
            else:
                free.append(slot)
        out[free] = waiting
    return kept


def spread_copies(
    physical_to_logical: np.ndarray,
    load: ArrayArg,
    *,
    num_devices: int,
    num_nodes: int = 1,
    num_groups: int = 1,
) -> np.ndarray:
    """Swap experts between devices until no device holds two copies of one expert, as far as that costs no balance.

    A swap is made when the busier of its two devices does not get busier; under the hierarchical policy both are of one
    node. physical_to_logical (layers, P), load (layers, E) and the sizes as in ``rebalance_experts``; returns
    (layers, P).
    """
    load = checked_load(load)
    spread = physical_to_logical.copy()
    per_node = num_devices if num_groups % num_nodes else num_devices // num_nodes
    for experts, share in zip(spread, share_of_slots(physical_to_logical, load), strict=True):
        devices, share = experts.reshape(num_devices, -1), share.reshape(num_devices, -1)
        for device, slot in np.ndindex(*devices.shape):
            first = device // per_node * per_node
            if (devices[device] == devices[device, slot]).sum() > 1:
                _swap_away(devices, share, device, slot, range(first, first + per_node))
    return spread


def _swap_away(devices: np.ndarray, share: np.ndarray, device: int, slot: int, others: range) -> None:
    """Exchange one slot with the slot of another device that leaves the two most even. In place; maybe not at all."""
    expert, carried = devices[device, slot], share.sum(axis=1)
    best, best_peak = None, np.inf
    for other in others:
        if expert in devices[other]:  # includes the device itself
            continue
        for there, candidate in enumerate(devices[other]):
            moved = share[device, slot] - share[other, there]
            peak = max(carried[device] - moved, carried[other] + moved)
            is_free = peak <= max(carried[device], carried[other])
            if is_free and peak < best_peak and candidate not in devices[device]:
                best, best_peak = (other, there), peak
    if best is not None:
        for array in (devices, share):
            array[device, slot], array[best] = array[best], array[device, slot]


def share_of_slots(physical_to_logical: np.ndarray, load: np.ndarray) -> np.ndarray:
    """(layers, S) load of slots when the copies of an expert share its load (layers, E) evenly; 0 in empty ones."""
    is_used = physical_to_logical >= 0
    experts = np.where(is_used, physical_to_logical, 0)
    count = np.zeros(load.shape, np.int64)
    np.add.at(count, (np.arange(len(load))[:, None], experts), is_used)
    return np.where(is_used, np.take_along_axis(load / np.maximum(count, 1), experts, 1), 0.0)


def checked_load(load: ArrayArg) -> np.ndarray:
    """(layers, E) float64, finite and >= 0; raises ValueError."""
    load = np.asarray(load, np.float64)
    if load.ndim != 2 or 0 in load.shape:
        raise ValueError(f"load has shape {load.shape}, expected (layers, experts)")
    if not (np.isfinite(load).all() and (load >= 0).all()):
        raise ValueError("load holds numbers that are negative or not finite, expected tokens per expert")
    return load


def check_sizes(num_experts: int, num_physical_experts: int, num_devices: int, num_nodes: int, num_groups: int) -> None:
    """Raise ValueError unless slots divide over devices, devices over nodes and experts over groups."""
    if num_physical_experts < num_experts:
        raise ValueError(f"{num_physical_experts} physical experts cannot hold {num_experts} logical ones")
    if num_devices < 1 or num_physical_experts % num_devices:
        missing = -num_physical_experts % max(num_devices, 1)
        raise ValueError(
            f"{num_physical_experts} physical experts do not divide over num_devices={num_devices}; "
            f"raise num_redundant_experts by {missing}"
        )
    if num_nodes < 1 or num_devices % num_nodes:
        raise ValueError(f"num_nodes={num_nodes} does not divide num_devices={num_devices}; pass num_nodes=1")
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups={num_groups} does not divide {num_experts} experts; pass num_groups=1")
