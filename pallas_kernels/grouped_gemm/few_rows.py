"""How tiles of a few rows of plain weights are run on Hopper without TMA and wgmma (``FewRowsConfig``)."""

import dataclasses

from pallas_kernels.grouped_gemm.columns import (
    CHANNELS,
    FEW_ROWS,
    LEAST_SLOTS,
    ROW_PIECES,
    SPLITS,
    ColumnsConfig,
    Ring,
    ring,
)
from pallas_kernels.grouped_gemm.problem import GemmDesc

BLOCK_PIECES = CHANNELS * ROW_PIECES  # of 16 bytes, which a warp multiplies of one projection at a time


@dataclasses.dataclass(frozen=True)
class FewRowsConfig(ColumnsConfig):
    """A CTA is one warpgroup. block_m: rows of a tile, ``FEW_ROWS``."""

    block_m: int = FEW_ROWS


def ring_of(desc: GemmDesc, config: FewRowsConfig) -> Ring:
    """As short as rings are: longer ones take as long or 1 to 2% longer with FP8 blocks (H200)."""
    return ring(-(-blocks_of(desc) // config.k_split), LEAST_SLOTS, BLOCK_PIECES)


def blocks_of(desc: GemmDesc) -> int:
    """Blocks of 128 bytes of K."""
    return -(-desc.k * desc.itemsize // (ROW_PIECES * 16))


def few_rows_error(desc: GemmDesc, config: FewRowsConfig) -> str | None:
    """Why ``config`` cannot run ``desc``, or None when it can."""
    if reason := desc.unsupported():
        return reason
    if config.k_split not in SPLITS:
        return f"k_split={config.k_split}: one of {', '.join(map(str, sorted(SPLITS)))} warps share K"
    if config.block_m != FEW_ROWS:
        return f"block_m={config.block_m}: a tile has {FEW_ROWS} rows"
    if desc.k_parts > 1:
        return f"k_parts={desc.k_parts} of few rows: not built, warps share K already"
    if desc.unpermuted_rows > config.block_m:
        return f"the same {desc.unpermuted_rows} rows in every tile: a tile has {config.block_m}"
    if any(start % config.block_n for start in desc.starts):
        widths = ", ".join(map(str, desc.widths))
        return f"weights of {widths} columns side by side: multiples of the {config.block_n} columns of a CTA"
    if desc.transposes_w or desc.pulls is not None or desc.keeps_before:
        return "few rows with transposed weights or several outputs: not built"
    if desc.top_k or desc.quantization != "none":
        return "few rows that are added up or quantized first: tiles of one row have that"
    if desc.requantize == "group":
        return "requantize='group' of few rows: the columns of a group lie in several CTAs"
    return None


def few_rows_candidates(desc: GemmDesc) -> list[FewRowsConfig]:
    """Configurations that can run ``desc``, preferred ones first: as many warps share K as have two blocks each."""
    splits = sorted(SPLITS, key=lambda k_split: blocks_of(desc) < 2 * k_split)
    return [config for config in map(FewRowsConfig, splits) if few_rows_error(desc, config) is None]


def describe_few_rows(desc: GemmDesc, config: FewRowsConfig) -> str:
    """One line for ``explain``."""
    ctas = desc.rows // config.block_m * -(-desc.n // config.block_n)
    parts = f", K in {config.k_split} parts" if config.k_split > 1 else ""
    return f"{config.block_m} rows, {desc.projections} x {CHANNELS} channels a warp{parts}, {ctas} CTAs"
