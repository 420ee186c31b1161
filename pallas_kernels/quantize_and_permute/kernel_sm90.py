"""Quantize each token once and write it to the rows of its experts.

Each block is one warpgroup and takes every num_blocks-th token:

    load the row (16 bytes a thread at a time), keep it in registers -> largest magnitude -> codes
    for each of the token's top_k rows: store codes and scale

So a row is read once and quantized once however many experts it goes to; the rows written are the only traffic that
grows with top_k. With groups of 128 a warp holds one group, so that its maximum is five shuffles.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic, sm90
from pallas_kernels.common.numerics import (
    quantize_e4m3_group,
    quantize_e4m3_row,
    quantize_e4m3_static,
    quantize_int8_token,
)
from pallas_kernels.common.rows import pieces, vector_length
from pallas_kernels.quantize_and_permute.config import GROUP, PermuteConfig, PermuteDesc

# Four groups of 128 columns: one a warp, four columns a thread.
GROUP_LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((4, 128), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def quantize_and_permute_sm90(desc: PermuteDesc, config: PermuteConfig) -> Callable[..., Any]:
    """The kernel: (x, [row_of], [scale (1,)], [rows (n,)]) -> (codes, scales or None). For configs without error."""
    shape = (desc.num_rows, desc.width // GROUP, GROUP) if desc.is_grouped else (desc.num_rows, desc.width)
    out: Any = [jax.ShapeDtypeStruct(shape, desc.out_dtype)]
    if desc.scale_shape is not None:
        out.append(jax.ShapeDtypeStruct(desc.scale_shape, jnp.float32))
    call = plgpu.kernel(
        functools.partial(_kernel, desc, config),
        out_type=out,
        grid=(config.num_blocks,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=mosaic.compiler_params(),
    )

    def run(x, *rest):
        if desc.is_grouped:
            x = x.reshape(desc.num_tokens, -1, GROUP)
        codes, *scales = call(x, *rest)
        return codes.reshape(desc.num_rows, desc.width), scales[0] if scales else None

    return run


def _kernel(desc: PermuteDesc, config: PermuteConfig, *refs: Any) -> None:
    pending = list(refs)
    x = pending.pop(0)
    row_of = pending.pop(0) if desc.top_k else None
    given = pending.pop(0) if desc.quantization == "e4m3_tensor" else None
    named = pending.pop(0) if desc.num_named is not None else None
    codes, *scales = pending
    block = lax.axis_index("block")
    process = _process_groups if desc.is_grouped else _process_row

    scales = scales[0] if scales else None

    def one_token(i, _):
        token = block + i * config.num_blocks
        targets = [token] if row_of is None else [row_of[token, j] for j in range(desc.top_k)]
        process(desc, x, given, token, targets, codes, scales, always=row_of is None)
        return 0

    def one_named(i, row):
        # The next name is on its way while this row is worked on.
        following = named[lax.min(block + (i + 1) * config.num_blocks, jnp.int32(desc.num_items - 1))]
        pl.when(row >= 0)(functools.partial(process, desc, x, given, row, [row], codes, scales, always=True))
        return following

    mine = lax.div(desc.num_items - block + (config.num_blocks - 1), jnp.int32(config.num_blocks))
    if named is None:
        lax.fori_loop(0, mine, one_token, 0)
    else:
        lax.fori_loop(0, mine, one_named, named[block])


def _process_row(desc, x, given, token, targets, codes, scales, *, always):
    vector = vector_length(desc.width, jnp.dtype(desc.dtype).itemsize)
    piece = sm90.WARPGROUP * vector
    starts = pieces(desc.width, piece)
    layout = plgpu.Layout.WG_STRIDED((piece,), vec_size=vector)
    loaded = [mosaic.load(x.at[token, pl.ds(s, piece)], layout=layout, optimized=False) for s in starts]
    scale = None
    if desc.quantization == "none":
        quantized = loaded
    elif desc.quantization == "e4m3_tensor":
        quantized = [quantize_e4m3_static(v.astype(jnp.float32), given[0]) for v in loaded]
    else:
        values = [v.astype(jnp.float32) for v in loaded]
        amax = jnp.max(functools.reduce(jnp.maximum, [jnp.abs(v) for v in values]))
        rule = quantize_e4m3_row if desc.quantization == "e4m3_row" else quantize_int8_token
        quantized, all_scales = zip(*(rule(v, amax) for v in values), strict=True)
        scale = all_scales[0]

    def store(row):
        for start, value in zip(starts, quantized, strict=True):
            codes.at[row, pl.ds(start, piece)][...] = value
        if scale is not None:
            scales[row] = scale

    _for_targets(targets, store, always)


def _process_groups(desc, x, given, token, targets, codes, scales, *, always):
    del given
    groups = desc.width // GROUP
    piece = groups if groups % 4 == 0 and groups <= 64 else 4
    for start in pieces(groups, piece):
        part = pl.ds(start, piece)
        values = mosaic.load(x.at[token, part], layout=GROUP_LAYOUT, optimized=False).astype(jnp.float32)
        amax = jnp.max(jnp.abs(values), axis=1)
        quantized, scale = _quantize_groups(values, amax, desc.has_power_of_two_scales)

        def store(row, part=part, quantized=quantized, scale=scale):
            codes.at[row, part][...] = quantized
            scales.at[part, row][...] = scale

        _for_targets(targets, store, always)


def _quantize_groups(values, amax, is_power_of_two):
    # The rule takes the maximum broadcast over its group; the scale of a group is that of any of its elements.
    _, scale = quantize_e4m3_group(amax, amax, is_power_of_two)
    quantized, _ = quantize_e4m3_group(values, lax.broadcast_in_dim(amax, values.shape, [0]), is_power_of_two)
    return quantized, scale


def _for_targets(targets, store, always):
    for row in targets:
        if always:
            store(row)
        else:

            @pl.when(row >= 0)
            def _(row=row):
                store(row)
