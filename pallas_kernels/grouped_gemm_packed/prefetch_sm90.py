"""Packed weights on their way to L2 while the kernel in front of the product still runs."""

from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_gemm.prefetch_sm90 import prefetch_first_tile
from pallas_kernels.grouped_gemm_packed.config import PackedConfig, PackedDesc, block_k


def prefetch_weights(desc: PackedDesc, config: PackedConfig, *refs: Any) -> None:
    """As many K steps of the first tile's weights as the ring has slots. refs: those of the kernel's body."""
    _, w, tile_expert, num_tiles, *_ = refs
    steps = min(config.num_stages, desc.k // block_k(desc, config))

    def prefetch(n: Any, e: Any) -> None:
        first = (e * desc.channel_blocks + n * config.channel_groups) * desc.halves
        channels = pl.ds(first, config.channel_groups * desc.halves)
        for step in range(steps):
            depth = pl.ds(step * config.step_blocks, config.step_blocks)
            plgpu.async_prefetch(w.at[channels, depth])

    column_tiles = -(-desc.channel_blocks // config.channel_groups)
    prefetch_first_tile(config, tile_expert, num_tiles, column_tiles, desc.num_experts, prefetch)
