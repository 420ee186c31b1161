"""Quantize each token once and write it to the rows of its experts.

Each CTA is one warpgroup and takes every num_ctas-th token:

    load the row (16 bytes a thread at a time), keep it in registers -> largest magnitude -> codes
    for each of the token's top_k rows: store codes and scale

A row is read once and quantized once however many experts it goes to; only the rows written grow with top_k. With
groups of 128 a warp holds one group, whose maximum is five shuffles; a last group of 64 columns is held by every warp.
Groups of 16 and 32 lie in 2 to 16 neighbouring threads; they belong to microscaling formats, whose rounded values are
written in bfloat16.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic, simt, sm90
from pallas_kernels.common.microscaling import group_factors, nvfp4_global_scale, round_element
from pallas_kernels.common.numerics import magnitude, quantize_e4m3_static, quantize_int8_token
from pallas_kernels.common.numerics_sm90 import divide_in, e4m3_in_groups, e4m3_of_row, e4m3_of_tensor
from pallas_kernels.common.row_kernel_sm90 import for_items_of, items_of, row_kernel
from pallas_kernels.common.rows import pieces, vector_length
from pallas_kernels.common.types import Kernel, Layout, Ref, Scalar, Value
from pallas_kernels.quantize_and_permute.config import (
    GROUP,
    SHORT_GROUP,
    TAKES_SCALE,
    PermuteConfig,
    PermuteDesc,
    grid_vector,
)

PART_ELEMENTS = 64  # of a row that a thread holds at once
MOST_GROUPS = 64  # of 128 columns that a warpgroup holds at once: 64 values a thread

Store: TypeAlias = Callable[[Scalar], None]  # writes what is quantized to one row

# Four groups of 128 columns: one a warp, four columns a thread.
GROUP_LAYOUT = mosaic.row_a_warp(4)

# Rows of fewer: every warp works on all of them, and all store the same.
FEW_GROUPS_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((1, 128), (4,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
)

# The last group of a row, where it has half of the columns: every warp works on it, and all store the same.
SHORT_GROUP_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((1, SHORT_GROUP), (2,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
)


def quantize_and_permute_sm90(desc: PermuteDesc, config: PermuteConfig) -> Kernel:
    """The kernel: (x, [row_of], [scale (1,)], [rows (n,)]) -> (codes, scales or None). For configs without error."""
    body = functools.partial(_kernel, desc, config)
    call = row_kernel(body, quantized_outputs(desc), config.num_ctas, "quantize_and_permute")

    def run(x, *rest):
        codes, *scales = call(x.reshape(desc.num_tokens, *split_columns(desc)), *rest)
        return codes.reshape(desc.num_rows, desc.width), scales[0] if scales else None

    return run


def split_columns(desc: PermuteDesc) -> tuple[int, ...]:
    """Columns of a row as the kernel takes and writes them: (groups, columns of a group), or (H,) without groups and
    where the last one is short.
    """
    group = GROUP if desc.is_grouped else desc.microscaling_group
    return (desc.width,) if group is None or desc.width % group else (desc.width // group, group)


def quantized_outputs(desc: PermuteDesc) -> list[jax.ShapeDtypeStruct]:
    """Codes, and scales where the kernel computes them."""
    out = [jax.ShapeDtypeStruct((desc.num_rows, *split_columns(desc)), jnp.dtype(desc.out_dtype))]
    return out if desc.scale_shape is None else [*out, jax.ShapeDtypeStruct(desc.scale_shape, jnp.float32)]


def _kernel(desc: PermuteDesc, config: PermuteConfig, *refs: Ref) -> None:
    mosaic.begin()
    pending = list(refs)
    x = pending.pop(0)
    row_of = pending.pop(0) if desc.top_k else None
    given = pending.pop(0) if desc.quantization in TAKES_SCALE else None
    named = pending.pop(0) if desc.num_named is not None else None
    rows = RowQuantizer(desc, x, given, *pending)
    cta = lax.axis_index("cta")

    def row_and_part(item):
        """Of the rows that are named, or of all."""
        if desc.parts == 1:
            return item, None
        parts = jnp.int32(desc.parts)
        return lax.div(item, parts), lax.rem(item, parts)

    def one_token(item):
        token, part = row_and_part(item)
        targets: list[Any] = [token] if row_of is None else [row_of[token, j] for j in range(desc.top_k)]
        rows.quantize(token, targets, always=row_of is None, part=part)

    if named is None:
        for_items_of(cta, desc.num_items, config.num_ctas, one_token)
        return

    def one_named(i, row):
        # The next name is on its way while this row is worked on.
        item = cta + i * config.num_ctas
        following = named[row_and_part(lax.min(item + config.num_ctas, jnp.int32(desc.num_items - 1)))[0]]
        pl.when(row >= 0)(lambda: rows.quantize(row, [row], always=True, part=row_and_part(item)[1]))
        return following

    lax.fori_loop(0, items_of(cta, desc.num_items, config.num_ctas), one_named, named[row_and_part(cta)[0]])


@dataclasses.dataclass(frozen=True)
class RowQuantizer:
    """Quantizes rows by one warpgroup, which is alone at this in its CTA.

    Args:
        desc: of the call.
        x: ref of the tokens, their columns as ``split_columns`` says.
        given: ref of the given scale, or None.
        codes, scales: refs of ``quantized_outputs``; scales None where there are none.
    """

    desc: PermuteDesc
    x: Ref
    given: Ref | None
    codes: Ref
    scales: Ref | None = None

    def quantize(self, token: Scalar, targets: list[Scalar], *, always: bool, part: Scalar | None = None) -> None:
        """Quantize row ``token`` of x and write it to the rows ``targets``.

        always: whether all targets are rows; else those below 0 are left out. part: of the row's ``desc.parts`` alone.
        """
        for store in self.stores(token, part):
            for row in targets:
                if always:
                    store(row)
                else:
                    pl.when(row >= 0)(functools.partial(store, row))

    def stores(self, token: Scalar, part: Scalar | None = None) -> Iterator[Store]:
        """Quantize row ``token`` of x, or its ``part``, piece by piece: what writes each to a row."""
        kind, group = self.desc.microscaling_kind, self.desc.microscaling_group
        if self.desc.is_grouped:
            return self._groups(token, part)
        if kind is not None and group is not None:
            return self._microscaling(token, kind, group)
        return self._whole_row(token)

    def _load(self, token: Scalar, start: Scalar, length: int, layout: Layout) -> Value:
        return mosaic.load(self.x.at[token, pl.ds(start, length)], layout=layout, optimized=False)

    def _whole_row(self, token: Scalar) -> Iterator[Store]:
        desc = self.desc
        vector = vector_length(desc.width, jnp.dtype(desc.dtype).itemsize)
        piece = sm90.WARPGROUP * vector
        starts = pieces(desc.width, piece)
        layout = plgpu.Layout.WG_STRIDED((piece,), vec_size=vector)
        loaded = [self._load(token, start, piece, layout) for start in starts]
        scale = None
        if desc.quantization == "none":
            quantized = loaded
        elif self.given is not None:
            quantized = [quantize_e4m3_static(v.astype(jnp.float32), self.given[0]) for v in loaded]
        else:
            values = [v.astype(jnp.float32) for v in loaded]
            amax = jnp.max(functools.reduce(jnp.maximum, [jnp.abs(v) for v in values]))
            if desc.quantization == "e4m3_tensor_row":
                quantized, scale = e4m3_of_tensor(values, amax, layout)
            else:
                rule = e4m3_of_row if desc.quantization == "e4m3_row" else quantize_int8_token
                quantized, all_scales = zip(*(rule(v, amax) for v in values), strict=True)
                scale = all_scales[0]

        def store(row):
            for start, value in zip(starts, quantized, strict=True):
                self.codes.at[row, pl.ds(start, piece)][...] = value
            if self.scales is not None and scale is not None:
                self.scales[row] = scale

        yield store

    def _groups(self, token: Scalar, part: Scalar | None) -> Iterator[Store]:
        desc, scales = self.desc, self.scales
        assert scales is not None
        parts = _parts_in_groups(desc, part)
        # Loads of a row's parts are on their way together, where registers hold all of them.
        at_once = len(parts) if desc.width <= MOST_GROUPS * GROUP else 1
        for first in range(0, len(parts), at_once):
            batch = parts[first : first + at_once]
            loaded = [self._load_groups(token, *own) for own in batch]
            for own, read in zip(batch, loaded, strict=True):
                values = read.astype(jnp.float32)
                amax = jnp.max(jnp.abs(values), axis=1)
                quantized, scale = e4m3_in_groups(values, amax, desc.has_power_of_two_scales)

                def store(row, start=own[0], quantized=quantized, scale=scale):
                    self._store_groups(row, start, quantized)
                    scales.at[pl.ds(start, scale.shape[0]), row][...] = scale

                yield store

    def _load_groups(self, token: Scalar, start: Scalar, shape: tuple[int, int], layout: Layout) -> Value:
        """Groups (count, columns of each) of a token from group ``start`` on."""
        if len(split_columns(self.desc)) > 1:
            return self._load(token, start, shape[0], layout)
        return load_as(self.x.at[token, pl.ds(start * GROUP, math.prod(shape))], shape, layout)

    def _store_groups(self, row: Scalar, start: Scalar, codes: Value) -> None:
        if len(split_columns(self.desc)) > 1:
            self.codes.at[row, pl.ds(start, codes.shape[0])][...] = codes
        else:
            store_flat(self.codes.at[row, pl.ds(start * GROUP, codes.size)], codes)

    def _microscaling(self, token: Scalar, kind: str, group: int) -> Iterator[Store]:
        desc, vector = self.desc, grid_vector(self.desc)
        layout = _small_group_layout(group, vector)
        parts = _parts(desc.width // group, sm90.WARPGROUP * vector // group, vector)
        loaded = [self._load(token, *part, layout) for part in parts]
        values = [value.astype(jnp.float32) for value in loaded]
        maxima = [jnp.max(magnitude(value), axis=1) for value in values]
        divide = divide_in(layout.reduce(1))
        row_amax = functools.reduce(jnp.maximum, map(jnp.max, maxima)) if self.scales is not None else None
        rounded = []
        for value, amax in zip(values, maxima, strict=True):
            global_scale = None if self.given is None else self.given[0]
            if row_amax is not None:
                whole = plgpu.layout_cast(jnp.full(amax.shape, row_amax), layout.reduce(1))
                global_scale = nvfp4_global_scale(whole, divide)
            factors = group_factors(amax, kind, global_scale, divide)
            scale, inverse = (lax.broadcast_in_dim(factor, value.shape, [0]) for factor in factors)
            rounded.append((round_element(value * inverse, kind) * scale).astype(self.codes.dtype))

        if row_amax is not None:
            divide = divide_in(simt.LANES)
            whole = plgpu.layout_cast(jnp.full((sm90.WARPGROUP,), row_amax), simt.LANES)
            row_scale = lax.bitcast_convert_type(divide(1.0, nvfp4_global_scale(whole, divide)), jnp.int32)
            lane = simt.thread_index()

        def store(row):
            for part, value in zip(parts, rounded, strict=True):
                self.codes.at[row, pl.ds(*part)][...] = value
            if self.scales is not None:
                index = plgpu.layout_cast(jnp.full(lane.shape, row), simt.LANES)
                simt.store(self.scales, index, row_scale, lane == 0)

        yield store


def load_as(ref: Ref, shape: tuple[int, int], layout: Layout) -> Value:
    """The elements of a flat ref in ``shape``. The interpreter knows no ref in another shape: tests replace this."""
    return mosaic.load(ref.reshape(shape), layout=layout, optimized=False)


def store_flat(ref: Ref, value: Value) -> None:
    """Write all elements of ``value`` to a flat ref; tests replace it as ``load_as``."""
    ref.reshape(value.shape)[...] = value


def _parts_in_groups(desc: PermuteDesc, part: Scalar | None) -> list[tuple[Any, tuple[int, int], Layout]]:
    """(first group, (groups, columns of each), layout) of what a row in groups of 128 is cut into.

    Whole groups come in fours. Where they are no multiple, two parts of the row overlap, see ``pieces``. part: of the
    row's ``desc.parts`` alone.
    """
    groups = desc.width // GROUP
    if part is not None:
        piece = groups // desc.parts
        return [(part * piece, (piece, GROUP), GROUP_LAYOUT)]
    layout, piece = GROUP_LAYOUT, 4
    if groups < 4:
        layout, piece = FEW_GROUPS_LAYOUT, groups
    elif groups <= MOST_GROUPS:
        piece = groups if groups % 4 == 0 else -(-groups // 8) * 4
    parts = [(start, (piece, GROUP), layout) for start in pieces(groups, piece)] if groups else []
    if desc.width % GROUP:
        parts.append((groups, (1, SHORT_GROUP), SHORT_GROUP_LAYOUT))
    return parts


def _parts(groups: int, tile: int, vector: int) -> list[tuple[int, int]]:
    """(first group, groups) of parts of a row that are whole tiles and leave registers free.

    The last part may reach back into the one before, see ``pieces``. Parts are few and large, because the time of
    Mosaic's layout inference grows steeply with the number of operations.
    """
    at_once = PART_ELEMENTS // vector * tile
    whole = groups // tile * tile
    parts = [(start, min(at_once, whole - start)) for start in range(0, whole, at_once)]
    return parts if whole == groups else [*parts, (groups - tile, tile)]


def _small_group_layout(group: int, vector: int) -> Layout:
    """Groups side by side in the threads of a warp, ``vector`` columns a thread."""
    groups = 32 * vector // group
    tiling = plgpu.Tiling(((4 * groups, group), (groups, group), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
