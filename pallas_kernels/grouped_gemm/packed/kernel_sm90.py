"""Grouped GEMM on Hopper with packed weights: they are the left operand, unpacked in registers; rows are its columns.

One persistent block per multiprocessor takes every num_sms-th tile of block_m rows and 64 * num_consumers channels (of
each half). Its warpgroups, by role:

    producer (1)           for each tile, for each K step:
                               wait empty[slot] -> bulk copies of w, x, group scales, zero points -> full[slot]
    consumers (1, 2, 4)    for each tile, for each K step:
      64 channels of           wait full[slot] -> 16-byte loads of w[slot] -> operands by bit moves
      each half each           -> wgmma operands x[slot]^T -> empty[slot]
                           after a tile's last step: [sums of those that share channels ->] epilogue in registers ->
                           transposed staging -> bulk store

Scales inside the blocks are multiplied into the operands, which stay exact; scales per channel follow the sum; scales
per group multiply the float32 partial sum of each group. No product is in flight when a step ends.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.accumulator_math_sm90 import sigmoid
from pallas_kernels.grouped_gemm.packed.config import PackedConfig, PackedDesc, is_promoted, registers, sum_registers
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N
from pallas_kernels.grouped_gemm.packed.pipeline_sm90 import (
    Scratch,
    gather_sums,
    k_steps,
    multiply,
    multiply_promoted,
    place,
    produce,
    scratch_types,
)
from pallas_kernels.grouped_gemm.persistent_sm90 import launch, run_tiles


def grouped_gemm_packed_sm90(desc: PackedDesc, config: PackedConfig) -> Callable[[Mapping[str, Any]], Any]:
    """The kernel for ``desc``, a function of the operands by name (``operand_names``) that returns (rows, N). config
    must pass ``config_error``. Rows of tiles from num_tiles on are not written.
    """
    out = jax.ShapeDtypeStruct((desc.rows, desc.n), desc.out_dtype)
    call = launch(functools.partial(_kernel, desc, config), config, out, scratch_types(desc, config))
    return lambda operands: call(*(operands[name] for name in operand_names(desc)))


def operand_names(desc: PackedDesc) -> list[str]:
    """Names of the arrays the kernel takes, in order; B = E * channel_blocks * projections counts blocks of 64
    channels.

    x (rows or unpermuted_rows, K); w (B, K / block_k, *block_shape) i32; tile_expert (rows / block_m,) i32;
    num_tiles (1,)
    i32; scale (B, groups, 64); zero (B, groups, 64) of the operand's dtype; channel_scale (B, 64) f32; bias (B, 64),
    all blocks of a half together; x_scale (1,) or (rows,) f32, with unpermuted_rows (block_m,).
    """
    names = ["x", "w", "tile_expert", "num_tiles"]
    names += ["scale"] if desc.fmt.scale == "group" else []
    names += ["zero"] if desc.fmt.has_zero_point else []
    names += ["channel_scale"] if desc.has_channel_scale else []
    names += ["bias"] if desc.bias_dtype is not None else []
    names += ["x_scale"] if desc.lhs_scale != "none" else []
    return names


def _kernel(desc: PackedDesc, config: PackedConfig, *refs: Any, **allocated: Any) -> None:
    *inputs, out = refs[: len(operand_names(desc)) + 1]
    operands = dict(zip(operand_names(desc), inputs, strict=True))
    scratch = Scratch(**allocated)
    warpgroup = lax.axis_index("warpgroup")
    steps = k_steps(desc, config, operands["num_tiles"][0])

    def consume(m, n, e, count):
        group, *_ = place(config, warpgroup)
        channel = n * config.channel_groups + group
        # Past the last block nothing is stored, but the vectors must lie inside their arrays.
        last = lax.min(channel, jnp.int32(desc.channel_blocks - 1))
        vectors = _vectors(desc, operands, e, last)
        multiply_tile = multiply_promoted if is_promoted(desc, config) else multiply
        sums = multiply_tile(desc, config, scratch, warpgroup, steps, count)

        def store(sums):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            rows = config.block_m // len(sums[0])
            for index, piece in enumerate(zip(*sums, strict=True)):
                first = (0 if desc.unpermuted_rows else m * config.block_m) + index * rows
                value = _epilogue(desc, config, piece, vectors, operands, first).astype(desc.out_dtype)
                staging = scratch.staging.at[group, pl.ds(index * rows, rows)]
                staging.transpose((1, 0))[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            target = out.at[pl.ds(m * config.block_m, config.block_m), pl.ds(channel * BLOCK_N, BLOCK_N)]
            inside = mosaic.column_predicate(desc.n, BLOCK_N * config.channel_groups, channel * BLOCK_N)
            plgpu.copy_smem_to_gmem(scratch.staging.at[group], target, predicate=inside)

        gather_sums(config, scratch, warpgroup, sums, store)

    run_tiles(
        config,
        operands,
        -(-desc.channel_blocks // config.channel_groups),
        steps,
        registers=registers(config),
        produce=functools.partial(produce, desc, config, operands, scratch, steps),
        consume=consume,
    )


def _vectors(desc: PackedDesc, operands: Mapping[str, Any], e: Any, block: Any) -> list[dict[str, Any]]:
    """(64,) channel scale and bias of each half, loaded before the sums so that their latency hides."""
    places = {
        "channel_scale": [
            (e * desc.channel_blocks + block) * desc.projections + half for half in range(desc.projections)
        ],
        "bias": [(e * desc.projections + half) * desc.channel_blocks + block for half in range(desc.projections)],
    }

    def load(name, half):
        vector = operands[name].at[places[name][half]]
        return mosaic.load(vector, layout=mosaic.ROWS, optimized=False).astype(jnp.float32)

    names = [name for name in places if name in operands]
    return [{name: load(name, half) for name in names} for half in range(desc.projections)]


def _epilogue(
    desc: PackedDesc,
    config: PackedConfig,
    sums: Sequence[Any],
    vectors: list[dict[str, Any]],
    operands: Mapping[str, Any],
    first: Any,
) -> Any:
    """Scales, bias and activation of the sums (64, rows) of each half; float32, before any rounding.

    first: row of x, among those with a scale, that the first column belongs to.
    """
    shape = sums[0].shape
    values = []
    factor = 1 / desc.fmt.unit
    if desc.lhs_scale == "row":
        rows = pl.ds(first, shape[1])
        row_scale = mosaic.load(operands["x_scale"].at[rows], layout=mosaic.COLUMNS, optimized=False)
        factor = lax.broadcast_in_dim(row_scale * factor, shape, [1])
    elif desc.lhs_scale == "tensor":
        factor = operands["x_scale"][0] * factor
    for value, vector in zip(sums, vectors, strict=True):
        if desc.lhs_scale != "none" or desc.fmt.unit != 1:
            value = value * factor
        if "channel_scale" in vector:
            value = value * lax.broadcast_in_dim(vector["channel_scale"], shape, [0])
        if "bias" in vector:
            value = value + lax.broadcast_in_dim(vector["bias"], shape, [0])
        values.append(value)
    if desc.activation is None:
        return values[0]
    # Beside so many registers of sums ptxas spills three in the shorter one.
    is_full = is_promoted(desc, config) and sum_registers(desc, config) >= 176
    return desc.activation(*values, sigmoid=lax.logistic if is_full else sigmoid)
