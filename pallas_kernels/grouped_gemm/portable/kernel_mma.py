"""The body of the portable grouped GEMMs: one warpgroup a CTA, one tile of the output each, no TMA and no wgmma.

    for every K step
        wait             the step's slot of the ring has arrived (cp.async), for all threads
        prefetch         cp.async of the step that is num_stages - 1 further into the slot that was read last
        main loop        shared memory -> ldmatrix, or words -> operands by bit moves -> mma.sync
    epilogue             scales, bias, activation -> staged in shared memory -> stores of whole rows

Plain weights are the right operand: a tile is (block_m rows, block_n columns) of each projection. Packed weights are
the left operand, which is unpacked in registers: a tile is (64 channels, piece_m rows) for each block of 64 channels
and each piece of rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.shapes import or_shapes
from pallas_kernels.common.types import Kernel, Ref, Scalar, TileRef, Value
from pallas_kernels.grouped_gemm.packed.dequantize_sm90 import load_block
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N
from pallas_kernels.grouped_gemm.packed.problem import PackedDesc
from pallas_kernels.grouped_gemm.portable import copies_mma as copies
from pallas_kernels.grouped_gemm.portable.config import (
    AnyDesc,
    MmaConfig,
    folds_scales,
    group_rows,
    is_promoted,
    piece_m,
    step_k,
    unpacks_late,
)
from pallas_kernels.grouped_gemm.problem import SCALE_GROUP, GemmDesc

_LAYOUT: Any = plgpu.Layout
_mma: Any = vars(plgpu).get("mma")  # jax 0.10 has none
_SWIZZLE = 128


def grouped_gemm_mma(desc: AnyDesc, config: MmaConfig) -> Kernel:
    """The kernel for ``desc``: dict of ``desc.operand_names`` -> (rows, N up to whole tiles) of ``desc.out_dtype``.

    ``config`` must pass ``config_error``.
    """
    columns = -(-desc.n // config.block_n)
    grid = desc.rows // config.block_m * columns
    names = desc.operand_names
    loop: Any = _packed if isinstance(desc, PackedDesc) else _plain

    def body(*refs):
        operands, output, scratch = dict(zip(names, refs[:-2], strict=True)), refs[-2], refs[-1]
        mosaic.begin()
        shape = (desc.rows // config.block_m, columns)
        row, column = plgpu.planar_snake(lax.axis_index("tile"), shape, 0, config.raster_group_m)

        @pl.when(row < operands["num_tiles"][0])
        def _():
            loop(desc, config, operands, output, scratch, row, column)

    def run(operands: dict[str, jax.Array]) -> jax.Array:
        out_type = jax.ShapeDtypeStruct((desc.rows, columns * config.block_n), jnp.dtype(desc.out_dtype))
        kernel = plgpu.kernel(
            body,
            out_type=out_type,
            grid=(grid,),
            grid_names=("tile",),
            scratch_types=[plgpu.RefUnion([*_ring(desc, config)], _staging(desc, config))],
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, approx_math=True
            ),
            kernel_name="portable_grouped_gemm",
        )
        return or_shapes(kernel, out_type)(*(operands[name] for name in names))

    return run


def _tiled(dtype: Any) -> tuple[Any, ...]:
    return mosaic.tiled(dtype, _SWIZZLE)


def _output_swizzle(dtype: Any) -> int:
    """Bytes of the swizzle of a staged output.

    Sums of 32 bits that warps share by columns alone (m_warps=1) have no stores without bank conflicts at 128 or 64,
    and jax refuses to make others; at 32 every tile has.
    """
    return 32 if jnp.dtype(dtype).itemsize == 4 else _SWIZZLE


def _ring(desc: AnyDesc, config: MmaConfig) -> list[Any]:
    """Slots of rows, of weights, and of the vectors that packed weights need."""
    stages, blocks = config.num_stages, desc.projections * config.block_n // BLOCK_N
    if isinstance(desc, GemmDesc):
        dtype, depth = jnp.dtype(desc.dtype), step_k(desc, config)
        return [
            plgpu.SMEM((stages, config.block_m, depth), dtype, transforms=_tiled(dtype)),
            plgpu.SMEM((stages, desc.projections, config.block_n, depth), dtype, transforms=_tiled(dtype)),
        ]
    fmt, operand = desc.fmt, jnp.dtype(desc.fmt.operand)
    ring = [
        plgpu.SMEM((stages, config.step_blocks, config.block_m, fmt.block_k), operand, transforms=_tiled(operand)),
        plgpu.SMEM((stages, blocks, config.step_blocks, *fmt.block_shape), jnp.int32),
    ]
    vectors = (stages, blocks, group_rows(desc, config), BLOCK_N)
    ring += [plgpu.SMEM(vectors, jnp.dtype(desc.scale_dtype))] if fmt.scale == "group" else []
    ring += [plgpu.SMEM(vectors, operand)] if fmt.has_zero_point else []
    return ring


def _staging(desc: AnyDesc, config: MmaConfig) -> Any:
    """The output of a tile."""
    dtype = jnp.dtype(desc.out_dtype)
    transforms = mosaic.tiled(dtype, _output_swizzle(dtype))
    return plgpu.SMEM((config.block_m, config.block_n), dtype, transforms=transforms)


def _for_each_step(
    config: MmaConfig, steps: int, fetch: Callable[[Scalar, Scalar], None], multiply: Callable[..., Any], initial: Any
) -> Any:
    """fold ``multiply(step, slot, carried)`` over all K steps, the ring kept full; all of it may be reused after."""
    stages = config.num_stages
    for step in range(stages - 1):
        with jax.named_scope("load"):
            fetch(jnp.int32(step), jnp.int32(step))
            copies.commit()

    def one_step(step, carried):
        slot = lax.rem(step, jnp.int32(stages))
        copies.wait(stages - 2)
        ahead = step + (stages - 1)
        with jax.named_scope("load"):
            fetch(ahead, lax.rem(ahead, jnp.int32(stages)))
            copies.commit()
        with jax.named_scope("main_loop"):
            return multiply(step, slot, carried)

    carried = lax.fori_loop(0, steps, one_step, initial)
    copies.wait(0)
    return carried


# -- plain weights ----------------------------------------------------------------------------------------------------


def _plain(
    desc: GemmDesc,
    config: MmaConfig,
    operands: dict[str, Ref],
    output: Ref,
    scratch: Any,
    row: Scalar,
    column: Scalar,
) -> None:
    (xs, ws), staging = scratch
    dtype, block_m, block_n = jnp.dtype(desc.dtype), config.block_m, config.block_n
    left, right, sums = (
        kind(dtype, m_warps=config.m_warps) for kind in (_LAYOUT.MMA_LHS, _LAYOUT.MMA_RHS, _LAYOUT.MMA_ACC)
    )
    height = piece_m(desc, config)
    projections, pieces, shape = range(desc.projections), range(block_m // height), (height, block_n)
    expert, first_column = operands["tile_expert"][row], column * block_n
    first_row = 0 if desc.unpermuted_rows else row * block_m
    rows = operands["x"].at[pl.ds(first_row, block_m)]
    left_columns = None if desc.n % block_n == 0 else desc.n - first_column
    weights = [operands["w"].at[expert * desc.projections + p, pl.ds(first_column, block_n)] for p in projections]
    steps = -(-desc.k // step_k(desc, config))

    def fetch(step, slot):
        copies.copy_rows(rows, xs.at[slot], _tiled(dtype), step, None)
        for p in projections:
            copies.copy_rows(weights[p], ws.at[slot, p], _tiled(dtype), step, left_columns)

    accumulator = jnp.int32 if desc.accumulator == "int32" else jnp.float32

    def zeros():
        return plgpu.layout_cast(jnp.zeros(shape, accumulator), sums)

    def spread(vector, axis):
        return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, [axis]), sums)

    def products(slot, totals, finish=lambda p, piece, total: total):
        """totals[p][piece] and the products of the step; finish: what becomes of each."""
        found = [list(own) for own in totals]
        for piece in pieces:
            x = mosaic.load(xs.at[slot, pl.ds(piece * height, height)], layout=left)
            for p in projections:
                w = mosaic.load(ws.at[slot, p].T, layout=right)
                found[p][piece] = finish(p, piece, _mma(totals[p][piece], x, w))
        return found

    def scales_of_rows(step):
        group = lax.min(step, jnp.int32(steps - 1))
        return [
            mosaic.load(
                operands["x_scale"].at[group, pl.ds(first_row + piece * height, height)],
                layout=sums.reduce(1),
                optimized=False,
            )
            for piece in pieces
        ]

    def promoted(step, slot, carried):
        totals, row_scales = carried
        following = scales_of_rows(step + 1)
        block = lax.div(first_column, jnp.int32(SCALE_GROUP))
        factors = [operands["w_scale"][expert * desc.projections + p, block, step] for p in projections]

        def finish(p, piece, product):
            return totals[p][piece] + product * spread(row_scales[piece] * factors[p], 0)

        return products(slot, [[zeros() for _ in pieces] for _ in projections], finish), following

    initial = [[zeros() for _ in pieces] for _ in projections]
    if desc.is_block_scaled:
        totals, _ = _for_each_step(config, steps, fetch, promoted, (initial, scales_of_rows(jnp.int32(0))))
    else:
        totals = _for_each_step(config, steps, fetch, lambda step, slot, totals: products(slot, totals), initial)

    with jax.named_scope("epilogue"):

        def of_columns(name, p):
            ref = operands[name].at[expert * desc.projections + p, pl.ds(first_column, block_n)]
            vector = mosaic.load(ref, layout=sums.reduce(0), optimized=False).astype(jnp.float32)
            return spread(vector, 1)

        for piece in pieces:
            own = pl.ds(piece * height, height)
            values = []
            for p in projections:
                value = totals[p][piece].astype(jnp.float32)
                if desc.lhs_scale == "tensor":
                    value = value * operands["x_scale"][0]
                elif desc.lhs_scale == "row":
                    ref = operands["x_scale"].at[pl.ds(first_row + piece * height, height)]
                    vector = mosaic.load(ref, layout=sums.reduce(1), optimized=False)
                    value = value * spread(vector, 0)
                if desc.rhs_scale == "tensor":
                    value = value * operands["w_scale"][expert * desc.projections + p]
                elif desc.rhs_scale == "channel":
                    value = value * of_columns("w_scale", p)
                values.append(value if desc.bias_dtype is None else value + of_columns("bias", p))
            staging.at[own][...] = _activated(desc, values).astype(desc.out_dtype)
        _store(config, staging, output, row, first_column)


def _activated(desc: AnyDesc, values: Sequence[Value]) -> Value:
    return values[0] if desc.activation is None else desc.activation(*values, sigmoid=_sigmoid)


def _sigmoid(x: Value) -> Value:
    return 1.0 / (1.0 + jnp.exp(-x))


def _store(config: MmaConfig, staging: TileRef, output: Ref, row: Scalar, first_column: Scalar) -> None:
    """Rows of the staged tile to the output, each thread 16 bytes at a time."""
    copies.barrier()
    shape = (config.block_m, config.block_n)
    layout = _LAYOUT.SMEM_GMEM_COPY(shape, output.dtype, _output_swizzle(output.dtype))
    output[pl.ds(row * shape[0], shape[0]), pl.ds(first_column, shape[1])] = mosaic.load(staging, layout=layout)


# -- packed weights ---------------------------------------------------------------------------------------------------


def _packed(
    desc: PackedDesc,
    config: MmaConfig,
    operands: dict[str, Ref],
    output: Ref,
    scratch: Any,
    row: Scalar,
    column: Scalar,
) -> None:
    fmt, block_m, height = desc.fmt, config.block_m, piece_m(desc, config)
    unit = fmt.folded_unit if folds_scales(desc) else fmt.unit
    (xs, ws, *vectors), staging = scratch
    scales = vectors.pop(0) if fmt.scale == "group" else None
    zeros = vectors.pop(0) if fmt.has_zero_point else None
    operand = jnp.dtype(fmt.operand)
    right, sums = _LAYOUT.MMA_RHS(operand, m_warps=4), _LAYOUT.MMA_ACC(operand, m_warps=4)
    groups_of_channels, depth = config.block_n // BLOCK_N, step_k(desc, config)
    blocks, pieces = desc.projections * groups_of_channels, range(block_m // height)
    shape, accumulator = (BLOCK_N, height), jnp.int32 if desc.accumulator == "int32" else jnp.float32
    expert = operands["tile_expert"][row]
    first_row = 0 if desc.unpermuted_rows else row * block_m
    rows = operands["x"].at[pl.ds(first_row, block_m)]
    # Blocks past the last channel are copies of the last; what they make is cut off the output.
    channels = [
        lax.min(column * groups_of_channels + j, jnp.int32(desc.channel_blocks - 1)) for j in range(groups_of_channels)
    ]
    places = [
        (expert * desc.channel_blocks + channel) * desc.projections + p
        for channel in channels
        for p in range(desc.projections)
    ]
    num_blocks = desc.k // fmt.block_k
    steps = num_blocks // config.step_blocks
    block_bytes = 4 * fmt.block_shape[0] * fmt.block_shape[1]
    group, step_groups = fmt.group_size, group_rows(desc, config)

    def group_of(step):
        if group is None:
            return 0
        return step * step_groups if depth >= group else lax.div(step, jnp.int32(group // depth))

    def fetch(step, slot):
        for b in range(config.step_blocks):
            copies.copy_rows(rows, xs.at[slot, b], _tiled(operand), step * config.step_blocks + b, None)
        inside = lax.min(step, jnp.int32(steps - 1))  # a step past the last is not multiplied
        for index, place in enumerate(places):
            source = operands["w"].at[place, pl.ds(inside * config.step_blocks, config.step_blocks)]
            copies.copy_bytes(source, ws.at[slot, index], block_bytes * config.step_blocks)
            for name, target in (("scale", scales), ("zero", zeros)):
                if target is not None:
                    own = operands[name].at[place, pl.ds(group_of(inside), step_groups)]
                    size = step_groups * BLOCK_N * jnp.dtype(target.dtype).itemsize
                    copies.copy_bytes(own, target.at[slot, index], size)

    def new_sums(dtype=accumulator):
        return plgpu.layout_cast(jnp.zeros(shape, dtype), sums)

    def unpacked(slot, index, b):
        """Operands of a block, in parts of K: one, or one for each group of it."""
        width = fmt.block_k
        if is_promoted(desc):
            assert group is not None
            width = min(width, group)
        first = b * fmt.block_k
        size = group or desc.k
        at = tuple((first + fmt.block_k // 4 * q) // size % step_groups for q in range(4))
        return load_block(
            fmt,
            ws.at[slot, index, b],
            width,
            at,
            None if zeros is None else zeros.at[slot, index],
            scales.at[slot, index] if scales is not None and folds_scales(desc) else None,
            for_mma=True,
            has_bf16_mul=config.target.has_bf16_mul,
        )

    def rows_of(slot, b, piece):
        return mosaic.load(xs.at[slot, b, pl.ds(piece * height, height)].T, layout=right)

    def multiply(step, slot, totals):
        del step
        totals = [list(own) for own in totals]
        for b in range(config.step_blocks):
            for together in [[index] for index in range(blocks)] if unpacks_late(desc) else [list(range(blocks))]:
                left = [unpacked(slot, index, b)[0] for index in together]
                for piece in pieces:
                    x = rows_of(slot, b, piece)
                    for index, operand in zip(together, left, strict=True):
                        totals[index][piece] = _mma(totals[index][piece], operand, x)
        return totals

    def multiply_promoted(step, slot, totals):
        del step
        assert scales is not None
        totals = [list(own) for own in totals]
        for b in range(config.step_blocks):
            for index in range(blocks):
                parts = unpacked(slot, index, b)
                width = fmt.block_k // len(parts)
                for number, part in enumerate(parts):
                    at = (b * fmt.block_k + number * width) // (group or 1) % step_groups
                    factor = mosaic.load(scales.at[slot, index, at], layout=sums.reduce(1), optimized=False)
                    factor = lax.broadcast_in_dim(factor.astype(jnp.float32), shape, [0])
                    for piece in pieces:
                        x = rows_of(slot, b, piece)[number * width : (number + 1) * width]
                        found = _mma(new_sums(), part, x).astype(jnp.float32)
                        totals[index][piece] = totals[index][piece] + found * factor
        return totals

    if is_promoted(desc):
        initial = [[new_sums(jnp.float32) for _ in pieces] for _ in range(blocks)]
        totals = _for_each_step(config, steps, fetch, multiply_promoted, initial)
    else:
        totals = _for_each_step(config, steps, fetch, multiply, [[new_sums() for _ in pieces] for _ in range(blocks)])

    with jax.named_scope("epilogue"):

        def of_channels(ref):
            vector = mosaic.load(ref, layout=sums.reduce(1), optimized=False).astype(jnp.float32)
            return lax.broadcast_in_dim(vector, shape, [0])

        for j, channel in enumerate(channels):
            for piece in pieces:
                values = []
                for p in range(desc.projections):
                    index = j * desc.projections + p
                    value = totals[index][piece].astype(jnp.float32)
                    if desc.lhs_scale == "row":
                        ref = operands["x_scale"].at[pl.ds(first_row + piece * height, height)]
                        vector = mosaic.load(ref, layout=sums.reduce(0), optimized=False) * (1 / unit)
                        value = value * lax.broadcast_in_dim(vector, shape, [1])
                    elif desc.lhs_scale == "tensor":
                        value = value * (operands["x_scale"][0] * (1 / unit))
                    elif unit != 1:
                        value = value * (1 / unit)
                    if desc.has_channel_scale:
                        value = value * of_channels(operands["channel_scale"].at[places[index]])
                    if desc.bias_dtype is not None:
                        place = (expert * desc.projections + p) * desc.channel_blocks + channel
                        value = value + of_channels(operands["bias"].at[place])
                    values.append(value)
                result = _activated(desc, values).astype(desc.out_dtype)
                part = staging.at[pl.ds(piece * height, height), pl.ds(j * BLOCK_N, BLOCK_N)]
                part.T[...] = plgpu.layout_cast(result, _LAYOUT.WGMMA_TRANSPOSED)
        _store(config, staging, output, row, column * config.block_n)
