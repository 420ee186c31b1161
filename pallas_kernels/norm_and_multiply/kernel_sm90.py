"""Residual sum, RMSNorm and matrix times vector of one token.

Each CTA takes some columns of the product, as in grouped_gemm/vector_sm90.py. While their weights come it makes the
norm of the whole row as if it were alone and leaves it in shared memory, from which its warps multiply. CTAs exchange
nothing; the first one writes the sum.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.add_and_norm.kernel_sm90 import NormedRows
from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.row_kernel_sm90 import row_kernel
from pallas_kernels.common.types import Kernel, Ref
from pallas_kernels.grouped_gemm.vector import VectorConfig
from pallas_kernels.grouped_gemm.vector_sm90 import columns_of_one
from pallas_kernels.norm_and_multiply.config import NormProductDesc


def norm_and_multiply_sm90(desc: NormProductDesc, config: VectorConfig) -> Kernel:
    """The kernel: (operands of ``add_and_norm_sm90``, then by name those of the product but for its row) -> [sum (1,
    H)], product (1, N). config must pass ``config_error``."""
    norm, gemm = desc.norm, desc.gemm
    out = [jax.ShapeDtypeStruct((1, norm.width), norm.dtype)] * norm.has_addend
    out += [jax.ShapeDtypeStruct((gemm.n,), gemm.out_dtype)]
    row = [plgpu.SMEM((1, norm.width), norm.dtype)]
    body, ctas = functools.partial(_kernel, desc, config), gemm.n // config.block_n
    call = row_kernel(body, out, ctas, "norm_and_multiply", scratch_types=row)

    def run(of_norm, of_product):
        flat = [a.reshape(-1) if name.startswith("bias") else a for name, a in of_product.items()]
        *total, product = call(*of_norm, *flat)
        return [*total, product[None]]

    return run


def product_names(desc: NormProductDesc) -> list[str]:
    """Of the product's operands, in order."""
    return [name for name in desc.gemm.operand_names if name not in ("x", "tile_expert")]


def _kernel(desc: NormProductDesc, config: VectorConfig, *refs: Ref) -> None:
    mosaic.begin()
    pending, cta = list(refs), lax.axis_index("cta")
    rows = NormedRows(desc.norm, pending)
    operands = {name: pending.pop(0) for name in product_names(desc)}
    total_out = pending.pop(0) if desc.norm.has_addend else None
    out, operands["x"] = pending

    def make_row():
        total = rows.summed(0)
        pl.when(cta == 0)(lambda: rows.store_sum(total_out, 0, total))
        rows.store(operands["x"], 0, rows.normed(total))
        simt.barrier()

    columns_of_one(desc.gemm, config, operands, out, jnp.int32(0), cta * config.block_n, make_row)
