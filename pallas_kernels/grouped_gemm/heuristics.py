"""From a description to configurations, best first, with the reason for each choice and each prune."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from pallas_kernels.common.sm90 import SMEM_BYTES
from pallas_kernels.grouped_gemm.columns import FEW_ROWS
from pallas_kernels.grouped_gemm.config import (
    BLOCK_MS,
    SMALL_M,
    SWAP_AB_BLOCK_MS,
    GemmConfig,
    config_error,
    least_chunk,
    shared_memory,
)
from pallas_kernels.grouped_gemm.few_rows import (
    FewRowsConfig,
    describe_few_rows,
    few_rows_candidates,
    few_rows_error,
)
from pallas_kernels.grouped_gemm.problem import GemmDesc, GroupedGemm
from pallas_kernels.grouped_gemm.vector import VectorConfig, describe_vector, vector_candidates, vector_error

MAX_STAGES = 8
MAX_SWAP_AB_STAGES = 12  # Slots are smaller: more of them keep as many bytes on their way.
MOST_SCALED = 80  # rows of the highest small-M tile where every 128 of K are scaled
_PLENTY = 4  # With so many rounds of the machine, a ragged last one no longer counts.
_MANY_TILES = 120  # of rows; from so many on gate and up are read two experts at a time
_LONG = 16  # Over so many rounds CTAs drift apart, and those of one expert no longer find its weights in L2.
Config = TypeVar("Config")


def height_for(rows_per_expert: float, heights: Iterable[int]) -> int | None:
    """The lowest of ``heights`` that nearly every expert fits, or None: the expected rows and almost two standard
    deviations of uniform routing. A second tile reads its expert's weights again and multiplies mostly padding.
    """
    enough = rows_per_expert + 1.9 * math.sqrt(rows_per_expert)
    return next((height for height in heights if height >= enough), None)


def choose_block_m(rows_per_expert: float, *, may_swap: bool = False, may_be_large_m: bool = True) -> int:
    """Rows of a tile for an expected number of rows per expert in use.

    Just above them while weights bind, and above that 128, where two warpgroups share each weight tile. Tiles of 8 rows
    are at most 3% faster than those of 16 (H200). Where every 128 of K are scaled, 80 is the highest small-M tile: with
    steps of two blocks it is 3 to 5% faster than 128 at 54 to 64 rows an expert (H100, five calls of four models).
    Both products take 0.87 and 0.91 of the time at 64 rows (H200, two models).

    Args:
        rows_per_expert: expected, of the experts in use.
        may_swap: every product of the layer can run with swap_ab, whose tiles have more heights.
        may_be_large_m: these may be large-M tiles, which are chosen where they save a twentieth of the work; False
            where every 128 of K are scaled.
    """
    most = SMALL_M if may_be_large_m else MOST_SCALED
    heights = [height for height in SWAP_AB_BLOCK_MS if 16 <= height <= most] if may_swap else [64]
    if height := height_for(rows_per_expert, heights):
        return height
    best = large_m_heights(rows_per_expert)[0]
    saves = tile_work(rows_per_expert, best) < 0.95 * tile_work(rows_per_expert, 128)
    return best if may_swap and may_be_large_m and saves else 128


def large_m_heights(rows_per_expert: float) -> list[int]:
    """Heights of large-M tiles that only swap_ab has, least expected work first."""
    heights = (height for height in SWAP_AB_BLOCK_MS if height > SMALL_M and height not in BLOCK_MS)
    return sorted(heights, key=lambda height: tile_work(rows_per_expert, height))


def tile_work(rows_per_expert: float, block_m: int) -> float:
    """Time of an expert's tiles of 256 weight rows under uniform routing, in rows that pass the L2.

    Rows and weights of a step pass at about 40 bytes a clock and SM, 128 each; products of 256 weight rows
    take as long as 2.5 rows pass.
    """
    return tiles_of_expert(rows_per_expert, block_m) * max(block_m + 256, 2.5 * block_m)


def tiles_of_expert(rows: float, block_m: int) -> float:
    """Expected tiles of an expert that is hit: its rows are about normal, with their mean as variance."""
    deviation = math.sqrt(2 * rows)
    most = math.ceil((rows + 4 * deviation) / block_m)
    # Tile i is there with more than i * block_m rows.
    return 1.0 + sum(0.5 * math.erfc((i * block_m + 0.5 - rows) / deviation) for i in range(1, most))


def space(desc: GemmDesc, block_m: int, num_sms: int) -> Iterator[GemmConfig]:
    """Every configuration worth a look in tiles of ``block_m`` rows, preferred ones first, even those that cannot run.

    A CTA reads (block_m + weight rows) * K bytes for block_m * weight rows products, and fp8 products at full rate
    leave room for about 64 bytes a clock: hence wide tiles. Narrow ones follow for calls with few tiles, where more
    CTAs can read weights at once, and come first where 128 columns make fewer than two rounds of the machine.
    With up to 96 rows 256 columns come last: fewer stages, and no faster. Each tile has as many stages as fit. Steps of
    two blocks of K come first where an expert has one tile and weights bind: 1 to 7% of a layer in small-M tiles (H200,
    32 of 36 layers of three models), 2 to 13% of both products at 32 to 128 rows an expert (H100, four layers, 8 and 16
    bits). Where rows of K are no multiple of 128 bytes, small-M tiles have steps of four instead: 6 to 10% faster there
    (H200, one shape). They come first from 48 rows on, in narrow tiles, which have more stages: both products take 0.84
    to 0.95 of the time (H100, the same shape in FP8 and int8). Where 128 experts or more have a small-M tile, gate and
    up projections are read two experts at a time: 3% faster than eight on average (H100, 17 calls of two models).
    One matrix for all rows whose tiles of 64 columns are at most half a round has two consumers a tile, which share its
    K steps of two blocks: 0.84 to 0.91 of the time of one in such tiles with FP8 blocks (H100, 16 and 64 rows, three
    matrices; steps of one block and more consumers are slower, and so are two where tiles are more). Where they are at
    most a round, 64 rows of 8 bits have them with swap_ab: 0.95 of the time of the plain order (H200, FP8 with a scale
    a channel, 5120 x 2048; int8 was not timed).
    """
    rows, tiles = _expected(desc, block_m)
    is_short = tiles * -(-desc.n // 128) < 1.8 * num_sms and block_m in (8, 16, 64)
    widths = (64, 128, 256) if is_short else (128, 64, 256)
    if block_m in SWAP_AB_BLOCK_MS:
        is_large_m = block_m > SMALL_M
        group = 2 if desc.projections > 1 and not is_large_m and tiles >= _MANY_TILES else GemmConfig.raster_group_m
        if is_large_m:  # width first: a narrow tile passes as many rows for fewer products
            steps = (1, 2) if tiles > desc.num_experts else (2, 1)
            ways = [(block_n, blocks) for block_n in (256, 128, 192, 64) for blocks in steps]
        elif desc.k * desc.itemsize % 128:
            steps = (1, 4) if block_m < 48 else (4, 1)
            ways = [(block_n, blocks) for blocks in steps for block_n in ((64, 128, 256) if blocks == 4 else widths)]
        else:
            ways = [(block_n, blocks) for blocks in (2, 1) for block_n in widths]
        if desc.num_experts == 1 and not is_large_m and 2 * tiles * -(-desc.n // 64) <= num_sms:
            yield deepest(desc, GemmConfig(block_m, 64, 2, num_sms=num_sms, swap_ab=True, step_blocks=2, sharers=2))
        for block_n, blocks in ways:
            config = GemmConfig(block_m, block_n, 2, group, num_sms=num_sms, swap_ab=True, step_blocks=blocks)
            yield deepest(desc, config)
    if block_m in BLOCK_MS:
        # A tile that is nearly full is moved at once: eight copies a step hold up the producer.
        is_chunked = desc.has_tile_rows and rows / tiles < 0.75 * block_m and not desc.has_outputs_beside
        for block_n in (256, 128, 96, 64, 48, 32) if block_m == 128 else (*widths, 96, 48, 32):
            chunk = max(16, least_chunk(desc, block_m, block_n)) if is_chunked else None
            yield deepest(desc, GemmConfig(block_m, block_n, 2, row_chunk=chunk, num_sms=num_sms))


def deepest(desc: GemmDesc, config: GemmConfig) -> GemmConfig:
    """``config`` with the most stages that fit, or with two when none does."""
    most = MAX_SWAP_AB_STAGES if config.swap_ab else MAX_STAGES
    for stages in range(most, 2, -1):
        deeper = dataclasses.replace(config, num_stages=stages)
        if config_error(desc, deeper) is None:
            return deeper
    return config


def refusal(desc: GemmDesc, config: GemmConfig) -> str | None:
    """Why a configuration of ``space`` is not worth timing, or None."""
    if reason := config_error(desc, config):
        return reason
    if config.sharers > 1 and desc.k < 2 * config.sharers * config.block_k(desc):
        return f"sharers={config.sharers}: one step each"
    is_one_round = config.block_n == 64 and expected_tiles(desc, config.block_m) * -(-desc.n // 64) <= config.num_sms
    is_dense = desc.num_experts == 1 and not desc.is_block_scaled and desc.itemsize == 1
    if config.block_m == 64 and config.swap_ab and config.sharers == 1 and not (is_dense and is_one_round):
        return "64 rows with swap_ab: weights then pass the tensor core no faster than rows do, one more layout to run"
    if config.block_m == 128 and config.swap_ab:
        return "128 rows with swap_ab: the plain tile leaves out chunks that nobody uses"
    is_short = config.num_stages * config.step_blocks < (3 if config.is_large_m else 4)
    # Gate and up of 96 rows with block scales spill in two stages of two blocks.
    is_two_by_two = (config.num_stages, config.step_blocks) == (2, 2)
    is_short |= is_two_by_two and desc.is_block_scaled and config.block_m > MOST_SCALED
    if config.swap_ab and is_short:
        return f"{config.num_stages} stages: too few bytes on their way for tiles that wait for memory"
    if config.block_m == 128 and config.block_n < 64:
        return f"block_n={config.block_n}: for filling the machine at few rows"
    return None


def candidates(desc: GemmDesc, block_m: int, num_sms: int) -> list[Any]:
    """Configurations that can run ``desc`` in tiles of ``block_m`` rows and are worth timing, preferred ones first."""
    if block_m == VectorConfig.block_m:
        return vector_candidates(desc, num_sms)
    if block_m == FEW_ROWS:
        return few_rows_candidates(desc)
    return [c for c in space(desc, block_m, num_sms) if refusal(desc, c) is None]


def in_clusters(desc: GemmDesc, found: Iterable[GemmConfig]) -> list[GemmConfig]:
    """The two widest of ``found`` in clusters of two CTAs, sharing rows and sharing weights.

    Only where tiles have 80 rows or more and make two rounds of the machine. For whoever times them; ``choose_config``
    takes one by ``_in_step``.
    """
    wide = sorted((config for config in found if config.block_m >= 80), key=lambda config: -config.block_n)[:2]
    wide = [c for c in wide if expected_tiles(desc, c.block_m) * -(-desc.n // c.block_n) >= 2 * c.num_sms]
    pairs = [dataclasses.replace(config, row_chunk=None, cluster=2) for config in wide]
    pairs += [dataclasses.replace(pair, shares_weights=True) for pair in pairs]
    return [pair for pair in pairs if config_error(desc, pair) is None]


def choose_config(desc: GemmDesc, block_m: int, num_sms: int) -> GemmConfig | VectorConfig | FewRowsConfig:
    """The candidate that needs the fewest columns one after another: rounds of the machine times columns a tile, of
    which each sharer counts a part.

    Of near equals the first. Raises NotImplementedError with the reason where there is no candidate.
    """
    found = candidates(desc, block_m, num_sms)
    if block_m in (VectorConfig.block_m, FEW_ROWS):
        if not found:
            is_one = block_m == VectorConfig.block_m
            raise NotImplementedError(
                vector_error(desc, VectorConfig(1)) if is_one else few_rows_error(desc, FewRowsConfig(4))
            )
        return found[0]
    if not found:
        smallest = GemmConfig(block_m, 64, 2, num_sms=num_sms, swap_ab=block_m < 64)
        raise NotImplementedError(config_error(desc, smallest) or f"no configuration of {desc} fits {SMEM_BYTES} bytes")

    def depth(config: GemmConfig) -> float:
        rounds = rounds_of(expected_tiles(desc, block_m) * -(-desc.n // config.block_n), num_sms)
        return rounds * config.block_n / config.sharers

    return _in_step(desc, first_of_least(found, depth))


def _in_step(desc: GemmDesc, config: GemmConfig) -> GemmConfig:
    """``config``, in clusters that share weights where they would be read from memory for each tile of an expert.

    CTAs that work on one expert read the same weights at the same time as long as they run in step. Over many rounds
    they drift apart. Both products of DeepSeek-V3's 256 experts take 0.72 of the time at 8192 tokens with FP8 blocks,
    the first with a scale a channel 0.73 (H100). Those of three other models take 0.94 to 1.03 of it with FP8 blocks.
    One matrix for all rows, and products with outputs beside theirs, were not timed in clusters.
    """
    if desc.num_experts == 1 or desc.has_outputs_beside:
        return config
    tiles = expected_tiles(desc, config.block_m)
    rounds = tiles * -(-desc.n // config.block_n) / config.num_sms
    is_long = rounds >= _LONG and tiles >= 1.5 * desc.num_experts
    if not is_long or config.block_m <= SMALL_M or config.row_chunk is not None:
        return config
    pair = dataclasses.replace(config, cluster=2, shares_weights=True)
    return config if config_error(desc, pair) else pair


def first_of_least(found: Sequence[Config], depth: Callable[[Config], float]) -> Config:
    """The first whose depth is nearly the least."""
    least = min(map(depth, found))
    return next(config for config in found if depth(config) <= 1.08 * least)


def rounds_of(tiles: float, num_sms: int) -> float:
    """Tiles that the busiest CTA takes one after another; of many rounds the ragged last one does not count."""
    rounds = tiles / num_sms
    return rounds if rounds >= _PLENTY else max(1.0, float(math.ceil(rounds - 0.05)))


def expected_tiles(desc: GroupedGemm, block_m: int) -> float:
    """Tiles of rows in use when routing is uniform; how many there are is data on the device, ``desc.rows`` a bound."""
    return _expected(desc, block_m)[1]


def _expected(desc: GroupedGemm, block_m: int) -> tuple[float, float]:
    """(rows in use, tiles they take) when routing is uniform."""
    experts = desc.num_experts
    if experts == 1 and desc.unpermuted_rows:  # each tile has them all
        return float(desc.unpermuted_rows * (desc.rows // block_m)), float(desc.rows // block_m)
    pairs = float(desc.rows // block_m)
    if desc.rows > pairs + experts * (block_m - 1):
        pairs = max(desc.rows - experts * (block_m - 1.0), 1.0)
    hit = experts * (1 - (1 - 1 / experts) ** pairs)
    return pairs, hit * max(1, math.ceil(pairs / hit / block_m - 0.05))


def describe(desc: GemmDesc, config: GemmConfig | VectorConfig | FewRowsConfig) -> str:
    """One line for ``explain``."""
    if isinstance(config, VectorConfig):
        return describe_vector(desc, config)
    if isinstance(config, FewRowsConfig):
        return describe_few_rows(desc, config)
    swapped = " with swap_ab" if config.swap_ab else ""
    swapped += f", {config.sharers} consumers in turn" if config.sharers > 1 else ""
    step = f" of {config.step_blocks * 128} bytes of K" if config.step_blocks > 1 else ""
    pairs = f" in pairs that share {'weights' if config.shares_weights else 'rows'}" if config.cluster > 1 else ""
    requantized = ", which requantize their rows" if desc.requantize != "none" else ""
    return (
        f"{config.block_m} x {desc.projections} x {config.block_n} tiles{swapped}, "
        f"{config.num_stages} stages{step} "
        f"({shared_memory(desc, config) >> 10} KiB shared memory), {config.num_sms} persistent CTAs{pairs}{requantized}"
    )
