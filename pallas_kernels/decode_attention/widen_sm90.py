"""e4m3 codes of one tile in shared memory to 16-bit numbers in another, by one warpgroup, in inline PTX."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.sm90 import WARPGROUP
from pallas_kernels.common.types import TileRef

CHUNK = 8  # codes that a thread turns at once into the 16 bytes that a swizzle keeps together
_ROW = 128  # bytes of a row of a swizzled tile
_TILE = 8 * _ROW
_BATCH = 8  # loads of a thread that are under way together


def target_offsets(thread: Any, width: int, kind: int) -> Any:
    """Byte in the target where a thread's chunk of pass ``kind`` goes. thread: its index, an array of any library.

    The codes' rows lie one after the other; in a pass thread i takes chunk i of the next 128. The target is made of
    tiles of 8 rows of 128 bytes, those of the same rows beside each other; a row's chunk c lies at c ^ (row % 8).
    """
    per_row, tiles = width // CHUNK, width // 64
    chunk = thread + kind * WARPGROUP
    row, column = chunk >> (per_row.bit_length() - 1), chunk & (per_row - 1)
    tile = (row >> 3) * tiles + (column >> 3)
    return tile * _TILE + (row & 7) * _ROW + (((column & 7) ^ (row & 7)) << 4)


def widen_tile(source: TileRef, target: TileRef) -> None:
    """target = source in target's dtype, exactly; NaN stays NaN. Other proxies see it after ``plgpu.commit_smem``.

    source: (rows, width) float8_e4m3fn, row by row; width is 64, 128 or 256. target: bfloat16 or float16, in swizzled
    tiles of 128 bytes a row.
    """
    rows, width = source.shape
    rows_of_pass = WARPGROUP * CHUNK // width
    kinds = max(1, 8 // rows_of_pass)  # passes whose rows differ modulo 8
    step = kinds * WARPGROUP * CHUNK * 2  # bytes of the target from one pass of a kind to the next
    thread = simt.thread_index() & (WARPGROUP - 1)
    offsets = [target_offsets(thread, width, kind) for kind in range(kinds)]
    is_half = jnp.dtype(target.dtype) == jnp.float16
    passes, codes = rows // rows_of_pass, WARPGROUP * CHUNK

    def text(first: int, count: int) -> str:
        lines = [f".reg .b32 w<{2 * count}>, d<4>; .reg .b16 l, h, x, y; .reg .f32 f, g;"]
        for j in range(count):
            lines.append(f"ld.shared.v2.b32 {{w{2 * j}, w{2 * j + 1}}}, [$0 + {(first + j) * codes}];")
        for j in range(count):
            for word in range(2):
                lines.append(f"mov.b32 {{l, h}}, w{2 * j + word};")
                lines += [_converted(f"d{2 * word + i}", half, is_half) for i, half in enumerate("lh")]
            kind, at = (first + j) % kinds, (first + j) // kinds * step
            lines.append(f"st.shared.v4.b32 [${1 + kind} + {at}], {{d0, d1, d2, d3}};")
        return "{ " + " ".join(lines) + " }"

    @simt.inline(plgpu.RefType(), plgpu.RefType(mosaic.tiled(target.dtype, _ROW)), *[simt.LANES] * (1 + kinds))
    def write(ctx, source, target, read_at, *write_at):
        del ctx
        bases = [llvm.ptrtoint(simt.integer(32), mgpu.utils.memref_ptr(ref)) for ref in (source, target)]
        places: list[Any] = [arith.addi(bases[0], simt.value_of(read_at))]
        places += [arith.addi(bases[1], simt.value_of(at)) for at in write_at]
        for first in range(0, passes, _BATCH):
            count = min(_BATCH, passes - first)
            simt.asm(places, text(first, count), ",".join("r" * len(places)) + ",~{memory}")

    write(source, target, thread * CHUNK, *offsets)


def _converted(target: str, half: str, is_half: bool) -> str:
    """Two codes in a register of 16 bits to two numbers in one of 32."""
    if is_half:
        return f"cvt.rn.f16x2.e4m3x2 {target}, {half};"
    to_float = f"mov.b32 {{x, y}}, {target}; cvt.f32.f16 f, x; cvt.f32.f16 g, y;"
    return f"cvt.rn.f16x2.e4m3x2 {target}, {half}; {to_float} cvt.rn.bf16x2.f32 {target}, g, f;"
