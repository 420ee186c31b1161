"""The kernel bodies of ``nvlink_dispatch`` with several devices played by one GPU: their memories are parts of its own.

A launch has the blocks of all devices. Not rehearsed: addresses of other GPUs, XLA's barrier before the launch,
and visibility across NVLink.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic, simt
from pallas_kernels.nvlink_dispatch.combine_sm90 import combine_body, combine_shape
from pallas_kernels.nvlink_dispatch.config import ExchangeConfig, ExchangeDesc
from pallas_kernels.nvlink_dispatch.devices_sm90 import Devices
from pallas_kernels.nvlink_dispatch.dispatch_sm90 import dispatch_body, dispatch_scratch, dispatch_shapes


class Parts(Devices):
    """Device d's arguments are part d of arrays with one more leading axis; its semaphores the d-th of a list."""

    @property
    def me(self) -> Any:
        return lax.axis_index("device")

    def own(self, ref: Any) -> Any:
        return ref.at[self.me]

    def on(self, ref: Any, device: Any) -> Any:
        return ref.at[device]

    def semaphore(self) -> Any:
        return [pl.get_global(plgpu.SemaphoreType.REGULAR) for _ in range(self.desc.size)]

    def signal_each(self, semaphore: Any) -> None:
        simt.barrier()
        for one in semaphore:
            pl.semaphore_signal(one)

    def wait(self, semaphore: Any, value: int) -> None:
        for number, one in enumerate(semaphore):
            pl.when(self.me == number)(functools.partial(pl.semaphore_wait, one, value, decrement=False))


def _kernel(body: Any, out: Any, desc: ExchangeDesc, config: ExchangeConfig, scratch: tuple[Any, ...] = ()) -> Any:
    leaves, structure = jax.tree.flatten(out)
    call = plgpu.kernel(
        functools.partial(body, desc, config, Parts),
        out_type=[jax.ShapeDtypeStruct((desc.size, *one.shape), one.dtype) for one in leaves],
        grid=(desc.size, config.num_ctas),
        grid_names=("device", "cta"),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=mosaic.compiler_params(),
    )
    return lambda *operands: jax.tree.unflatten(structure, call(*operands))


def dispatch(desc: ExchangeDesc, config: ExchangeConfig, x: Any, slots: Any, weights: Any = None) -> Any:
    """x: (size, T, H). slots, weights: (size, T, top_k). Returns what ``dispatch_sm90`` does, by device."""
    split, out = dispatch_shapes(desc)
    padding = ((0, 0), (0, desc.padded_pairs - desc.num_pairs))
    padded = [
        jnp.pad(part.reshape(desc.size, -1), padding, constant_values=fill)
        for part, fill in ((slots, -1), (weights, 0))
        if part is not None
    ]
    kernel = _kernel(dispatch_body, out, desc, config, dispatch_scratch(desc))
    codes, scales, came, *rest = kernel(x.reshape(desc.size, desc.num_tokens, *split), *padded)
    came = came[..., : desc.num_pairs].reshape(desc.size, desc.num_rows, desc.top_k)
    return codes.reshape(desc.size, desc.num_rows, desc.width), scales, came, *rest


def combine(
    desc: ExchangeDesc, config: ExchangeConfig, rows: Any, row_of: Any, slots: Any, weights: Any, *mail: Any
) -> Any:
    """rows: (size, Mp, H). row_of: (size, size * T, top_k). slots: (size, T, top_k). weights: of these, or all that
    arrived. mail: mailbox and table, by device. Returns (size, T, H).
    """
    row_of, slots = (part.reshape(desc.size, -1) for part in (row_of, slots))
    if desc.sum_dtype is None:
        weights = weights.reshape(desc.size, -1)
    return _kernel(combine_body, combine_shape(desc), desc, config)(rows, row_of, slots, weights, *mail)
