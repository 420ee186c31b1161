"""Quantize each token once and write it to the rows of its experts.

Each block is one warpgroup and takes every num_blocks-th token:

    load the row (16 bytes a thread at a time), keep it in registers -> largest magnitude -> codes
    for each of the token's top_k rows: store codes and scale

So a row is read once and quantized once however many experts it goes to; the rows written are the only traffic that
grows with top_k. With groups of 128 a warp holds one group, so that its maximum is five shuffles; groups of 16 and 32
(microscaling formats, whose rounded values are written in bfloat16) lie in 2 to 16 neighbouring threads.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic, simt, sm90
from pallas_kernels.common.division_sm90 import divide_in
from pallas_kernels.common.e4m3_sm90 import e4m3_in_groups, e4m3_of_row
from pallas_kernels.common.microscaling import group_factors, nvfp4_global_scale, round_element
from pallas_kernels.common.numerics import magnitude, quantize_e4m3_static, quantize_int8_token
from pallas_kernels.common.rows import pieces, vector_length
from pallas_kernels.quantize_and_permute.config import (
    GROUP,
    TAKES_SCALE,
    PermuteConfig,
    PermuteDesc,
    grid_vector,
)

PART_ELEMENTS = 64  # of a row that a thread holds at once

# Four groups of 128 columns: one a warp, four columns a thread.
GROUP_LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((4, 128), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

# Rows of fewer: every warp works on all of them, and all store the same.
FEW_GROUPS_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((1, 128), (4,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
)


def quantize_and_permute_sm90(desc: PermuteDesc, config: PermuteConfig) -> Callable[..., Any]:
    """The kernel: (x, [row_of], [scale (1,)], [rows (n,)]) -> (codes, scales or None). For configs without error."""
    call = plgpu.kernel(
        functools.partial(_kernel, desc, config),
        out_type=quantized_outputs(desc),
        grid=(config.num_blocks,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=mosaic.compiler_params(),
    )

    def run(x, *rest):
        codes, *scales = call(x.reshape(desc.num_tokens, *split_columns(desc)), *rest)
        return codes.reshape(desc.num_rows, desc.width), scales[0] if scales else None

    return run


def split_columns(desc: PermuteDesc) -> tuple[int, ...]:
    """Columns of a row as the kernel takes and writes them: those of a group along an axis of their own."""
    group = GROUP if desc.is_grouped else desc.microscaling_group
    return (desc.width,) if group is None else (desc.width // group, group)


def quantized_outputs(desc: PermuteDesc) -> list[jax.ShapeDtypeStruct]:
    """Codes, and scales where the kernel computes them."""
    out = [jax.ShapeDtypeStruct((desc.num_rows, *split_columns(desc)), jnp.dtype(desc.out_dtype))]
    return out if desc.scale_shape is None else [*out, jax.ShapeDtypeStruct(desc.scale_shape, jnp.float32)]


def _kernel(desc: PermuteDesc, config: PermuteConfig, *refs: Any) -> None:
    mosaic.begin()
    pending = list(refs)
    x = pending.pop(0)
    row_of = pending.pop(0) if desc.top_k else None
    given = pending.pop(0) if desc.quantization in TAKES_SCALE else None
    named = pending.pop(0) if desc.num_named is not None else None
    codes, *scales = pending
    block = lax.axis_index("block")
    scales = scales[0] if scales else None

    def one_token(i, _):
        token = block + i * config.num_blocks
        targets = [token] if row_of is None else [row_of[token, j] for j in range(desc.top_k)]
        quantize_token(desc, x, given, token, targets, codes, scales, always=row_of is None)
        return 0

    def name(item):
        return named[item if desc.parts == 1 else lax.div(item, jnp.int32(desc.parts))]

    def one_named(i, row):
        # The next name is on its way while this row is worked on.
        item = block + i * config.num_blocks
        following = name(lax.min(item + config.num_blocks, jnp.int32(desc.num_items - 1)))
        quantize = functools.partial(quantize_token, desc, x, given, row, [row], codes, scales, always=True)
        if desc.parts > 1:
            quantize = functools.partial(quantize, part=lax.rem(item, jnp.int32(desc.parts)))
        pl.when(row >= 0)(quantize)
        return following

    mine = lax.div(desc.num_items - block + (config.num_blocks - 1), jnp.int32(config.num_blocks))
    if named is None:
        lax.fori_loop(0, mine, one_token, 0)
    else:
        lax.fori_loop(0, mine, one_named, name(block))


def quantize_token(
    desc: PermuteDesc,
    x: Any,
    given: Any,
    token: Any,
    targets: list[Any],
    codes: Any,
    scales: Any,
    *,
    always: bool,
    part: Any = None,
) -> None:
    """Quantize row ``token`` of x by one warpgroup, alone at this in its block, and write it to the rows ``targets``,
    those below 0 left out unless ``always``. given: ref of the given scale, or None. codes, scales: refs of
    ``quantized_outputs``, scales None where there are none. part: of the row's ``desc.parts`` alone.
    """
    process = functools.partial(_process_groups, part=part) if desc.is_grouped else _process_row
    if desc.microscaling_group is not None:
        process = _process_small_groups
    process(desc, x, given, token, targets, codes, scales, always=always)


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
        rule = e4m3_of_row if desc.quantization == "e4m3_row" else quantize_int8_token
        quantized, all_scales = zip(*(rule(v, amax) for v in values), strict=True)
        scale = all_scales[0]

    def store(row):
        for start, value in zip(starts, quantized, strict=True):
            codes.at[row, pl.ds(start, piece)][...] = value
        if scale is not None:
            scales[row] = scale

    _for_targets(targets, store, always)


def _process_groups(desc, x, given, token, targets, codes, scales, *, always, part):
    del given
    groups = desc.width // GROUP
    layout, piece = GROUP_LAYOUT, groups if groups % 4 == 0 and groups <= 64 else 4
    if groups < 4:
        layout, piece = FEW_GROUPS_LAYOUT, groups
    if part is not None:
        piece = groups // desc.parts
    for start in pieces(groups, piece) if part is None else [part * piece]:
        own = pl.ds(start, piece)
        values = mosaic.load(x.at[token, own], layout=layout, optimized=False).astype(jnp.float32)
        amax = jnp.max(jnp.abs(values), axis=1)
        quantized, scale = e4m3_in_groups(values, amax, desc.has_power_of_two_scales)

        def store(row, own=own, quantized=quantized, scale=scale):
            codes.at[row, own][...] = quantized
            scales.at[own, row][...] = scale

        _for_targets(targets, store, always)


def _process_small_groups(desc, x, given, token, targets, codes, scales, *, always):
    group, vector = desc.microscaling_group, grid_vector(desc)
    layout = _small_group_layout(group, vector)
    parts = [pl.ds(*part) for part in _parts(desc.width // group, sm90.WARPGROUP * vector // group, vector)]
    loaded = [mosaic.load(x.at[token, part], layout=layout, optimized=False) for part in parts]
    values = [value.astype(jnp.float32) for value in loaded]
    maxima = [jnp.max(magnitude(value), axis=1) for value in values]
    divide = divide_in(layout.reduce(1))
    row_amax = functools.reduce(jnp.maximum, map(jnp.max, maxima)) if scales is not None else None
    rounded = []
    for value, amax in zip(values, maxima, strict=True):
        global_scale = None if given is None else given[0]
        if row_amax is not None:
            whole = plgpu.layout_cast(jnp.full(amax.shape, row_amax), layout.reduce(1))
            global_scale = nvfp4_global_scale(whole, divide)
        factors = group_factors(amax, desc.microscaling_kind, global_scale, divide)
        scale, inverse = (lax.broadcast_in_dim(factor, value.shape, [0]) for factor in factors)
        rounded.append((round_element(value * inverse, desc.microscaling_kind) * scale).astype(codes.dtype))

    if row_amax is not None:
        divide = divide_in(simt.LANES)
        whole = plgpu.layout_cast(jnp.full((sm90.WARPGROUP,), row_amax), simt.LANES)
        row_scale = lax.bitcast_convert_type(divide(1.0, nvfp4_global_scale(whole, divide)), jnp.int32)
        lane = simt.thread_index()

    def store(row):
        for part, value in zip(parts, rounded, strict=True):
            codes.at[row, part][...] = value
        if scales is not None:
            index = plgpu.layout_cast(jnp.full(lane.shape, row), simt.LANES)
            simt.store(scales, index, row_scale, lane == 0)

    _for_targets(targets, store, always)


def _parts(groups: int, tile: int, vector: int) -> list[tuple[int, int]]:
    """(first group, groups) of the parts of a row that are whole tiles and leave registers free; the last may reach
    back into the one before, see ``pieces``.

    Few and large ones: the time of layout inference grows steeply with the number of operations.
    """
    at_once = PART_ELEMENTS // vector * tile
    whole = groups // tile * tile
    parts = [(start, min(at_once, whole - start)) for start in range(0, whole, at_once)]
    return parts if whole == groups else [*parts, (groups - tile, tile)]


def _small_group_layout(group: int, vector: int) -> Any:
    """Groups side by side in the threads of a warp, ``vector`` columns a thread."""
    groups = 32 * vector // group
    tiling = plgpu.Tiling(((4 * groups, group), (groups, group), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def _for_targets(targets, store, always):
    for row in targets:
        if always:
            store(row)
        else:

            @pl.when(row >= 0)
            def _(row=row):
                store(row)
