"""From a description to configurations, best first, with the reason for each choice."""

from collections.abc import Iterator

from pallas_kernels.common.mosaic import SMEM_BYTES
from pallas_kernels.grouped_gemm.config import SCALE_GROUP, GemmConfig, GemmDesc, config_error, shared_memory

MAX_STAGES = 8


def choose_block_m(rows_per_expert: float) -> int:
    """Rows of a tile for an expected number of rows per expert in use.

    Up to about 96 rows weights are read faster than 64 rows are multiplied, and smaller tiles waste fewer rows of
    padding; above, two warpgroups share each weight tile.
    """
    return 64 if rows_per_expert <= 96 else 128


def candidates(desc: GemmDesc, block_m: int, num_sms: int) -> Iterator[GemmConfig]:
    """Configurations that can run ``desc`` in tiles of ``block_m`` rows, preferred ones first.

    Wide tiles come first: a block reads (block_m + weight rows) * K bytes for block_m * weight rows products, and fp8
    products at full rate leave room for about 64 bytes a clock. Narrow ones follow for calls with few tiles, where more
    blocks can read weights at once.
    """
    widths = (SCALE_GROUP,) if desc.requantize == "group" else (256, 128, 64)
    for block_n in dict.fromkeys(min(width, 256 // desc.halves) for width in widths):
        for stages in range(MAX_STAGES, 1, -1):
            chunk = 16 if block_m == 64 and desc.has_tile_rows else None
            config = GemmConfig(block_m, block_n, stages, row_chunk=chunk, num_sms=num_sms)
            if config_error(desc, config) is None:
                yield config
                break


def choose_config(desc: GemmDesc, block_m: int, num_sms: int) -> GemmConfig:
    """The first candidate that fills the machine, else the one with the most tiles. Raises NotImplementedError with
    the reason.

    The number of tiles in use is data on the device; the capacity ``desc.rows`` bounds it.
    """
    found = list(candidates(desc, block_m, num_sms))
    if not found:
        smallest = GemmConfig(block_m, 64, 2, num_sms=num_sms)
        raise NotImplementedError(config_error(desc, smallest) or f"no configuration of {desc} fits {SMEM_BYTES} bytes")
    return next((c for c in found if _tiles(desc, c) >= num_sms), found[-1])


def _tiles(desc: GemmDesc, config: GemmConfig) -> int:
    return desc.rows // config.block_m * -(-desc.n // config.block_n)


def describe(desc: GemmDesc, config: GemmConfig) -> str:
    """One line for ``explain``."""
    return (
        f"{config.block_m} x {desc.halves} x {config.block_n} tiles, {config.num_stages} stages "
        f"({shared_memory(desc, config) >> 10} KiB shared memory), {config.num_sms} persistent blocks"
    )
