"""Rows of experts back to the devices of their tokens, and their sum there.

Every CTA (one warpgroup):

    for each of its arrived tokens, or pieces of them, that have rows here:
        rows return:  load each row -> store it at its (token, slot) in the mailbox of the token's device
        sums return:  load the rows, add them up times their weights in float32 in the order of the slots, round ->
                      store the partial sum at (this device, token) in that mailbox
    the last CTA to come here: signal every device, behind what all have stored
    wait for every device
    for each of its own tokens' pieces: weighted sum of its rows in the order of the slots, as a single device adds
        them; or sum of the devices' partial sums in their order; in float32

Lifetime of a mailbox. It is an output of the dispatch of the same call, and an input here, so it belongs to its device
from the start of its dispatch until this launch ends there. Another device learns its address, and that its counter is
zero, from that dispatch, which ends behind the signals of all: no store and no signal comes too early. This launch ends
on a device when every device has signalled it, behind the stores of all its CTAs: none comes too late. So there is no
barrier before the launch, and no memory to fill.

Why it cannot hang. Every device signals every device once. All CTAs of a device wait, and are resident together
(``CTAS_PER_SM``), so each CTA that others wait for runs.

Visibility. A CTA's stores come before its barrier, the barrier before a fence of the system and the count of CTAs. The
last CTA passes another fence before it signals. A waiting CTA acquires the signals at system scope and passes a barrier
before it reads. It has not read its mailbox before.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.row_kernel_sm90 import for_items_of
from pallas_kernels.common.rows import pieces
from pallas_kernels.common.sm90 import WARPGROUP
from pallas_kernels.common.types import Kernel, Layout, Ref, Scalar, Value
from pallas_kernels.nvlink_dispatch.config import ExchangeConfig, ExchangeDesc
from pallas_kernels.nvlink_dispatch.devices_sm90 import Devices, SlotsOfToken, once_kernel
from pallas_kernels.nvlink_dispatch.mailbox_sm90 import Mailboxes


def combine_sm90(desc: ExchangeDesc, config: ExchangeConfig) -> Kernel:
    """The kernel: (rows (Mp, H), row_of (size * T * k,), slots (T * k,), weights, mailbox, table) -> (T, H) float32.

    weights: (T * k,) of this device's tokens; where sums return (size, padded_pairs) of all that arrived. mailbox and
    table: of the dispatch. config must pass config_error. To be called inside ``jax.shard_map`` over ``desc.mesh``.
    """

    def nvlink_combine(*refs):  # the name that profilers show
        combine_body(desc, config, Devices, *refs)

    return once_kernel(nvlink_combine, combine_shape(desc), config, "nvlink_combine")


def combine_shape(desc: ExchangeDesc) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((desc.num_tokens, desc.width), jnp.float32)


def combine_body(
    desc: ExchangeDesc, config: ExchangeConfig, make_devices: Callable[[ExchangeDesc], Devices], *refs: Ref
) -> None:
    """refs: operands of ``combine_sm90``, then the output."""
    devices = make_devices(desc)
    rows, row_of, slots, weights, mailbox, table, out = map(devices.own, refs)
    mailboxes = Mailboxes(table, desc.size)
    combine = _Combine(desc, rows, row_of, slots, weights, mailbox, mailboxes, mailboxes.index())
    starts = pieces(desc.width, combine.length)
    parts = 1 if config.takes_whole_rows else len(starts)
    cta = lax.axis_index("cta")

    def one_arrived(item):
        number = lax.div(item, jnp.int32(parts))
        here = starts if config.takes_whole_rows else [combine.start_of(lax.rem(item, jnp.int32(parts)))]
        combine.send(number, here)

    for_items_of(cta, desc.num_rows * parts, config.num_ctas, one_arrived)
    mailboxes.signal(config.num_ctas)
    mailboxes.wait()
    cta = lax.axis_index("cta")

    def one_piece(item):
        token = lax.div(item, jnp.int32(len(starts)))
        start = combine.start_of(lax.rem(item, jnp.int32(len(starts))))
        value = combine.total(token, start)
        out.at[token, pl.ds(start, combine.length)][...] = value

    for_items_of(cta, desc.num_tokens * len(starts), config.num_ctas, one_piece)


@dataclasses.dataclass(frozen=True)
class _Combine:
    """What a CTA sends back, and how it adds up what came back. The refs are those of ``combine_sm90``."""

    desc: ExchangeDesc
    rows: Ref
    row_of: Ref
    slots: Ref
    weights: Ref
    mailbox: Ref
    mailboxes: Mailboxes
    me: Value

    @property
    def length(self) -> int:
        """Elements of a piece of a row."""
        return WARPGROUP * self.desc.return_vector

    @property
    def layout(self) -> Layout:
        return plgpu.Layout.WG_STRIDED((self.length,), vec_size=self.desc.return_vector)

    def start_of(self, number: Value) -> Value:
        """First element of a piece by its number."""
        return lax.min(number * self.length, jnp.int32(self.desc.width - self.length))

    def load(self, ref: Ref, row: Scalar, start: Scalar) -> Value:
        return mosaic.load(ref.at[row, pl.ds(start, self.length)], layout=self.layout, optimized=False)

    def send(self, number: Value, starts: Sequence[Scalar]) -> None:
        """Send the rows of an arrived token by its number, or their sum, in pieces from ``starts`` on."""
        desc = self.desc
        token = lax.div(number, jnp.int32(desc.size))  # CTAs side by side send to different devices
        device = lax.rem(self.me + 1 + number, jnp.int32(desc.size))
        arrived = device * desc.num_tokens + token
        places = [self.row_of[arrived * desc.top_k + j] for j in range(desc.top_k)]

        def store(row, start, values):
            self.mailboxes.store(device, row * desc.width + start, values, self.layout)

        @pl.when(functools.reduce(lax.max, places) >= 0)
        def _():
            if desc.sum_dtype is None:
                self._send_rows(token, places, starts, store)
            else:
                self._send_sum(device, token, places, starts, store)

    def _send_rows(
        self, token: Value, places: list[Value], starts: Sequence[Scalar], store: Callable[..., None]
    ) -> None:
        for j, place in enumerate(places):

            @pl.when(place >= 0)
            def _(j=j, place=place):
                loaded = [self.load(self.rows, place, start) for start in starts]
                for start, value in zip(starts, loaded, strict=True):
                    store(token * self.desc.top_k + j, start, value)

    def _send_sum(
        self, device: Value, token: Value, places: list[Value], starts: Sequence[Scalar], store: Callable[..., None]
    ) -> None:
        desc = self.desc
        zero = jnp.zeros((self.length,), jnp.float32)
        sums = [zero for _ in starts]
        for j, place in enumerate(places):
            weight = self.weights[device, token * desc.top_k + j]

            def add(*sums, place=place, weight=weight):
                return [
                    total + self.load(self.rows, place, start).astype(jnp.float32) * weight
                    for total, start in zip(sums, starts, strict=True)
                ]

            sums = lax.cond(place >= 0, add, lambda *sums: list(sums), *sums)
        for start, value in zip(starts, sums, strict=True):
            store(self.me * desc.num_tokens + token, start, value.astype(desc.sum_dtype))

    def total(self, token: Value, start: Value) -> Value:
        """A piece of a token's output, from what came back."""

        def load(row):
            return self.load(self.mailbox, row, start).astype(jnp.float32)

        terms = self._rows_of(token, load) if self.desc.sum_dtype is None else self._sums_of(token, load)
        kept = (
            jnp.where(lax.broadcast_in_dim(is_there, values.shape, ()), values, jnp.zeros(values.shape, jnp.float32))
            for values, is_there in terms
        )
        return functools.reduce(operator.add, kept)

    def _rows_of(self, token: Value, load: Callable[[Value], Value]) -> Iterator[tuple[Value, Value]]:
        """Each slot's weighted row, and whether it is there; the memory of one that is not may hold anything."""
        for j in range(self.desc.top_k):
            pair = token * self.desc.top_k + j
            yield load(pair) * self.weights[pair], self.slots[pair] >= 0

    def _sums_of(self, token: Value, load: Callable[[Value], Value]) -> Iterator[tuple[Value, Value]]:
        """Each device's partial sum, and whether it is there."""
        desc = self.desc
        slots = SlotsOfToken(desc, self.slots, token)
        has_sent = [slots.any_on(device) for device in range(desc.size)]
        some = functools.reduce(lax.max, [jnp.where(sent, device, 0) for device, sent in enumerate(has_sent)])
        for device, sent in enumerate(has_sent):
            # Where a device sent no row, one that is read anyhow is loaded again: no branch before the next load.
            row = jnp.where(sent, device, some) * desc.num_tokens + token
            yield load(row), sent
