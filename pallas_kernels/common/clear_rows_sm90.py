"""Zeros in place of values outside the slots in use: these may hold anything, and 0 * NaN is NaN."""

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.sm90 import WARPGROUP
from pallas_kernels.common.types import Scalar, TileRef


def clear_rows(values: TileRef, start: Scalar, end: Scalar) -> None:
    """Zero the rows of ``values`` outside [start, end), by one warpgroup.

    values: 16-bit elements in shared memory, in swizzled tiles of 128 bytes a row. Several warpgroups may do it at
    once: they write the same bytes. The swizzle moves 16 bytes within a row of a tile, so a row of zeros is one under
    any swizzle.
    """
    rows, width = values.shape
    row_bytes = 128
    tiles = width * 2 // row_bytes
    offsets = [tile * 8 * row_bytes + start for tile in range(tiles) for start in range(0, row_bytes, 16)]
    stores = " ".join(f"@p st.shared.v4.b32 [$0 + {offset}], {{z, z, z, z}};" for offset in offsets)
    text = "{ .reg .pred p; .reg .b32 z; setp.ne.s32 p, $1, 0; mov.b32 z, 0; " + stores + " }"

    @simt.inline(plgpu.RefType(mosaic.tiled(values.dtype, row_bytes)), simt.LANES, simt.LANES)
    def write(ctx, values, offset, mask):
        del ctx
        base = llvm.ptrtoint(simt.integer(32), mgpu.utils.memref_ptr(values))
        simt.asm([arith.addi(base, simt.value_of(offset)), simt.value_of(mask)], text, "r,r,~{memory}")

    for first in range(0, rows, WARPGROUP):
        row = (simt.thread_index() & (WARPGROUP - 1)) + first
        outside = ((row < start) | (row >= end)) & (row < rows)
        offset = (row >> 3) * (tiles * 8 * row_bytes) + (row & 7) * row_bytes
        write(values, offset, jnp.where(outside, jnp.ones_like(row), jnp.zeros_like(row)))
    plgpu.commit_smem()
