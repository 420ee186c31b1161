"""Packed weights to matrices of 16 bits on Hopper: what the dequant main loop makes in registers, stored.

Several CTAs a SM, one warpgroup each; step after step of 64 channels by ``STEP_BLOCKS`` blocks of K.

    TMA copy of a step's words, scales and zero points -> full[slot]
    wait full[slot] -> operands by bit moves -> times scales in float32 -> staging -> empty[slot] -> TMA stores

The next step's copies are under way meanwhile. Memory binds: 4 bits in and 16 bits out for each weight.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.shapes import or_shapes
from pallas_kernels.common.types import Kernel, Scalar, TileRef
from pallas_kernels.grouped_gemm.packed.dense_config import CTAS_PER_SM, STAGES, STEP_BLOCKS, DenseDesc
from pallas_kernels.grouped_gemm.packed.dequantize_sm90 import load_block
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N
from pallas_kernels.grouped_gemm.scheduler_sm90 import tiles_of_cta


def dequantize_sm90(desc: DenseDesc, num_sms: int) -> Kernel:
    """The kernel: (w, scale, zero, channel_scale), those that there are, -> (E * G * N, K).

    B counts blocks of channels: w (B, KB, *block_shape) i32; scale, zero (B, groups, 64); channel_scale (B, 64) f32.
    ``desc`` must be supported.
    """
    fmt, parts = desc.fmt, desc.fmt.block_k // desc.width
    grouped = (STAGES, desc.step_groups, BLOCK_N)
    shapes: dict[str, tuple[tuple[int, ...], Any, Any]] = dict(
        w=((STAGES, STEP_BLOCKS, *fmt.block_shape), jnp.int32, ()),
        staging=(
            (STEP_BLOCKS, parts, BLOCK_N, desc.width),
            jnp.dtype(desc.out_dtype),
            mosaic.tiled(desc.out_dtype, 2 * desc.width),
        ),
    )
    if desc.has_groups:
        shapes["scale"] = (grouped, jnp.dtype(desc.scale_dtype), ())
    if fmt.has_zero_point:
        shapes["zero"] = (grouped, jnp.dtype(fmt.operand), ())
    scratch: dict[str, Any] = {
        name: plgpu.SMEM(shape, dtype, transforms=transforms) for name, (shape, dtype, transforms) in shapes.items()
    }
    copies = 1 + desc.has_groups + fmt.has_zero_point
    scratch["full"] = plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES)
    scratch["empty"] = plgpu.Barrier(num_arrivals=1, num_barriers=STAGES)
    names = ["w", *(name for name in ("scale", "zero") if name in shapes)]
    names += ["channel_scale"] if desc.has_channel_scale else []
    rows = desc.num_experts * desc.projections * desc.n
    out_type = jax.ShapeDtypeStruct((rows, desc.k), jnp.dtype(desc.out_dtype))
    kernel = plgpu.kernel(
        functools.partial(_kernel, desc, names, num_sms * CTAS_PER_SM),
        out_type=out_type,
        grid=(num_sms * CTAS_PER_SM,),
        grid_names=("block",),
        scratch_types=scratch,
        compiler_params=mosaic.compiler_params(),
        kernel_name="dequantize",
    )
    return or_shapes(kernel, out_type)


def _kernel(desc: DenseDesc, names: list[str], num_ctas: int, /, *refs: TileRef, **scratch: TileRef) -> None:
    mosaic.begin()
    operands, out = dict(zip(names, refs, strict=False)), refs[len(names)]
    cta = lax.axis_index("block")
    count = tiles_of_cta(cta, desc.num_blocks * desc.steps, num_ctas)

    def place(t: Scalar) -> tuple[Scalar, Scalar]:
        """(block of channels, part of K) of this CTA's step t: the parts of a block follow each other."""
        linear = cta + t * num_ctas
        return lax.div(linear, jnp.int32(desc.steps)), lax.rem(linear, jnp.int32(desc.steps))

    def load(t: Scalar) -> None:
        (block, part), slot = place(t), lax.rem(t, jnp.int32(STAGES))
        full, depth = scratch["full"].at[slot], pl.ds(part * STEP_BLOCKS, STEP_BLOCKS)
        plgpu.copy_gmem_to_smem(operands["w"].at[block, depth], scratch["w"].at[slot], full)
        groups = pl.ds(_first_group(desc, part), desc.step_groups)
        for name in ("scale", "zero"):
            if name in operands:
                plgpu.copy_gmem_to_smem(operands[name].at[block, groups], scratch[name].at[slot], full)

    @pl.when(count > 0)
    def _():
        load(jnp.int32(0))

    def one_step(t, _):
        (block, part), slot = place(t), lax.rem(t, jnp.int32(STAGES))

        @pl.when(t + 1 < count)
        def _():
            @pl.when(t + 1 >= STAGES)
            def _():
                plgpu.barrier_wait(scratch["empty"].at[lax.rem(t + 1, jnp.int32(STAGES))])

            load(t + 1)

        plgpu.barrier_wait(scratch["full"].at[slot])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        _convert(desc, operands, scratch, block, slot)
        mosaic.release(scratch["empty"].at[slot])
        plgpu.commit_smem()
        _store(desc, scratch["staging"], out, block, part)
        return 0

    lax.fori_loop(0, count, one_step, 0)

    # Leave no completed phase unobserved.
    def drain(t, _):
        plgpu.barrier_wait(scratch["empty"].at[lax.rem(t, jnp.int32(STAGES))])
        return 0

    lax.fori_loop(lax.max(count - STAGES, 0), count, drain, 0)
    plgpu.wait_smem_to_gmem(0)


def _first_group(desc: DenseDesc, part: Scalar) -> Scalar:
    group = desc.fmt.group_size
    if group is None or desc.groups == 1:
        return 0
    if desc.step_k >= group:
        return part * desc.step_groups
    return lax.div(part, jnp.int32(group // desc.step_k))


def _convert(
    desc: DenseDesc, operands: dict[str, TileRef], scratch: dict[str, TileRef], block: Scalar, slot: Scalar
) -> None:
    """Write the step in ``slot`` to staging."""
    fmt, shape = desc.fmt, (BLOCK_N, desc.width)
    of_rows: Any = 1 / fmt.unit
    if desc.has_channel_scale:
        channels = mosaic.load(operands["channel_scale"].at[block], layout=mosaic.ROWS, optimized=False)
        of_rows = channels * jnp.float32(of_rows)

    def group_of(column: int) -> int:
        return min(column // (fmt.group_size or desc.step_k), desc.step_groups - 1)

    for depth in range(STEP_BLOCKS):
        first = depth * fmt.block_k
        rows = tuple(group_of(first + fmt.block_k // 4 * q) for q in range(4))
        zeros = scratch["zero"].at[slot] if fmt.has_zero_point else None
        parts = load_block(fmt, scratch["w"].at[slot, depth], desc.width, rows, zeros)
        for index, operand in enumerate(parts):
            factor = of_rows
            if desc.has_groups:
                scale = scratch["scale"].at[slot, group_of(first + index * desc.width)]
                factor = mosaic.load(scale, layout=mosaic.ROWS, optimized=False).astype(jnp.float32) * of_rows
            if getattr(factor, "shape", ()):
                factor = lax.broadcast_in_dim(factor, shape, [0])
            value = operand.astype(jnp.float32) * factor
            scratch["staging"][depth, index] = value.astype(desc.out_dtype)


def _store(desc: DenseDesc, staging: TileRef, out: TileRef, block: Scalar, part: Scalar) -> None:
    """Store staged columns to the rows of ``block``, whose projections lie side by side. None past K are stored."""
    whole, projection = lax.div(block, jnp.int32(desc.projections)), lax.rem(block, jnp.int32(desc.projections))
    expert, channel = (op(whole, jnp.int32(desc.channel_blocks)) for op in (lax.div, lax.rem))
    first = (expert * desc.projections + projection) * desc.n + channel * BLOCK_N
    rows = pl.ds(pl.multiple_of(first, BLOCK_N), BLOCK_N)
    for depth in range(STEP_BLOCKS):
        for index in range(desc.fmt.block_k // desc.width):
            column = part * desc.step_k + depth * desc.fmt.block_k + index * desc.width
            inside = mosaic.column_predicate(desc.k, desc.step_k, column)
            target = out.at[rows, pl.ds(column, desc.width)]
            plgpu.copy_smem_to_gmem(staging.at[depth, index], target, predicate=inside)
