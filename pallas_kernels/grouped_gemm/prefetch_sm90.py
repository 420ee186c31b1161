"""Weights on their way to L2 while the kernel in front of a grouped GEMM still runs."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_gemm.config import GemmConfig, GemmDesc
from pallas_kernels.grouped_gemm.schedule import tile_index

BOX_BYTES = 128  # of K in one prefetch


def prefetch_first_tile(
    config: Any,
    tile_expert: Any,
    num_tiles: Any,
    column_tiles: int,
    num_experts: int,
    prefetch: Callable[[Any, Any], None],
) -> None:
    """Let the producer call ``prefetch(column tile, expert)`` for this block's first tile, in front of
    ``mosaic.begin``.

    What says which tile that is may be written by a kernel that still runs. So it is clamped, and what comes of it is
    only a hint: weights are fetched into L2, where every later read and write passes, and never into the block.
    """
    row_tiles = lax.clamp(jnp.int32(0), num_tiles[0], jnp.int32(tile_expert.shape[0]))
    block = lax.axis_index("block")

    @pl.when((lax.axis_index("warpgroup") == config.num_consumers) & (block < row_tiles * column_tiles))
    def _():
        m, n = tile_index(block, row_tiles, column_tiles, config.band)
        expert = lax.clamp(jnp.int32(0), tile_expert[m], jnp.int32(num_experts - 1))
        prefetch(n, expert)


def prefetch_weights(desc: GemmDesc, config: GemmConfig, *refs: Any) -> None:
    """As many K steps of the first tile's weights as the ring has slots. refs: those of the kernel's body."""
    _, w, tile_expert, num_tiles, *_ = refs
    width = BOX_BYTES // desc.itemsize
    boxes = min(config.num_stages * config.step_blocks, desc.k // width)

    def prefetch(n: Any, e: Any) -> None:
        channels = pl.ds(n * config.block_n, config.block_n)
        for half in range(desc.halves):
            for box in range(boxes):
                weights = w.at[e * desc.halves + half, channels, pl.ds(box * width, width)]
                plgpu.async_prefetch(weights)

    column_tiles = -(-desc.n // config.block_n)
    prefetch_first_tile(config, tile_expert, num_tiles, column_tiles, desc.num_experts, prefetch)
