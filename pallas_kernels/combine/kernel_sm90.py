"""Weighted sum of a token's expert rows: top_k reads and one write, in float32, in the order of the slots.

Each CTA is one warpgroup and takes every num_ctas-th (token, piece of the row). It reads the same columns of the
token's rows, one vector a thread each, adds them up, rounds once and stores. There are no atomics, so the same inputs
give the same bits.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.combine.config import CombineConfig, CombineDesc
from pallas_kernels.common import mosaic, sm90
from pallas_kernels.common.row_kernel_sm90 import for_items_of, row_kernel
from pallas_kernels.common.types import Kernel, Ref


def combine_sm90(desc: CombineDesc, config: CombineConfig) -> Kernel:
    """The kernel: (rows, row_of, weights, [shared]) -> (T, H). config must pass config_error."""
    out = jax.ShapeDtypeStruct((desc.num_tokens, desc.width), desc.out_dtype)
    return row_kernel(functools.partial(_kernel, desc, config), out, config.num_ctas, "combine")


def _kernel(desc: CombineDesc, config: CombineConfig, rows: Ref, row_of: Ref, weights: Ref, *rest: Ref) -> None:
    mosaic.begin()
    *shared, out = rest
    cta = lax.axis_index("cta")
    layout = plgpu.Layout.WG_STRIDED((desc.piece,), vec_size=desc.piece // sm90.WARPGROUP)
    starts = desc.starts

    def load(ref, row, columns):
        return mosaic.load(ref.at[row, columns], layout=layout, optimized=False).astype(jnp.float32)

    def one_item(item):
        token = lax.div(item, jnp.int32(len(starts)))
        start = lax.min(lax.rem(item, jnp.int32(len(starts))) * desc.piece, jnp.int32(starts[-1]))
        columns = pl.ds(start, desc.piece)
        total = jnp.zeros((desc.piece,), jnp.float32)
        for j in range(desc.top_k):
            row = row_of[token, j]
            values = load(rows, lax.max(row, jnp.int32(0)), columns) * weights[token, j].astype(jnp.float32)
            routed = lax.broadcast_in_dim(row >= 0, values.shape, ())
            total = total + jnp.where(routed, values, 0.0)
        if shared:
            total = total + load(shared[0], token, columns)
        out.at[token, columns][...] = total.astype(desc.out_dtype)

    for_items_of(cta, desc.num_tokens * len(starts), config.num_ctas, one_item)
