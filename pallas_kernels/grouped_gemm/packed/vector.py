"""How tiles of one row of packed weights are run on Hopper (``PackedVectorConfig``): matrix times vector (GEMV)."""

import dataclasses
from typing import ClassVar

from pallas_kernels.common.sm90 import WARPS
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N, PackedFormat
from pallas_kernels.grouped_gemm.packed.problem import PackedDesc

CHANNELS = 16  # of a warp: the rows of one mma.sync
_MOST_REGISTERS = 96  # of a thread, for weights and their scales that are under way together
_SPLITS = (4, 2, 1)  # preferred ones first


@dataclasses.dataclass(frozen=True)
class PackedVectorConfig:
    """A CTA is one warpgroup; each of its warps multiplies 16 channels of every projection with its part of one row.

    k_split: how many warps share their channels, each with its part of K.
    """

    k_split: int
    block_m: ClassVar[int] = 1

    @property
    def block_n(self) -> int:
        """Columns of a CTA."""
        return CHANNELS * WARPS // self.k_split


@dataclasses.dataclass(frozen=True)
class Share:
    """The blocks of K of one of the warps that share channels: as many for each, or one more for the first ``longer``.

    A loop of ``turns`` takes ``at_once`` blocks each, the last ``rest`` follow it. The last block of all is none of the
    warp's own where it has one less.
    """

    least: int
    longer: int
    turns: int
    at_once: int
    rest: int

    @property
    def most(self) -> int:
        return self.least + (self.longer > 0)


def words_a_thread(fmt: PackedFormat) -> int:
    """Of one block."""
    return BLOCK_N * fmt.block_k * fmt.bits // 32 // 128


def sums_of_block(fmt: PackedFormat) -> int:
    """Partial sums of a block, each scaled: one for each group that lies in it; 1 where scales do not follow sums."""
    return max(1, fmt.block_k // (fmt.group_size or fmt.block_k)) if fmt.scale == "group" else 1


def share_of_warp(desc: PackedDesc, config: PackedVectorConfig) -> Share:
    """How the warps of a CTA take K."""
    fmt = desc.fmt
    least, longer = divmod(desc.k // fmt.block_k, config.k_split)
    beside = 2 * sums_of_block(fmt) * ((fmt.scale == "group") + fmt.has_zero_point)
    of_block = desc.projections * (words_a_thread(fmt) + fmt.scale_words // 32 + beside)
    most = least + (longer > 0)
    at_once = -(-most // -(-most // max(1, _MOST_REGISTERS // of_block)))
    turns = (most - 1) // at_once
    return Share(least, longer, turns, at_once, most - turns * at_once)


def vector_error(desc: PackedDesc, config: PackedVectorConfig) -> str | None:
    """Why ``config`` cannot run ``desc``, or None when it can."""
    if reason := desc.unsupported():
        return reason
    if config.k_split not in _SPLITS:
        return f"k_split={config.k_split}: one of {', '.join(map(str, sorted(_SPLITS)))} warps share K"
    if desc.unpermuted_rows > 1:
        return f"the same {desc.unpermuted_rows} rows in every tile: a tile has 1"
    if any(start % config.block_n for start in desc.starts):
        widths = ", ".join(map(str, desc.widths))
        return f"weights of {widths} columns side by side: multiples of the {config.block_n} columns of a CTA"
    return None


def vector_candidates(desc: PackedDesc) -> list[PackedVectorConfig]:
    """Configurations that can run ``desc``, preferred ones first: as many warps share K as have two blocks each."""
    fitting = [config for config in map(PackedVectorConfig, _SPLITS) if vector_error(desc, config) is None]
    return sorted(fitting, key=lambda config: desc.k < 2 * config.k_split * desc.fmt.block_k)


def describe_vector(desc: PackedDesc, config: PackedVectorConfig) -> str:
    """What follows the weights in the line for ``explain``."""
    ctas = desc.rows * -(-desc.n // config.block_n)
    parts = f", K in {config.k_split} parts" if config.k_split > 1 else ""
    return f"matrix times vector, {desc.projections} x {CHANNELS} channels a warp{parts}, {ctas} CTAs"
