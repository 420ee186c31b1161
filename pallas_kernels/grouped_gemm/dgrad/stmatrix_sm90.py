"""From registers in the layout of wgmma to shared memory as wgmma reads it, four 8 x 8 matrices an instruction."""

from typing import Any, TypeAlias

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.types import TileRef, Value

IrValue: TypeAlias = Any  # an MLIR value; the tests run this file on NumPy arrays of threads

_UNIT = 64
_TILE_BYTES = 1024  # 8 rows of 128 bytes, whose chunks of 16 bytes are swizzled


def store_matrices(matrix: TileRef, piece: int, value: Value) -> None:
    """Write (64, 64) of 16 bits, in layout WGMMA, to columns piece * 64 and on of ``matrix`` (64, columns)."""

    @simt.inline(plgpu.RefType(mosaic.tiled(matrix.dtype, 128)), mosaic.WGMMA)
    def write(ctx, matrix, value):
        del ctx
        base = llvm.ptrtoint(simt.integer(32), mgpu.utils.memref_ptr(matrix))
        thread = _asm([], "{ .reg .b32 t; mov.u32 t, %tid.x; and.b32 $0, t, 127; }")
        address = arith.addi(base, row_offset(thread, columns // _UNIT))
        for pair in range(_UNIT // 16):
            registers = [_register(value, 2 * pair + column, half) for column in range(2) for half in range(2)]
            store = f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [a + {piece * _TILE_BYTES}], {{$1, $2, $3, $4}};"
            text = f"{{ .reg .b32 a; xor.b32 a, $0, {pair_bits(pair)}; {store} }}"
            simt.asm([address, *registers], text, "r,r,r,r,r,~{memory}")

    columns = matrix.shape[1]
    write(matrix, value)


def row_offset(thread: IrValue, pieces: int) -> IrValue:
    """Bytes from a piece's start to the row that a thread names in the first 16 columns: row lane % 8 of matrix
    lane / 8, which are the upper and the lower 8 of the warp's 16 rows in the left 8 columns, then in the right ones.
    """
    return _asm(
        [thread],
        "{ .reg .b32 w, r, h, c; shr.u32 w, $1, 5; and.b32 r, $1, 7; shr.u32 h, $1, 3; and.b32 h, h, 1;"
        " mad.lo.u32 w, w, 2, h; shr.u32 c, $1, 4; and.b32 c, c, 1; xor.b32 c, c, r; shl.b32 c, c, 4;"
        f" mad.lo.u32 c, r, 128, c; mad.lo.u32 $0, w, {pieces * _TILE_BYTES}, c; }}",
    )


def pair_bits(pair: int) -> int:
    """What 16 columns further on change in an address: the swizzle moves chunks of 16 bytes by an exclusive or."""
    return 32 * pair


def _register(value: Any, column: int, half: int) -> IrValue:
    """Two neighbours of one row, of columns 8 * column and on, in the upper or the lower 8 rows."""
    where = [0] * value.registers.ndim
    where[1], where[4] = column, half
    return mgpu.utils.bitcast(value.registers[tuple(where)], simt.integer(32))


def _asm(operands: list[IrValue], text: str) -> IrValue:
    constraints = "=r" + ",r" * len(operands)
    return llvm.inline_asm(simt.integer(32), operands, text, constraints, has_side_effects=False, asm_dialect=0)
