"""What ``sweep.py products`` times: shapes of layers and their shards, formats, and the configurations worth a look.

A shape is a model's name, with "/tp2" behind it for one of two shards of every expert (a part of the intermediate
size), "/ep2" for one half of the experts. Shards of experts keep top_k: T counts tokens all of whose experts
are on the device, as it does for dsv3-ep8.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from moe_jax.benchmarking import SHAPES
from pallas_kernels.grouped_gemm import GemmConfig
from pallas_kernels.grouped_gemm import candidates as unpacked_candidates
from pallas_kernels.grouped_gemm import choose_block_m as unpacked_block_m
from pallas_kernels.grouped_gemm import choose_config as unpacked_config
from pallas_kernels.grouped_gemm.config import SMALL_M, SWAP_AB_BLOCK_MS, config_error
from pallas_kernels.grouped_gemm.heuristics import deepest, height_for, large_m_heights
from pallas_kernels.grouped_gemm.packed import BLOCK_MS, PackedConfig, PackedDesc
from pallas_kernels.grouped_gemm.packed import config_error as packed_error
from pallas_kernels.grouped_gemm.packed.config import LARGE_M
from pallas_kernels.grouped_gemm.packed.heuristics import MAX_STAGES, choose_block_m
from pallas_kernels.grouped_gemm.packed.heuristics import choose_config as packed_config
from pallas_kernels.tuning import LayerKey, table_for

_SHAPES = SHAPES | {"dsv3-tp8": (256, 8, 7168, 256), "deepseek-v3": (256, 8, 7168, 2048)}
H200_SMS = 132


# (consumers, k_split, blocks of K a step, whether each consumer takes one projection), by height and tokens
_Shape = tuple[int, int, int, bool]
_ONE_GATED = [
    (4, 4, 8, 0), (2, 2, 4, 0), (2, 1, 2, 0), (4, 2, 4, 0), (1, 1, 2, 0), (2, 1, 4, 0), (4, 1, 4, 1), (2, 1, 4, 1)
]  # fmt: skip
_ONE = [(4, 4, 8, 0), (1, 1, 2, 0), (4, 2, 2, 0), (4, 1, 2, 0), (2, 1, 4, 0), (2, 2, 4, 0), (4, 4, 4, 0)]
_SMALL_M_GATED = [
    (4, 1, 2, 0), (4, 2, 4, 0), (2, 1, 4, 0), (3, 1, 2, 0), (4, 1, 4, 1), (4, 1, 2, 1), (2, 2, 4, 0), (4, 4, 8, 0)
]  # fmt: skip
_SMALL_M = [(4, 1, 4, 0), (3, 1, 4, 0), (4, 1, 2, 0), (2, 1, 4, 0), (3, 1, 2, 0), (4, 2, 4, 0)]
_LARGE_M_GATED = [
    (2, 1, 4, 0), (4, 1, 2, 1), (2, 1, 2, 0), (2, 1, 4, 1), (2, 1, 2, 1), (3, 1, 2, 0), (4, 1, 1, 1), (2, 1, 1, 0)
]  # fmt: skip
_LARGE_M = [(4, 1, 2, 0), (2, 1, 2, 0), (3, 1, 2, 0), (2, 1, 4, 0), (4, 1, 1, 0), (2, 1, 1, 0)]


def shape(name: str) -> tuple[int, int, int, int]:
    """(experts, top_k, hidden, intermediate) of a shape."""
    model, *shards = name.split("/")
    experts, top_k, hidden, intermediate = _SHAPES[model]
    for shard in shards:
        kind, parts = shard[:2], int(shard[2:])
        experts, intermediate = (experts // parts, intermediate) if kind == "ep" else (experts, intermediate // parts)
    return experts, top_k, hidden, intermediate


def rows_per_expert(tokens: int, experts: int, top_k: int) -> float:
    return tokens * top_k / (experts * (1 - (1 - top_k / experts) ** tokens))


def heights(mean: float, allowed: tuple[int, ...], is_brief: bool = False) -> list[int]:
    """Tile heights that hold an average expert with some to spare, and nearly every expert. is_brief: the heuristic's
    height alone.
    """
    if is_brief:
        return [h for h in [height_for(mean, allowed)] if h]
    found = [next((h for h in allowed if h >= mean + s * math.sqrt(mean)), None) for s in (0.9, 2.5)]
    return sorted({h for h in found if h})


def packed_space(desc: PackedDesc, mean: float, tokens: int, is_brief: bool) -> list[PackedConfig]:
    """desc: at any height. mean: rows of an expert that is hit. is_brief: four shapes at the heuristic's height."""
    allowed = BLOCK_MS[:8]
    tiles = [choose_block_m(mean)] if is_brief else heights(mean, allowed) or [128]
    if desc.fmt.operand == "int8":  # 80 rows are summed in pieces that its wgmma does not take
        tiles = sorted({96 if block_m == 80 else block_m for block_m in tiles})
    if tiles == [8]:
        tiles = [8, 16]
    if desc.fmt.operand == "int8" and 48 < mean < 72 and not is_brief:
        tiles = [64, *tiles]  # few experts need a second one
    if mean > 96 and not is_brief:
        tiles = [128, *LARGE_M, 256] if mean >= 256 else [128, *(height for height in LARGE_M if height >= mean)]
    return list(dict.fromkeys(config for block_m in tiles for config in _at_height(desc, block_m, tokens, is_brief)))


def _at_height(desc: PackedDesc, block_m: int, tokens: int, is_brief: bool) -> Iterator[PackedConfig]:
    here = dataclasses.replace(desc, rows=-(-desc.rows // block_m) * block_m)
    may_fold = desc.fmt.scale == "group" and desc.scale_dtype == desc.fmt.operand and block_m >= 48
    count = 0
    for consumers, split, blocks, splits in _shapes(here, block_m, tokens):
        for folds in (False, True) if may_fold else (False,):
            group = 16 if block_m >= 128 else 8
            config = PackedConfig(block_m, consumers, blocks, 2, folds, group, H200_SMS, split, splits)
            config = _deepest(here, config)
            if config is None or (is_brief and count >= 4):
                continue
            count += 1
            yield config
            if block_m >= 128 and tokens >= 8192 and count <= 2 and not is_brief:
                yield dataclasses.replace(config, raster_group_m=8)


def _shapes(desc: PackedDesc, block_m: int, tokens: int) -> list[_Shape]:
    is_gated = desc.projections > 1
    if block_m >= 48:
        shapes = _LARGE_M_GATED if is_gated else _LARGE_M
    elif tokens == 1:
        shapes = _ONE_GATED if is_gated else _ONE
    else:
        shapes = _SMALL_M_GATED if is_gated else _SMALL_M
    if desc.fmt.is_8bit:  # blocks twice as deep
        shapes = [(c, split, max(split, blocks // 2), h) for c, split, blocks, h in shapes]
    if desc.k // desc.fmt.block_k % 2:  # steps of 3 and 5 blocks beside 2 and 4, whose last one is padding in part
        odd = [(c, 1, {4: 5, 2: 3}[blocks], h) for c, split, blocks, h in shapes if split == 1 and blocks in (2, 4)]
        shapes = odd[:2] + shapes + odd[2:]
    return list(dict.fromkeys((c, split, blocks, bool(h)) for c, split, blocks, h in shapes))


def _deepest(desc: PackedDesc, config: PackedConfig) -> PackedConfig | None:
    for stages in range(MAX_STAGES, 1, -1):
        deeper = dataclasses.replace(config, num_stages=stages)
        if packed_error(desc, deeper) is None:
            return deeper
    return None


def unpacked_space(key: Any, gemm: int, tokens: int, is_brief: bool) -> list[Any]:
    mean = rows_per_expert(tokens, key.num_experts, key.top_k)
    found = []
    low = tuple(height for height in SWAP_AB_BLOCK_MS[1:] if height <= 96)
    swapped = heights(mean, low, is_brief) if key.may_swap else []
    if mean > 64:
        large_m = large_m_space(key, gemm, tokens)
        found += large_m[:3] if is_brief else large_m
    for block_m in swapped:
        own = unpacked_candidates(key.products(tokens, block_m)[gemm - 1], block_m, H200_SMS)
        own = [config for config in own if config.swap_ab]
        found += own + [dataclasses.replace(config, raster_group_m=2) for config in own[:1]]
    for block_m in (64, 128):
        if (block_m == 64 and (mean > 80 or (swapped and mean < 40))) or (block_m == 128 and mean < 40):
            continue
        desc = key.products(tokens, block_m)[gemm - 1]
        configs = [c for c in unpacked_candidates(desc, block_m, H200_SMS) if not c.swap_ab and c.block_n > 48]
        if block_m == 128 and mean < 200:
            configs = [c for c in configs if c.row_chunk is not None] or configs
        elif block_m == 128 and not is_brief:
            configs += [dataclasses.replace(c, raster_group_m=16) for c in configs[:2]]
        found += configs[:2] if is_brief else configs
    return [c for c in found if config_error(key.products(tokens, c.block_m)[gemm - 1], c) is None]


def large_m_space(key: Any, gemm: int, tokens: int) -> list[Any]:
    """Large-M tiles, swap_ab: the likeliest height in every width, two more in the widest."""
    found: list[Any] = []
    if not key.may_be_large_m:
        return found
    for rank, block_m in enumerate(large_m_heights(rows_per_expert(tokens, key.num_experts, key.top_k))[:3]):
        desc = key.products(tokens, block_m)[gemm - 1]
        wide = [config for config in unpacked_candidates(desc, block_m, H200_SMS) if config.block_n > 64]
        found += wide if rank == 0 else wide[:1]
        if rank == 0 and wide and tokens >= 8192:
            found.append(dataclasses.replace(wide[0], raster_group_m=16))
    return found


def of_table(key: Any, gemm: int, tokens: int, kind: str = "NVIDIA H200") -> list[Any]:
    """The configuration that the table of a kind of GPU has for a layer, if any."""
    entry = table_for(kind).lookup(key, tokens)
    return [] if entry is None else [(entry.config.gemm1, entry.config.gemm2)[gemm - 1]]


def of_heuristic(key: Any, gemm: int, tokens: int, num_sms: int) -> list[Any]:
    """What a layer without an entry runs with, if anything."""
    rows = rows_per_expert(tokens, key.num_experts, key.top_k)
    if isinstance(key, LayerKey):
        block_m = unpacked_block_m(rows, may_swap=key.may_swap, may_be_large_m=key.may_be_large_m)
        choose = unpacked_config
    else:
        block_m, choose = choose_block_m(rows), packed_config
    try:
        return [choose(key.products(tokens, block_m)[gemm - 1], block_m, num_sms)]
    except NotImplementedError:
        return []


def pairs_space(key: Any, gemm: int, tokens: int) -> list[Any]:
    """The first tile of 128 rows, of the two likeliest heights of ``large_m_space`` and of 80 or 96 rows that hold an
    expert, in clusters whose CTAs share weights, or rows.
    """
    mean, found = rows_per_expert(tokens, key.num_experts, key.top_k), []
    low = heights(mean, (80, 96), is_brief=True) if key.may_swap and mean > 40 else []
    for block_m in (*low, *(large_m_heights(mean)[:2] if key.may_be_large_m else ()), 128):
        desc = key.products(tokens, block_m)[gemm - 1]
        pair = dataclasses.replace(unpacked_candidates(desc, block_m, H200_SMS)[0], cluster=2, row_chunk=None)
        ways = (dataclasses.replace(pair, shares_weights=True), pair)
        found += [way for way in ways if config_error(desc, way) is None]
    return found


def rasters_space(key: Any, gemm: int, tokens: int) -> list[Any]:
    """Raster groups of one row tile to eight: small-M tiles in steps of 1, 2 and 4 blocks, and plain ones of 64 rows;
    above 90 rows an expert two large-M heights, and plain tiles of 128 rows, as single CTAs and in clusters.
    """
    mean, found = rows_per_expert(tokens, key.num_experts, key.top_k), []
    if mean <= 90:
        low = tuple(height for height in SWAP_AB_BLOCK_MS[1:] if height <= SMALL_M)
        found += [
            GemmConfig(block_m, block_n, 2, group, swap_ab=True, step_blocks=blocks)
            for block_m in heights(mean, low, is_brief=True)
            for blocks in (1, 2, 4)
            for block_n in (64, 128)
            for group in ((1, 2, 8) if tokens < 1024 else (1, 2, 4, 8))
        ]
        plain = [GemmConfig(64, block_n, 2, group, 16) for block_n in (96, 64, 128) for group in (1, 2, 8)]
        found += plain if mean > 20 else []
    else:
        ways: list[dict[str, Any]] = [{}, dict(cluster=2, shares_weights=True), dict(cluster=2)]
        found += [
            GemmConfig(block_m, block_n, 2, group, swap_ab=True, step_blocks=blocks, **way)
            for block_m in large_m_heights(mean)[:2]
            for block_n in (128, 192, 256)
            for blocks in (1, 2)
            for way in ways
            for group in (2, 8)
        ]
        found += [
            GemmConfig(128, block_n, 2, group, **way)
            for block_n in (128, 192, 256)
            for way in ways[:2]
            for group in (2, 8)
        ]
    own = [(config, key.products(tokens, config.block_m)[gemm - 1]) for config in found]
    deep = dict.fromkeys((deepest(desc, config), desc) for config, desc in own)
    return [config for config, desc in deep if config_error(desc, config) is None]
