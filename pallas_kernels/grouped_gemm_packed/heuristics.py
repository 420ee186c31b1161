"""From a description to configurations, best first."""

from collections.abc import Iterator

from pallas_kernels.common.sm90 import SMEM_BYTES
from pallas_kernels.grouped_gemm_packed.config import (
    PackedConfig,
    PackedDesc,
    block_k,
    config_error,
    is_promoted,
    shared_memory,
)

MAX_STAGES = 12


def choose_block_m(rows_per_expert: float) -> int:
    """Rows of a tile for an expected number of rows per expert in use: few, since every column of the matrix
    instruction is paid for, but at least 16, since with 8 it is no faster; at most 128, which a gated product's sums
    leave room for.
    """
    return next((m for m in (16, 32, 64) if rows_per_expert <= 0.75 * m), 128)


def candidates(desc: PackedDesc, block_m: int, num_sms: int) -> Iterator[PackedConfig]:
    """Configurations that can run ``desc`` in tiles of ``block_m`` rows, preferred ones first.

    Four consumers first, which hide each other's waits and share the rows; fewer for calls with few tiles. Partial sums
    in float32 first; scales folded into the operands where a tile's sums leave no room for them.
    """
    for folds in (False, True):
        for consumers in (4, 2, 1):
            for blocks in (2, 3, 1):
                for stages in range(MAX_STAGES, 1, -1):
                    config = PackedConfig(block_m, consumers, blocks, stages, folds, _band(block_m), num_sms)
                    if config_error(desc, config) is None:
                        yield config
                        break
                else:
                    continue
                break


def choose_config(desc: PackedDesc, block_m: int, num_sms: int) -> PackedConfig:
    """The first candidate that fills the machine, else the one with the most tiles. Raises NotImplementedError with
    the reason.

    The number of tiles in use is data on the device; the capacity ``desc.rows`` bounds it.
    """
    found = list(candidates(desc, block_m, num_sms))
    if not found:
        smallest = PackedConfig(block_m, 1, 1, 2, num_sms=num_sms)
        raise NotImplementedError(config_error(desc, smallest) or f"no configuration of {desc} fits {SMEM_BYTES} bytes")
    return next((c for c in found if _tiles(desc, c) >= num_sms), max(found, key=lambda c: _tiles(desc, c)))


def _band(block_m: int) -> int:
    """Row tiles walked together: with tall tiles 16 measured 7% faster than 8 at 256 rows an expert (int4, H200)."""
    return 16 if block_m >= 128 else 8


def _tiles(desc: PackedDesc, config: PackedConfig) -> int:
    return desc.rows // config.block_m * -(-desc.channel_blocks // config.channel_groups)


def describe(desc: PackedDesc, config: PackedConfig) -> str:
    """One line for ``explain``."""
    weights = f"{desc.fmt.element} weights unpacked to {desc.fmt.operand}"
    if desc.fmt.scale == "group":
        when = "in float32 per group" if is_promoted(desc, config) else f"rounded to {desc.fmt.operand}"
        weights += f", scales {when}"
    return (
        f"{weights}; {config.block_m} rows x {desc.halves} x {64 * config.channel_groups} channels, K steps of "
        f"{block_k(desc, config)}, {config.num_stages} stages ({shared_memory(desc, config) >> 10} KiB shared memory), "
        f"{config.num_sms} persistent blocks"
    )
