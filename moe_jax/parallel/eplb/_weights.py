"""Moving experts between slots: one gather along the expert axis of every leaf, whatever the leaf means.

Leaves are moved as bits. On one device that is ``leaf[source]``. Over a mesh each device sends the experts that others
lack in one all-to-all per piece of a leaf: room for ``width`` experts for each pair of devices, and pieces such that
the rooms stay below ``_PIECE_BYTES``. Tables of indices are data: a compiled program serves every move of its width.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moe_jax._typing import Array, DTypeLike
from moe_jax.parallel._placement import Placement

_PIECE_BYTES = 64 << 20  # of the send buffer on one device; the receive buffer is as large


def source_slots(old: Placement, new: Placement) -> np.ndarray:
    """(S,) int32: for each slot of ``new`` a slot of ``old`` with the same expert; -1 for a slot that stays empty.

    The slot itself comes first, then one of the same device, else the copies in turn, so that no device sends all.
    Raises ValueError when the placements differ in slots, devices or experts.
    """
    for what in ("num_experts", "num_slots", "num_devices"):
        before, after = getattr(old, what), getattr(new, what)
        if before != after:
            raise ValueError(f"the new placement has {what}={after}, the old one {before}; only slots can change hands")
    old_experts, new_experts = np.asarray(old.physical_to_logical), np.asarray(new.physical_to_logical)
    source = np.full(old.num_slots, -1, np.int32)
    served: dict[int, int] = {}  # by expert: how many devices a copy has been promised to
    promised: dict[tuple[int, int], int] = {}  # (expert, device) -> old slot
    for slot, expert in enumerate(new_experts.tolist()):
        if expert < 0:
            continue
        holders = np.flatnonzero(old_experts == expert)
        device = slot // old.slots_per_device
        here = holders[holders // old.slots_per_device == device]
        if old_experts[slot] == expert:
            source[slot] = slot
        elif here.size:
            source[slot] = here[0]
        else:
            if (expert, device) not in promised:
                turn = served.get(expert, 0)
                promised[expert, device] = int(holders[turn % holders.size])
                served[expert] = turn + 1
            source[slot] = promised[expert, device]
    return source


def place_experts(weights: Any, placement: Placement) -> Any:
    """Experts by id into slots: leaves (L, ...) to (S, ...), with all copies, and zeros in empty slots.

    Scalars, which all experts share, stay. Raises ValueError for leaves of another number of experts.
    """
    experts = jnp.asarray(placement.physical_to_logical)

    def place(leaf):
        if leaf.ndim == 0:
            return leaf
        if leaf.shape[0] != placement.num_experts:
            raise ValueError(f"a leaf of the weights has shape {leaf.shape}, expected {placement.num_experts} experts")
        return _place(leaf, experts)

    return jax.tree.map(place, weights)


def move_experts(weights: Any, old: Placement, new: Placement) -> Any:
    """The same experts in other slots: every leaf with an expert axis, bit for bit.

    The given arrays stay valid, so that a layer can serve from them until it takes all new ones at once. Empty slots
    keep what they hold.

    Args:
        weights: pytree of arrays, (S, ...) by slot. Scalars, which all experts share, stay. Any axis may be sharded,
            the first one by slots. Each device then moves its own parts.

    Returns:
        Arrays of the same shapes, dtypes and shardings.

    Raises:
        ValueError: placements or leaves do not have the same number of slots.
    """
    source = source_slots(old, new)
    return gather_experts(weights, np.where(source < 0, np.arange(source.size), source).astype(np.int32))


def gather_experts(weights: Any, source: np.ndarray) -> Any:
    """Every leaf as ``leaf[source]`` along the expert axis, bit for bit; as ``move_experts`` but for any indices."""
    tables = functools.cache(functools.partial(exchange_tables, source))

    def gather(leaf):
        if leaf.ndim == 0:
            return leaf
        if leaf.shape[0] != source.size:
            raise ValueError(f"a leaf of the weights has shape {leaf.shape}, expected {source.size} slots along axis 0")
        if not isinstance(leaf.sharding, NamedSharding):
            return _gather(leaf, source)
        mesh, spec = leaf.sharding.mesh, leaf.sharding.spec
        axis = spec[0] if len(spec) else None
        names = (axis,) if isinstance(axis, str) else axis or ()
        num_devices = math.prod(mesh.shape[name] for name in names)
        moved = _exchange(leaf, *tables(num_devices), mesh=mesh, spec=PartitionSpec(axis, *spec[1:]))
        return jax.device_put(moved, leaf.sharding)  # no copy: the same layout by the same name, for jit's cache

    return jax.tree.map(gather, weights)


def exchange_tables(source: np.ndarray, num_devices: int) -> tuple[np.ndarray, np.ndarray]:
    """From ``leaf[source]`` to what devices do: (send, take), both int32.

    send: (from, to, width), slots of the sending device, 0 where there is nothing to send. width is the largest number
        of experts that one device gets from another, rounded up to a power of two; 0 when every expert stays where it
        is, so that few widths ever occur.
    take: (devices, slots), for each slot of a device its index among the device's own slots followed by what came, by
        sender.
    """
    per_device = source.size // num_devices
    wanted: dict[tuple[int, int], dict[int, int]] = {}
    for slot, origin in enumerate(source.tolist()):
        pair = (origin // per_device, slot // per_device)
        if pair[0] != pair[1]:
            places = wanted.setdefault(pair, {})
            places.setdefault(origin % per_device, len(places))
    most = max(map(len, wanted.values()), default=0)
    width = 1 << (most - 1).bit_length() if most else 0
    send = np.zeros((num_devices, num_devices, width), np.int32)
    for (sender, receiver), places in wanted.items():
        send[sender, receiver, : len(places)] = list(places)
    take = np.empty(source.size, np.int32)
    for slot, origin in enumerate(source.tolist()):
        sender, receiver = origin // per_device, slot // per_device
        take[slot] = origin % per_device
        if sender != receiver:
            take[slot] = per_device + sender * width + wanted[sender, receiver][origin % per_device]
    return send, take.reshape(num_devices, per_device)


@jax.jit
def _place(leaf: Array, experts: Array) -> Array:
    is_used = (experts >= 0).reshape(-1, *(1,) * (leaf.ndim - 1))
    bits = _to_bits(leaf)
    return _from_bits(jnp.where(is_used, bits[experts], jnp.zeros_like(bits, shape=())), leaf.dtype)


@jax.jit
def _gather(leaf: Array, source: Array) -> Array:
    return _from_bits(_to_bits(leaf).at[source].get(mode="promise_in_bounds"), leaf.dtype)


@functools.partial(jax.jit, static_argnames=("mesh", "spec"))
def _exchange(leaf: Array, send: Array, take: Array, *, mesh: Mesh, spec: PartitionSpec) -> Array:
    axis = spec[0]
    num_devices, _, width = send.shape

    def on_device(leaf, send, take):
        """leaf (slots, ...) of this device; the tables are those of all."""
        bits = _to_bits(leaf)
        device = 0 if axis is None else lax.axis_index(axis)
        send, take = send[device], take[device]
        slots = bits.shape[0]
        if width == 0:
            return _from_bits(bits[take], leaf.dtype)
        rows = bits.reshape(slots, -1)
        pieces = _pieces(rows.shape[1], num_devices * width * rows.dtype.itemsize)

        def move(piece):
            arriving = lax.all_to_all(piece[send], axis, 0, 0)
            return jnp.concatenate([piece, arriving.reshape(-1, piece.shape[1])])[take]

        moved = lax.map(move, rows.reshape(slots, pieces, -1).swapaxes(0, 1))
        return _from_bits(moved.swapaxes(0, 1).reshape(bits.shape), leaf.dtype)

    specs = (spec, PartitionSpec(), PartitionSpec())
    return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=spec)(leaf, send, take)


def _pieces(columns: int, bytes_per_column: int) -> int:
    """Into how many equal pieces to cut the columns: a power of two, more only while they can be halved."""
    pieces = 1
    while columns * bytes_per_column > pieces * _PIECE_BYTES and columns % (2 * pieces) == 0:
        pieces *= 2
    return pieces


def _to_bits(leaf: Array) -> Array:
    return lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")


def _from_bits(bits: Array, dtype: DTypeLike) -> Array:
    return lax.bitcast_convert_type(bits, dtype)
