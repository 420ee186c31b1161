"""Rows to the devices of their experts and back, by stores into the other devices' memory over NVLink.

dispatch, every block (one warpgroup), for each of its tokens:
    load the row (16 bytes a thread) -> quantize -> for each device with an expert of this token: store codes, scales
for each of its vectors of 128 slots: store them on every device
block 0:   wait until all blocks of this device have stored -> signal every device -> wait for every device's signal

combine, every block, for each of its pairs (arrived token, slot) that has a row here:
    load the row -> store it at its (token, slot) on the device the token came from
block 0:   wait until all blocks of this device have stored -> signal every device
all:       wait for every device's signal -> for each of its tokens: weighted sum of the top_k rows, in float32, in the
           order of the slots, as a single device adds them

Where a row lands is known without asking: token t of device s is row s * T + t on every device, its slot k comes back
to row t * top_k + k. So no counts are exchanged before rows travel, every buffer holds the worst case (one copy of
every token; one row of every pair) and nothing is ever dropped. Rows that nobody sent are unspecified and have no slot
of this device, so nobody reads them.

Why a fast device never overwrites what a slow one still reads. The buffers that others store into are outputs of the
launch itself: memory that XLA gives to this call on this device from its start to the last use of the output. Before
the kernel XLA runs a barrier of all devices of the mesh on the kernels' streams (jax 0.10 and 0.11 do so for every
kernel with a remote reference), behind the fill that zeroes the semaphores. So the first store of any device comes
after every device has finished whatever used that memory before, the previous call included, and after its semaphores
are zero. The kernel ends on a device when every device has signalled it, each behind all its stores: later launches
read complete rows, and no store of this call is still under way towards this device. The next call starts with its own
barrier, which a device reaches behind its own reads.

Why it cannot hang. Every device signals every device once, tokens or not; the number of signals does not depend on the
routing. A signal waits only for blocks of its own device, which wait for nothing before they have stored. In dispatch
one block waits; in combine all do, and all are resident together (``BLOCKS_PER_SM``), so none of those they wait for is
kept from running.

Visibility: a block's stores come before its barrier, the barrier before the release of its semaphore, which block 0
acquires before it releases, at system scope, the semaphores of the other devices.

The address of another device's buffer comes from a table of all arguments on all devices, which XLA fills before each
execution (one process drives all devices); the device may be computed in the kernel.

Not built: GEMM 1 on the rows of one device while those of another still travel. It learns that rows are there from the
end of this launch; a flag for every tile would have to reach the loader of every grouped GEMM.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.numerics import quantize_e4m3_group, quantize_e4m3_row, quantize_int8_token
from pallas_kernels.common.rows import pieces, vector_length
from pallas_kernels.common.sm90 import WARPGROUP
from pallas_kernels.push.config import GROUP, PushConfig, PushDesc
from pallas_kernels.quantize_and_permute.kernel_sm90 import GROUP_LAYOUT


def dispatch_sm90(desc: PushDesc, config: PushConfig) -> Callable[..., Any]:
    """The kernel: (x (T, H), slots (padded_pairs,) int32) -> (codes, scales or None, slots (size, padded_pairs)).

    config must pass config_error. To be called inside ``jax.shard_map`` over ``desc.mesh``.
    """
    split, out = dispatch_shapes(desc)
    call = _kernel(functools.partial(dispatch_body, desc, config, Devices), out, config)

    def run(x, slots):
        codes, *scales, slots = call(x.reshape(desc.num_tokens, *split), slots)
        return codes.reshape(desc.num_rows, desc.width), scales[0] if scales else None, slots

    return run


def combine_sm90(desc: PushDesc, config: PushConfig) -> Callable[..., Any]:
    """The kernel: (rows (Mp, H), row_of (size * T * k,), slots (T * k,), weights (T * k,)) -> (T, H) float32.

    rows: of ``desc.dtype``. config must pass config_error. To be called inside ``jax.shard_map`` over ``desc.mesh``.
    """
    out = combine_shapes(desc)
    call = _kernel(functools.partial(combine_body, desc, config, Devices), out, config)
    split = _Row(desc).split

    def run(rows, *rest):
        return call(rows.reshape(-1, *split), *rest)[1].reshape(desc.num_tokens, desc.width)

    return run


def _kernel(body: Callable[..., None], out: Any, config: PushConfig) -> Callable[..., Any]:
    return plgpu.kernel(
        body,
        out_type=out,
        grid=(config.num_blocks,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=mosaic.compiler_params(),
    )


def dispatch_shapes(desc: PushDesc) -> tuple[tuple[int, ...], list[jax.ShapeDtypeStruct]]:
    """(a row as the kernel splits it, its outputs)."""
    split = (desc.width // GROUP, GROUP) if desc.is_grouped else _Row(desc).split
    out = [jax.ShapeDtypeStruct((desc.num_rows, *split), desc.code_dtype)]
    if desc.scale_shape is not None:
        out.append(jax.ShapeDtypeStruct(desc.scale_shape, jnp.float32))
    return split, [*out, jax.ShapeDtypeStruct((desc.size, desc.padded_pairs), jnp.int32)]


def combine_shapes(desc: PushDesc) -> list[jax.ShapeDtypeStruct]:
    """Outputs of the kernel: the rows that come back, and their sums."""
    return [
        jax.ShapeDtypeStruct((desc.num_pairs, *_Row(desc).split), desc.dtype),
        jax.ShapeDtypeStruct((desc.num_tokens, *_Row(desc).split), jnp.float32),
    ]


class _Row:
    """A row as the warpgroup holds it: in pieces of a vector of up to 16 bytes a thread.

    A row of whole pieces is split into runs of 32 vectors, one a warp: of such a layout Mosaic stores whole vectors
    into another device's memory, whose alignment it does not know. Of a plain vector it stores single elements there,
    at 49 to 65 GB/s on two H200s. Rows of other lengths, and rows with one scale, whose maximum over such a layout
    Mosaic cannot place, keep to that.
    """

    def __init__(self, desc: PushDesc):
        itemsize = jnp.dtype(desc.dtype).itemsize
        vector = 16 // itemsize
        while vector > 1 and desc.width % (WARPGROUP * vector):
            vector //= 2
        if desc.quantization == "none" and desc.width % (WARPGROUP * vector) == 0:
            run = 32 * vector
            self.split: tuple[int, ...] = (desc.width // run, run)
            tiling = plgpu.Tiling(((4, run), (vector,)))
            self.layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
            self.starts, self.shape = list(range(0, desc.width // run, 4)), (4, run)
        else:
            vector = vector_length(desc.width, itemsize)
            self.split = (desc.width,)
            self.layout = plgpu.Layout.WG_STRIDED((WARPGROUP * vector,), vec_size=vector)
            self.starts, self.shape = pieces(desc.width, WARPGROUP * vector), (WARPGROUP * vector,)

    def load(self, rows: Any, row: Any, start: Any) -> Any:
        return mosaic.load(rows.at[row, self.part(start)], layout=self.layout, optimized=False)

    def load_all(self, rows: Any, row: Any) -> list[Any]:
        return [self.load(rows, row, start) for start in self.starts]

    def store_all(self, rows: Any, row: Any, values: Sequence[Any]) -> None:
        for start, value in zip(self.starts, values, strict=True):
            rows.at[row, self.part(start)][...] = value

    def part(self, start: Any) -> Any:
        return pl.ds(start, self.shape[0])


class Devices:
    """The devices along ``desc.axis`` as one of them, ``me``, sees them, by their index there.

    Made in the kernel. All that the bodies below know of other devices is here, so that a test can put parts of one
    device's memory in their place.
    """

    def __init__(self, desc: PushDesc):
        self.desc = desc
        self.me: Any = lax.axis_index(desc.axis)

    def each(self) -> list[Any]:
        """All devices, this one last, each device starting with another."""
        return [lax.rem(self.me + 1 + i, jnp.int32(self.desc.size)) for i in range(self.desc.size)]

    def own(self, ref: Any) -> Any:
        """An argument of the kernel on this device."""
        return ref

    def on(self, ref: Any, device: Any) -> Any:
        """The same argument of the kernel on another device."""
        return plgpu.remote_ref(ref, self._number(device), device_id_type=pl.DeviceIdType.LOGICAL)

    def semaphore(self) -> Any:
        """One on every device, zero at the start."""
        return pl.get_global(plgpu.SemaphoreType.REGULAR)

    def signal(self, semaphore: Any, device: Any = None) -> None:
        """Add one to a semaphore of a device, of this one where none is given."""
        if device is None:
            pl.semaphore_signal(semaphore)
        else:
            pl.semaphore_signal(semaphore, device_id=self._number(device), device_id_type=pl.DeviceIdType.LOGICAL)

    def wait(self, semaphore: Any, value: int) -> None:
        """Until this device's semaphore has reached value."""
        pl.semaphore_wait(semaphore, value, decrement=False)

    def _number(self, device: Any) -> Any:
        """Of a device among all of the mesh."""
        total = device * self.desc.strides[self.desc.axis]
        for name, stride in self.desc.strides.items():
            if name != self.desc.axis:
                total = total + lax.axis_index(name) * stride
        return total


def _share(total: int, config: PushConfig, body: Callable[[Any], None]) -> None:
    """body(item) for every num_blocks-th item below total, from the block's own on."""
    block = lax.axis_index("block")

    def step(i, _):
        body(block + i * config.num_blocks)
        return 0

    mine = lax.div(total - block + (config.num_blocks - 1), jnp.int32(config.num_blocks))
    lax.fori_loop(0, mine, step, 0)


def _signal_when_all_stored(devices: Devices, config: PushConfig, stored: Any, arrived: Any) -> None:
    """Tell every device, once, that all this one stores there is there."""
    simt.barrier()
    devices.signal(stored)

    @pl.when(lax.axis_index("block") == 0)
    def _():
        devices.wait(stored, config.num_blocks)
        for device in devices.each():
            devices.signal(arrived, device)


def dispatch_body(
    desc: PushDesc, config: PushConfig, make_devices: Callable[[PushDesc], Devices], x: Any, slots: Any, *outputs: Any
) -> None:
    codes, *scales, slots_out = outputs
    devices = make_devices(desc)
    stored, arrived = devices.semaphore(), devices.semaphore()
    x, slots = devices.own(x), devices.own(slots)
    process = _groups_of_token if desc.is_grouped else _row_of_token

    def one_token(token):
        mine = [slots[token * desc.top_k + j] for j in range(desc.top_k)]
        owners = [lax.div(slot, jnp.int32(desc.slots_per_device)) for slot in mine]
        row = devices.me * desc.num_tokens + token

        def send(store):
            for device in devices.each():
                wanted = functools.reduce(
                    lambda a, b: a | b, [(o == device) & (s >= 0) for o, s in zip(owners, mine, strict=True)]
                )

                @pl.when(wanted)
                def _(device=device):
                    store(devices.on(codes, device), devices.on(scales[0], device) if scales else None, row)

        process(desc, x, token, send)

    def one_vector(index):
        part = pl.ds(index * WARPGROUP, WARPGROUP)
        values = mosaic.load(slots.at[part], layout=simt.LANES, optimized=False)
        for device in devices.each():
            devices.on(slots_out, device).at[devices.me, part][...] = values

    _share(desc.padded_pairs // WARPGROUP, config, one_vector)
    _share(desc.num_tokens, config, one_token)
    _signal_when_all_stored(devices, config, stored, arrived)

    @pl.when(lax.axis_index("block") == 0)
    def _():
        devices.wait(arrived, desc.size)


def _row_of_token(desc: PushDesc, x: Any, token: Any, send: Callable[..., None]) -> None:
    """Quantize a token with one scale, or none, and send it."""
    whole = _Row(desc)
    loaded, scale = whole.load_all(x, token), None
    if desc.quantization != "none":
        values = [v.astype(jnp.float32) for v in loaded]
        amax = jnp.max(functools.reduce(jnp.maximum, [jnp.abs(v) for v in values]))
        rule = quantize_e4m3_row if desc.quantization == "e4m3_row" else quantize_int8_token
        loaded, scales = zip(*(rule(v, amax) for v in values), strict=True)
        scale = scales[0]

    def store(codes, scales, row):
        whole.store_all(codes, row, loaded)
        if scale is not None:
            scales[row] = scale

    send(store)


def _groups_of_token(desc: PushDesc, x: Any, token: Any, send: Callable[..., None]) -> None:
    """Quantize a token with a scale for every 128 columns and send it, at most 64 groups at a time."""
    groups = desc.width // GROUP
    piece = groups if groups <= 64 else 4
    is_power_of_two = desc.quantization.endswith("_ue8m0")
    for start in range(0, groups, piece):
        part = pl.ds(start, piece)
        values = mosaic.load(x.at[token, part], layout=GROUP_LAYOUT, optimized=False).astype(jnp.float32)
        amax = jnp.max(jnp.abs(values), axis=1)
        _, scale = quantize_e4m3_group(amax, amax, is_power_of_two)
        quantized, _ = quantize_e4m3_group(values, lax.broadcast_in_dim(amax, values.shape, [0]), is_power_of_two)

        def store(codes, scales, row, part=part, quantized=quantized, scale=scale):
            codes.at[row, part][...] = quantized
            scales.at[row, part][...] = scale

        send(store)


def combine_body(
    desc: PushDesc,
    config: PushConfig,
    make_devices: Callable[[PushDesc], Devices],
    rows: Any,
    row_of: Any,
    slots: Any,
    weights: Any,
    back: Any,
    out: Any,
) -> None:
    devices = make_devices(desc)
    stored, arrived = devices.semaphore(), devices.semaphore()
    rows, row_of, slots, weights = map(devices.own, (rows, row_of, slots, weights))
    pairs, together, whole = desc.num_pairs, config.pairs_at_once, _Row(desc)
    first = lax.rem(devices.me + 1, jnp.int32(desc.size)) * pairs

    def few_pairs(item):
        places = [lax.rem(first + item * together + j, jnp.int32(desc.size * pairs)) for j in range(together)]
        for place, row in [(place, row_of[place]) for place in places]:

            @pl.when(row >= 0)
            def _(place=place, row=row):
                device = lax.div(place, jnp.int32(pairs))
                target = devices.on(back, device)
                whole.store_all(target, place - device * pairs, whole.load_all(rows, row))

    _share(desc.size * pairs // together, config, few_pairs)
    _signal_when_all_stored(devices, config, stored, arrived)
    devices.wait(arrived, desc.size)
    back, out = devices.own(back), devices.own(out)

    step, last = whole.shape[0], whole.starts[-1]

    def one_piece(item):
        token = lax.div(item, jnp.int32(len(whole.starts)))
        start = lax.min(lax.rem(item, jnp.int32(len(whole.starts))) * step, jnp.int32(last))
        total = jnp.zeros(whole.shape, jnp.float32)
        for j in range(desc.top_k):
            pair = token * desc.top_k + j
            values = whole.load(back, pair, start).astype(jnp.float32) * weights[pair]
            total = total + jnp.where(lax.broadcast_in_dim(slots[pair] >= 0, values.shape, ()), values, 0.0)
        out.at[token, whole.part(start)][...] = total

    _share(desc.num_tokens * len(whole.starts), config, one_piece)
