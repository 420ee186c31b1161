"""Grouped GEMM on Hopper: one persistent CTA per SM, a producer warpgroup and one to four consumers.

Tiles of one row and of four have kernels of their own (vector_sm90.py, few_rows_sm90.py, and packed/vector_sm90.py for
packed weights).

The scheduler walks the tiles, the pipeline keeps the ring full, the epilogue stores; the main loops differ in where the
operands of wgmma come from:

    plain      x from shared memory times w from shared memory     tiles of 64 or 128 rows
    swap_ab    w from shared memory times x from shared memory     few rows per expert, heights between multiples of 64
    dequant    packed w, unpacked in registers, times x            weights of 4 or 8 bits
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.types import TileRef
from pallas_kernels.grouped_gemm import mainloop_dequant_sm90, mainloop_plain_sm90, mainloop_swap_ab_sm90
from pallas_kernels.grouped_gemm.config import GemmConfig
from pallas_kernels.grouped_gemm.few_rows import FewRowsConfig
from pallas_kernels.grouped_gemm.few_rows_sm90 import few_rows_sm90
from pallas_kernels.grouped_gemm.packed.config import PackedConfig
from pallas_kernels.grouped_gemm.packed.problem import PackedDesc
from pallas_kernels.grouped_gemm.packed.vector import PackedVectorConfig
from pallas_kernels.grouped_gemm.packed.vector_sm90 import packed_gemv_sm90
from pallas_kernels.grouped_gemm.pipeline_sm90 import CtaContext, MainLoop, Scratch, produce
from pallas_kernels.grouped_gemm.problem import SCALE_GROUP, GemmDesc
from pallas_kernels.grouped_gemm.scheduler_sm90 import launch, likely_row, run_tiles
from pallas_kernels.grouped_gemm.vector import VectorConfig
from pallas_kernels.grouped_gemm.vector_sm90 import grouped_gemv_sm90


def grouped_gemm_sm90(
    desc: GemmDesc | PackedDesc,
    config: GemmConfig | PackedConfig | VectorConfig | FewRowsConfig | PackedVectorConfig,
) -> Callable[[Mapping[str, jax.Array]], Any]:
    """The kernel for ``desc``, a function of the operands by name (``desc.operand_names``).

    config must pass ``config_error``. Returns the output (rows, N), and with requantize="group" also its scales
    (ceil(N / 128), rows) float32, with keeps_before what the activation was given, (rows, G * N).
    With ``desc.pulls`` it returns the cotangent (rows, G * N), the sums over each tile's columns (column tiles, rows)
    float32, and with has_weighted (rows, N). Rows of tiles from num_tiles on are not written.
    """
    if isinstance(config, VectorConfig):
        assert isinstance(desc, GemmDesc)
        return grouped_gemv_sm90(desc, config)
    if isinstance(config, FewRowsConfig):
        assert isinstance(desc, GemmDesc)
        return few_rows_sm90(desc, config)
    if isinstance(config, PackedVectorConfig):
        assert isinstance(desc, PackedDesc)
        return packed_gemv_sm90(desc, config)
    out: Any = jax.ShapeDtypeStruct((desc.rows, desc.n), jnp.dtype(desc.stored_dtype))
    if isinstance(desc, PackedDesc):
        assert isinstance(config, PackedConfig)
        main_loop = mainloop_dequant_sm90.main_loop(desc, config)
    else:
        assert isinstance(config, GemmConfig)
        main_loop = (mainloop_swap_ab_sm90 if config.swap_ab else mainloop_plain_sm90).main_loop(desc, config)
        if desc.requantize == "group":
            out = (out, jax.ShapeDtypeStruct((-(-desc.n // SCALE_GROUP), desc.rows), jnp.float32))
        if desc.keeps_before:
            out = (out, jax.ShapeDtypeStruct((desc.rows, desc.projections * desc.n), out.dtype))
        if desc.pulls is not None:
            wide = jax.ShapeDtypeStruct((desc.rows, desc.pulled_projections * desc.n), out.dtype)
            sums = jax.ShapeDtypeStruct((-(-desc.n // config.block_n), desc.rows), jnp.float32)
            out = (wide, sums, out) if desc.has_weighted else (wide, sums)
    call = launch(functools.partial(_kernel, desc, config, main_loop), config, out, main_loop.scratch)
    return lambda operands: call(*(operands[name] for name in desc.operand_names))


def _kernel(desc: Any, config: Any, main_loop: MainLoop, *refs: TileRef, **allocated: TileRef) -> None:
    names = desc.operand_names
    operands = dict(zip(names, refs, strict=False))
    warpgroup = lax.axis_index("warpgroup")
    parts = desc.k_parts if isinstance(desc, GemmDesc) else 1
    steps, column_tiles = -(-desc.k // (parts * config.block_k(desc))), -(-desc.n // config.block_n)
    # Read here, the first tile's expert comes while the number of tiles does, and then out of L1. And a number >= 0
    # whose range LLVM does not know hides the number of steps from it: it unrolls loops of up to about eight, which
    # makes 32 TMA copies in the producer, and spills in both roles. A tile out of use may have any expert.
    expert = operands["tile_expert"][likely_row(config, operands["tile_expert"].shape[0], column_tiles)]
    unknown = lax.min(lax.max(expert, jnp.int32(0)), operands["num_tiles"][0])

    def hidden(number):
        return lax.min(jnp.int32(number), unknown + number)

    behind = hidden(main_loop.epilogue_steps) if main_loop.epilogue_steps else None
    scratch = Scratch(**allocated)
    sharers = config.sharers if isinstance(config, GemmConfig) else 1
    cta = CtaContext(desc, config, operands, refs[len(names) :], scratch, warpgroup, hidden(steps), behind, sharers)
    run_tiles(
        config,
        operands["tile_expert"],
        operands["num_tiles"],
        column_tiles,
        cta.all_steps,
        registers=main_loop.registers,
        produce=functools.partial(produce, cta, main_loop),
        consume=functools.partial(main_loop.consume, cta),
    )
