"""Memory of one device that the others fill, by address: where it is, stores into it, and the count of who is done.

A remote reference costs a barrier of all devices before each launch, in which they learn one another's addresses
(XLA's, jax 0.10 and 0.11). A launch that is given the addresses as data needs neither. One process drives all devices,
so an address means the same on each of them.

A table is (size + 1, 128) int32 in global memory. Row d, written by device d, holds the address of d's mailbox in bytes
0 to 7 and that of d's counter in bytes 8 to 15. The last row holds this device's counter, its index, and how many of
its CTAs are done. CTAs have one warpgroup.
"""

import dataclasses

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common import simt
from pallas_kernels.common.sm90 import WARPGROUP
from pallas_kernels.common.types import Layout, Ref, Scalar, Value

TABLE_ROW = 128  # int32


@dataclasses.dataclass(frozen=True)
class Mailboxes:
    """The mailboxes of all devices as one of them reaches them.

    Args:
        table: ref of this device's table.
        size: devices.
    """

    table: Ref
    size: int

    def start(self, me: Scalar) -> None:
        """Fill this device's last row, before any of its CTAs or other devices count there."""
        self.table.at[self.size][...] = jnp.where(simt.thread_index() == 1, me, 0)

    def index(self) -> Value:
        """The ``me`` that ``start`` was given, where nothing else says which device this is."""
        return self.table[self.size, 1]

    def own_entry(self, mailbox: Ref) -> Value:
        """This device's row of every table, (128,) int32 in layout ``simt.LANES``."""
        result = plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.int32, simt.LANES)

        @simt.inline(plgpu.RefType(), plgpu.RefType(), result=result)
        def make(ctx, mailbox, table):
            del ctx
            counter = arith.addi(simt.address_of(table), simt.integer_constant(4 * TABLE_ROW * self.size))
            text = (
                "{ .reg .pred p; .reg .b32 t, low, high; .reg .b64 a; mov.u32 t, %tid.x; setp.lt.u32 p, t, 2; "
                "selp.b64 a, $1, $2, p; mov.b64 {low, high}, a; and.b32 t, t, 1; setp.eq.u32 p, t, 0; "
                "selp.b32 $0, low, high, p; }"
            )
            return simt.wrap(simt.asm([simt.address_of(mailbox), counter], text, "=r,l,l", has_result=True))

        return make(mailbox, self.table)

    def store(self, device: Scalar, start: Value, values: Value, layout: Layout) -> None:
        """Store values, (128 * v,) in layout WG_STRIDED, to elements ``start`` () int32 and after of a mailbox.

        v elements are at most 16 bytes, and start times their size a multiple of v elements' bytes.
        """

        @simt.inline(plgpu.RefType(), simt.LANES, simt.LANES, layout)
        def write(ctx, table, device, start, values):
            del ctx
            (register,) = values.registers.flat
            kind = ir.VectorType(register.type)
            (length,) = kind.shape
            itemsize = mgpu.utils.bitwidth(kind.element_type) // 8
            row = arith.muli(_wide(device), simt.integer_constant(4 * TABLE_ROW))
            entry = arith.addi(simt.address_of(table), row)
            base = simt.asm([entry], "ld.global.b64 $0, [$1];", "=l,l", has_result=True, bits=64)
            thread = simt.asm([], "mov.u32 $0, %tid.x;", "=r", has_result=True)
            first = arith.muli(arith.extui(simt.integer(64), thread), simt.integer_constant(length))
            element = arith.addi(_wide(start), first)
            address = arith.addi(base, arith.muli(element, simt.integer_constant(itemsize)))
            unit = next(size for size in (4, 2, 1) if length * itemsize % size == 0)
            words = vector.bitcast(ir.VectorType.get((length * itemsize // unit,), simt.integer(8 * unit)), register)
            pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), address)
            llvm.StoreOp(words, pointer, alignment=length * itemsize)

        write(self.table, device, start, values)

    def signal(self, num_ctas: int) -> None:
        """Add one to the counter of each device, behind all stores of all num_ctas CTAs.

        All threads of each CTA call once. The last CTA to come signals, so that other devices' counters see few
        additions.
        """
        simt.barrier()

        @simt.inline(plgpu.RefType())
        def add(ctx, table):
            del ctx
            own = 4 * TABLE_ROW * self.size + 8
            each = " ".join(
                f"ld.global.b64 a, [$0+{4 * TABLE_ROW * device + 8}]; red.relaxed.sys.global.add.u32 [a], 1;"
                for device in range(self.size)
            )
            text = (
                "{ .reg .pred p; .reg .b32 t; .reg .b64 a; mov.u32 t, %tid.x; setp.ne.u32 p, t, 0; @p bra DONE; "
                f"fence.acq_rel.sys; atom.relaxed.gpu.global.add.u32 t, [$0+{own}], 1; "
                f"setp.ne.u32 p, t, {num_ctas - 1}; @p bra DONE; fence.acq_rel.sys; {each} DONE: }}"
            )
            simt.asm([simt.address_of(table)], text, "l,~{memory}")

        add(self.table)

    def wait(self) -> None:
        """Wait until all devices have signalled this one. What came before each signal is then visible to all threads,
        which all call.
        """

        @simt.inline(plgpu.RefType())
        def spin(ctx, table):
            del ctx
            text = (
                "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.ne.u32 p, t, 0; @p bra DONE; "
                f"AGAIN: ld.acquire.sys.global.u32 t, [$0]; setp.lt.u32 p, t, {self.size}; @p bra AGAIN; "
                "DONE: bar.sync 0; }"
            )
            counter = arith.addi(simt.address_of(table), simt.integer_constant(4 * TABLE_ROW * self.size))
            simt.asm([counter], text, "l,~{memory}")

        spin(self.table)


def signal_semaphores(semaphores: list[Ref]) -> None:
    """Add one to each semaphore, on whatever device it is, behind what this CTA has stored and a barrier."""

    @simt.inline(*[plgpu.RefType()] * len(semaphores))
    def add(ctx, *semaphores):
        del ctx
        operands = [f"@p red.relaxed.sys.global.add.u32 [${i}], 1;" for i in range(len(semaphores))]
        text = (
            "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; @p fence.acq_rel.sys; "
            f"{' '.join(operands)} }}"
        )
        simt.asm([simt.address_of(one) for one in semaphores], text, "l," * len(semaphores) + "~{memory}")

    add(*semaphores)


def _wide(scalar: mgpu.FragmentedArray) -> ir.Value:
    return arith.extsi(simt.integer(64), scalar.registers.item())
