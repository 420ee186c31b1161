"""Copy each token to the rows of its experts, its columns in each expert's own order (act-order weights).

Each block is one warpgroup and takes every num_blocks-th (token, slot, piece of the row):

    row -> expert of its tile -> the order's indices, one a thread and 16 in flight -> the token's elements -> store

Indices and stores are contiguous; the token's elements come from anywhere in its row, which the first of its slots
leaves in L2.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.rows import WARPGROUP
from pallas_kernels.quantize_and_permute.config import GATHERED, PermuteConfig, PermuteDesc


def gather_rows_sm90(desc: PermuteDesc, config: PermuteConfig) -> Callable[..., Any]:
    """The kernel: (x, row_of, columns, tile_expert) -> (rows, None). For configs without error."""
    call = plgpu.kernel(
        functools.partial(_kernel, desc, config),
        out_type=jax.ShapeDtypeStruct((desc.num_rows * desc.width,), desc.dtype),
        grid=(config.num_blocks,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=mosaic.compiler_params(),
    )

    def run(x, row_of, columns, tile_expert):
        rows = call(x.reshape(-1), row_of.reshape(-1), columns.reshape(-1), tile_expert)
        return rows.reshape(desc.num_rows, desc.width), None

    return run


def _kernel(
    desc: PermuteDesc, config: PermuteConfig, x: Any, row_of: Any, columns: Any, tile_expert: Any, out: Any
) -> None:
    mosaic.begin()
    block, lane = lax.axis_index("block"), simt.thread_index()
    itemsize = jnp.dtype(desc.dtype).itemsize
    pieces = -(-desc.width // GATHERED)
    in_flight = -(-min(desc.width, GATHERED) // WARPGROUP)

    def one_item(i, _):
        item = block + i * config.num_blocks
        pair, piece = lax.div(item, jnp.int32(pieces)), lax.rem(item, jnp.int32(pieces))
        row = row_of[pair]

        @pl.when(row >= 0)
        def _():
            order = tile_expert[lax.div(row, jnp.int32(desc.block_m))] * desc.width
            token = lax.div(pair, jnp.int32(desc.top_k)) * desc.width
            places = [lane + (piece * GATHERED + j * WARPGROUP) for j in range(in_flight)]
            inside = [place < desc.width for place in places]
            sources = [simt.load(columns, p + order, mask, 0) for p, mask in zip(places, inside, strict=True)]
            values = [simt.load_bits(x, s + token, mask, itemsize) for s, mask in zip(sources, inside, strict=True)]
            for place, value, mask in zip(places, values, inside, strict=True):
                simt.store_bits(out, place + row * desc.width, value, mask, itemsize)

        return 0

    mine = lax.div(desc.num_items - block + (config.num_blocks - 1), jnp.int32(config.num_blocks))
    lax.fori_loop(0, mine, one_item, 0)
