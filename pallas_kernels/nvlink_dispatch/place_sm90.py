"""Copy rows that arrived, with their scales, to rows in expert order.

Each CTA is one warpgroup and takes every num_ctas-th row that arrived:

    its top_k places -> where it has any: load the row (16 bytes a thread) and its scales -> store them at each place
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.row_kernel_sm90 import for_items_of, row_kernel
from pallas_kernels.common.rows import pieces, vector_length
from pallas_kernels.common.sm90 import WARPGROUP
from pallas_kernels.common.types import Kernel, Ref
from pallas_kernels.nvlink_dispatch.config import ExchangeConfig, PlaceDesc
from pallas_kernels.quantize_and_permute.kernel_sm90 import GROUP_LAYOUT


def place_sm90(desc: PlaceDesc, config: ExchangeConfig) -> Kernel:
    """The kernel: (codes (N, H) int8, scales, row_of (N, k)) -> (codes (Mp, H) int8, scales)."""
    shape = (desc.num_groups, desc.num_places) if desc.num_groups else (desc.num_places,)
    out = [
        jax.ShapeDtypeStruct((desc.num_places, desc.width), jnp.int8),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    ]
    call = row_kernel(functools.partial(_place, desc, config), out, config.num_ctas, "nvlink_place")
    return lambda *operands: tuple(call(*operands))


def _place(
    desc: PlaceDesc, config: ExchangeConfig, codes: Ref, scales: Ref, row_of: Ref, codes_out: Ref, scales_out: Ref
) -> None:
    cta = lax.axis_index("cta")
    vector = vector_length(desc.width, 1)
    piece = WARPGROUP * vector
    starts = pieces(desc.width, piece)
    layout = plgpu.Layout.WG_STRIDED((piece,), vec_size=vector)

    def one_row(row):
        places = [row_of[row, j] for j in range(desc.top_k)]

        @pl.when(functools.reduce(lax.max, places) >= 0)
        def _():
            loaded = [mosaic.load(codes.at[row, pl.ds(s, piece)], layout=layout, optimized=False) for s in starts]
            if desc.num_groups:
                scale = mosaic.load(scales.at[row], layout=GROUP_LAYOUT.reduce(1), optimized=False)
            else:
                scale = scales[row]
            for place in places:

                @pl.when(place >= 0)
                def _(place=place):
                    for start, value in zip(starts, loaded, strict=True):
                        codes_out.at[place, pl.ds(start, piece)][...] = value
                    if desc.num_groups:
                        scales_out.at[pl.ds(0, desc.num_groups), place][...] = scale
                    else:
                        scales_out[place] = scale

    for_items_of(cta, desc.num_rows, config.num_ctas, one_row)
