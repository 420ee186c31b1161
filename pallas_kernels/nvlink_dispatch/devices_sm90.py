"""The devices of an exchange as one of them sees them, and how its blocks share the work."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jaxlib.mlir import ir

from pallas_kernels.common import mosaic, simt
from pallas_kernels.nvlink_dispatch import mailbox_sm90
from pallas_kernels.nvlink_dispatch.config import ExchangeConfig, ExchangeDesc


class Devices:
    """The devices along ``desc.axis`` as one of them, ``me``, sees them, by their index there.

    Made in the kernel. All that the kernels' bodies know of other devices is here, so that a test can put parts of one
    device's memory in their place.
    """

    def __init__(self, desc: ExchangeDesc):
        self.desc = desc

    @property
    def me(self) -> Any:
        """Asking makes the launch one that waits for all devices; so do ``on`` and ``signal_each``."""
        return lax.axis_index(self.desc.axis)

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

    def signal_each(self, semaphore: Any) -> None:
        """Add one to the semaphore of every device, behind all stores of this block."""
        simt.barrier()
        if mosaic.INLINE_TAKES_REMOTE:
            mailbox_sm90.signal_semaphores([self.on(semaphore, device) for device in self.each()])
            return
        for device in self.each():  # a fence each
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


def share(total: int, config: ExchangeConfig, body: Callable[[Any], None]) -> None:
    """body(item) for every num_blocks-th item below total, from the block's own on."""
    block = lax.axis_index("block")

    def step(i, _):
        body(block + i * config.num_blocks)
        return 0

    mine = lax.div(total - block + (config.num_blocks - 1), jnp.int32(config.num_blocks))
    lax.fori_loop(0, mine, step, 0)


def block_kernel(body: Callable[..., None], out: Any, config: ExchangeConfig, scratch: tuple[Any, ...] = ()) -> Any:
    """A kernel of num_blocks blocks of one warpgroup, run once for each call. ``jax.vmap`` of it is an error: Pallas
    would put all batches into one launch, which has one semaphore, and more blocks that wait than are resident.
    """
    kernel = plgpu.kernel(
        body,
        out_type=out,
        grid=(config.num_blocks,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=mosaic.compiler_params(),
    )

    def call(*operands):
        results = _once_each.bind(*operands, kernel=jax.make_jaxpr(kernel)(*operands))
        return results if isinstance(out, list) else results[0]

    return call


# A launch that XLA may not merge with one of equal operands, nor repeat. Two layers of the same tokens would else share
# a dispatch and so its mailbox, which serves one combine. Pallas says so of a kernel for TPUs alone.
_once_each = Primitive("once_each")
_once_each.multiple_results = True
_once_each.def_abstract_eval(lambda *operands, kernel: kernel.out_avals)


def _lower_once_each(ctx: Any, *operands: Any, kernel: Any) -> Any:
    results = mlir.lower_fun(jaxpr_as_fun(kernel), multiple_results=True)(ctx, *operands)
    launch = results[0].owner
    assert launch.name == "stablehlo.custom_call", f"{launch.name} holds the launch, which cannot be marked"
    launch.attributes["has_side_effect"] = ir.BoolAttr.get(True)
    return results


def _refuse_batches(operands: Any, axes: Any, *, kernel: Any) -> Any:
    del operands, axes, kernel
    raise NotImplementedError("no jax.vmap over an exchange of rows between devices; jax.lax.map does one by one")


mlir.register_lowering(_once_each, _lower_once_each)
batching.primitive_batchers[_once_each] = _refuse_batches
