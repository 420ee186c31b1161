"""Residual sum and RMSNorm of rows.

Each CTA is one warpgroup and takes every num_ctas-th row. It reads the row once, a vector a thread and piece, keeps the
sum in registers while its squares are added up, and writes sum and norm.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.add_and_norm.config import AddNormConfig, AddNormDesc
from pallas_kernels.common import mosaic, sm90
from pallas_kernels.common.row_kernel_sm90 import for_items_of, row_kernel
from pallas_kernels.common.rows import pieces, vector_length
from pallas_kernels.common.types import Kernel, Ref


def add_and_norm_sm90(desc: AddNormDesc, config: AddNormConfig) -> Kernel:
    """The kernel: (x, weight, [parts (P, R, H)]) -> [sum, norm], without the sum where nothing is added."""
    out = jax.ShapeDtypeStruct((desc.num_tokens, desc.width), desc.dtype)
    return row_kernel(functools.partial(_kernel, desc, config), [out] * (1 + bool(desc.num_parts)), config.num_ctas)


def _kernel(desc: AddNormDesc, config: AddNormConfig, x: Ref, weight: Ref, *rest: Ref) -> None:
    mosaic.begin()
    parts, total_out = (rest[0], rest[1]) if desc.num_parts else (None, None)
    out = rest[-1]
    vector = vector_length(desc.width, 2)
    piece = sm90.WARPGROUP * vector
    layout = plgpu.Layout.WG_STRIDED((piece,), vec_size=vector)
    starts = pieces(desc.width, piece)

    def load(ref, *index):
        return mosaic.load(ref.at[*index], layout=layout, optimized=False).astype(jnp.float32)

    def one_row(row):
        columns = [pl.ds(start, piece) for start in starts]
        values = [load(x, row, part) for part in columns]
        if parts is not None and total_out is not None:
            for i, part in enumerate(columns):
                added = [load(parts, index, row, part) for index in range(desc.num_parts)]
                values[i] = values[i] + functools.reduce(jnp.add, added)
            for part, value in zip(columns, values, strict=True):
                total_out.at[row, part][...] = value.astype(desc.dtype)
        squares = [value * value for value in values]
        if counted_twice := len(starts) * piece - desc.width:
            column = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (piece,), 0), layout)
            squares[-1] = jnp.where(column >= counted_twice, squares[-1], 0.0)
        total = jnp.sum(functools.reduce(jnp.add, squares))
        inverse = lax.rsqrt(total * (1.0 / desc.width) + desc.eps)
        for part, value in zip(columns, values, strict=True):
            out.at[row, part][...] = (value * inverse * load(weight, part)).astype(desc.dtype)

    for_items_of(lax.axis_index("cta"), desc.num_tokens, config.num_ctas, one_row)
