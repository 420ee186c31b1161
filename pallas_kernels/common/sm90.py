"""Facts of a Hopper GPU (sm_90), and sizes that follow from them.

Without Pallas, so that choosing a configuration, and `import moe_jax`, does not load it.
"""

import jax.numpy as jnp

from pallas_kernels.common.types import Dtype

WARPGROUP = 128
WARPS, LANES = 4, 32  # of a warpgroup
SMEM_BYTES = 232_448  # shared memory that one CTA may use (227 KiB)
SMEM_ALIGN = 1024  # Mosaic rounds each shared-memory allocation up to this
REDUCTION_BYTES = 16  # that Mosaic keeps for reductions over warps where a kernel has none; by default 2048
TMA_ALIGN = 128  # bytes; where in shared memory a TMA copy may start
TMA_BOX = 256  # largest extent of one TMA copy along any dimension


def swizzle_bytes(minor_bytes: int) -> int | None:
    """Widest swizzle (128, 64 or 32 bytes) that divides a row of ``minor_bytes``, or None."""
    return next((s for s in (128, 64, 32) if minor_bytes % s == 0), None)


def smem_bytes(shape: tuple[int, ...], dtype: Dtype) -> int:
    """Bytes one shared-memory allocation occupies, rounding included."""
    size = jnp.dtype(dtype).itemsize
    for extent in shape:
        size *= extent
    return -(-size // SMEM_ALIGN) * SMEM_ALIGN
