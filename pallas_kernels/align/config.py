"""What one call asks (``AlignDesc``) and whether the Hopper kernel can run it."""

import dataclasses
from typing import Any

LAST_BIT = 31  # of those that say which rows of a tile are in use: this row's, and that of all rows behind it
MAX_EXPERTS = 1024
MAX_WARPGROUPS = 8  # of a CTA: 1024 threads, the most there can be
MAX_CTAS = 64  # one thread loads all their counters of an expert at once
MANY_PAIRS = 16_384  # from here on several CTAs share the pairs


@dataclasses.dataclass(frozen=True)
class AlignDesc:
    """Static description of one call.

    Args:
        num_pairs: T * top_k ids.
        num_experts: experts that get rows.
        block_m: rows of a tile.
        num_rows: rows in all tiles, ``row_capacity``.
        has_offset: whether the id of the first expert is given, as on the shards of an expert-parallel layer.
        top_k: where tokens stay unpermuted: row t of an expert's one tile is token t, which needs T <= block_m. 0 where
            an expert's rows follow each other.
        are_wide: whether an id is 64 bits: two words, low first.
    """

    num_pairs: int
    num_experts: int
    block_m: int
    num_rows: int
    has_offset: bool = False
    top_k: int = 0
    are_wide: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens T where they stay unpermuted, else 0."""
        return self.num_pairs // self.top_k if self.top_k else 0

    @property
    def num_tiles(self) -> int:
        """All tiles, in use or not."""
        return self.num_rows // self.block_m

    @property
    def outputs(self) -> dict[str, int]:
        """Elements of each output of the kernel, by name and in order."""
        found = dict(row_of=self.num_pairs, group_sizes=self.num_experts, tile_expert=self.num_tiles)
        found |= dict(tile_rows=self.num_tiles, num_tiles=1)
        return found | (dict(tile_bits=self.num_tiles) if self.top_k else {})


@dataclasses.dataclass(frozen=True)
class AlignConfig:
    """num_warpgroups: of a CTA, 128 threads each. num_ctas: 1 does everything in one launch, more take two launches."""

    num_warpgroups: int
    num_ctas: int = 1


def row_capacity(num_pairs: Any, num_experts: int, block_m: int) -> Any:
    """Rows that suffice for any ids: an expert in use pads by at most block_m - 1 rows.

    num_pairs: an int, or symbolic as in the shapes of ``jax.export``; so is the result.
    """
    bound = num_pairs + num_experts * (block_m - 1)
    if isinstance(num_pairs, int):
        bound = min(bound, num_pairs * block_m)
    return -(-bound // block_m) * block_m


def config_error(desc: AlignDesc, config: AlignConfig) -> str | None:
    """Why the Hopper kernel cannot run ``desc``, or None when it can."""
    if not 1 <= desc.num_experts <= MAX_EXPERTS:
        return f"num_experts={desc.num_experts}: 1 to {MAX_EXPERTS}, a thread each"
    if desc.num_pairs < 1:
        return "no pairs: there is nothing to align"
    if not 1 <= config.num_warpgroups <= MAX_WARPGROUPS:
        return f"num_warpgroups={config.num_warpgroups}: 1 to {MAX_WARPGROUPS}"
    if not 1 <= config.num_ctas <= MAX_CTAS:
        return f"num_ctas={config.num_ctas}: 1 to {MAX_CTAS}"
    if config.num_ctas > 1 and desc.top_k:
        return f"num_ctas={config.num_ctas} of unpermuted tokens: one CTA knows all tokens of an expert"
    return None


def choose_config(desc: AlignDesc) -> AlignConfig:
    """A thread per pair and per expert, up to a full CTA; more threads only slow the barriers down.

    Many pairs go to 32 CTAs of half the threads in two launches. On an H200 65536 pairs take 37 us in one CTA and 4.0
    in 32; 32768 pairs 20 and 3.7; 8192 pairs 4.4 and 3.4, where the gap between two launches costs what they gain.
    """
    if desc.num_pairs >= MANY_PAIRS and not desc.top_k:
        return AlignConfig(4, 32)
    threads = max(desc.num_pairs, desc.num_experts)
    return AlignConfig(min(MAX_WARPGROUPS, max(1, -(-threads // 128))))
