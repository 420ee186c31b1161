"""Rows of experts back to the devices of their tokens, and their sum there.

Every block (one warpgroup):

    for each of its arrived tokens, or pieces of them, that have rows here:
        rows return:  load each row -> store it at its (token, slot) in the mailbox of the token's device
        sums return:  load the rows, add them up times their weights in float32 in the order of the slots, round ->
                      store the sum at (this device, token) in that mailbox
    the last block to come here: signal every device, behind what all have stored
    wait for every device
    for each of its own tokens' pieces: weighted sum of its rows in the order of the slots, as a single device adds
        them; or sum of the devices' sums in their order; in float32

The mailboxes are outputs of the dispatch of the same call, and inputs here. A device's mailbox is its own from the
start of its dispatch until this launch ends on it. Another device learns its address, and that its counter is zero,
from that dispatch, which ends behind the signals of all; so no store and no signal comes too early. This launch ends on
a device when every device has signalled it, behind the stores of all its blocks: none comes too late. So there is no
barrier before the launch, and no memory to fill.

Why it cannot hang. Every device signals every device once; all blocks of a device wait, and are resident together
(``BLOCKS_PER_SM``), so none of those that others wait for is kept from running.

Visibility: a block's stores come before its barrier, the barrier before a fence of the system and the count of blocks;
the last block passes another fence before it signals; a waiting block acquires the signals at system scope and passes
a barrier before it reads. It has not read its mailbox before.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.rows import pieces
from pallas_kernels.common.sm90 import WARPGROUP
from pallas_kernels.nvlink_dispatch import mailbox_sm90
from pallas_kernels.nvlink_dispatch.config import ExchangeConfig, ExchangeDesc
from pallas_kernels.nvlink_dispatch.devices_sm90 import Devices, block_kernel, share


def combine_sm90(desc: ExchangeDesc, config: ExchangeConfig) -> Callable[..., Any]:
    """The kernel: (rows (Mp, H), row_of (size * T * k,), slots (T * k,), weights, mailbox, table) -> (T, H) float32.

    weights: (T * k,) of this device's tokens; where sums return (size, padded_pairs) of all that arrived. mailbox and
    table: of the dispatch. config must pass config_error. To be called inside ``jax.shard_map`` over ``desc.mesh``.
    """

    def nvlink_combine(*refs):  # the name that profilers show
        combine_body(desc, config, Devices, *refs)

    return block_kernel(nvlink_combine, combine_shape(desc), config)


def combine_shape(desc: ExchangeDesc) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((desc.num_tokens, desc.width), jnp.float32)


def combine_body(
    desc: ExchangeDesc,
    config: ExchangeConfig,
    make_devices: Callable[[ExchangeDesc], Devices],
    rows: Any,
    row_of: Any,
    slots: Any,
    weights: Any,
    mailbox: Any,
    table: Any,
    out: Any,
) -> None:
    devices = make_devices(desc)
    rows, row_of, slots, weights = map(devices.own, (rows, row_of, slots, weights))
    mailbox, table, out = map(devices.own, (mailbox, table, out))
    me = mailbox_sm90.index(table, desc.size)
    length = WARPGROUP * desc.return_vector
    layout = plgpu.Layout.WG_STRIDED((length,), vec_size=desc.return_vector)
    starts = pieces(desc.width, length)
    send = _send_rows if desc.sum_dtype is None else _send_sums
    total = _total_of_rows if desc.sum_dtype is None else _total_of_sums

    def start_of(number):
        return lax.min(number * length, jnp.int32(desc.width - length))

    def load(ref, row, start):
        return mosaic.load(ref.at[row, pl.ds(start, length)], layout=layout, optimized=False)

    def store(device, row, start, values):
        mailbox_sm90.store(table, device, row * desc.width + start, values, layout)

    parts = 1 if config.takes_whole_rows else len(starts)

    def one_arrived(item):
        number = lax.div(item, jnp.int32(parts))
        here = starts if config.takes_whole_rows else [start_of(lax.rem(item, jnp.int32(parts)))]
        token = lax.div(number, jnp.int32(desc.size))  # blocks side by side send to different devices
        device = lax.rem(me + 1 + number, jnp.int32(desc.size))
        arrived = device * desc.num_tokens + token
        places = [row_of[arrived * desc.top_k + j] for j in range(desc.top_k)]

        @pl.when(functools.reduce(lax.max, places) >= 0)
        def _():
            loads = functools.partial(load, rows)
            send(desc, me, device, token, places, here, weights, loads, functools.partial(store, device))

    share(desc.num_rows * parts, config, one_arrived)
    mailbox_sm90.signal(table, desc.size, config.num_blocks)
    mailbox_sm90.wait(table, desc.size)

    def one_piece(item):
        token = lax.div(item, jnp.int32(len(starts)))
        start = start_of(lax.rem(item, jnp.int32(len(starts))))
        value = total(desc, token, slots, weights, lambda row: load(mailbox, row, start).astype(jnp.float32))
        out.at[token, pl.ds(start, length)][...] = value

    share(desc.num_tokens * len(starts), config, one_piece)


def _send_rows(desc, me, device, token, places, starts, weights, load, store):
    del me, device, weights
    for j, place in enumerate(places):

        @pl.when(place >= 0)
        def _(j=j, place=place):
            loaded = [load(place, start) for start in starts]
            for start, value in zip(starts, loaded, strict=True):
                store(token * desc.top_k + j, start, value)


def _send_sums(desc, me, device, token, places, starts, weights, load, store):
    zero = jnp.zeros((WARPGROUP * desc.return_vector,), jnp.float32)
    sums = [zero for _ in starts]
    for j, place in enumerate(places):
        weight = weights[device, token * desc.top_k + j]

        def add(*sums, place=place, weight=weight):
            return [s + load(place, start).astype(jnp.float32) * weight for s, start in zip(sums, starts, strict=True)]

        sums = lax.cond(place >= 0, add, lambda *sums: list(sums), *sums)
    for start, value in zip(starts, sums, strict=True):
        store(me * desc.num_tokens + token, start, value.astype(desc.sum_dtype))


def _total_of_rows(desc, token, slots, weights, load):
    total = None
    for j in range(desc.top_k):
        pair = token * desc.top_k + j
        values = load(pair) * weights[pair]
        total = _add(total, values, slots[pair] >= 0)
    return total


def _total_of_sums(desc, token, slots, weights, load):
    del weights
    owned = [slots[token * desc.top_k + j] for j in range(desc.top_k)]
    owners = [lax.div(slot, jnp.int32(desc.slots_per_device)) for slot in owned]
    sent = [
        functools.reduce(
            lambda a, b: a | b, [(owner == device) & (slot >= 0) for owner, slot in zip(owners, owned, strict=True)]
        )
        for device in range(desc.size)
    ]
    some = functools.reduce(lax.max, [jnp.where(is_sent, device, 0) for device, is_sent in enumerate(sent)])
    total = None
    for device, is_sent in enumerate(sent):
        # In place of a row that nobody sent one that is read anyhow, without a branch in front of the next load.
        row = jnp.where(is_sent, device, some) * desc.num_tokens + token
        total = _add(total, load(row), is_sent)
    return total


def _add(total, values, is_there):
    """Memory that nobody wrote may hold anything, and counts as zero."""
    values = jnp.where(lax.broadcast_in_dim(is_there, values.shape, ()), values, jnp.zeros(values.shape, jnp.float32))
    return values if total is None else total + values
