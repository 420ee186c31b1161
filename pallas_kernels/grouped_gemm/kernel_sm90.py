"""Grouped GEMM on Hopper, activations as the left operand: fp8, int8, bfloat16 or float16, both operands alike.

One persistent block per multiprocessor takes every num_sms-th tile. Its warpgroups, by role:

    producer (1)          for each tile, for each K step:
                              wait empty[slot] -> bulk copies of x, w, x's group scales into slot -> full[slot]
                          after a tile's last step:
                              wait vectors_empty -> row scales, column scales, bias -> vectors_full
    consumers (1 or 2)    for each tile, for each K step:
      64 rows each            wait full[slot] -> wgmma x[slot] w[slot]^T -> empty[slot]
                          after a tile's last step:
                              wait vectors_full -> epilogue in registers -> staged bulk store; vectors_empty

With per-tensor, per-channel and per-row scales one accumulator runs over all of K and the scales follow in the
epilogue. With 128x128 weight blocks and 1x128 activation groups the product of each K step is scaled and added in
float32.

With cluster=2 the blocks of a cluster work on neighbouring column tiles of one row tile. Each loads half of the rows
of a K step into the slots of both, so ``empty`` counts the consumers of both: neither runs more than a ring ahead of
the other, and neither ends while the other still writes or signals. With shares_weights they work on neighbouring row
tiles, and where both are of one expert each loads half of the weights; where not, each its own, still in step.

Registers a thread with two consumers: 168 at entry, then 240 (consumers) and 24 (producer); no spills at 128 x 256
tiles (jax 0.11.2, ptxas 13.0). Shared memory at that tile: 4 stages of 48 KiB and 32 KiB of staging.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.grouped_gemm.config import SCALE_GROUP, GemmConfig, GemmDesc
from pallas_kernels.grouped_gemm.epilogue_sm90 import TileVectors, store_tile
from pallas_kernels.grouped_gemm.operands import operand_names
from pallas_kernels.grouped_gemm.persistent_sm90 import launch, run_tiles
from pallas_kernels.grouped_gemm.pipeline_sm90 import (
    Scratch,
    k_steps,
    multiply,
    multiply_promoted,
    produce,
    scratch_types,
    skip,
)

# (consumer, producer) registers a thread, by number of consumers. Asking for more than 3 x 168 together never returns;
# with one consumer every thread enters with up to 255 and keeps them.
_REGISTERS = {1: None, 2: (240, 24)}


def grouped_gemm_sm90(desc: GemmDesc, config: GemmConfig) -> Callable[[Mapping[str, Any]], Any]:
    """The kernel for ``desc``, a function of the operands by name (``operand_names``). config must pass
    ``config_error``.

    Returns the output (rows, N), and with requantize="group" also its scales (ceil(N / 128), rows) f32. Rows of tiles
    from num_tiles on are not written.
    """
    out: Any = jax.ShapeDtypeStruct((desc.rows, desc.n), desc.stored_dtype)
    if desc.requantize == "group":
        out = (out, jax.ShapeDtypeStruct((-(-desc.n // SCALE_GROUP), desc.rows), jnp.float32))
    body = functools.partial(_kernel, desc, config)
    call = launch(body, config, out, scratch_types(desc, config), cluster=config.cluster)
    return lambda operands: call(*(operands[name] for name in operand_names(desc)))


def _kernel(desc: GemmDesc, config: GemmConfig, *refs: Any, **allocated: Any) -> None:
    names = operand_names(desc)
    operands = dict(zip(names, refs, strict=False))
    out, *out_scale = refs[len(names) :]
    scratch = Scratch(**allocated)
    warpgroup = lax.axis_index("warpgroup")
    steps = k_steps(desc, config, operands["num_tiles"][0])

    def consume(m, n, e, count):
        known = lax.min(m, operands["num_tiles"][0] - 1) if config.shares_weights else m
        in_use = operands["tile_rows"][known] - warpgroup * 64 if desc.has_tile_rows else None
        if config.shares_weights:
            in_use = jnp.where(known == m, 64 if in_use is None else in_use, 0)

        def compute():
            multiply_tile = multiply_promoted if desc.is_block_scaled else multiply
            parts = multiply_tile(desc, config, operands, scratch, warpgroup, steps, count, n, e)
            if scratch.vectors_full is not None:
                plgpu.barrier_wait(scratch.vectors_full)
            store_tile(
                desc,
                config,
                parts,
                _tile_vectors(desc, operands, scratch, warpgroup, e),
                staging=scratch.staging.at[warpgroup],
                out=out,
                out_scale=out_scale[0] if out_scale else None,
                row=m * config.block_m + warpgroup * 64,
                column_tile=n,
                in_use=in_use,
            )
            if scratch.vectors_full is not None:
                mosaic.release(scratch.vectors_empty)

        if config.shares_weights or (desc.has_tile_rows and config.num_consumers > 1):
            # The second half of an expert's last tile is often empty: leave the tensor core to the first.
            pl.when(in_use > 0)(compute)
            pl.when(in_use <= 0)(lambda: skip(desc, config, scratch, steps, count))
        else:
            compute()

    run_tiles(
        config,
        operands,
        -(-desc.n // config.block_n),
        steps,
        registers=_REGISTERS[config.num_consumers],
        produce=functools.partial(produce, desc, config, operands, scratch, steps),
        consume=consume,
        cluster=config.cluster,
        pairs_rows=config.shares_weights,
    )


def _tile_vectors(desc: GemmDesc, operands: Mapping[str, Any], scratch: Scratch, warpgroup: Any, e: Any) -> TileVectors:
    rows = scalar = requantize = None
    if desc.lhs_scale == "row":
        rows = mosaic.load(scratch.rows.at[pl.ds(warpgroup * 64, 64)], layout=mosaic.ROWS, optimized=False)
    tensor_scales = []
    if desc.lhs_scale == "tensor":
        tensor_scales.append(lambda half: operands["x_scale"][0])
    if desc.rhs_scale == "tensor":
        tensor_scales.append(lambda half: operands["w_scale"][e * desc.projections + half])
    if tensor_scales:
        scalar = lambda half: functools.reduce(lambda a, b: a * b, [read(half) for read in tensor_scales])  # noqa: E731
    if desc.requantize == "tensor":
        requantize = 1.0 / operands["out_scale"][0]
    return TileVectors(rows, scalar, scratch.columns, scratch.bias, requantize)
