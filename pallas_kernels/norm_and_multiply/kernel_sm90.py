"""Residual sum, RMSNorm and matrix times vector of one token.

Each CTA takes some columns of the product, as in grouped_gemm/vector_sm90.py. While their weights come it makes the
norm of the whole row as if it were alone, quantizes it, and leaves it in shared memory, from which its warps multiply.
CTAs exchange nothing; the first one writes the sum.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.add_and_norm.kernel_sm90 import NormedRows, quantized, split_columns
from pallas_kernels.common import mosaic, simt, sm90
from pallas_kernels.common.row_kernel_sm90 import row_kernel
from pallas_kernels.common.types import Kernel, Ref, Value
from pallas_kernels.grouped_gemm.vector import VectorConfig
from pallas_kernels.grouped_gemm.vector_sm90 import columns_of_one
from pallas_kernels.norm_and_multiply.config import NormProductDesc
from pallas_kernels.quantize_and_permute.kernel_sm90 import GROUP_LAYOUT, quantized_outputs


def norm_and_multiply_sm90(desc: NormProductDesc, config: VectorConfig) -> Kernel:
    """The kernel: (operands of ``add_and_norm_sm90``, then by name those of the product but for its rows) -> [sum (1,
    H)], product (1, N). config must pass ``config_error``."""
    norm, gemm = desc.norm, desc.gemm
    columns = split_columns(norm.rows)
    out = [jax.ShapeDtypeStruct((1, *columns), norm.dtype)] * norm.has_addend
    out += [jax.ShapeDtypeStruct((gemm.n,), gemm.out_dtype)]
    codes, *scales = quantized_outputs(norm.rows)
    row = [plgpu.SMEM((1, norm.width), codes.dtype), *(plgpu.SMEM(part.shape, part.dtype) for part in scales)]
    call = row_kernel(functools.partial(_kernel, desc, config), out, gemm.n // config.block_n, scratch_types=row)

    def run(of_norm, of_product):
        split = [a.reshape(*a.shape[:-1], *columns) if a.shape[-1] == norm.width else a for a in of_norm]
        flat = [a.reshape(-1) if name.startswith(("w_scale", "bias")) else a for name, a in of_product.items()]
        *total, product = call(*split, *flat)
        return [*(a.reshape(1, -1) for a in total), product[None]]

    return run


def product_names(desc: NormProductDesc) -> list[str]:
    """Of the product's operands, in order."""
    return [name for name in desc.gemm.operand_names if name not in ("x", "x_scale", "tile_expert")]


def _kernel(desc: NormProductDesc, config: VectorConfig, *refs: Ref) -> None:
    mosaic.begin()
    pending, cta = list(refs), lax.axis_index("cta")
    rows = NormedRows(desc.norm, pending)
    operands = {name: pending.pop(0) for name in product_names(desc)}
    total_out = pending.pop(0) if desc.norm.has_addend else None
    out, codes, *scales = pending
    operands |= dict(x=codes) | (dict(x_scale=scales[0]) if scales else {})

    def make_row():
        total = rows.summed(0)
        pl.when(cta == 0)(lambda: rows.store_sum(total_out, 0, total))
        normal = rows.normed(total)
        if not scales:
            rows.store(codes, 0, normal)
        elif desc.norm.rows.is_grouped:
            (values,), scale = quantized(rows, normal)
            _store_groups(values, scale, codes, scales[0])
        else:
            values, scales[0][0] = quantized(rows, normal)
            rows.store(codes, 0, values)
        simt.barrier()

    columns_of_one(desc.gemm, config, operands, out, jnp.int32(0), cta * config.block_n, make_row)


def _store_groups(quantized: Value, scale: Value, codes: Ref, scales: Ref) -> None:
    """Codes in ``GROUP_LAYOUT`` and their scales to shared memory, into which Pallas does not store that layout."""
    thread, count = simt.thread_index(), quantized.shape[0] // sm90.WARPS
    lane, warp = thread & (sm90.LANES - 1), lax.shift_right_logical(thread, jnp.full_like(thread, 5))
    for index, word in enumerate(simt.words(quantized, GROUP_LAYOUT, count)):
        simt.store(codes, thread + index * sm90.WARPGROUP, word, thread >= 0)
    for index, word in enumerate(simt.words(scale, GROUP_LAYOUT.reduce(1), count)):
        simt.store(scales, warp + index * sm90.WARPS, word, lane == 0)
