"""The devices of an exchange as one of them sees them, and kernels that each call launches once."""

import functools
import operator
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
from pallas_kernels.common.row_kernel_sm90 import row_kernel
from pallas_kernels.common.types import Kernel, Ref, Scalar, Value
from pallas_kernels.nvlink_dispatch.config import ExchangeConfig, ExchangeDesc
from pallas_kernels.nvlink_dispatch.mailbox_sm90 import signal_semaphores


class Devices:
    """The devices along ``desc.axis`` as one of them, ``me``, sees them, by their index there.

    Made in the kernel; holds all that kernel bodies know of other devices. A test can put parts of one device's memory
    in their place.
    """

    def __init__(self, desc: ExchangeDesc):
        self.desc = desc

    @property
    def me(self) -> Value:
        """This device. A launch that asks waits for all devices first, as it does after ``on`` and ``signal_each``."""
        return lax.axis_index(self.desc.axis)

    def each(self) -> list[Value]:
        """All devices, this one last; each device starts with another."""
        return [lax.rem(self.me + 1 + i, jnp.int32(self.desc.size)) for i in range(self.desc.size)]

    def own(self, ref: Ref) -> Ref:
        """An argument of the kernel on this device."""
        return ref

    def on(self, ref: Ref, device: Value) -> Ref:
        """The same argument of the kernel on another device."""
        remote_ref: Any = plgpu.remote_ref
        return remote_ref(ref, self._number(device), device_id_type=pl.DeviceIdType.LOGICAL)

    def semaphore(self) -> Ref:
        """One on every device, zero at the start."""
        get_global: Any = pl.get_global
        return get_global(plgpu.SemaphoreType.REGULAR)

    def signal_each(self, semaphore: Ref) -> None:
        """Add one to the semaphore of every device, behind all stores of this CTA."""
        simt.barrier()
        if mosaic.INLINE_TAKES_REMOTE:
            signal_semaphores([self.on(semaphore, device) for device in self.each()])
            return
        for device in self.each():  # a fence each
            pl.semaphore_signal(semaphore, device_id=self._number(device), device_id_type=pl.DeviceIdType.LOGICAL)

    def wait(self, semaphore: Ref, value: int) -> None:
        """Wait until this device's semaphore has reached value."""
        pl.semaphore_wait(semaphore, value, decrement=False)

    def _number(self, device: Value) -> Value:
        """The device's number in the mesh."""
        total = device * self.desc.strides[self.desc.axis]
        for name, stride in self.desc.strides.items():
            if name != self.desc.axis:
                total = total + lax.axis_index(name) * stride
        return total


class SlotsOfToken:
    """The slots of one token of this device, and the devices that hold them. slots: ref of all tokens' slots, flat."""

    def __init__(self, desc: ExchangeDesc, slots: Ref, token: Scalar):
        self.slots = [slots[token * desc.top_k + j] for j in range(desc.top_k)]
        self.owners = [lax.div(slot, jnp.int32(desc.slots_per_device)) for slot in self.slots]

    def any_on(self, device: Scalar) -> Value:
        """Whether a device holds one of them."""
        here = [(owner == device) & (slot >= 0) for owner, slot in zip(self.owners, self.slots, strict=True)]
        return functools.reduce(operator.or_, here)


def once_kernel(
    body: Callable[..., None], out: Any, config: ExchangeConfig, name: str, scratch: tuple[Any, ...] = ()
) -> Kernel:
    """A kernel that runs once for each call.

    ``jax.vmap`` of it is an error. Pallas would put all batches into one launch, which has one semaphore, and more CTAs
    that wait than are resident.
    """
    kernel = row_kernel(body, out, config.num_ctas, name, scratch_types=scratch)

    def call(*operands):
        results = _once_each.bind(*operands, kernel=jax.make_jaxpr(kernel)(*operands))
        return results if isinstance(out, list) else results[0]

    return call


# XLA may not merge this launch with one of equal operands, nor repeat it: two layers of the same tokens would share a
# dispatch and so its mailbox, which serves one combine. Pallas has such a mark for TPU kernels only.
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
