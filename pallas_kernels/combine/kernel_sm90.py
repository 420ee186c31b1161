"""Weighted sum of a token's expert rows: top_k reads and one write, in float32, in the order of the slots.

Each block is one warpgroup and takes every num_blocks-th (token, piece of the row): it reads the same columns of the
token's rows, one vector a thread each, adds them up, rounds once and stores. No atomics: the same inputs give the same
bits.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.combine.config import CombineConfig, CombineDesc
from pallas_kernels.common import mosaic, sm90


def combine_sm90(desc: CombineDesc, config: CombineConfig) -> Callable[..., Any]:
    """The kernel: (rows, row_of, weights, [shared]) -> (T, H). config must pass config_error."""
    return plgpu.kernel(
        functools.partial(_kernel, desc, config),
        out_type=jax.ShapeDtypeStruct((desc.num_tokens, desc.width), desc.out_dtype),
        grid=(config.num_blocks,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=mosaic.compiler_params(),
    )


def _kernel(desc: CombineDesc, config: CombineConfig, rows: Any, row_of: Any, weights: Any, *rest: Any) -> None:
    mosaic.begin()
    *shared, out = rest
    block = lax.axis_index("block")
    layout = plgpu.Layout.WG_STRIDED((desc.piece,), vec_size=desc.piece // sm90.WARPGROUP)
    starts = desc.starts
    items = desc.num_tokens * len(starts)

    def load(ref, row, columns):
        return mosaic.load(ref.at[row, columns], layout=layout, optimized=False).astype(jnp.float32)

    def one_item(i, _):
        item = block + i * config.num_blocks
        token = lax.div(item, jnp.int32(len(starts)))
        start = lax.min(lax.rem(item, jnp.int32(len(starts))) * desc.piece, jnp.int32(starts[-1]))
        columns = pl.ds(start, desc.piece)
        total = jnp.zeros((desc.piece,), jnp.float32)
        for j in range(desc.top_k):
            row = row_of[token, j]
            values = load(rows, lax.max(row, jnp.int32(0)), columns) * weights[token, j]
            routed = lax.broadcast_in_dim(row >= 0, values.shape, ())
            total = total + jnp.where(routed, values, 0.0)
        if shared:
            total = total + load(shared[0], token, columns)
        out.at[token, columns][...] = total.astype(desc.out_dtype)
        return 0

    mine = lax.div(items - block + (config.num_blocks - 1), jnp.int32(config.num_blocks))
    lax.fori_loop(0, mine, one_item, 0)
