"""Tokens to the devices of their experts, by stores into those devices' memory over NVLink.

Every CTA (one warpgroup):

    for each of its vectors of 128 slots (or weights): store it on every device
    for each of its tokens:
        load the row (16 bytes a thread) -> quantize -> store codes and scales on each device with an expert of it
    behind all that: signal every device
CTA 0, first:  zero the counter of this device's mailbox, tell every device where both are
CTA 0, last:   wait for every CTA of every device

Token t of device s is row s * T + t on every device. So no counts are exchanged before rows travel. Every buffer holds
the worst case, one copy of every token, and nothing is ever dropped. Rows that nobody sent are unspecified; they have
no slot of this device, so nobody reads them.

Why a fast device never overwrites what a slow one still reads. The buffers that others store into are outputs of the
launch itself: memory that XLA gives to this call on this device from its start to the last use of the output. Before
the kernel XLA runs a barrier of all devices of the mesh on the kernels' streams (jax 0.10 and 0.11 do so for every
kernel with a remote reference), behind the fill that zeroes the semaphore. So the first store of any device comes after
every device has finished whatever used that memory before, the previous call included, and after its semaphore is zero.
The kernel ends on a device when all CTAs of all devices have signalled it, each behind all its stores. Later launches
therefore read complete rows, and no store of this launch is still under way towards this device. The mailbox is an
output too; its one use is the combine of the same call, combine_sm90.py. XLA is told of a side effect
(devices_sm90.py), so that it never makes one launch of two with equal operands, nor repeats one.

Why it cannot hang. Every CTA signals every device once, tokens or not; the number of signals does not depend on the
routing. One CTA waits; the others wait for nothing.

Visibility: a CTA's stores come before its barrier, the barrier before a fence of the system and the semaphores of all
devices, which their CTA 0 acquires.

The address of another device's buffer comes from a table of all arguments on all devices, which XLA fills before each
execution (one process drives all devices); the device may be computed in the kernel.

Not built: GEMM 1 on the rows of one device while those of another still travel. The end of this launch is what says
that rows are there; a flag for every tile would have to reach the loader of every grouped GEMM.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.numerics import quantize_int8_token
from pallas_kernels.common.numerics_sm90 import e4m3_in_groups, e4m3_of_row
from pallas_kernels.common.row_kernel_sm90 import for_items_of
from pallas_kernels.common.rows import pieces, vector_length
from pallas_kernels.common.sm90 import WARPGROUP
from pallas_kernels.common.types import Kernel, Ref, Scalar, Value
from pallas_kernels.nvlink_dispatch.config import GROUP, ExchangeConfig, ExchangeDesc
from pallas_kernels.nvlink_dispatch.devices_sm90 import Devices, SlotsOfToken, once_kernel
from pallas_kernels.nvlink_dispatch.mailbox_sm90 import TABLE_ROW, Mailboxes
from pallas_kernels.quantize_and_permute.kernel_sm90 import GROUP_LAYOUT

# Eight groups of 128 columns: two a warp, eight columns a thread.
PAIRS_LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((8, 128), (2, 8))), warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1)

Store: TypeAlias = Callable[[Ref, Ref | None, Value], None]  # to the codes and scales of a device, at a row
Send: TypeAlias = Callable[[Store], None]  # calls it for each device that holds a slot of the token


def dispatch_sm90(desc: ExchangeDesc, config: ExchangeConfig) -> Kernel:
    """The kernel: (x (T, H), slots (padded_pairs,) int32, [weights (padded_pairs,) float32]) -> (codes, scales or None,
    slots (size, padded_pairs), weights so or None, mailbox (mailbox_rows, H), table).

    Weights where sums return. config must pass config_error. To be called inside ``jax.shard_map`` over ``desc.mesh``.
    """
    split, out = dispatch_shapes(desc)
    leaves, structure = jax.tree.flatten(out)

    def nvlink_dispatch(*refs):  # the name that profilers show
        dispatch_body(desc, config, Devices, *refs)

    call = once_kernel(nvlink_dispatch, leaves, config, "nvlink_dispatch", dispatch_scratch(desc))

    def run(x, slots, weights=None):
        told = (slots,) if weights is None else (slots, weights)
        codes, *rest = jax.tree.unflatten(structure, call(x.reshape(desc.num_tokens, *split), *told))
        return codes.reshape(desc.num_rows, desc.width), *rest

    return run


def dispatch_shapes(desc: ExchangeDesc) -> tuple[tuple[int, ...], tuple[jax.ShapeDtypeStruct | None, ...]]:
    """(a row as the kernel splits it, its outputs and None where there is none)."""
    split = (desc.width // GROUP, GROUP) if desc.is_grouped else _Row(desc).split
    has_sums = desc.sum_dtype is not None
    return split, (
        jax.ShapeDtypeStruct((desc.num_rows, *split), desc.code_dtype),
        None if desc.scale_shape is None else jax.ShapeDtypeStruct(desc.scale_shape, jnp.float32),
        jax.ShapeDtypeStruct((desc.size, desc.padded_pairs), jnp.int32),
        jax.ShapeDtypeStruct((desc.size, desc.padded_pairs), jnp.float32) if has_sums else None,
        jax.ShapeDtypeStruct((desc.mailbox_rows, desc.width), desc.mailbox_dtype),
        jax.ShapeDtypeStruct((desc.size + 1, TABLE_ROW), jnp.int32),
    )


def dispatch_scratch(desc: ExchangeDesc) -> tuple[Any, ...]:
    """Shared memory of a CTA: the largest magnitude of each warp, where rows have one scale."""
    has_one_scale = desc.quantization != "none" and not desc.is_grouped
    return (plgpu.SMEM((WARPGROUP // 32,), jnp.float32),) if has_one_scale else ()


class _Row:
    """A row as the warpgroup holds it: in pieces of a vector of up to 16 bytes a thread.

    Rows of whole pieces are split into runs of 32 vectors, one a warp. Mosaic then stores whole vectors into another
    device's memory, whose alignment it does not know. From a plain vector it stores single elements there, at 49 to 65
    GB/s on two H200s; rows of other lengths are stored so.
    """

    def __init__(self, desc: ExchangeDesc):
        itemsize = jnp.dtype(desc.dtype).itemsize
        vector = 16 // itemsize
        while vector > 1 and desc.width % (WARPGROUP * vector):
            vector //= 2
        self.is_split = desc.width % (WARPGROUP * vector) == 0
        if self.is_split:
            run = 32 * vector
            self.split: tuple[int, ...] = (desc.width // run, run)
            self.layout = mosaic.row_a_warp(vector)
            self.starts, self.shape = list(range(0, desc.width // run, 4)), (4, run)
        else:
            vector = vector_length(desc.width, itemsize)
            self.split = (desc.width,)
            self.layout = plgpu.Layout.WG_STRIDED((WARPGROUP * vector,), vec_size=vector)
            self.starts, self.shape = pieces(desc.width, WARPGROUP * vector), (WARPGROUP * vector,)

    def load_all(self, rows: Ref, row: Scalar) -> list[Value]:
        return [mosaic.load(rows.at[row, self.part(s)], layout=self.layout, optimized=False) for s in self.starts]

    def store_all(self, rows: Ref, row: Scalar, values: Sequence[Value]) -> None:
        for start, value in zip(self.starts, values, strict=True):
            rows.at[row, self.part(start)][...] = value

    def part(self, start: Scalar) -> Any:
        return pl.ds(start, self.shape[0])

    def amax(self, values: list[Value], *scratch: Ref) -> Value:
        """The largest magnitude of a row, the same in all threads."""
        most = functools.reduce(jnp.maximum, [jnp.abs(v) for v in values])
        if not self.is_split:
            return jnp.max(most)
        (maxima,) = scratch
        simt.barrier()  # warps may still read the maxima of the row before
        maxima[...] = jnp.max(most, axis=1)
        simt.barrier()
        return functools.reduce(lax.max, [maxima[i] for i in range(WARPGROUP // 32)])


def dispatch_body(
    desc: ExchangeDesc, config: ExchangeConfig, make_devices: Callable[[ExchangeDesc], Devices], x: Ref, *refs: Ref
) -> None:
    """refs: the other operands of ``dispatch_sm90``, its outputs without those that are None, scratch memory."""
    pending = list(refs)
    has_sums, has_scales = desc.sum_dtype is not None, desc.scale_shape is not None
    told = [pending.pop(0) for _ in range(1 + has_sums)]  # slots, and weights
    codes = pending.pop(0)
    scales = pending.pop(0) if has_scales else None
    told_out = [pending.pop(0) for _ in range(1 + has_sums)]
    mailbox, table, *scratch = pending
    devices = make_devices(desc)
    arrived = devices.semaphore()
    x, told = devices.own(x), [devices.own(one) for one in told]
    send_token = _send_in_groups if desc.is_grouped else _send_whole_row

    @pl.when(lax.axis_index("cta") == 0)
    def _():
        own = Mailboxes(devices.own(table), desc.size)
        own.start(devices.me)
        entry = own.own_entry(devices.own(mailbox))
        for device in devices.each():
            devices.on(table, device).at[devices.me][...] = entry

    def one_token(token):
        slots = SlotsOfToken(desc, told[0], token)
        row = devices.me * desc.num_tokens + token

        def send(store):
            for device in devices.each():

                @pl.when(slots.any_on(device))
                def _(device=device):
                    store(devices.on(codes, device), None if scales is None else devices.on(scales, device), row)

        send_token(desc, x, token, send, *scratch)

    def one_vector(index, source, target):
        part = pl.ds(index * WARPGROUP, WARPGROUP)
        values = mosaic.load(source.at[part], layout=simt.LANES, optimized=False)
        for device in devices.each():
            devices.on(target, device).at[devices.me, part][...] = values

    vectors = desc.padded_pairs // WARPGROUP

    def one_item(item):
        for number, (source, target) in enumerate(zip(told, told_out, strict=True)):
            first = number * vectors
            pl.when((item >= first) & (item < first + vectors))(
                functools.partial(one_vector, item - first, source, target)
            )
        pl.when(item >= desc.num_vectors)(functools.partial(one_token, item - desc.num_vectors))

    for_items_of(lax.axis_index("cta"), desc.num_vectors + desc.num_tokens, config.num_ctas, one_item)
    devices.signal_each(arrived)

    @pl.when(lax.axis_index("cta") == 0)
    def _():
        devices.wait(arrived, desc.size * config.num_ctas)


def _send_whole_row(desc: ExchangeDesc, x: Ref, token: Value, send: Send, *scratch: Ref) -> None:
    """Quantize a token with one scale, or none, and send it."""
    whole = _Row(desc)
    loaded, scale = whole.load_all(x, token), None
    if desc.quantization != "none":
        values = [v.astype(jnp.float32) for v in loaded]
        amax = whole.amax(values, *scratch)
        rule = e4m3_of_row if desc.quantization == "e4m3_row" else quantize_int8_token
        loaded, scales = zip(*(rule(v, amax) for v in values), strict=True)
        scale = scales[0]

    def store(codes, scales, row):
        whole.store_all(codes, row, loaded)
        if scale is not None:
            scales[row] = scale

    send(store)


def _send_in_groups(desc: ExchangeDesc, x: Ref, token: Value, send: Send) -> None:
    """Quantize a token with a scale for every 128 columns and send it, at most 64 groups at a time."""
    groups = desc.width // GROUP
    layout, least = (PAIRS_LAYOUT, 8) if groups % 8 == 0 else (GROUP_LAYOUT, 4)
    piece = groups if groups <= 64 else least
    is_power_of_two = desc.quantization.endswith("_ue8m0")
    for start in range(0, groups, piece):
        part = pl.ds(start, piece)
        values = mosaic.load(x.at[token, part], layout=layout, optimized=False).astype(jnp.float32)
        amax = jnp.max(jnp.abs(values), axis=1)
        quantized, scale = e4m3_in_groups(values, amax, is_power_of_two)

        def store(codes, scales, row, part=part, quantized=quantized, scale=scale):
            codes.at[row, part][...] = quantized
            scales.at[row, part][...] = scale

        send(store)
