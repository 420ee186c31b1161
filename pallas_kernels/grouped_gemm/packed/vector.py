"""How tiles of a few rows of packed weights are run on Hopper without TMA and wgmma (``PackedVectorConfig``)."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.common.sm90 import LANES, WARPGROUP, WARPS
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
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N, PackedFormat
from pallas_kernels.grouped_gemm.packed.problem import PackedDesc

HEIGHTS = (1, FEW_ROWS)  # rows of a tile
_RING_BYTES = 32 << 10  # of a warpgroup: six of an SM have room for that
_RING_BYTES_OF_MANY = 24 << 10  # eight have
_MANY, _BLOCKS_OF_MANY = 2.5, 4  # warpgroups an SM, from which on each warp has so few blocks under way
_AT_ONCE = 7  # warpgroups on an SM that multiply gate and up projections, by their registers
MOST_ROWS = 8  # of a token that are added up, by a warpgroup each: at 64 registers a thread they take all of an SM's


@dataclasses.dataclass(frozen=True)
class PackedVectorConfig(ColumnsConfig):
    """A CTA is one warpgroup, or one for each row of a token, which it adds up.

    most_blocks: of K that a warp has under way, if these are not all; None for as many as there is room for.
    block_m: rows of a tile, one of ``HEIGHTS``.
    """

    most_blocks: int | None = None
    block_m: int = 1


def words_a_thread(fmt: PackedFormat) -> int:
    """Of one block, scales left out."""
    return BLOCK_N * fmt.block_k * fmt.bits // 32 // WARPGROUP


def sums_of_block(fmt: PackedFormat) -> int:
    """Partial sums of a block, each scaled: one for each group that lies in it; 1 where scales do not follow sums."""
    return max(1, fmt.block_k // (fmt.group_size or fmt.block_k)) if fmt.scale == "group" else 1


def ring_of(desc: PackedDesc, config: PackedVectorConfig) -> Ring:
    """As deep as a warp's part of K where there is room for it, else as ``config`` says."""
    fmt, number = desc.fmt, sums_of_block(desc.fmt)
    words = (words_a_thread(fmt) * LANES + fmt.scale_words // WARPS) // 4
    scales = number * jnp.dtype(desc.scale_dtype).itemsize if fmt.scale == "group" else 0
    zeros = number * jnp.dtype(fmt.operand).itemsize if fmt.has_zero_point else 0
    of_slot = WARPS * 16 * (desc.projections * (words + scales + zeros) + ROW_PIECES * config.block_m)
    room = (_RING_BYTES_OF_MANY if desc.top_k or config.most_blocks else _RING_BYTES) // of_slot
    steps = -(-(desc.k // fmt.block_k) // config.k_split)
    if room < steps:
        room = max(LEAST_SLOTS, min(room, config.most_blocks or room))
    return ring(steps, room, words, scales, zeros)


def vector_error(desc: PackedDesc, config: PackedVectorConfig) -> str | None:
    """Why ``config`` cannot run ``desc``, or None when it can."""
    if reason := desc.unsupported():
        return reason
    if config.k_split not in SPLITS:
        return f"k_split={config.k_split}: one of {', '.join(map(str, sorted(SPLITS)))} warps share K"
    if config.block_m not in HEIGHTS:
        return f"block_m={config.block_m}: one of {', '.join(map(str, HEIGHTS))} rows"
    if desc.unpermuted_rows > config.block_m:
        return f"the same {desc.unpermuted_rows} rows in every tile: a tile has {config.block_m}"
    if any(start % config.block_n for start in desc.starts):
        widths = ", ".join(map(str, desc.widths))
        return f"weights of {widths} columns side by side: multiples of the {config.block_n} columns of a CTA"
    if desc.top_k and desc.rows > MOST_ROWS:
        return f"the sum of {desc.rows} rows: at most {MOST_ROWS}, a warpgroup each"
    if desc.top_k and (desc.num_tokens > 1 or desc.widths or config.block_m > 1):
        return "the sum of rows: of one token in tiles of one row, with no weights side by side"
    return None


def adds_up_at_once(desc: PackedDesc, num_sms: int) -> bool:
    """Whether CTAs that add up a token's rows fit the SMs at the same time, with at most 64 registers a thread, and are
    nearly as many on each; of one round half will do.

    Those behind a first round would begin with nothing on its way. With 180 CTAs on 132 SMs a layer of gpt-oss takes
    0.99 to 1.06 of the time, with 64 to 256 those of Qwen3 and Mixtral 0.95 to 0.98 (H200).
    """
    (config, *_) = vector_candidates(desc, num_sms)
    ctas = -(-desc.n // config.block_n)
    of_sm = -(-ctas // num_sms)
    return of_sm <= MOST_ROWS // desc.rows and ctas >= (0.45 if of_sm == 1 else 0.9) * of_sm * num_sms


def vector_candidates(desc: PackedDesc, num_sms: int, block_m: int = 1) -> list[PackedVectorConfig]:
    """Configurations that can run ``desc`` in tiles of ``block_m`` rows, preferred ones first: as many warps share K as
    have two blocks each, and two, not four, where gate and up projections would leave few CTAs for a second round.

    Those of DeepSeek-V3, 1024 CTAs with four warps and 512 with two, take 0.91 to 0.95 of the time with two (H200).
    Where SMs have several warpgroups, more blocks than four under way delay the first one: four take 0.87 to 1.01 of
    the time of whole layers.
    """

    def of_sm(k_split: int) -> float:
        """Warpgroups."""
        return desc.rows // block_m * -(-desc.n // PackedVectorConfig(k_split).block_n) / num_sms

    def is_second_choice(k_split: int) -> bool:
        is_ragged = desc.projections > 1 and k_split == 4 and 1 < of_sm(k_split) / _AT_ONCE < 1.5
        return is_ragged or desc.k < 2 * k_split * desc.fmt.block_k

    found = [
        PackedVectorConfig(k_split, _BLOCKS_OF_MANY if of_sm(k_split) >= _MANY else None, block_m)
        for k_split in sorted(SPLITS, key=is_second_choice)
    ]
    return [config for config in found if vector_error(desc, config) is None]


def describe_vector(desc: PackedDesc, config: PackedVectorConfig) -> str:
    """What follows the weights in the line for ``explain``."""
    ctas = (1 if desc.top_k else desc.rows // config.block_m) * -(-desc.n // config.block_n)
    which = f", which add up {desc.top_k} rows" if desc.top_k else ""
    parts = f", K in {config.k_split} parts" if config.k_split > 1 else ""
    what = "matrix times vector" if config.block_m == 1 else f"{config.block_m} rows"
    return f"{what}, {desc.projections} x {CHANNELS} channels a warp{parts}, {ctas} CTAs{which}"
