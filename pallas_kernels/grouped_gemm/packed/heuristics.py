"""From a description to configurations, best first."""

import math
from collections.abc import Iterator
from typing import Any

from pallas_kernels.common.sm90 import SMEM_BYTES
from pallas_kernels.grouped_gemm.config import SMALL_M
from pallas_kernels.grouped_gemm.heuristics import (
    expected_tiles,
    first_of_least,
    height_for,
    rounds_of,
    tiles_of_expert,
)
from pallas_kernels.grouped_gemm.packed.config import (
    BLOCK_MS,
    LARGE_M,
    PackedConfig,
    config_error,
    shared_memory,
)
from pallas_kernels.grouped_gemm.packed.problem import PackedDesc
from pallas_kernels.grouped_gemm.packed.vector import (
    HEIGHTS,
    PackedVectorConfig,
    describe_vector,
    vector_candidates,
    vector_error,
)

MAX_STAGES = 12
_SPLIT = 0  # in place of a k_split: the consumers that share channels take one projection each
# (consumers, k_split, blocks of K a step), preferred ones first where the machine is filled alike. Measured on an H200
# for int4 g128, mxfp4 and nvfp4. Long steps have fewer barriers. The accumulators of a gated tile leave no room for
# long steps of four consumers, which e2m1, dearer to unpack, prefers all the same. From 48 rows on tiles take so many
# registers that fewer consumers win. K of an odd number of blocks has steps of 3 or 5. The last ones are for what
# refuses all others: where a consumer takes one projection, scales in float32 sums leave room in a gated tile of 128.
_ANY = ((2, 1, 2), (2, 1, 3), (1, 1, 2), (1, 1, 3), (4, 1, 1), (2, 1, 1), (1, 1, 1))
_FEW_GATED = ((2, 1, 4), (3, 1, 3), (4, 2, 4), (4, 1, 2), (2, 2, 4), (4, 4, 8), (3, 1, 2), *_ANY)
_FEW_GATED_E2M1 = ((3, 1, 3), (4, 1, 2), (4, 2, 4), (2, 1, 4), (2, 2, 4), (4, 4, 8), (3, 1, 2), *_ANY)
_FEW = (
    *((4, 1, 4), (3, 1, 5), (3, 1, 4), (4, 1, 2), (2, 1, 4), (4, 2, 4), (4, 4, 8), (2, 2, 4), (3, 1, 3), (3, 1, 2)),
    *_ANY,
)
_MANY_GATED = ((2, 1, 4), (3, 1, 3), *_ANY, (2, _SPLIT, 2), (2, _SPLIT, 1))
_MANY = ((4, 1, 2), (3, 1, 2), (3, 1, 3), (2, 1, 4), *_ANY)
_MANY_FROM = 48  # rows of a tile
_UNPACKING = 32.0  # rows whose products take as long as a tile's unpacking that no product hides: a guess
_FOLDED_FROM = 80  # rows of a tile from which scales in the operands measured 5 to 25% faster than in the sums (int4)


def choose_block_m(rows_per_expert: float) -> int:
    """Rows of a tile for an expected number of rows per expert in use: few, since every column of wgmma is paid for.

    Up to 96 rows one tile has to hold nearly every expert. Above, experts may take several: the height of the least
    expected work, padding and unpacking included.
    """
    low = height_for(rows_per_expert, (m for m in BLOCK_MS if m <= SMALL_M))
    return low or min((*LARGE_M[:-1], 128), key=lambda height: _work(rows_per_expert, height))


def _work(rows_per_expert: float, height: int) -> float:
    """Rows that an expert's tiles of ``height`` multiply, unpacking counted as rows: expected, uniform routing."""
    return tiles_of_expert(rows_per_expert, height) * (height + _UNPACKING)


def candidates(desc: PackedDesc, block_m: int, num_sms: int) -> Iterator[Any]:
    """Configurations that can run ``desc`` in tiles of ``block_m`` rows, preferred ones first, each with as many stages
    as fit.

    Scales of groups are applied to float32 partial sums first. From 80 rows on they are folded into the operands first,
    which needs scales of the operands' dtype; in lower tiles that is left for where accumulators leave no room.
    """
    if block_m in HEIGHTS:
        yield from vector_candidates(desc, num_sms, block_m)
        return
    # With 128 rows and more, 16 measured 7% faster than 8 at 256 rows an expert (int4, H200).
    raster_group_m = 16 if block_m >= 128 else 8
    for folds in (True, False) if block_m >= _FOLDED_FROM else (False, True):
        for consumers, split, blocks in _shapes(desc, block_m >= _MANY_FROM):
            for stages in range(MAX_STAGES, 1, -1):
                config = PackedConfig(
                    block_m, consumers, blocks, stages, folds, raster_group_m, num_sms, split or 1, not split
                )
                if config_error(desc, config) is None and _fits_k(desc, config):
                    yield config
                    break


def _fits_k(desc: PackedDesc, config: PackedConfig) -> bool:
    """Whether steps divide K, or ones of an even number of blocks reach past it by little; by more where groups of
    scales go with no odd number of blocks.
    """
    step = config.block_k(desc)
    past = -(-desc.k // step) * step / desc.k
    return past == 1 or (config.step_blocks % 2 == 0 and past <= (1.07 if desc.fmt.scale == "group" else 1.03))


def _shapes(desc: PackedDesc, has_many_rows: bool) -> dict[tuple[int, int, int], None]:
    """(consumers, k_split, blocks) by preference. Blocks of 8-bit operands are twice as deep: half as many of them."""
    if has_many_rows:
        shapes = _MANY_GATED if desc.projections > 1 else _MANY
    elif desc.projections > 1:
        shapes = _FEW_GATED_E2M1 if desc.fmt.element == "e2m1" else _FEW_GATED
    else:
        shapes = _FEW
    if not desc.fmt.is_8bit:
        return dict.fromkeys(shapes)
    return dict.fromkeys((c, split, max(split, blocks // 2, 1) if split else blocks) for c, split, blocks in shapes)


def choose_config(desc: PackedDesc, block_m: int, num_sms: int) -> PackedConfig | PackedVectorConfig:
    """The first candidate whose CTAs have, nearly, the fewest channels one after another. Raises NotImplementedError
    with the reason.
    """
    found = list(candidates(desc, block_m, num_sms))
    if block_m in HEIGHTS:
        if not found:
            raise NotImplementedError(vector_error(desc, PackedVectorConfig(4, block_m=block_m)))
        return found[0]
    if not found:
        smallest = PackedConfig(block_m, 2 if block_m in LARGE_M else 1, 1, 2, num_sms=num_sms)
        raise NotImplementedError(config_error(desc, smallest) or f"no configuration of {desc} fits {SMEM_BYTES} bytes")
    found = [config for config in found if config.folds_scales == found[0].folds_scales]
    tiles = expected_tiles(desc, block_m)

    def depth(config: PackedConfig) -> float:
        columns = math.ceil(desc.channel_blocks / config.channel_groups)
        alone = 2 if config.num_consumers == 1 else 1  # nobody multiplies while it unpacks
        return alone * rounds_of(tiles * columns, num_sms) * config.channel_groups

    return first_of_least(found, depth)


def describe(desc: PackedDesc, config: PackedConfig | PackedVectorConfig) -> str:
    """One line for ``explain``."""
    weights = f"{desc.fmt.element} weights unpacked to {desc.fmt.operand}"
    if desc.fmt.scale == "group":
        is_folded = isinstance(config, PackedConfig) and config.folds_scales
        weights += f", scales {f'rounded to {desc.fmt.operand}' if is_folded else 'in float32 per group'}"
    if isinstance(config, PackedVectorConfig):
        return f"{weights}; {describe_vector(desc, config)}"
    shared = f" ({config.k_split} warpgroups split K)" if config.k_split > 1 else ""
    shared += " (a warpgroup for each projection)" if config.splits_projections else ""
    memory = f"{config.num_stages} stages ({shared_memory(desc, config) >> 10} KiB shared memory)"
    return (
        f"{weights}; {config.block_m} rows x {desc.projections} x {64 * config.channel_groups} channels{shared}, "
        f"K steps of {config.block_k(desc)}, {memory}, {config.num_sms} persistent CTAs"
    )
