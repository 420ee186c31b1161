"""Copies from global to shared memory by ``cp.async``, each thread its own 16 bytes, in inline PTX.

Pallas has them below sm_90 alone, and without bounds. A warpgroup's copies of a step make one group; ``wait`` returns
when all but the newest few groups have arrived, and only for the thread's own copies, so a barrier follows it.
"""

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.common import simt
from pallas_kernels.common.sm90 import WARPGROUP
from pallas_kernels.common.types import Scalar, TileRef

_CHUNK = 16  # bytes of a copy
_ROW = 128  # bytes of a row of a tile, as the 128-byte swizzle has them
_ROWS_AT_ONCE = WARPGROUP * _CHUNK // _ROW
_SPLAT = plgpu.Layout.WG_SPLAT


def commit() -> None:
    """End the group of copies issued since the last one; it may be empty."""
    _inline("cp.async.commit_group;")


def wait(newest: int) -> None:
    """Until this thread's copies have arrived, but for its ``newest`` groups; then for all threads of the CTA."""
    _inline(f"cp.async.wait_group {newest}; bar.sync 0;")


def barrier() -> None:
    """Wait for all threads of the CTA."""
    _inline("bar.sync 0;")


def _inline(text: str) -> None:
    @simt.inline()
    def emit(ctx):
        del ctx
        simt.asm([], text, "~{memory}")

    emit()


def copy_rows(source: TileRef, target: TileRef, transforms: Any, step: Scalar, rows_left: Scalar | None) -> None:
    """128 bytes of each row to a tile with the 128-byte swizzle: step ``step`` of the rows' bytes.

    Args:
        source: (rows, K) in global memory, K contiguous and a multiple of 16 bytes. What lies past K is written as
            zeros.
        target: (rows, 128 bytes) in shared memory, rows a multiple of 16.
        transforms: of ``target``.
        step: () int32.
        rows_left: rows from the tile's first one to the array's last one; those after it are copies of the last.
            None where all are inside.
    """
    count, width = source.shape[0], source.shape[1]
    arguments = [source, target, step] + ([] if rows_left is None else [rows_left])

    @simt.inline(plgpu.RefType(), plgpu.RefType(transforms), *[_SPLAT] * (len(arguments) - 2))
    def copy(ctx, source, target, step, *rows_left):
        del ctx
        row_bytes = width * mgpu.utils.bytewidth(ir.MemRefType(source.type).element_type)
        thread = _thread()
        row, chunk = arith.shrui(thread, _constant(3)), arith.andi(thread, _constant(7))
        swizzled = arith.xori(chunk, arith.andi(row, _constant(7)))
        offset = arith.addi(arith.muli(row, _constant(_ROW)), arith.muli(swizzled, _constant(_CHUNK)))
        shared = arith.addi(llvm.ptrtoint(simt.integer(32), mgpu.utils.memref_ptr(target)), offset)
        column = arith.addi(arith.muli(_scalar(step), _constant(_ROW)), arith.muli(chunk, _constant(_CHUNK)))
        is_inside = arith.cmpi(arith.CmpIPredicate.slt, column, _constant(row_bytes))
        size = arith.select(is_inside, _constant(_CHUNK), _constant(0))
        column = arith.select(is_inside, column, _constant(0))
        base = simt.address_of(source)
        starts = range(0, count, _ROWS_AT_ONCE)
        if rows_left:
            last = arith.subi(_scalar(rows_left[0]), _constant(1))
            for start in starts:
                own = arith.minsi(arith.addi(row, _constant(start)), last)
                _copy(
                    shared,
                    start * _ROW,
                    _plus(base, arith.addi(arith.muli(own, _constant(row_bytes)), column)),
                    0,
                    size,
                )
            return
        first = _plus(base, arith.addi(arith.muli(row, _constant(row_bytes)), column))
        for start in starts:
            _copy(shared, start * _ROW, first, start * row_bytes, size)

    copy(*arguments)


def copy_bytes(source: TileRef, target: TileRef, count: int) -> None:
    """``count`` contiguous bytes, a multiple of 16, from global to shared memory without transforms."""

    @simt.inline(plgpu.RefType(), plgpu.RefType())
    def copy(ctx, source, target):
        del ctx
        at = arith.muli(_thread(), _constant(_CHUNK))
        shared = arith.addi(llvm.ptrtoint(simt.integer(32), mgpu.utils.memref_ptr(target)), at)
        first = _plus(simt.address_of(source), at)
        for start in range(0, count, WARPGROUP * _CHUNK):
            if start + WARPGROUP * _CHUNK <= count:
                _copy(shared, start, first, start, _constant(_CHUNK))
                continue
            text = (
                f"{{ .reg .pred p; setp.lt.s32 p, $2, {count - start}; "
                f"@p cp.async.cg.shared.global [$0+{start}], [$1+{start}], 16; }}"
            )
            simt.asm([shared, first, at], text, "r,l,r,~{memory}")

    copy(source, target)


def _copy(shared: Any, shared_offset: int, address: Any, offset: int, size: Any) -> None:
    """16 bytes, of which ``size`` come from memory and the rest are zeros."""
    text = f"cp.async.cg.shared.global.L2::128B [$0+{shared_offset}], [$1+{offset}], 16, $2;"
    simt.asm([shared, address, size], text, "r,l,r,~{memory}")


def _thread() -> Any:
    return llvm.inline_asm(
        simt.integer(32), [], "{ .reg .b32 t; mov.u32 t, %tid.x; and.b32 $0, t, 127; }", "=r", asm_dialect=0
    )


def _scalar(array: Any) -> Any:
    """The one value of an array in layout WG_SPLAT."""
    return array.registers.item()


def _plus(address: Any, offset: Any) -> Any:
    return arith.addi(address, arith.extsi(simt.integer(64), offset))


def _constant(value: int) -> Any:
    return simt.integer_constant(value, 32)
