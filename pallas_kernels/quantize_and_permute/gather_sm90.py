"""Copy each token to the rows of its experts, its columns in each expert's own order (act-order weights).

Each CTA is one warpgroup and takes every num_ctas-th (token, slot, piece of the row):

    row -> expert of its tile -> the order's indices, one a thread and 16 in flight -> the token's elements -> store

Indices and stores are contiguous. The token's elements come from anywhere in its row, which stays in L2.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.row_kernel_sm90 import for_items_of, row_kernel
from pallas_kernels.common.sm90 import WARPGROUP
from pallas_kernels.common.types import Kernel, Ref
from pallas_kernels.quantize_and_permute.config import GATHERED, PermuteConfig, PermuteDesc


def gather_rows_sm90(desc: PermuteDesc, config: PermuteConfig) -> Kernel:
    """The kernel: (x, row_of, columns, tile_expert) -> (rows, None). config must pass config_error."""
    out = jax.ShapeDtypeStruct((desc.num_rows * desc.width,), desc.dtype)
    call = row_kernel(functools.partial(_kernel, desc, config), out, config.num_ctas, "quantize_and_permute")

    def run(x, row_of, columns, tile_expert):
        rows = call(x.reshape(-1), row_of.reshape(-1), columns.reshape(-1), tile_expert)
        return rows.reshape(desc.num_rows, desc.width), None

    return run


def _kernel(
    desc: PermuteDesc, config: PermuteConfig, x: Ref, row_of: Ref, columns: Ref, tile_expert: Ref, out: Ref
) -> None:
    mosaic.begin()
    cta, lane = lax.axis_index("cta"), simt.thread_index()
    itemsize = jnp.dtype(desc.dtype).itemsize
    pieces = -(-desc.width // GATHERED)
    in_flight = -(-min(desc.width, GATHERED) // WARPGROUP)

    def one_item(item):
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

    for_items_of(cta, desc.num_items, config.num_ctas, one_item)
