"""The bodies of the push kernels with several devices played by one GPU: their memories are parts of its own.

A launch has the blocks of all devices. What is not rehearsed: addresses of other GPUs, XLA's barrier before the launch,
and visibility across NVLink.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.push.config import PushConfig, PushDesc
from pallas_kernels.push.kernel_sm90 import (
    Devices,
    combine_body,
    combine_shapes,
    dispatch_body,
    dispatch_shapes,
)


class Parts(Devices):
    """Device d's arguments are part d of arrays with one more leading axis; its semaphores the d-th of a list."""

    def __init__(self, desc: PushDesc):
        self.desc = desc
        self.me = lax.axis_index("device")

    def own(self, ref: Any) -> Any:
        return ref.at[self.me]

    def on(self, ref: Any, device: Any) -> Any:
        return ref.at[device]

    def semaphore(self) -> Any:
        return [pl.get_global(plgpu.SemaphoreType.REGULAR) for _ in range(self.desc.size)]

    def signal(self, semaphore: Any, device: Any = None) -> None:
        device = self.me if device is None else device
        for number, one in enumerate(semaphore):
            pl.when(device == number)(functools.partial(pl.semaphore_signal, one))

    def wait(self, semaphore: Any, value: int) -> None:
        for number, one in enumerate(semaphore):
            pl.when(self.me == number)(functools.partial(pl.semaphore_wait, one, value, decrement=False))


def _kernel(body: Any, out: list[jax.ShapeDtypeStruct], desc: PushDesc, config: PushConfig) -> Any:
    return plgpu.kernel(
        functools.partial(body, desc, config, Parts),
        out_type=[jax.ShapeDtypeStruct((desc.size, *one.shape), one.dtype) for one in out],
        grid=(desc.size, config.num_blocks),
        grid_names=("device", "block"),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=mosaic.compiler_params(),
    )


def dispatch(desc: PushDesc, config: PushConfig, x: Any, slots: Any) -> tuple[Any, Any, Any]:
    """x: (size, T, H). slots: (size, T, top_k). Returns codes (size, size * T, H), scales or None, slots, by device."""
    split, out = dispatch_shapes(desc)
    padding = ((0, 0), (0, desc.padded_pairs - desc.num_pairs))
    padded = jnp.pad(slots.reshape(desc.size, -1), padding, constant_values=-1)
    codes, *scales, came = _kernel(dispatch_body, out, desc, config)(
        x.reshape(desc.size, desc.num_tokens, *split), padded
    )
    came = came[..., : desc.num_pairs].reshape(desc.size, desc.num_rows, desc.top_k)
    return codes.reshape(desc.size, desc.num_rows, desc.width), scales[0] if scales else None, came


def combine(desc: PushDesc, config: PushConfig, rows: Any, row_of: Any, slots: Any, weights: Any) -> Any:
    """rows: (size, Mp, H). row_of: (size, size * T, top_k). slots, weights: (size, T, top_k). Returns (size, T, H)."""
    split, _ = dispatch_shapes(desc)
    flat = (part.reshape(desc.size, -1) for part in (row_of, slots, weights))
    rows = rows.reshape(desc.size, -1, *split)
    y = _kernel(combine_body, combine_shapes(desc), desc, config)(rows, *flat)[1]
    return y.reshape(desc.size, desc.num_tokens, desc.width)
