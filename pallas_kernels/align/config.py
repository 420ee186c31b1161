"""What one call asks (``AlignDesc``) and whether the Hopper kernel can run it."""

import dataclasses

OUTPUTS = ("row_of", "group_sizes", "tile_expert", "tile_rows", "num_tiles")  # of the kernel, in this order
MAX_EXPERTS = 1024
MAX_WARPGROUPS = 8  # 1024 threads, the most a block has
MAX_BLOCKS = 64  # whose counters of an expert one thread loads at once
MANY_PAIRS = 16_384  # that several blocks share


@dataclasses.dataclass(frozen=True)
class AlignDesc:
    """Static description: num_pairs = T * top_k ids of num_experts experts; num_rows rows in tiles of block_m.

    has_offset: the id of the first expert is given, as on the shards of an expert-parallel layer. top_k: with it, row t
    of an expert's one tile is that of token t, which needs T <= block_m; 0 where its rows follow each other.
    """

    num_pairs: int
    num_experts: int
    block_m: int
    num_rows: int
    has_offset: bool = False
    top_k: int = 0

    @property
    def num_tokens(self) -> int:
        """Rows of every tile in use that are those of tokens; 0 where an expert's rows follow each other."""
        return self.num_pairs // self.top_k if self.top_k else 0

    @property
    def num_tiles(self) -> int:
        """Tiles the rows make, in use or not."""
        return self.num_rows // self.block_m


@dataclasses.dataclass(frozen=True)
class AlignConfig:
    """num_warpgroups: of a block, 128 threads each. num_blocks: 1 does it all in one launch, more take two."""

    num_warpgroups: int
    num_blocks: int = 1


def row_capacity(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Rows that suffice whatever the ids are: each expert in use wastes at most block_m - 1 rows."""
    bound = min(num_pairs + num_experts * (block_m - 1), num_pairs * block_m)
    return -(-bound // block_m) * block_m


def config_error(desc: AlignDesc, config: AlignConfig) -> str | None:
    """Why the Hopper kernel cannot run ``desc``, or None when it can."""
    if not 1 <= desc.num_experts <= MAX_EXPERTS:
        return f"num_experts={desc.num_experts}: 1 to {MAX_EXPERTS}, a thread each"
    if desc.num_pairs < 1:
        return "no pairs: there is nothing to align"
    if not 1 <= config.num_warpgroups <= MAX_WARPGROUPS:
        return f"num_warpgroups={config.num_warpgroups}: 1 to {MAX_WARPGROUPS}"
    if not 1 <= config.num_blocks <= MAX_BLOCKS:
        return f"num_blocks={config.num_blocks}: 1 to {MAX_BLOCKS}"
    return None


def choose_config(desc: AlignDesc) -> AlignConfig:
    """A thread per pair and per expert up to a full block; more than the work needs only slows the barriers.

    Many pairs go to 32 blocks of half the threads in two launches: 65536 pairs 37 us in one block, 4.0 in 32; 32768
    pairs 20 and 3.7; 8192 pairs 4.4 and 3.4, which the gap between two launches makes even (H200).
    """
    if desc.num_pairs >= MANY_PAIRS:
        return AlignConfig(4, 32)
    threads = max(desc.num_pairs, desc.num_experts)
    return AlignConfig(min(MAX_WARPGROUPS, max(1, -(-threads // 128))))
