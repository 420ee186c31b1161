"""Dispatch and combine: how the tokens of a device reach the devices of their experts, and their results come back.

Every way is a function of the rows of one device inside ``jax.shard_map`` and returns the sum over experts of these
rows, summed over the expert axis and not over the tensor axis:

=================  ==========================================================  ===========================
name               dispatch                                                    combine
=================  ==========================================================  ===========================
replicate          tokens are the same on all devices of the expert axis       psum
all_gather         all_gather of tokens, weights and ids                       psum_scatter
all_to_all         all_to_all of rows, a fixed number for each pair of         all_to_all back, sum over k
                   devices in a round, as many rounds as it takes              in the order of a token's
                                                                               experts
ragged_all_to_all  the same rows in one exchange of just as many as there are  the same
nvlink_dispatch    one copy of a token, quantized, for each device with an     the rows of its experts into
                   expert of it, stored into that device's memory              this device's memory, sum
                                                                               over k as all_to_all; with
                                                                               bfloat16 partial sums one
                                                                               row of each device
=================  ==========================================================  ===========================

What a token has chosen among adapters (``Choices``, 0 or 1 for each rank in int8) travels with its row, in
collectives of its own.

Nothing here is bounded by a capacity: no token is dropped under any routing. Each device takes part in every
collective, tokens or not, so none waits for another forever.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax._typing import Array
from moe_jax.experts._low_rank import Choices
from moe_jax.experts._sort import sort_by_expert
from pallas_kernels.nvlink_dispatch import DispatchedRows, combine_rows, dispatch_rows

ALL_AT_ONCE = 128  # pairs of a device up to which one round of all_to_all takes any routing
ROOM = 1.25  # rows for each device in a round over their mean


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What a dispatch knows of its surroundings.

    axis, size: the expert axis. slots_per_device: experts of one device. round_axes: axes whose devices agree on the
    number of rounds. run: ``(x (M, H), weights (M, k) f32, ids (M, k) local or -1, choices (M, R)) -> (M, H) float32``,
    the experts of this device. sum_dtype: in which partial sums are added. row_dtype: of rows on their way back; holds
    what ``run`` gives for one expert of weight 1. is_one_round: one exchange must bring all rows, since activation
    scales are common to a call. serve: for ``nvlink_dispatch``, ``(what arrived, first slot here, send_back) ->
    (M, H) float32`` as ``Backend.serve_arrived`` has it; tokens travel in ``quantization``, and ``kernels`` names the
    implementation of the exchange.
    """

    axis: str
    size: int
    slots_per_device: int
    round_axes: tuple[str, ...]
    run: Callable[[Array, Array, Array, Choices], Array]
    sum_dtype: jnp.dtype
    row_dtype: jnp.dtype
    is_one_round: bool
    serve: Callable[[DispatchedRows, Array, Callable[[Array, Array], Array]], Array] | None = None
    quantization: str = "none"
    kernels: str = "hopper"

    def local_ids(self, slots: Array) -> Array:
        """Slots as indices into this device's experts, -1 for those of others."""
        index = slots - lax.axis_index(self.axis) * self.slots_per_device
        return jnp.where((slots >= 0) & (index >= 0) & (index < self.slots_per_device), index, -1)


def replicate(x: Array, weights: Array, slots: Array, choices: Choices, exchange: Exchange) -> Array:
    """Each device serves its experts for all tokens; partial sums are added."""
    y = exchange.run(x, weights, exchange.local_ids(slots), choices).astype(exchange.sum_dtype)
    return lax.psum(y, exchange.axis).astype(jnp.float32)


def all_gather(x: Array, weights: Array, slots: Array, choices: Choices, exchange: Exchange) -> Array:
    """As ``replicate`` on the tokens of all devices; each gets the sums of its own back."""
    gathered = jax.tree.map(lambda part: lax.all_gather(part, exchange.axis, tiled=True), (x, weights, slots, choices))
    x, weights, slots, choices = gathered
    y = exchange.run(x, weights, exchange.local_ids(slots), choices).astype(exchange.sum_dtype)
    return lax.psum_scatter(y, exchange.axis, tiled=True).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Pairs:
    """The (token, slot of top-k) pairs of a device, sorted by the device that serves them; leaves are arrays.

    pair: (N,) position t * top_k + k of each. device: (N,), ``size`` for pairs that go nowhere, which come last.
    rank: (N,) place among those for the same device. counts: (size,) pairs for each device. ids: (N,) expert there.
    """

    pair: Array
    device: Array
    rank: Array
    counts: Array
    ids: Array


def _sorted_pairs(slots: Array, exchange: Exchange) -> _Pairs:
    flat = slots.reshape(-1)
    device = jnp.where(flat >= 0, flat // exchange.slots_per_device, exchange.size)
    device, pair = sort_by_expert(device, exchange.size)
    counts = jnp.zeros(exchange.size, jnp.int32).at[device].add(1, mode="drop")
    starts = jnp.cumsum(counts) - counts
    rank = jnp.arange(flat.size, dtype=jnp.int32) - starts.at[device].get(mode="fill", fill_value=0)
    return _Pairs(pair, device, rank, counts, flat[pair] % exchange.slots_per_device)


def rows_per_round(num_pairs: int, exchange: Exchange) -> int:
    """Rows that each device sends to each other one in a round of ``all_to_all``, static."""
    if exchange.is_one_round or num_pairs <= ALL_AT_ONCE:
        return num_pairs
    return min(num_pairs, -(-int(ROOM * num_pairs) // exchange.size // 8) * 8 + 8)


def all_to_all(x: Array, weights: Array, slots: Array, choices: Choices, exchange: Exchange) -> Array:
    """One row for each pair goes to its expert and comes back; the sum over k is that of a single device, bit for bit.

    The devices with the most rows for one other set the number of rounds, the same for all.
    """
    num_tokens, top_k = slots.shape
    pairs = _sorted_pairs(slots, exchange)
    room = rows_per_round(pairs.pair.size, exchange)
    rounds = -(-lax.pmax(jnp.max(pairs.counts), exchange.round_axes) // room)

    def one_round(i: Array, rows: Array) -> Array:
        is_sent = (pairs.device < exchange.size) & (pairs.rank // room == i)
        place = jnp.where(is_sent, pairs.device * room + pairs.rank % room, exchange.size * room)
        sender = jnp.full(exchange.size * room, num_tokens, jnp.int32).at[place].set(pairs.pair // top_k, mode="drop")
        ids = jnp.full(exchange.size * room, -1, jnp.int32).at[place].set(pairs.ids, mode="drop")
        sent = jax.tree.map(lambda part: part.at[sender].get(mode="fill", fill_value=0), (x, choices))
        arrived = jax.tree.map(lambda part: lax.all_to_all(part, exchange.axis, 0, 0, tiled=True), (sent, ids))
        (came, chosen), ids = arrived
        served = _serve(came, chosen, ids, exchange)
        back = lax.all_to_all(served, exchange.axis, 0, 0, tiled=True)
        mine = back.at[place].get(mode="fill", fill_value=0)
        return rows.at[jnp.where(is_sent, pairs.pair, pairs.pair.size)].set(mine, mode="drop")

    rows = jnp.zeros((num_tokens * top_k, x.shape[1]), exchange.row_dtype)
    if room == pairs.pair.size:
        return _sum_over_experts(one_round(jnp.int32(0), rows), weights)
    _, rows = lax.while_loop(lambda s: s[0] < rounds, lambda s: (s[0] + 1, one_round(*s)), (jnp.int32(0), rows))
    return _sum_over_experts(rows, weights)


def ragged_all_to_all(x: Array, weights: Array, slots: Array, choices: Choices, exchange: Exchange) -> Array:
    """As ``all_to_all`` in one exchange of exactly the rows there are; buffers hold the worst case."""
    num_tokens, top_k = slots.shape
    pairs = _sorted_pairs(slots, exchange)
    me = lax.axis_index(exchange.axis)
    counts = lax.all_gather(pairs.counts, exchange.axis)  # (from, to)
    came = counts[:, me]
    before = jnp.cumsum(counts, axis=0) - counts  # rows for a device from those before the sender
    starts = jnp.cumsum(counts, axis=1) - counts  # where the rows for a device begin at their sender
    sizes = starts[me], pairs.counts, before[me], came
    back_sizes = before[:, me], came, starts[:, me], pairs.counts
    capacity = exchange.size * num_tokens * top_k

    def forth(rows: Array, fill: int) -> Array:
        out = jnp.full((capacity, *rows.shape[1:]), fill, rows.dtype)
        return lax.ragged_all_to_all(rows, out, *sizes, axis_name=exchange.axis)

    ids = forth(jnp.where(pairs.device < exchange.size, pairs.ids, -1)[:, None], -1)[:, 0]
    rows, chosen = jax.tree.map(lambda part: forth(part[pairs.pair // top_k], 0), (x, choices))
    served = _serve(rows, chosen, ids, exchange)
    empty = jnp.zeros((num_tokens * top_k, x.shape[1]), served.dtype)
    back = lax.ragged_all_to_all(served, empty, *back_sizes, axis_name=exchange.axis)
    rows = jnp.zeros_like(back).at[pairs.pair].set(back, unique_indices=True)
    return _sum_over_experts(rows, weights)


def nvlink_dispatch(x: Array, weights: Array, slots: Array, choices: Choices, exchange: Exchange) -> Array:
    """Two kernels that store into the memory of the other devices; the sum over k is that of a single device."""
    assert exchange.serve is not None and not choices  # the caller refuses experts that run elsewhere, and adapters
    where: dict[str, Any] = dict(
        axis=exchange.axis, slots_per_device=exchange.slots_per_device, implementation=exchange.kernels
    )
    # Sums in float32 would move more bytes than most tokens' rows, and rows are added up as on one device.
    if returns_sums := exchange.sum_dtype != jnp.float32:
        where |= dict(sum_dtype=exchange.sum_dtype)
    told = weights if returns_sums else None
    arrived = dispatch_rows(x, slots, told, quantization=exchange.quantization, row_dtype=exchange.row_dtype, **where)

    def send_back(rows: Array, row_of: Array) -> Array:
        return combine_rows(rows, row_of, slots, weights, arrived, **where)

    return exchange.serve(arrived, lax.axis_index(exchange.axis) * exchange.slots_per_device, send_back)


def _serve(rows: Array, choices: Choices, ids: Array, exchange: Exchange) -> Array:
    """Rows through this device's experts, one each, with weight 1."""
    weight = (ids >= 0).astype(jnp.float32)
    return exchange.run(rows, weight[:, None], ids[:, None], choices).astype(exchange.row_dtype)


def _sum_over_experts(rows: Array, weights: Array) -> Array:
    rows = rows.reshape(*weights.shape, -1).astype(jnp.float32)
    return jnp.sum(rows * weights[..., None], axis=1)


WAYS: dict[str, Callable[[Array, Array, Array, Choices, Exchange], Array]] = {
    "replicate": replicate,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "ragged_all_to_all": ragged_all_to_all,
    "nvlink_dispatch": nvlink_dispatch,
}
