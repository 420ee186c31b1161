"""From a description to configurations, best first, with the reason for each choice and each prune."""

import dataclasses
import math
from collections.abc import Iterator

from pallas_kernels.common.sm90 import SMEM_BYTES
from pallas_kernels.grouped_gemm.config import GemmConfig, GemmDesc, config_error, shared_memory

MAX_STAGES = 8
MAX_SWAPPED_STAGES = 12  # smaller slots: more of them keep as many bytes on their way
_PLENTY = 4  # rounds of the machine from which a ragged last one no longer counts


def choose_block_m(rows_per_expert: float, *, may_swap: bool = False) -> int:
    """Rows of a tile for an expected number of rows per expert in use.

    Up to about 96 rows weights are read faster than 64 rows are multiplied, and smaller tiles waste fewer rows of
    padding; above, two warpgroups share each weight tile. may_swap: every product of the layer can run with swapped
    operands, whose tiles hold fewer rows: then twice the expected rows, so that few experts need a second tile. Tiles
    of 8 rows run no faster than those of 16 (4.9 against 6.1 us, GEMM 1 of qwen3 at one token, H200).
    """
    if may_swap and rows_per_expert <= 24:
        return next(rows for rows in (16, 32, 64) if rows >= min(2 * rows_per_expert, 64))
    return 64 if rows_per_expert <= 96 else 128


def space(desc: GemmDesc, block_m: int, num_sms: int) -> Iterator[GemmConfig]:
    """Every configuration worth a look in tiles of ``block_m`` rows, wide tiles first, those that cannot run included.

    A block reads (block_m + weight rows) * K bytes for block_m * weight rows products, and fp8 products at full rate
    leave room for about 64 bytes a clock: hence wide tiles. Narrow ones follow for calls with few tiles, where more
    blocks can read weights at once. Each tile comes with as many stages as fit.
    """
    if block_m <= 96:
        for block_n in (256, 128, 64):
            yield _deepest(desc, GemmConfig(block_m, block_n, 2, num_sms=num_sms, is_swapped=True))
    if block_m in (64, 128):
        chunk = 16 if desc.has_tile_rows else None
        for block_n in (256, 128, 96, 64, 48, 32):
            yield _deepest(desc, GemmConfig(block_m, block_n, 2, row_chunk=chunk, num_sms=num_sms))


def _deepest(desc: GemmDesc, config: GemmConfig) -> GemmConfig:
    """``config`` with the most stages that fit, or with two when none does."""
    most = MAX_SWAPPED_STAGES if config.is_swapped else MAX_STAGES
    for stages in range(most, 2, -1):
        deeper = dataclasses.replace(config, num_stages=stages)
        if config_error(desc, deeper) is None:
            return deeper
    return config


def why_not(desc: GemmDesc, config: GemmConfig) -> str | None:
    """The reason for which a configuration of ``space`` is left out, or None."""
    if reason := config_error(desc, config):
        return reason
    if config.block_m == 64 and config.is_swapped:
        return "64 rows swapped: weights then pass the tensor core no faster than rows do, and one more layout to run"
    if config.block_m == 128 and config.block_n not in (64, 128, 256):
        return f"block_n={config.block_n}: for filling the machine at few rows"
    return None


def candidates(desc: GemmDesc, block_m: int, num_sms: int) -> list[GemmConfig]:
    """Configurations that can run ``desc`` in tiles of ``block_m`` rows and are worth timing, wide tiles first."""
    return [c for c in space(desc, block_m, num_sms) if why_not(desc, c) is None]


def choose_config(desc: GemmDesc, block_m: int, num_sms: int) -> GemmConfig:
    """The candidate that needs the fewest columns one after another: rounds of the machine times columns a tile.

    Of equals the widest. Raises NotImplementedError with the reason where there is no candidate.
    """
    found = candidates(desc, block_m, num_sms)
    if not found:
        smallest = GemmConfig(block_m, 64, 2, num_sms=num_sms, is_swapped=block_m < 64)
        raise NotImplementedError(config_error(desc, smallest) or f"no configuration of {desc} fits {SMEM_BYTES} bytes")

    def depth(config: GemmConfig) -> float:
        rounds = expected_tiles(desc, block_m) * -(-desc.n // config.block_n) / num_sms
        return float((rounds if rounds >= _PLENTY else math.ceil(rounds - 0.05)) * config.block_n)

    return min(found, key=depth)


def expected_tiles(desc: GemmDesc, block_m: int) -> float:
    """Tiles of rows in use when routing is uniform; how many there are is data on the device, ``desc.rows`` a bound."""
    experts = desc.num_experts
    pairs = float(desc.rows // block_m)
    if desc.rows > pairs + experts * (block_m - 1):
        pairs = max(desc.rows - experts * (block_m - 1.0), 1.0)
    hit = experts * (1 - (1 - 1 / experts) ** pairs)
    return hit * math.ceil(pairs / hit / block_m)


def describe(desc: GemmDesc, config: GemmConfig) -> str:
    """One line for ``explain``."""
    swapped = ", operands swapped" if config.is_swapped else ""
    return (
        f"{config.block_m} x {desc.halves} x {config.block_n} tiles{swapped}, {config.num_stages} stages "
        f"({shared_memory(desc, config) >> 10} KiB shared memory), {config.num_sms} persistent blocks"
    )
