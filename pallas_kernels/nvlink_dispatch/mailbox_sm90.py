"""Memory of one device that the others fill, by address: where it is, stores into it, and the count of who is done.

A remote reference costs a barrier of all devices before each launch (XLA's, jax 0.10 and 0.11), in which they learn
one another's addresses. A launch that was told the addresses as data needs neither. One process drives all devices, so
an address means the same on each of them.

A table is (size + 1, 128) int32 in global memory. Row d, written by device d: bytes 0 to 7 the address of its mailbox,
8 to 15 that of its counter. The last row: this device's counter, its index, and how many of its blocks are done. Blocks
are of one warpgroup.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common import simt
from pallas_kernels.common.sm90 import WARPGROUP

TABLE_ROW = 128  # int32


def start(table: Any, size: int, me: Any) -> None:
    """This device's last row, before any of its blocks or other devices count."""
    table.at[size][...] = jnp.where(simt.thread_index() == 1, me, 0)


def index(table: Any, size: int) -> Any:
    """What ``start`` was told, where nothing else says which device this is."""
    return table[size, 1]


def own_entry(mailbox: Any, table: Any, size: int) -> Any:
    """This device's row of every table, (128,) int32 in layout ``simt.LANES``."""

    result = plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.int32, simt.LANES)

    @simt.inline(plgpu.RefType(), plgpu.RefType(), result=result)
    def make(ctx, mailbox, table):
        del ctx
        counter = arith.addi(_address(table), _constant(4 * TABLE_ROW * size))
        text = (
            "{ .reg .pred p; .reg .b32 t, low, high; .reg .b64 a; mov.u32 t, %tid.x; setp.lt.u32 p, t, 2; "
            "selp.b64 a, $1, $2, p; mov.b64 {low, high}, a; and.b32 t, t, 1; setp.eq.u32 p, t, 0; "
            "selp.b32 $0, low, high, p; }"
        )
        return simt.wrap(simt.asm([_address(mailbox), counter], text, "=r,l,l", has_result=True))

    return make(mailbox, table)


def store(table: Any, device: Any, start: Any, values: Any, layout: Any) -> None:
    """values, (128 * v,) in layout WG_STRIDED, to elements ``start`` () int32 and after of a device's mailbox.

    v elements are at most 16 bytes, and start times their size a multiple of v elements' bytes.
    """

    @simt.inline(plgpu.RefType(), simt.LANES, simt.LANES, layout)
    def write(ctx, table, device, start, values):
        del ctx
        (register,) = values.registers.flat
        kind = ir.VectorType(register.type)
        (length,) = kind.shape
        itemsize = mgpu.utils.bitwidth(kind.element_type) // 8
        row = arith.muli(_wide(device), _constant(4 * TABLE_ROW))
        entry = arith.addi(_address(table), row)
        base = simt.asm([entry], "ld.global.b64 $0, [$1];", "=l,l", has_result=True, bits=64)
        thread = simt.asm([], "mov.u32 $0, %tid.x;", "=r", has_result=True)
        first = arith.muli(arith.extui(_int(64), thread), _constant(length))
        element = arith.addi(_wide(start), first)
        address = arith.addi(base, arith.muli(element, _constant(itemsize)))
        unit = next(size for size in (4, 2, 1) if length * itemsize % size == 0)
        words = vector.bitcast(ir.VectorType.get((length * itemsize // unit,), _int(8 * unit)), register)
        pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), address)
        llvm.StoreOp(words, pointer, alignment=length * itemsize)

    write(table, device, start, values)


def signal(table: Any, size: int, num_blocks: int) -> None:
    """Add one to the counter of each device, behind all stores of all num_blocks blocks, each of which calls once. The
    last one to come does, so that counters of other devices see few additions. All threads of a block call.
    """
    simt.barrier()

    @simt.inline(plgpu.RefType())
    def add(ctx, table):
        del ctx
        own = 4 * TABLE_ROW * size + 8
        each = " ".join(
            f"ld.global.b64 a, [$0+{4 * TABLE_ROW * device + 8}]; red.relaxed.sys.global.add.u32 [a], 1;"
            for device in range(size)
        )
        text = (
            "{ .reg .pred p; .reg .b32 t; .reg .b64 a; mov.u32 t, %tid.x; setp.ne.u32 p, t, 0; @p bra DONE; "
            f"fence.acq_rel.sys; atom.relaxed.gpu.global.add.u32 t, [$0+{own}], 1; "
            f"setp.ne.u32 p, t, {num_blocks - 1}; @p bra DONE; fence.acq_rel.sys; {each} DONE: }}"
        )
        simt.asm([_address(table)], text, "l,~{memory}")

    add(table)


def signal_semaphores(semaphores: list[Any]) -> None:
    """Add one to each, on whatever device it is, behind what this thread block has stored and a barrier."""

    @simt.inline(*[plgpu.RefType()] * len(semaphores))
    def add(ctx, *semaphores):
        del ctx
        operands = [f"@p red.relaxed.sys.global.add.u32 [${i}], 1;" for i in range(len(semaphores))]
        text = (
            "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; @p fence.acq_rel.sys; "
            f"{' '.join(operands)} }}"
        )
        simt.asm([_address(one) for one in semaphores], text, "l," * len(semaphores) + "~{memory}")

    add(*semaphores)


def wait(table: Any, size: int) -> None:
    """Until all devices have signalled this one; what came before each signal is visible then. All threads call."""

    @simt.inline(plgpu.RefType())
    def spin(ctx, table):
        del ctx
        text = (
            "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.ne.u32 p, t, 0; @p bra DONE; "
            f"AGAIN: ld.acquire.sys.global.u32 t, [$0]; setp.lt.u32 p, t, {size}; @p bra AGAIN; "
            "DONE: bar.sync 0; }"
        )
        counter = arith.addi(_address(table), _constant(4 * TABLE_ROW * size))
        simt.asm([counter], text, "l,~{memory}")

    spin(table)


def _address(ref: Any) -> Any:
    return llvm.ptrtoint(_int(64), mgpu.utils.memref_ptr(ref))


def _wide(scalar: Any) -> Any:
    return arith.extsi(_int(64), scalar.registers.item())


def _constant(value: int) -> Any:
    return arith.constant(_int(64), ir.IntegerAttr.get(_int(64), value))


def _int(bits: int) -> Any:
    return ir.IntegerType.get_signless(bits)
